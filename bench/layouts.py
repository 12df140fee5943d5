"""Every layout of one model on 8 ranks: its error against one device, the bytes a rank sends, the memory a rank needs.

All products of the axes dp, tp, cp and pp with every ZeRO level, every pipeline schedule, the variants of each axis,
and for a mixture of experts every split of the experts. Each layout is run twice on the same 8 gloo processes: in
float64 as `meshwright verify` does it (ragged documents, plain SGD), which gives the worst relative error of any
gradient or update; and by the trainer in float32 with AdamW, which gives bytes and memory. Memory is the growth of a
process's resident set from before its trainer is made to its highest in a step.

    python bench/layouts.py [--only "tp2"] [--limit 5]

Writes bench/results/layouts.json and from it docs/layouts-on-8-ranks.md. Exit code 1 if an error is too large.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, forget_peak, peak_resident_bytes, write_result
from layouts_page import PAGE, page
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import SCHEDULES
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table
from meshwright.spec.refuse import refuse
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.trainer import Trainer
from meshwright.verification.compare import TOLERANCES, compare
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import run_rank
from meshwright.verification.reference import Reference
from synthetic import SyntheticData

RANKS = 8
BATCH = 16  # global batch in sequences
SEQUENCE = 64
COMMON = {"hidden": 64, "heads": 8, "kv_heads": 2, "vocabulary": 2000, "max_positions": SEQUENCE}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"preset": "llama-3-8b", "layers": 8, "intermediate": 224, **COMMON},
    "mixture": {
        "preset": "qwen3-30b-a3b",
        "layers": 8,
        "head_dim": 16,
        "experts": 8,
        "experts_per_token": 2,
        "expert_intermediate": 48,
        **COMMON,
    },
}
SMALLEST_MAPPED_BYTES = 1 << 14  # allocations from this size on are returned to the kernel when freed


# --- layouts


def products(*, every_zero: bool = True) -> Iterator[Layout]:
    """All products of dp, tp, cp and pp that make 8 ranks, with every ZeRO level where there is something to shard. A
    pipeline gets two micro-batches a stage."""
    sizes = (1, 2, 4, 8)
    for pp in sizes:
        for cp in sizes:
            for tp in sizes:
                if RANKS % (tp * cp * pp):
                    continue
                dp = RANKS // (tp * cp * pp)
                micro_batches = min(2 * pp, BATCH // dp) if pp > 1 else 1
                for zero in (0, 1, 2, 3) if every_zero and dp * cp > 1 else (0,):
                    yield Layout(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, micro_batches=micro_batches)


def schedules() -> Iterator[Layout]:
    """Every pipeline schedule on two, four and eight stages, the other ranks sharding their optimizer's state."""
    for pp in (2, 4, 8):
        for name in SCHEDULES:
            dp = RANKS // pp
            yield Layout(dp=dp, pp=pp, schedule=name, zero=1 if dp > 1 else 0, micro_batches=min(2 * pp, BATCH // dp))


def variants() -> Iterator[Layout]:
    """What an axis can do otherwise: tensor without sequence parallelism, Ulysses, hybrid sharding, micro-batches,
    recomputation."""
    texts = ["tp8:nosp", "dp2 zero1 tp4:nosp", "dp2 tp2:nosp pp2 mb4", "cp8:ulysses", "dp2 zero1 cp4:ulysses"]
    texts += ["tp2 cp4:ulysses", "cp2:ulysses tp2 pp2 mb4"]
    texts += [f"dp8 zero{zero} hs{group}" for zero in (1, 2, 3) for group in (2, 4)]
    texts += ["dp4 zero3 hs2 tp2", "dp4 zero3 hs2 cp2", "dp4 zero2 hs2 pp2 mb4"]
    texts += ["dp8 mb2", "dp8 zero2 mb2", "dp8 zero3 mb2"]
    for how in ("selective", "full"):
        texts += [f"{base} ac:{how}" for base in ("dp8 zero3", "tp8", "cp8", "pp8 mb16", "dp2 zero1 tp2 pp2 mb4")]
    return map(Layout.parse, texts)


def splits_of_experts() -> Iterator[Layout]:
    """Every product of axes with its experts whole on each rank, over two, over all ranks of a stage, and over as many
    as leave tp ranks for each of them."""
    for layout in products(every_zero=False):
        zero, stage = 1 if layout.dp * layout.cp > 1 else 0, layout.dp * layout.tp * layout.cp
        for ep, etp in dict.fromkeys(((1, 1), (2, 1), (stage, 1), (stage // layout.tp, layout.tp))):
            if 1 < ep <= stage or ep == etp == 1:
                yield layout.with_(ep=ep, etp=etp, zero=zero)
    for zero in (2, 3):
        yield Layout.parse(f"dp8 zero{zero} ep4")
        yield Layout.parse(f"dp2 zero{zero} tp2 cp2 ep2")


# --- one layout


def config_of(model: str) -> ModelConfig:
    return config_from_recipe(recipe(model, Layout()).model, SEQUENCE, COMMON["vocabulary"])


def recipe(model: str, layout: Layout) -> Recipe:
    """What the trainer runs: AdamW in float32."""
    return Recipe.from_tables(
        {
            "layout": str(layout),
            "model": MODELS[model],
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": SEQUENCE},
            "train": {"steps": 10, "batch": BATCH, "learning_rate": 1e-4, "compile": False},
        }
    )


def measure(model: str, layout_text: str) -> dict[str, int]:
    """On one rank: bytes sent in a step, highest memory of a step and what of it is state, all in bytes."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, SMALLEST_MAPPED_BYTES)  # M_MMAP_THRESHOLD of mallopt(3): freed memory is no longer resident
    layout = Layout.parse(layout_text)
    gc.collect()
    before = resident_bytes()
    mesh = Mesh.create(layout)
    shape = {**COMMON, "sequence": SEQUENCE, "batch": BATCH}
    data: Any = SyntheticData(shape)
    trainer = Trainer(
        LanguageModelTask(recipe(model, layout), layout.with_(precision="fp32"), config_of(model), data, mesh)
    )
    forget_peak()
    mesh.record.clear()
    trainer.step()
    figures = {
        "sent_bytes": sum(mesh.record.sent_by_site().values()),
        "peak_bytes": max(0, peak_resident_bytes() - before),
        "state_bytes": sum(trainer.memory().values()),
    }
    mesh.close()
    return figures


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(model: str, layout: Layout, ranks: LocalRanks, reference: Reference) -> dict[str, Any]:
    """The line of one layout; `refused` where it cannot be."""
    line: dict[str, Any] = {"layout": str(layout)}
    try:
        refuse(layout, reference.problem.config, BATCH, SEQUENCE, ranks.world_size)
    except UserError as error:
        return line | {"refused": str(error).removeprefix(f'layout "{layout}": ')}
    begun = time.monotonic()
    answers = ranks.run(run_rank, reference.problem, str(layout))
    found = compare(reference, [each[0] for each in answers], layout)
    figures = ranks.run("layouts:measure", model, str(layout))
    line |= {
        "passed": found.passed,
        "relative_error": max(found.worst_error, found.loss_error, found.gradient_norm_error),
        "worst": found.worst_name,
    }
    for key in figures[0]:
        values = [rank[key] for rank in figures]
        line[key] = {"most": max(values), "mean": round(statistics.mean(values))}
    line["seconds"] = round(time.monotonic() - begun, 2)
    print(line, file=sys.stderr)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="run only layouts whose notation contains this text; write no results"
    )
    parser.add_argument(
        "--limit", type=int, default=10**9, help="run only this many layouts of each table; write no results"
    )
    arguments = parser.parse_args()
    begun = time.monotonic()
    wanted = {
        "products": ("dense", products()),
        "schedules": ("dense", schedules()),
        "variants": ("dense", variants()),
        "experts": ("mixture", splits_of_experts()),
    }
    models: dict[str, Any] = {}
    references: dict[str, Reference] = {}
    for model in MODELS:
        config = config_of(model)
        references[model] = Reference(Problem(config, BATCH, "float64", SEQUENCE, steps=1))
        with LocalRanks(1) as ranks:
            ranks.run("layouts:measure", model, "dp1")  # code loaded in the first step is not memory of the layout
            alone = ranks.run("layouts:measure", model, "dp1")[0]
        models[model] = {**MODELS[model], "parameters": parameter_table(config).numel, "one_device": alone}
    tables: dict[str, list[dict[str, Any]]] = {}
    with LocalRanks(RANKS, timeout=300) as ranks:
        ranks.run("layouts:measure", "dense", "dp8")
        for name, (model, layouts) in wanted.items():
            chosen = [layout for layout in dict.fromkeys(layouts) if arguments.only in str(layout)]
            tables[name] = [run(model, layout, ranks, references[model]) for layout in chosen[: arguments.limit]]
    result = {
        "ranks": RANKS,
        "batch": BATCH,
        "sequence": SEQUENCE,
        "tolerance": TOLERANCES["float64"],
        "models": models,
        "tables": tables,
        "seconds": round(time.monotonic() - begun),
    }
    if arguments.only or arguments.limit < 10**9:
        print(page(result))
    else:
        write_result("layouts", result)
        PAGE.write_text(page(result))
        print(f"wrote {RESULTS / 'layouts.json'} and {PAGE}", file=sys.stderr)
    return 0 if all(line.get("passed", True) for table in tables.values() for line in table) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
