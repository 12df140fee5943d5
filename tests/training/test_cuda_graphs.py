"""Forward and backward as one CUDA graph: replays compute what the step computes without it."""

from __future__ import annotations

import dataclasses
import json
import random
import string
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from bench.shared.flash_kernels import flash_kernels_on_cpu
from bench.shared.packed_documents import documents_from_starts
from meshwright.comm.mesh import Mesh, find_axis
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.model import attention_inputs, varlen_attention
from meshwright.parallel.stage_compute import StageCompute
from meshwright.spec.config import ModelConfig
from meshwright.spec.presets import preset
from meshwright.training import language_model
from meshwright.training.cuda_graphs import FixedDocuments, GraphedForwardBackward
from tests.adapters.adapter_cases import small, write_base
from tests.conftest import exhaustive
from tests.emulation.test_streams import edited
from tests.training import training_cases as cases
from tests.training.recorded_graph import Capture, CapturedCalls, RecordedGraph


class Outcome(NamedTuple):
    """Outcome of a run: what is compared of each step, the state at the end, the names of each step's phases, the log
    lines, the error."""

    lines: list[tuple[Any, ...]]
    state: cases.Values
    phases: list[str]
    said: list[str]
    error: str


LETTERS = "".join(random.Random(3).choices(string.ascii_lowercase, k=15_000))  # the same with every version of Python
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


RANKS = {"dp2": 2, "dp2 zero1 mb2 ac:full bf16": 2, "dp4 zero1 hs2": 4, "dp2 zero1 tp2 bf16": 4}
"""Layouts of several ranks, and their numbers."""
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
    """Train a layout of several ranks on emulated ones. Return what is compared of each step, the state at the end
    and the errors of the ranks. graphs: value of `train.cuda_graphs`."""
    changes: dict[str, Any] = {"data_document_mask": False, "train_cuda_graphs": graphs, "train_steps": 4}
    with EmulatedRanks(RANKS[layout]) as emulated, CapturedCalls(emulated.matcher):
        ranks: Any = emulated
        outcomes = cases.run(ranks, place, layout, fault="update_early", **changes)
    return cases.trace(place), cases.whole_state(outcomes), [outcome["error"] for outcome in outcomes]


@pytest.fixture(scope="module")
def launched_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that trains a layout of several ranks without graphs, once."""
    return cache(lambda layout: train_ranks(tmp_path_factory.mktemp("ranks"), layout, graphs=False))


@pytest.mark.parametrize("layout", [BOTH, *exhaustive(*(layout for layout in RANKS if layout != BOTH))])
def test_replayed_steps_of_several_ranks_equal_launched_steps_bit_for_bit(
    layout: str, tmp_path: Path, launched_ranks: Callable[[str], Any], graphs: list[RecordedGraph]
):
    lines, state, _ = launched_ranks(layout)
    assert len(lines) == 4 and not graphs
    found, replayed, errors = train_ranks(tmp_path, layout, graphs=True)
    assert errors == [""] * RANKS[layout]
    assert found == lines and cases.same(replayed, state)
    assert [graph.replays for graph in graphs] == [2] * RANKS[layout]


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


EXPERTS = {
    "model_family": "qwen3_moe", "model_experts": 4, "model_experts_per_token": 2, "model_expert_intermediate": 16,
}  # fmt: skip


def test_replays_of_experts_equal_launched_steps(tmp_path: Path, graphs: list[RecordedGraph]):
    """Experts get other numbers of tokens in each step."""
    given = {**EXPERTS, "model_layers": 1, "train_steps": 4, "train_profile": None}
    found = [train(tmp_path / str(graph), "ac:full fp16", train_cuda_graphs=graph, **given) for graph in (False, True)]
    assert found[0].error == "" and found[0].lines == found[1].lines and cases.same(found[0].state, found[1].state)
    assert [graph.replays for graph in graphs] == [2]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attend by the definition of PyTorch's CUDA kernels, on the CPU; document boundaries are not padded."""
    monkeypatch.setattr(attention_inputs, "choose_mask_form", lambda *_: "varlen")
    monkeypatch.setattr(varlen_attention, "pad_document_count", lambda documents: documents)
    with flash_kernels_on_cpu():
        yield


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Changes of a recipe that packs short texts, of changing lengths, into sequences."""
    place = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    texts = [LETTERS[97 * number :][: 5 + 37 * number % 80] for number in range(150)]
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes = {"data_source": str(place), "data_document_mask": True, "train_profile": None}
    return {**changes, "model_layers": 1, "train_batch": 4, "train_steps": 8}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, of_texts: dict[str, Any]) -> Outcome:
    """Outcome of steps with packed documents that launch each kernel."""
    with pytest.MonkeyPatch.context() as patch, flash_kernels_on_cpu():
        patch.setattr(attention_inputs, "choose_mask_form", lambda *_: "varlen")
        place = tmp_path_factory.mktemp("packed")
        return train(place, "ac:full fp16", train_cuda_graphs=False, **of_texts)


def test_replays_of_packed_documents_equal_launched_steps(
    tmp_path: Path,
    packed: Outcome,
    graphs: list[RecordedGraph],
    flash: None,
    of_texts: dict[str, Any],
):
    """A step with more documents than those before it runs without a graph, and the next one captures another."""
    found = train(tmp_path, "ac:full fp16", **of_texts)
    assert found.error == "" and found.lines == packed.lines and cases.same(found.state, packed.state)
    together = ["forward and backward" in phases for phases in found.phases]
    assert sum(graph.replays for graph in graphs) == sum(together) >= 2 and not all(together[2:])
    assert all(graph.replays for graph in graphs) and len(graphs) > 1


DOCUMENT_FAULTS = {
    "boundaries of the captured step are used again": (
        GraphedForwardBackward, "__call__", "tensor.copy_(value)", "tensor.dtype == torch.int32 or tensor.copy_(value)",
    ),
    "positions of the captured step are used again": (
        GraphedForwardBackward, "__call__", "tensor.copy_(value)",
        "tensor is captured.micro_batches[0].documents.starts_BS or tensor.copy_(value)",
    ),
    "boundaries are made in the graph": (FixedDocuments, "fix", "bounds=", "samples_B=None and "),
}  # fmt: skip


@pytest.mark.parametrize("fault", [next(iter(DOCUMENT_FAULTS)), *exhaustive(*[*DOCUMENT_FAULTS][1:])])
def test_planted_fault_in_packed_documents_is_caught(
    fault: str,
    tmp_path: Path,
    packed: Outcome,
    graphs: list[RecordedGraph],
    flash: None,
    of_texts: dict[str, Any],
):
    with edited(*DOCUMENT_FAULTS[fault]):
        found = train(tmp_path, "ac:full fp16", **of_texts)
    assert graphs
    if "made in the graph" in fault:
        assert found.error == "CaptureFailed: the host waits for aten.nonzero.default"
    else:
        assert found.error == "" and found.lines != packed.lines


def test_boundaries_of_batches_have_one_shape_and_one_longest_length_until_there_are_more_documents():
    fixed, tokens = FixedDocuments(), torch.zeros(2, 12)
    with mock.patch.object(varlen_attention, "pad_document_count", lambda documents: documents):
        for starts, expected in (
            ([[0, 5], [0, 1, 2]], [0, 5, 12, 13, 14, 24]), ([[0], [0]], [0, 12, 24, 24, 24, 24]),
            ([[0, 1, 2, 3, 4], [0]], [0, 1, 2, 3, 4, 12, 24]), ([[0, 5], [0]], [0, 5, 12, 24, 24, 24, 24]),
        ):  # fmt: skip
            documents = documents_from_starts(starts, 12)
            found = fixed.fix(documents, tokens)
            mask = varlen_attention.make_varlen_mask(found, 7, torch.device("cpu"))
            assert mask.cu_seqlens is not None and mask.cu_seqlens.tolist() == [expected]
            assert mask.lengths is not None and mask.lengths.tolist() == [12] and mask.window == 7
            places = [at - max(start for start in row if start <= at) for row in starts for at in range(12)]
            positions_BS = found.positions_BS()
            assert positions_BS is not None and positions_BS.flatten().tolist() == places
            assert found.cut_into_chunks(5, 2, 12, torch.device("cpu")).bounds == ()  # more boundaries


def test_deterministic_gradients_have_one_order_of_additions_however_many_documents_came_before():
    """Flash attention's backward splits its sums by multiprocessors / (documents x heads), rounded up."""
    tokens = torch.zeros(2, 12)
    for heads, least in ((8, 32), (2, 128), (64, 16)):
        found = FixedDocuments(heads).fix(documents_from_starts([[0, 5], [0]], 12), tokens).bounds[0]
        assert found.shape == (1, least + 1) and least * heads >= 148


def test_open_mesh_releases_graphs_but_keeps_no_model_in_memory():
    """An axis, by which operators find it, holds its mesh's communicator until the mesh is closed."""
    mesh = Mesh.single()
    passes: Any = mock.Mock(**{"engine.mesh": mesh})
    graphed: Any = GraphedForwardBackward(lambda *_: torch.zeros(1), passes)
    graphed._captured, seen = torch.zeros(1), weakref.ref(graphed)
    mesh.communicator.release_graphs()
    assert graphed._captured is None
    del graphed
    assert seen() is None and find_axis(mesh.tp.key).communicator is mesh.communicator
    mesh.close()


RANK_FAULTS = {
    "gradients are reduced in the captured step alone": (
        GraphedForwardBackward, "__call__", "in captured.reductions:",
        "in captured.reductions * (captured.graph.replays == 1):",
    ),
    "reductions are not waited for": (
        GraphedForwardBackward, "__call__", "in captured.reductions:", "in captured.reductions[:-2]:",
    ),
    "forward begins before the all-gather of parameters has ended": (
        GraphedForwardBackward, "__call__", "unit.unshard()", "self._captured is None and unit.unshard()",
    ),
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
        GraphedForwardBackward, "_replay", "captured.graph.replay()", "len(captured.inputs)",
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
