"""Predicted peak memory of steps with compiled blocks against PyTorch's record of its allocator on a CPU.

    python bench/compiled_memory.py [--only TEXT]

Model families, activation checkpointing, dtypes, packed documents, preference pairs, encoders, the axes of two ranks
and schedules with split backward, each a few steps of a small model; the limit is 5% of the peak. Also reported: the
error without persistent memory, which is known exactly, and the predicted peak of the same step with uncompiled
blocks. Compiling takes half an hour or more. Writes
`bench/results/compiled_memory.json`; exit code 1 when a peak is beyond the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from bench.shared import encoder_cases
from bench.shared.ledger_cases import Step, measure
from common import write_result
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.planner.memory.ledger import ledger
from meshwright.spec.presets import preset

LIMIT = 0.05
MIXTURES = [
    *(
        ("mixtral-tiny", f"dp1{again}", dtype, 4, 128)
        for again in ("", " ac:selective", " ac:full")
        for dtype in ("bfloat16", "float32")
    ),
    *(("mixtral-wide", f"dp1{again}", "bfloat16", 4, 256) for again in ("", " ac:selective", " ac:full")),
    *(("dots1-tiny", f"dp1{again}", "bfloat16", 4, 128) for again in ("", " ac:selective", " ac:full")),
    *(("qwen2-moe-tiny", f"dp1{again}", "float32", 4, 128) for again in ("", " ac:full")),
    ("qwen2-moe-wide", "mb2", "bfloat16", 8, 128),
    ("qwen3-moe-tiny", "dp1", "bfloat16", 4, 128),
    ("dots1-tiny", "dp1", "float32", 4, 128),
]
"""With "wide" the experts hold the most, else attention's tiles do. In qwen2-moe-tiny one layer of two is dense, in
dots1-tiny the first one."""
SPREAD = [
    *(("mixtral-tiny", layout, "float32", 4, 128) for layout in ("tp2", "cp2", "dp2 zero1", "dp2 zero3")),
    ("mixtral-wide", "tp2 ac:full", "bfloat16", 4, 128),
    ("mixtral-wide", "tp2 ac:selective", "float32", 4, 128),
    ("qwen2-moe-tiny", "tp2", "float32", 4, 128),
    ("dots1-tiny", "tp2:nosp", "bfloat16", 4, 128),
    *(("mixtral-wide", f"dp2 ep2{again}", "bfloat16", 4, 128) for again in ("", " ac:selective")),
    ("mixtral-wide", "dp2 ep2 ac:full", "float32", 4, 128),
    ("mixtral-tiny", "dp2 ep2", "float32", 4, 128),
    ("mixtral-tiny", "dp2 ep2 ac:selective", "float32", 4, 128),
    ("dots1-tiny", "tp2 ep2", "bfloat16", 4, 128),
    ("qwen2-moe-tiny", "tp2 ep2", "float32", 4, 128),
    ("mixtral-wide", "tp2 ep1:etp2", "float32", 4, 128),
    ("mixtral-tiny", "cp2:ulysses", "bfloat16", 4, 128),
    ("mixtral-wide", "dp2 zero2 mb2", "bfloat16", 8, 128),
]
EXPERTS = {
    "mixtral-tiny": {"experts": 4},
    "mixtral-wide": {"experts": 4, "expert_intermediate": 512, "intermediate": 512},
    "qwen2-moe-tiny": {"experts": 4, "dense_layers": (1,)},
    "dots1-tiny": {"experts": 4},
    "qwen2-moe-wide": {"expert_intermediate": 256, "shared_intermediate": 256, "dense_layers": ()},
}
WIDE = {"llama-tiny": {"hidden": 128}, "gpt2-tiny": {"hidden": 128, "intermediate": 512, "head_dim": 16}}
ONE = [
    *(("llama-tiny", f"dp1{again}", "bfloat16", 4, 256) for again in ("", " ac:selective", " ac:full")),
    ("llama-tiny", "dp1", "float32", 4, 256), ("llama-tiny", "mb2", "bfloat16", 8, 128),
    ("gpt2-tiny", "dp1", "float32", 4, 128), ("gpt2-tiny", "dp1 ac:full", "bfloat16", 4, 128),
    ("qwen2-tiny", "dp1 ac:selective", "float32", 4, 128), ("qwen3-tiny", "dp1", "bfloat16", 4, 128),
    ("mistral-tiny", "dp1", "bfloat16", 4, 256),
]  # fmt: skip
TWO = [
    *(("llama-tiny", layout, "float32", 4, 256) for layout in (
        "tp2", "tp2 ac:selective", "cp2", "cp2:ulysses", "cp2:ulysses ac:full", "dp2 zero1", "dp2 zero3")),
    ("llama-tiny", "dp2 zero2 mb2", "bfloat16", 8, 128), ("llama-tiny", "tp2 ac:full", "bfloat16", 4, 256),
    ("llama-tiny", "pp2 mb4", "float32", 16, 128),
]  # fmt: skip
SPLIT = [
    *(("llama-tiny", f"pp2:zb-h1 mb4{again}", dtype, 16, 128)
        for again in ("", " ac:selective", " ac:full") for dtype in ("float32", "bfloat16")),
    *(("gpt2-tiny", f"pp2:{name} mb4", "bfloat16", 16, 128) for name in ("zb-h2", "zb-v", "v-half")),
    *(("llama-tiny", f"pp2:{name} mb4", "float32", 16, 128)
        for name in ("zb-v", "v-min", "interleaved-zb", "dualpipe", "dualpipe-v")),
    ("gpt2-tiny", "pp2:dualpipe mb4 ac:selective", "float32", 16, 128),
    ("qwen3-tiny", "pp2:zb-h1 mb4", "bfloat16", 16, 128),
]  # fmt: skip

DOCUMENTS = ((0,), (0, 37), (0, 11, 100, 150, 230), (0, 130, 131))
"""Where they begin in rows of 256 tokens."""
FAMILIES = [
    *(("qwen3-tiny", f"dp1 ac:{again}", dtype, 4, 128) for again in ("selective", "full")
      for dtype in ("float32", "bfloat16")),
    *(("mistral-tiny", f"dp1 ac:{again}", "float32", 4, 256) for again in ("selective", "full")),
    ("qwen2-tiny", "dp1", "bfloat16", 4, 128), ("qwen2-tiny", "dp1 ac:full", "bfloat16", 4, 128),
    ("gpt2-tiny", "dp1 ac:selective", "float32", 4, 128),
    *(("bert-tiny", f"dp1{again}", dtype, 8, 128) for again in ("", " ac:selective", " ac:full")
      for dtype in ("float32", "bfloat16")),
    ("bert-tiny classes", "dp1", "bfloat16", 8, 128), ("bert-tiny", "mb2", "float32", 16, 64),
    *(("llama-tiny pairs", layout, dtype, 4, 256) for layout, dtype in (("dp1", "float32"), ("mb2", "bfloat16"))),
    *((f"{name} documents", "dp1", dtype, 4, 256)
      for name, dtype in (("llama-tiny", "float32"), ("mistral-tiny", "bfloat16"), ("gpt2-tiny", "float32"))),
]  # fmt: skip
"""What families and rows have of their own; after the name of a preset what else is said of it."""


def family_of(name: str, layout: str, dtype: str, batch: int, sequence: int) -> Step | encoder_cases.EncoderStep:
    model, _, what = name.partition(" ")
    if model.startswith("bert"):
        config = encoder_cases.small(what or "masked")
        return encoder_cases.EncoderStep(config, layout, batch, sequence, dtype=dtype, compiled=True)
    step = step_of(model, layout, dtype, batch, sequence)
    return step._replace(pairs=what == "pairs", starts=DOCUMENTS if what == "documents" else None)


def step_of(name: str, layout: str, dtype: str, batch: int, sequence: int) -> Step:
    layers = 4 if "pp" in layout else 2
    sizes = WIDE.get(name, {}) | EXPERTS.get(name, {})
    config = preset(name.replace("wide", "tiny"))
    config = dataclasses.replace(config, vocabulary=256, tied=False, layers=layers, **sizes)
    return Step(config, layout, batch, sequence, dtype=dtype, compiled=True)


def line_of(name: str, step: Any, rank: int, found: Any) -> dict[str, Any]:
    eager = ledger(
        step.config, Layout.parse(step.layout), batch=step.batch, sequence=step.sequence, parameter_dtype=step.dtype,
        rank=rank, documents=step.starts or False, pairs=getattr(step, "pairs", False),
    )  # fmt: skip
    said, passing = found.predicted, found.peak - found.before
    line = {
        "model": name, "layout": step.layout, "dtype": step.dtype, "rows": step.batch, "sequence": step.sequence,
        "rank": rank, "peak_bytes": found.peak, "predicted_peak_bytes": said.peak_bytes,
        "error": round(said.peak_bytes / found.peak - 1, 5), "passing_bytes": passing,
        "passing_error": round((said.peak_bytes - said.between_steps) / passing - 1, 5),
        "passing_bytes_if_not_compiled": eager.peak_bytes - eager.between_steps,
    }  # fmt: skip
    print(line, file=sys.stderr, flush=True)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose model and layout contain this text")
    only = parser.parse_args().only
    lines: list[dict[str, Any]] = []
    one, two = [*ONE, *MIXTURES], [*TWO, *SPREAD, *SPLIT]
    for count, cases, of in ((1, one, step_of), (2, two, step_of), (1, FAMILIES, family_of)):
        chosen = [case for case in cases if only in f"{case[0]} {case[1]}"]
        if not chosen:
            continue
        with LocalRanks(count, timeout=900) as ranks:
            for case in chosen:
                step = of(*case)
                work = measure if isinstance(step, Step) else encoder_cases.measure
                for rank, found in enumerate(ranks.run(work, step)):
                    lines.append(line_of(case[0], step, rank, found))
                if not only:  # results are kept if the rest is interrupted
                    write_result("compiled_memory", summary(lines))
    return 0 if summary(lines)["largest_error"] <= LIMIT else 1


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    errors, passing = ([abs(line[name]) for line in lines] for name in ("error", "passing_error"))
    return {
        "limit": LIMIT, "ranks_measured": len(lines), "largest_error": max(errors),
        "largest_passing_error": max(passing),
        "lines": lines,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
