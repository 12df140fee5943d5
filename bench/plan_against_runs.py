"""Tensors and bytes on the wire that `meshwright plan` and a run predict, against what the run takes.

Each case is the training loop of `meshwright train` with a tiny model on 1, 2 or 4 gloo ranks, four steps.
Compared on every rank: the peak of tensors by PyTorch's record of its allocator with the prediction that the run makes
before its first step, and the bytes sent by mesh axis; of all ranks: the highest peak with `meshwright plan` of the
same recipe; on one rank without recomputation: FLOPs by PyTorch's counter. A thread of gloo frees a message when it
next runs, so of several ranks' steps the one that is least above its prediction counts. Under expert parallelism the
prediction is given the tokens that the router has sent, and the bytes of the axes `ep` and `etp` are not compared.

    python bench/plan_against_runs.py [--only TEXT] [--compiled]

Writes bench/results/plan_against_runs.json; exit code 1 if a figure is beyond its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from bench.shared.flop_counting import OURS
from bench.shared.ledger_cases import highest, live_bytes
from common import write_result
from meshwright.collectives.named import load_named_programs
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.planner.api import plan
from meshwright.planner.cost.micro_batch import Routed
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.hardware.devices import Device, Link
from meshwright.planner.hardware.measured import Measured
from meshwright.planner.memory.ledger import ledger
from meshwright.recipe import Recipe, load_recipe_text
from meshwright.spec.flops import forward_flops_per_token
from meshwright.training import loop, prediction
from plan_against_cases import CASES, COMPILED_CASES, describe, make_recipe, write_home

LIMITS = {"one rank, dp, tp": 0.01, "cp, ep, pp": 0.03, "compiled": 0.05}
"""Largest errors of the peak of tensors that docs/plan.md states."""
NOT_PRICED = {"reduce_scatter": 0.03}
"""Words of cases with tensors that are documented as not priced, and the largest error."""
FLOPS_LIMIT = 0.005


# --- on a rank


def measure(text: str) -> dict[str, Any]:
    """Train the recipe on this rank; return its predicted and measured figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    loop.device_peak_flops = lambda mesh, precision: 1e9
    recipe = load_recipe_text(text, "recipe", trust=True)
    layout = recipe.parsed_layout
    gc.collect()
    gc.freeze()
    mesh = Mesh.create(layout, "cpu", programs=load_named_programs(recipe.collectives, layout))
    directory = RunDirectory(recipe.run_directory)
    directory.create()
    try:
        run = loop.Run(recipe, mesh, directory, show_progress=False)
        with mock.patch.object(run.journal, "log"), StepMeter(run) as steps:
            result = run.run()
        flops = None
        plain = not (
            recipe.data.document_mask
            or recipe.train.compile
            or recipe.distill.teacher
            or run.trainer.task.config.adapter
        )
        if mesh.world_size == 1 and layout.recompute == "none" and plain:
            flops = result["predicted"]["flops_per_token"] * recipe.train.batch * recipe.data.sequence, count_flops(run)
        return {
            "steps": steps.found,
            "axes": dict(steps.prediction.sent_by_axis),
            "flops": flops,
            "notes": [line for line in steps.prediction.notes if "step time" not in line],
        }
    finally:
        mesh.close()
        gc.unfreeze()


def count_flops(run: loop.Run) -> float:
    """Return the FLOPs of forward and backward of a step, without the scores that attention's backward repeats."""
    task, data, train = run.trainer.task, run.recipe.data, run.recipe.train
    with FlopCounterMode(display=False, custom_mapping=OURS) as counter:
        task.forward_backward(task.load_step(0), 1)
    config = task.config
    repeated = forward_flops_per_token(config, data.sequence)["attention.scores"]
    repeated *= 1 + config.prediction_layers / config.layers
    return counter.get_total_flops() - repeated * train.batch * data.sequence


class StepMeter(contextlib.ExitStack):
    """Meter of the steps of a run, while it is open. Attributes: `prediction`: that of the run; `found`: of each step
    its predicted and measured peak of tensors, and bytes sent by axis."""

    def __init__(self, run: loop.Run) -> None:
        super().__init__()
        self.run, self.found = run, list[dict[str, Any]]()
        self._predict, self._launch, self._finish = run._predict, run.trainer.launch_step, run.trainer.finish_step
        self._agree = AllToAllTokenDispatcher._agree_on_routes
        self.enter_context(mock.patch.object(run, "_predict", self.predict))
        self.enter_context(mock.patch.object(run.trainer, "launch_step", self.launch))
        self.enter_context(mock.patch.object(run.trainer, "finish_step", self.finish))

    def predict(self) -> Any:
        self.prediction = self._predict()
        return self.prediction

    def launch(self, **options: Any) -> None:
        gc.collect()
        saved = sum(each.nbytes for each in self.run.checkpointer._buffers._buffers.values())  # copies for saves
        self._before, self._sent = live_bytes() - saved, self.run.mesh.record.sent_by_axis()
        self._routed: list[Routed] = []
        agree, routed, task = self._agree, self._routed, self.run.trainer.task
        documents = task.tokens.document_mask and task.tokens.documents > 1
        self._starts = task.document_starts(self.run.trainer.steps_done, 1) if documents else None

        def noted(dispatcher: AllToAllTokenDispatcher, ends_E: torch.Tensor) -> Any:
            routes = agree(dispatcher, ends_E)
            routed.append(Routed(sum(routes.received), sum(routes.shared)))
            return routes

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(mock.patch.object(AllToAllTokenDispatcher, "_agree_on_routes", noted))
        self._profile = self._stack.enter_context(
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        )
        self._launch(**options)

    def finish(self) -> Any:
        outcome = self._finish()
        for unit in self.run.trainer.parallel._units.values():
            if unit.pending_all_gather is not None:  # as in bench/shared/ledger_cases.py
                unit.unshard()
        self._stack.close()
        peak, where = highest(self._profile)
        now = self.run.mesh.record.sent_by_axis()
        sent = {axis: size - self._sent.get(axis, 0) for axis, size in now.items() if size != self._sent.get(axis, 0)}
        self.found.append(
            {"predicted": self._predict_peak(), "measured": self._before + peak, "where": where, "sent": sent}
        )
        return outcome

    def _predict_peak(self) -> int:
        """Return the predicted peak of the step, of its documents and the tokens that its router has sent."""
        trainer, given = self.run.trainer, dict[str, Any]()
        if self._starts is not None:
            given["documents"] = self._starts
        if self._routed and trainer.layout.micro_batches == 1:
            config, stages = trainer.task.config, trainer.parallel.partition.stages_on(self.run.mesh.pp.rank)
            layers = [layer for stage in stages for layer in stage.layers if config.has_experts(layer)]
            given["routed"] = dict(zip(layers, self._routed, strict=False))
        if not given:
            return int(self.prediction.memory["peak"])
        with mock.patch.object(prediction, "ledger", lambda *sizes, **options: ledger(*sizes, **options | given)):
            memory = prediction.predict(trainer).memory
        assert memory is not None
        return int(memory["peak"])


# --- all ranks of a case


def compare(name: str, recipe: Recipe, found: list[dict[str, Any]], place: Path) -> dict[str, Any]:
    """Return the line of a case in the results. found: figures of each rank; place: directory of the cases' files."""
    layout = recipe.parsed_layout
    choose = max if layout.world_size == 1 else min
    steps = [choose(one["steps"][1:], key=lambda step: step["measured"] / step["predicted"]) for one in found]
    errors = [step["predicted"] / step["measured"] - 1 for step in steps]
    worst = max(range(len(errors)), key=lambda rank: abs(errors[rank]))
    routed = {"ep", "etp"} if layout.expert_parallel else set()
    wrong = [
        {"rank": rank, "step": number, "predicted": one["axes"], "measured": step["sent"]}
        for rank, one in enumerate(found)
        for number, step in enumerate(one["steps"])
        if number and not same_bytes(one["axes"], step["sent"], routed)
    ]
    planned = plan(recipe, make_cluster(layout.world_size), layout).best
    largest = max(step["measured"] for step in steps)
    flops = found[0]["flops"]
    return {
        "case": name, "layout": str(layout).replace(f"{place}/", ""), "compile": recipe.train.compile, "rank": worst,
        "predicted_peak_bytes": steps[worst]["predicted"], "measured_peak_bytes": steps[worst]["measured"],
        "error": round(errors[worst], 5), "planned_peak_bytes": planned.memory.peak_bytes,
        "planned_error": round(planned.memory.peak_bytes / largest - 1, 5),
        "sent_bytes": sum(sum(one["steps"][-1]["sent"].values()) for one in found), "wrong_bytes": wrong,
        "flops_error": flops and round(flops[0] / flops[1] - 1, 5),
    }  # fmt: skip


def make_cluster(ranks: int) -> Cluster:
    """Return a machine of CPU ranks. Its speeds are made up: memory does not depend on them."""
    device = Device("cpu", {"fp32": 0.1, "bf16": 0.2, "fp16": 0.1}, memory_bytes=2**33, memory_bandwidth=1e10)
    link = Link(bandwidth=2e9, latency=3e-5)
    measured = Measured("gloo", ranks, threads=1, products=(), passes=())
    return Cluster(f"{ranks} CPU ranks", device, ranks, ranks, link, link, measured)


def same_bytes(predicted: dict[str, int], measured: dict[str, int], apart: set[str]) -> bool:
    """Return True if the bytes are equal on every axis but those `apart`."""
    axes = {*predicted, *measured} - apart
    return all(predicted.get(axis, 0) == measured.get(axis, 0) for axis in axes)


def find_faults(line: dict[str, Any]) -> list[str]:
    """Return the figures of a case that are beyond their limits."""
    split = any(word.startswith(("cp", "ep", "pp")) for word in line["layout"].split())
    limit = LIMITS["compiled"] if line["compile"] else LIMITS["cp, ep, pp" if split else "one rank, dp, tp"]
    limit = next((most for words, most in NOT_PRICED.items() if words in line["case"]), limit)
    beyond = {
        "error": abs(line["error"]) > limit, "wrong_bytes": bool(line["wrong_bytes"]),
        "flops_error": abs(line["flops_error"] or 0.0) > FLOPS_LIMIT,
    }  # fmt: skip
    return [name for name, value in beyond.items() if value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose name and layout contain this text")
    parser.add_argument("--compiled", action="store_true", help="run the compiled cases, too")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    chosen = [*CASES.items(), *(COMPILED_CASES.items() if options.compiled else ())]
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary, contextlib.ExitStack() as stack:
        home, pools = Path(temporary), dict[int, LocalRanks]()
        write_home(home)
        for layout, several in chosen:
            for tables in several:
                name = describe(tables)
                if options.only not in f"{name} {layout}":
                    continue
                recipe = make_recipe(home, layout, tables)
                count = recipe.parsed_layout.world_size
                if count not in pools:
                    pools[count] = stack.enter_context(LocalRanks(count, timeout=900))
                found = pools[count].run("plan_against_runs:measure", recipe.to_toml())
                lines.append(compare(name, recipe, found, home))
                print(find_faults(lines[-1]) or "ok", lines[-1], file=sys.stderr, flush=True)
                if not options.only:  # results are kept if the rest is interrupted
                    write_result("plan_against_runs", summarise(lines), quiet=True)
    return 1 if any(map(find_faults, lines)) else 0


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result document. lines: those of all cases."""
    priced = [line for line in lines if not any(words in line["case"] for words in NOT_PRICED)]
    errors = sorted(abs(line["error"]) for line in priced)
    return {
        "limits": LIMITS, "not_priced": NOT_PRICED, "runs": len(lines), "runs_priced": len(priced),
        "median_error": errors[len(errors) // 2], "largest_error": errors[-1],
        "runs_with_wrong_bytes": sum(bool(line["wrong_bytes"]) for line in lines),
        "runs_with_flops": sum(line["flops_error"] is not None for line in lines),
        "largest_flops_error": max(abs(line["flops_error"] or 0.0) for line in lines),
        "beyond_limits": [f"{line['case']} {line['layout']}" for line in lines if find_faults(line)], "lines": lines,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
