"""Forward and backward as one CUDA graph: replays compute what the step computes without it, and what a graph cannot do
is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.emulation.ranks import EmulatedRanks
from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_cuda_graphs, check_recipe
from meshwright.parallel.stage_compute import StageCompute
from meshwright.recipe import load_recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.presets import preset
from meshwright.training import language_model
from meshwright.training.cuda_graphs import GraphedForwardBackward
from tests.adapters.adapter_cases import small, write_base
from tests.conftest import exhaustive
from tests.emulation.test_streams import edited
from tests.training import training_cases as cases
from tests.training.recorded_graph import Capture, RecordedGraph


class Outcome(NamedTuple):
    """Outcome of a run: what is compared of each step, the state at the end, the names of each step's phases, the log
    lines, the error."""

    lines: list[tuple[Any, ...]]
    state: cases.Values
    phases: list[str]
    said: list[str]
    error: str


WINDOWED = {"model_family": "mistral", "model_sliding_window": 20, "model_tied": False}
CASES: dict[str, dict[str, Any]] = {
    "ac:selective mb2 bf16": {**WINDOWED, "train_validate_every": 3, "checkpoint_every": 3},
    "ac:full fp16": {"train_loss_scale": 1024.0, "train_loss_scale_every": 2, "train_profile": "5"},
}
"""Changes of the recipe by layout. The loss scale changes after every second step; step 5 is profiled."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Let `train.cuda_graphs` capture graphs on CPUs; return the list of them."""
    made: list[RecordedGraph] = []

    def make() -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(language_model, "CAPTURING_DEVICES", ("cpu",))
    return made


DATA_PARALLEL = {"dp2": 2, "dp2 zero1 mb2 ac:full bf16": 2, "dp4 zero1 hs2": 4}
"""Layouts of data parallelism, and their ranks."""
BOTH = "dp2 zero1 mb2 ac:full bf16"
"""The layout with all-gathers of parameters and reductions of gradients."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Outcome of each case on a CPU, where `train.cuda_graphs` has no effect."""
    return {layout: train(tmp_path_factory.mktemp("launched"), layout) for layout in CASES}


def train(place: Path, layout: str, **options: Any) -> Outcome:
    """Train a case with `train.cuda_graphs`, and with updates that begin before the host knows the outcome of a step,
    as on GPUs. options: of `training_cases.run`."""
    changes = {"data_document_mask": False, "train_cuda_graphs": True, **CASES[layout], **options}
    (outcome,) = cases.run(None, place, layout, fault="update_early", **changes)
    phases = [", ".join(line["seconds_by_part"]) for line in cases.metrics(place) if "loss" in line]
    return Outcome(cases.trace(place), cases.whole_state([outcome]), phases, outcome["said"], outcome["error"])


def test_cpu_launches_all_kernels_and_says_so(launched: dict[str, Outcome]):
    for outcome in launched.values():
        assert outcome.said.count("train.cuda_graphs changes nothing on a CPU: it is for GPUs") == 1
        assert outcome.phases == ["data, forward, backward, reduce, agree, update"] * 6


@pytest.mark.parametrize("layout", CASES)
def test_replayed_steps_equal_launched_steps_bit_for_bit(
    layout: str, tmp_path: Path, launched: dict[str, Outcome], graphs: list[RecordedGraph]
):
    expected, found = launched[layout], train(tmp_path, layout)
    assert len({line[3] for line in expected.lines}) == len(expected.lines) == 6  # learning rates
    assert found.error == "" and found.lines == expected.lines and cases.same(found.state, expected.state)
    profiled = [5] if "train_profile" in CASES[layout] else []
    assert [graph.replays for graph in graphs] == [4 - len(profiled)]
    for step, phases in enumerate(found.phases, 1):
        together = step > 2 and step not in profiled
        assert phases == ("data, forward and backward, reduce, agree, update" if together else expected.phases[0])


def train_ranks(place: Path, layout: str, graphs: bool) -> tuple[list[tuple[Any, ...]], cases.Values, list[str]]:
    """Train a layout of data parallelism on emulated ranks. Return what is compared of each step, the state at the end
    and the errors of the ranks. graphs: value of `train.cuda_graphs`."""
    changes: dict[str, Any] = {"data_document_mask": False, "train_cuda_graphs": graphs, "train_steps": 4}
    with EmulatedRanks(DATA_PARALLEL[layout]) as emulated:
        ranks: Any = emulated
        outcomes = cases.run(ranks, place, layout, fault="update_early", **changes)
    return cases.trace(place), cases.whole_state(outcomes), [outcome["error"] for outcome in outcomes]


@pytest.fixture(scope="module")
def launched_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that trains a layout of data parallelism without graphs, once."""
    return cache(lambda layout: train_ranks(tmp_path_factory.mktemp("ranks"), layout, graphs=False))


@pytest.mark.parametrize("layout", [BOTH, *exhaustive(*(layout for layout in DATA_PARALLEL if layout != BOTH))])
def test_replayed_steps_of_data_parallelism_equal_launched_steps_bit_for_bit(
    layout: str, tmp_path: Path, launched_ranks: Callable[[str], Any], graphs: list[RecordedGraph]
):
    lines, state, _ = launched_ranks(layout)
    assert len(lines) == 4 and not graphs
    found, replayed, errors = train_ranks(tmp_path, layout, graphs=True)
    assert errors == [""] * DATA_PARALLEL[layout]
    assert found == lines and cases.same(replayed, state)
    assert [graph.replays for graph in graphs] == [2] * DATA_PARALLEL[layout]


def test_resumed_run_captures_again_and_equals_undisturbed_run(
    tmp_path: Path, launched: dict[str, Outcome], graphs: list[RecordedGraph]
):
    layout = "ac:selective mb2 bf16"
    assert len(train(tmp_path, layout, crash_after=3).lines) == 3
    found = train(tmp_path, layout)
    assert any(line.startswith("resumed from step-000003") for line in found.said)
    assert [graph.replays for graph in graphs] == [1, 1]
    assert found.lines == launched[layout].lines and cases.same(found.state, launched[layout].state)


ADAPTER = {"kind": "lora", "rank": 2, "targets": ["q_proj", "o_proj"], "dropout": 0.3, "base": "nf4"}
BASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "dropout of an adapter": (
        dataclasses.replace(small(), hidden=64, head_dim=16, intermediate=128), {"adapter": ADAPTER},
    ),
    "softcaps": (dataclasses.replace(preset("gemma2-tiny"), vocabulary=small().vocabulary, sliding_window=40), {}),
}  # fmt: skip
"""Base models, and further changes of the recipe."""


@pytest.mark.parametrize("base", BASES)
def test_replays_of_base_models_equal_launched_steps(base: str, tmp_path: Path, graphs: list[RecordedGraph]):
    """The keys of the samples, from which dropout is drawn, are inputs of the graph; the frozen base is dequantized in
    it."""
    config, more = BASES[base]
    write_base(tmp_path / "base", config, torch.float32)
    changes: dict[str, Any] = {
        "model": {"from": str(tmp_path / "base")}, "data_sequence": 40, "data_document_mask": False, **more,
    }  # fmt: skip
    found = []
    for graph in (False, True):
        place = tmp_path / str(graph)
        outcomes = cases.run_without_error(None, place, "mb2 fp32", train_cuda_graphs=graph, **changes)
        found.append((cases.trace(place), cases.whole_state(outcomes)))
    (lines, state), (replayed, replayed_state) = found
    assert replayed == lines and cases.same(replayed_state, state) and graphs[0].replays == 4


RANK_FAULTS = {
    "gradients are reduced in the captured step alone": (
        GraphedForwardBackward, "__call__", "in captured.reductions:",
        "in captured.reductions * (captured.graph.replays == 1):",
    ),
    "reductions are not waited for": (GraphedForwardBackward, "__call__", "engine.gradients.reducer.finish()", "pass"),
    "forward begins before the all-gather of parameters has ended": (
        GraphedForwardBackward, "__call__", "unit.unshard()", "self._captured is None and unit.unshard()",
    ),
    "reductions are captured": (GraphedForwardBackward, "_capture", "reductions.append", "reducer.launch"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [next(iter(RANK_FAULTS)), *exhaustive(*[*RANK_FAULTS][1:])])
def test_planted_fault_in_calls_of_data_parallelism_is_caught(
    fault: str, tmp_path: Path, launched_ranks: Callable[[str], Any], graphs: list[RecordedGraph]
):
    expected, expected_state, _ = launched_ranks(BOTH)
    with edited(*RANK_FAULTS[fault]):
        lines, state, errors = train_ranks(tmp_path, BOTH, graphs=True)
    assert len(graphs) == 2
    assert any(errors) or lines != expected or not cases.same(state, expected_state)


FAULTS = {
    "tokens of the captured step are used again": (
        GraphedForwardBackward, "__call__", "tensor.copy_(value)", "tensor.dim() or tensor.copy_(value)",
    ),
    "loss scale of the captured step is used again": (
        GraphedForwardBackward, "__call__", "tensor.copy_(value)", "tensor.dim() and tensor.copy_(value)",
    ),
    "captured step is not replayed": (
        GraphedForwardBackward, "__call__", "captured.graph.replay()", "len(captured.inputs)",
    ),
    "host waits for the loss": (StageCompute, "_forward", "+= out.detach()", "+= out.item()"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path, launched: dict[str, Outcome], graphs: list[RecordedGraph]):
    layout = "ac:full fp16"
    with edited(*FAULTS[fault]):
        found = train(tmp_path, layout, train_profile=None)
    assert len(graphs) == 1
    if fault == "host waits for the loss":
        assert found.error == "CaptureFailed: the host waits for aten._local_scalar_dense.default"
    else:
        assert found.error == "" and found.lines[:2] == launched[layout].lines[:2]
        assert found.lines[:5] != launched[layout].lines[:5]


EXPERTS = [
    "model.family=qwen3_moe", "model.experts=4", "model.experts_per_token=2", "model.expert_intermediate=16",
]  # fmt: skip
PAIRS = ["data.records=preference", "data.train_on=responses", "data.document_mask=true"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        *(
            (
                [f"layout={layout}"],
                "a CUDA graph has no calls to other ranks, which layers under tp, cp and pp make; use dp alone",
            )
            for layout in ("tp2", "dp2 cp2", "pp2 mb2")
        ),
        (["layout=dp2 zero2"], "a CUDA graph has no calls to other ranks, which layers under zero2 make; use zero1"),
        (["layout=dp2 zero1"], None),
        (PAIRS, 'a CUDA graph is for objective "next-token"; "dpo" has inputs of changing shapes'),
        (
            ["data.document_mask=true"],
            "a CUDA graph has fixed shapes, and batches pack other documents; set data.document_mask=false",
        ),
        (EXPERTS, "a CUDA graph has fixed shapes, and batches give experts other numbers of tokens"),
        ([], None),
    ],
)
def test_recipe_that_no_graph_can_repeat_is_refused(overrides: list[str], reason: str | None, tiny_recipe: Path):
    changed = ["data.document_mask=false", *overrides]
    check_recipe(load_recipe(tiny_recipe, changed))
    recipe = load_recipe(tiny_recipe, [*changed, "train.cuda_graphs=true"])
    if reason is None:
        check_recipe(recipe)
        return
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        check_recipe(recipe)
    assert str(error.value) == f'override "train.cuda_graphs=true": train.cuda_graphs: {reason}'


def test_windows_of_attention_with_softcap_are_refused_unless_sequences_fit_in_them(tiny_recipe: Path):
    recipe = load_recipe(tiny_recipe, ["train.cuda_graphs=true", "data.document_mask=false", "data.sequence=40"])
    check_cuda_graphs(recipe, dataclasses.replace(preset("gemma2-tiny"), sliding_window=40))
    with pytest.raises(UserError, match="which sliding windows of attention with a softcap need; set data.sequence=39"):
        check_cuda_graphs(recipe, dataclasses.replace(preset("gemma2-tiny"), sliding_window=39))
    check_cuda_graphs(recipe, dataclasses.replace(preset("gemma2-tiny"), sliding_window=39, attention_softcap=None))
