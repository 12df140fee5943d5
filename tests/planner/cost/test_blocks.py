"""Lists of operators: an operator written once is in every figure, and layouts computed as arrays equal single ones."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.planner.cost import tables
from meshwright.planner.cost.blocks import layer_operations, list_operations
from meshwright.planner.cost.communication import count_parameters
from meshwright.planner.cost.data_calls import Work
from meshwright.planner.cost.layer_times import LayerTimes
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.step_time import StepPredictor
from meshwright.planner.cost.traffic import predicted_traffic
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.memory import rank_memory
from meshwright.planner.memory.ledger import ledger
from meshwright.planner.memory.saved import saved_activations
from meshwright.planner.models import adapted_model
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.planner.search.estimate import predict_step
from meshwright.planner.show.explain import explain
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.stages import Stage, whole_model
from meshwright.toml import read_packaged_toml
from tests.planner.cost.operation_sums import total_flops

CONFIG = dataclasses.replace(preset("llama-3-8b"), layers=2, vocabulary=1024)
LAYOUT = Layout.parse("tp2 bf16")
SEQUENCE = 2048
PROBLEM = Problem(CONFIG, cluster("2xh100-sxm"), SEQUENCE, 1)


def forget_rows() -> None:
    """Empty the caches of the table and of what is computed from it."""
    for cached in (tables.list_rows, tables._read_row, tables._list_words, rank_memory._replay, predict_step):
        cached.cache_clear()


def figures() -> dict[str, float]:
    """Every figure that a new operator must change."""
    batch = MicroBatch.of(CONFIG, LAYOUT, 1, SEQUENCE)
    whole = whole_model(CONFIG)
    step = StepPredictor(PROBLEM, LAYOUT).price().breakdown
    sent = predicted_traffic(CONFIG, LAYOUT, Work(1, SEQUENCE, parameter_bytes=2))
    return {
        "flops": total_flops(list_operations(batch, whole)),
        "saved": sum(each.bytes for each in saved_activations(batch, whole)),
        "peak": ledger(CONFIG, LAYOUT, batch=1, sequence=SEQUENCE, device="cuda").peak_bytes,
        "parameters": count_parameters(batch, Stage(1, range(1), first=False, last=False))[0],
        "sent": sum(sent.values()),
        "compute": step["compute"],
        "tensor": step["tensor"],
        "explained": sum(row.flops for row in explain(PROBLEM, LAYOUT)),
    }


def test_operator_added_to_a_layer_is_in_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate of one number a head and token, computed by each rank of tp for its heads and all-gathered: one row of the
    table."""
    before, table = figures(), copy.deepcopy(read_packaged_toml("planner/cost/operators.toml"))
    table["mlp"].append(
        {
            "name": ".head_gate", "linear": "all_tokens heads hidden",
            "saved": [".head_gate.output = x rows tokens heads"], "calls": ["head_gate"],
        }
    )  # fmt: skip
    size = "heads tp all_tokens x"
    table["calls"]["head_gate"] = [{"axis": "tp", "operation": "all-gather", "sites": [f"mlp.head_gate = {size}"]}]
    monkeypatch.setattr(tables, "read_packaged_toml", lambda name: table)
    forget_rows()
    try:
        after = figures()
    finally:
        forget_rows()
    heads, layers = CONFIG.heads // 2, CONFIG.layers
    grown = {name: after[name] - before[name] for name in before}
    assert grown["flops"] == grown["explained"] == 3 * layers * 2 * SEQUENCE * heads * CONFIG.hidden
    assert grown["saved"] == layers * 2 * SEQUENCE * heads
    assert grown["parameters"] == heads * CONFIG.hidden
    assert grown["sent"] == layers * 2 * SEQUENCE * CONFIG.heads // 2
    assert grown["peak"] > 0 and grown["compute"] > 0 and grown["tensor"] > 0


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "qwen3-tiny", "mixtral-tiny", "qwen2-moe-tiny"])
def test_parameters_of_operators_are_those_of_the_parameter_table(name: str) -> None:
    config = preset(name)
    counts = count_parameters(MicroBatch.of(config, Layout(), 1, 64), whole_model(config))
    assert sum(counts) == parameter_table(config).numel


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny", "llama4-tiny"])
def test_trained_parameters_of_stages_are_those_of_the_parameter_table(name: str) -> None:
    """A model with adapters: its tied head is frozen, so that no trained parameter is counted twice."""
    config = adapted_model(name, {"kind": "lora", "rank": 8})
    times = StepPredictor(Problem(config, cluster("1xh100-sxm"), 64, 1), Layout.parse("bf16")).pipeline(None)
    assert times.dense.sum() + times.expert.sum() == parameter_table(config).trained.numel


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "mixtral-8x7b-v0.1", "qwen1.5-moe-a2.7b"])
def test_layouts_priced_together_equal_layouts_priced_alone(name: str) -> None:
    problem = Problem(preset(name), cluster("64xh100-sxm"), 4096, 64)
    notations = ["dp1", "tp2", "tp4 ac:full", "tp2:nosp ac:full", "cp2 tp2", "cp4:ulysses ac:selective", "cp2:ulysses"]
    notations += ["dp8 ep4", "dp8 ep8", "dp8 ep4:etp2 tp2 ac:full"] if problem.config.experts else []
    layouts = [Layout.parse(each) for each in notations]
    candidates = [StageCandidate(layout, rows) for layout in layouts for rows in (1, 2)]
    together = LayerTimes(problem, candidates)
    for number, one in enumerate(candidates):
        alone = LayerTimes(problem, [one])
        for part in ("layer", "first", "last"):
            np.testing.assert_allclose(getattr(alone, part)[..., 0], getattr(together, part)[..., number], rtol=1e-12)
        np.testing.assert_array_equal(alone.parameters[..., 0], together.parameters[..., number])


def test_multipliers_of_granite_are_passes_over_the_hidden_states() -> None:
    """Each reads and writes them once forward and once backward: two a layer, the embedding's and the head's."""
    config = preset("granite-tiny")
    plain = dataclasses.replace(config, residual_scale=1.0, embedding_scale=1.0, logit_divisor=1.0)
    moved = [
        sum(one.bytes * one.count for one in list_operations(MicroBatch.of(each, Layout(), 2, 64), whole_model(each)))
        for each in (config, plain)
    ]
    assert moved[0] - moved[1] == 2 * 64 * config.hidden * 2 * (2 + 2) * (2 * config.layers + 2)


@pytest.mark.parametrize(("layout", "repeated"), [("tp2 ac:selective", True), ("cp2 ac:selective", False)])
def test_selective_recompute_repeats_attention_but_no_ring(layout: str, repeated: bool) -> None:
    """The result of ring attention came over the wire, so it is kept."""
    batch = MicroBatch.of(CONFIG, Layout.parse(layout), 1, SEQUENCE)
    kinds = {one.kind for one in layer_operations(batch, 0) if one.phase == "recompute"}
    assert "elementwise" in kinds and "product" not in kinds
    assert ("attention" in kinds) == repeated
