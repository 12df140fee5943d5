"""Step times predicted for this machine from the measurements of `probe`, against measured ones.

The demo's recipe (recipes/quickstart.toml: its model, data and batch) as it is, and its model under six layouts in
float32, on 2 processes that share the cores, as `meshwright train` starts them. Layouts take turns; a layout's time is
the median over all its steps, warm ones left out, each as long as it would have been at the speed that the processors
had when they were probed: measured by a small product (`probe.points.ReferenceKernel`). Its duration is
also in the JSON. Nothing is fitted to these runs.

    python bench/plan_this_machine.py [--cluster cluster.toml] [--steps 8] [--rounds 3]

Without --cluster the machine is measured first. Writes bench/results/plan_this_machine.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import PreparedData
from meshwright.data.preparation import prepare
from meshwright.layout import Layout
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.planner.api import plan
from meshwright.planner.hardware.cluster import Cluster, cluster
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.show.explain import explain
from meshwright.probe.points import ReferenceKernel
from meshwright.recipe import Recipe, load_recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.trainer import Trainer

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
RANKS = 2
LIMIT = 0.15
LAYOUTS = ("dp2 fp32", "dp2 zero1 fp32", "dp2 zero3 fp32", "tp2 fp32", "pp2 mb4 fp32", "cp2 fp32")
WARM = 2


@cache
def demo() -> tuple[Recipe, ModelConfig, PreparedData]:
    """The demo's recipe, model and data (from the cache, if they were prepared before)."""
    recipe = load_recipe(RECIPE)
    data = prepare(recipe.data, recipe.run.seed)
    return recipe, config_from_recipe(recipe.model, recipe.data.sequence, data.vocabulary), data


def measure(text: str, steps: int, threads: int) -> dict[str, Any]:
    """On one rank: seconds of each step after the warm ones, and the median of each part of them."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    recipe, config, data = demo()
    layout = Layout.parse(text)
    mesh = Mesh.create(layout)
    kernel = ReferenceKernel(mesh.device)
    trainer = Trainer(LanguageModelTask(recipe, layout, config, data, mesh))
    seconds, parts, local = [], [], []
    for _ in range(WARM + steps):
        local.append(kernel.measure_seconds())
        begun = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - begun)
        parts.append(trainer.clock.seconds())
    local.append(kernel.measure_seconds())
    mesh.close()
    names = dict.fromkeys(name for each in parts for name in each)
    return {
        "seconds": seconds[WARM:],
        "yardstick": [(before + after) / 2 for before, after in pairwise(local)][WARM:],
        "parts": {name: statistics.median(each.get(name, 0.0) for each in parts[WARM:]) for name in names},
    }


def documents_in_a_row(data: PreparedData, rows: int = 256) -> float:
    """The mean number of documents in a row of the training split."""
    import numpy as np

    ids = data.split("train").read_batch(np.arange(rows)).document_ids
    return float(1 + (np.diff(ids, axis=1) != 0).sum() / len(ids))


def predict(text: str, where: Cluster) -> Estimate:
    """The planner's word on a layout of the demo."""
    recipe, config, data = demo()
    return plan(
        config, where, text, sequence=recipe.data.sequence, batch=recipe.train.batch, compile=recipe.train.compile,
        optimizer=recipe.train.optimizer, documents=documents_in_a_row(data),
    ).best  # fmt: skip


def probed(path: Path) -> Cluster:
    """This machine, measured now; the cluster file is written to `path`."""
    from meshwright.probe.ranks import probe
    from meshwright.probe.report import format_cluster_file, make_cluster_tables

    found = probe(RANKS, "cpu", log=lambda line: print(line, file=sys.stderr))
    path.write_text(format_cluster_file(make_cluster_tables(found, "cpu"), ["Written by bench/plan_this_machine.py."]))
    return cluster(str(path))


def table(lines: list[dict[str, Any]]) -> str:
    """What a person reads."""
    rows = [f"{'layout':<18} {'predicted':>10} {'measured':>10} {'error':>8} {'as it was':>10}"]
    for line in lines:
        rows.append(
            f"{line['layout']:<18} {line['predicted_seconds']:>8.4f} s {line['measured_seconds']:>8.4f} s "
            f"{line['error']:>+8.1%} {line['measured_as_it_was']:>8.4f} s"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="cluster file of `meshwright probe` (default: measure now)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a layout per round, after warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="run only layouts whose notation contains this text; write no results"
    )
    parser.add_argument(
        "--explain", action="store_true", help="print the components of the prediction; write no results"
    )
    options = parser.parse_args()
    begun = time.monotonic()
    where = (
        cluster(str(options.cluster))
        if options.cluster
        else probed(Path(tempfile.gettempdir()) / "plan_this_machine.toml")
    )
    recipe, _, _ = demo()
    threads = max(1, (os.cpu_count() or 1) // RANKS)
    level = where.measured.yardstick if where.measured is not None else None
    assert level is not None, "the cluster file was measured by an older probe"
    layouts = [text for text in (str(recipe.layout), *LAYOUTS) if options.only in text]
    seconds: dict[str, list[float]] = {text: [] for text in layouts}
    usual: dict[str, list[float]] = {text: [] for text in layouts}
    parts: dict[str, Any] = {}
    with LocalRanks(RANKS, threads=threads, timeout=300) as ranks:
        for _ in range(options.rounds):
            for text in layouts:
                by_rank = ranks.run("plan_this_machine:measure", text, options.steps, threads)
                # Ranks end a step together, so its time is that of the slowest rank.
                slowest = [max(each) for each in zip(*(one["seconds"] for one in by_rank), strict=True)]
                levels = [statistics.mean(each) for each in zip(*(one["yardstick"] for one in by_rank), strict=True)]
                seconds[text] += slowest
                usual[text] += [took * level / here for took, here in zip(slowest, levels, strict=True)]
                parts[text] = [one["parts"] for one in by_rank]
    lines = []
    for text in layouts:
        estimate, took, raw = (
            predict(text, where), statistics.median(usual[text]), statistics.median(seconds[text])
        )  # fmt: skip
        lines.append(
            {
                "layout": text,
                "recipe": text == str(recipe.layout),
                "predicted_seconds": round(estimate.time.seconds, 5),
                "measured_seconds": round(took, 5),
                "error": round(estimate.time.seconds / took - 1, 4),
                "measured_as_it_was": round(raw, 5),
                "error_as_it_was": round(estimate.time.seconds / raw - 1, 4),
                "predicted_parts": {name: round(value, 5) for name, value in estimate.time.breakdown.items()},
                "measured_parts_by_rank": [{n: round(v, 5) for n, v in one.items()} for one in parts[text]],
                "steps_as_they_were": [round(each, 5) for each in seconds[text]],
            }
        )
        if options.explain:
            print(text, lines[-1]["predicted_parts"], *lines[-1]["measured_parts_by_rank"], sep="\n  ")
            for row in explain(estimate.problem, estimate.layout)[:14]:
                print(f"  {row.operation:<24} {row.phase:<8} x{row.count:<5g} {row.shape} {row.seconds * 1e3:8.2f} ms")
    print(table(lines), file=sys.stderr)
    errors = [abs(line["error"]) for line in lines]
    if not options.only and not options.explain:
        write_result(
            "plan_this_machine",
            {
                "recipe": RECIPE.name, "ranks": RANKS, "threads": threads, "limit": LIMIT,
                "within": sum(error <= LIMIT for error in errors), "of": len(errors),
                "worst_error": max(errors), "layouts": lines, "seconds": round(time.monotonic() - begun),
            },
        )  # fmt: skip
    return 0 if max(errors) <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
