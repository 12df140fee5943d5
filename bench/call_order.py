"""NCCL's rule on the order of calls, checked on the recorded calls of every layout of `meshwright verify`'s grid.

python bench/call_order.py [--again] [LAYOUT ...]

Each layout trains a small model on local ranks: as launched, with weight gradients and chunks of products that overlap
with collectives as on GPUs, and compiled (forward, backward and recomputation of every block traced by torch.compile).
All calls of all ranks, over all mesh axes together, are then replayed on devices that run one kernel at a time in the
order in which they were posted. On gloo, axes over the same ranks share a group, so that their calls must agree in
order, too.
Runs that the result has, of the same version of the package and the same machine, are left out, so that an interrupted
benchmark goes on; --again repeats them. Exit code 1 if ranks can wait for each other in a circle, or calls are missing.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import read_stored, write_result
from meshwright.comm.local import LocalRanks
from meshwright.flight_recorder.circular_wait import find_circular_wait
from meshwright.layout import Layout
from meshwright.parallel import step
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.grid import GRID, MIXTURES
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import COMPILING_SECONDS, run_rank
from meshwright.verification.run import _choose_default_models

LAUNCHED, OVERLAPPED, COMPILED = "launched", "overlapped", "compiled"
SECONDS = 3 * COMPILING_SECONDS


def run_rank_as_on_gpu(problem: Problem, layout: str) -> None:
    """Train on this rank, and compute weight gradients while calls of backward are in flight, as on GPUs."""
    find = step.find_overlapped_weights

    def find_on_gpu(model: Any, mesh: Any) -> Any:
        with mock.patch.object(mesh, "device", torch.device("cuda")):
            return find(model, mesh)

    with mock.patch.object(step, "find_overlapped_weights", find_on_gpu):
        run_rank(problem, layout)


def list_problems(layout: Layout, mixture: bool) -> dict[str, tuple[str, Problem]]:
    """Return {kind of run: (function of a rank, problem)} for a layout. mixture: True for a model with experts."""
    _, config = _choose_default_models(layout, mixture, one=True)[0]
    plain = CaseBuilder(layout, config, "float32")
    found = {LAUNCHED: ("meshwright.verification.ranks:run_rank", plain.make_sgd_problem())}
    if layout.tp > 1 or layout.ep > 1:
        overlapped = CaseBuilder(layout, config, "float32", overlap=layout.tp > 1).make_sgd_problem()
        found[OVERLAPPED] = ("call_order:run_rank_as_on_gpu", overlapped)
    return found | {COMPILED: ("meshwright.verification.ranks:run_rank", plain.make_compiled_case("aot_eager").problem)}


def check_order(layout: Layout, function: str, problem: Problem) -> dict[str, Any]:
    """Train on new local ranks and replay their calls; return the number of calls and the first circular wait."""
    with LocalRanks(layout.world_size, timeout=SECONDS) as ranks:
        ranks.run(function, problem, str(layout))
        calls = [each.calls for each in ranks.calls().seen if each.calls is not None]
    lost = sum(sum(each.counts.values()) - len(each.calls) for each in calls)
    return {"calls": sum(len(each.calls) for each in calls), "lost": lost, "wait": find_circular_wait(calls)}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of all `runs`: numbers of faults, and of layouts and calls of each kind of run."""
    kinds = {kind: [run for run in runs if run["run"] == kind] for kind in (LAUNCHED, OVERLAPPED, COMPILED)}
    return {
        "circular_waits": sum(run["wait"] is not None for run in runs),
        "lost_calls": sum(run["lost"] for run in runs),
        "totals": {
            kind: {"layouts": len(found), "calls": sum(run["calls"] for run in found)} for kind, found in kinds.items()
        },
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="default: the grid")
    options = parser.parse_args()
    several = [layout for layout in GRID if layout.world_size > 1]
    wanted = [(layout, False) for layout in (list(map(Layout.parse, options.layouts)) or several)]
    wanted += [(layout, True) for layout in ([] if options.layouts else MIXTURES)]
    runs = {(each["layout"], each["experts"], each["run"]): each for each in read_stored("call_order").get("runs", [])}
    problems = [(layout, list_problems(layout, mixture)) for layout, mixture in wanted]
    for kind, (layout, kinds) in product((LAUNCHED, OVERLAPPED, COMPILED), problems):
        if kind not in kinds:
            continue
        function, problem = kinds[kind]
        key = str(layout), problem.config.experts > 0, kind
        if key not in runs or options.again:
            runs[key] = dict(zip(("layout", "experts", "run"), key, strict=True))
            runs[key] |= {"ranks": layout.world_size} | check_order(layout, function, problem)
            print(*runs[key].values(), flush=True)
            write_result("call_order", summarise(list(runs.values())), quiet=True)
    raise SystemExit(any(run["wait"] is not None or run["lost"] for run in runs.values()))


if __name__ == "__main__":
    main()
