"""Predicted peak memory on CUDA devices against the engine's step on fake CUDA tensors.

    python bench/gpu_ledger.py [--only TEXT]

The real engine takes three steps on tensors that say they lie on a CUDA device and have sizes but no memory; each
storage counts, in blocks of the caching allocator, from the operator that makes it to its last reference
(`bench/shared/cuda_cases.py`). Families, ways to recompute, types, documents, and every axis of a layout, at
the sizes of real models; what one forward keeps is compared tensor by tensor. The limit is 3% of the peak. It needs a
C++ compiler and no GPU. Not seen: how the allocator's pieces fit, what kernels and NCCL take in addition to the
sizes that their sources name.
Writes `bench/results/gpu_ledger.json`; exit code 1 when a peak is beyond the limit or a forward keeps something else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from bench.shared.cuda_cases import CudaStep, Measured, measured
from common import write_result

LIMIT = 0.03
AGAIN = "", "ac:selective", "ac:full"
DENSE = [
    ("llama-1b", 8, 4096), ("llama-3-8b", 2, 4096), ("gpt2-xl", 8, 1024), ("qwen2.5-7b", 2, 4096),
    ("qwen3-4b", 4, 4096), ("mistral-7b-v0.1", 2, 8192), ("mixtral-8x7b-v0.1", 2, 4096),
    ("qwen3-30b-a3b", 2, 4096),
]  # fmt: skip
BENCH = {
    "vocabulary": 32000, "hidden": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 2816,
    "tied": True,
}  # fmt: skip
"""The model of `bench/gpu/plan_on_gpu.py`."""
SPREAD = [
    "tp2", "tp4:nosp ac:selective", "cp2", "cp2:ulysses ac:full", "dp4 zero1", "dp4 zero2 mb2", "dp4 zero3 mb2",
    "dp4 zero3 hs2 ac:selective", "dp2 tp2 zero3 ac:full",
]  # fmt: skip
PIPELINES = ["pp4 mb8", "pp4:gpipe mb4 ac:full", "pp4:interleaved:2 mb8 ac:selective", "pp4:zb-h1 mb8", "pp4:zb-v mb8"]
EXPERTS = ["dp4 ep4", "dp4 ep2:etp2", "dp4 ep4 zero3 ac:selective"]
NO_HEAD = {"layers": 2, "vocabulary": 2048}
"""Models whose peak is not in the loss, as of one stage of a pipeline."""
INSIDE_LAYERS = ["", "tp4 ac:selective", "tp8 ac:full", "tp8", "tp8:nosp"]
WIDE_MLP = NO_HEAD | {"intermediate": 32768}
OVERLAPPED = [
    (name, layout, rows, change) for rows in (1, 8)
    for name, layout, change in (
        ("llama-1b", "tp4", WIDE_MLP), ("llama-1b", "tp4 ac:selective", WIDE_MLP),
        ("mistral-7b-v0.1", "tp8 ac:full", NO_HEAD), ("mistral-7b-v0.1", "tp8:nosp", NO_HEAD),
    )
]  # fmt: skip
"""Models whose products overlap with the collectives of tensor parallelism, with one sequence and with several."""
TWO, EIGHT = ({"layers": layers} for layers in (2, 8))
CASES = [
    *(CudaStep(name, f"{again} bf16".strip(), rows, length, TWO, saved=True)
      for name, rows, length in DENSE for again in AGAIN),
    *(CudaStep("llama-1b", f"{layout} fp32", 8, 4096, TWO, saved=True)
      for layout in ("mb2", "ac:selective", "ac:full")),
    *(CudaStep("llama-1b", f"{again} bf16".strip(), 8, 4096, TWO, documents=4, saved=True, hopper=bool(again))
      for again in AGAIN),
    *(CudaStep("llama-1b", layout, 8, 2048, BENCH) for layout in
      ("bf16", "ac:selective bf16", "ac:full bf16", "mb4 bf16", "mb4 fp32")),
    *(CudaStep("llama-3-8b", f"{again} bf16".strip(), 2, 4096) for again in ("", "ac:full")),
    *(CudaStep("llama-1b", f"{layout} bf16", 16, 4096, TWO, rank=1, saved=True) for layout in SPREAD),
    *(CudaStep(name, f"{layout} bf16".strip(), 4, 4096, NO_HEAD)
      for name in ("llama-1b", "mistral-7b-v0.1") for layout in INSIDE_LAYERS),
    *(CudaStep(name, f"{layout} bf16", rows, 4096, change, saved=True, overlap="chunks")
      for name, layout, rows, change in OVERLAPPED),
    *(CudaStep("llama-1b", f"{layout} bf16", 16, 4096, EIGHT, rank=rank) for layout in PIPELINES for rank in (0, 3)),
    *(CudaStep("mixtral-8x7b-v0.1", f"{layout} bf16", 8, 4096, TWO, saved=True) for layout in EXPERTS),
]  # fmt: skip


def line_of(case: CudaStep, found: Measured) -> dict[str, Any]:
    said, passing = found.predicted - found.predicted_between, found.peak - found.between
    line = {
        "model": case.model, "changed": case.change, "layout": case.layout, "rows": case.batch,
        "sequence": case.sequence,
        "documents": case.documents, "rank": case.rank, "overlap": case.overlap, "peak_bytes": found.peak,
        "predicted_peak_bytes": found.predicted, "error": round(found.error, 5),
        "passing_error": round(said / passing - 1, 5), "moment": found.moment,
        "forward_as_said": not (found.unexpected or found.missing) if case.saved else None,
    }  # fmt: skip
    print(line, file=sys.stderr, flush=True)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose model and layout contain this text")
    only = parser.parse_args().only
    chosen = [case for case in CASES if only in f"{case.model} {case.layout}"]
    lines = []
    for case, found in zip(chosen, measured(chosen), strict=True):
        lines.append(line_of(case, found))
        if not only:  # results are kept if the rest is interrupted
            write_result("gpu_ledger", summary(lines))
    found_all = summary(lines)
    return 0 if found_all["largest_error"] <= LIMIT and found_all["forwards"] == found_all["forwards_as_said"] else 1


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    held = [line["forward_as_said"] for line in lines if line["forward_as_said"] is not None]
    errors, passing = ([abs(line[name]) for line in lines] for name in ("error", "passing_error"))
    return {
        "limit": LIMIT, "steps": len(lines), "largest_error": max(errors), "largest_passing_error": max(passing),
        "forwards": len(held), "forwards_as_said": sum(held), "lines": lines,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
