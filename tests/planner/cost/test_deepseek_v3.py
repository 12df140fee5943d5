"""DeepSeek-V3's published training run: GPU hours, memory, and what its engine does differently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.deepseek_v3 import BATCH, CONFIG, LAYOUT, SEQUENCE, memory, predict, step
from meshwright.layout import Layout
from meshwright.planner.cost.blocks import layer_operations, prediction_operations
from meshwright.planner.cost.communication import ProcessGroups
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.layer_times import LayerTimes
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.rates import Collectives, Rates
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.memory.rank_memory import memory_of
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.spec.work import prediction_flops
from tests.planner.cost.operation_sums import total_flops

ENGINE = ENGINES["hai-llm"]


def test_published_gpu_hours_are_between_the_bounds():
    found = predict(ENGINE)
    for what in ("thousand_gpu_hours_per_trillion", "million_gpu_hours_pretraining", "million_gpu_hours"):
        figures = found[what]
        assert figures["low"] < figures["published"] < figures["high"], what
        assert figures["predicted"] == pytest.approx(figures["published"], rel=0.15), what
    assert memory(ENGINE) < 80e9 / 2**30, "the published run fits into 80 GB"


def test_dispatch_beside_computation_takes_processors_instead_of_time():
    exposed = step(BATCH, replace(ENGINE, overlap_processors=None)).breakdown["expert"]
    free = step(BATCH, replace(ENGINE, overlap_processors=0.0)).breakdown["expert"]
    shared = step(BATCH, ENGINE).breakdown["expert"]
    assert free == 0 < shared < exposed / 4
    wide = step(BATCH, replace(ENGINE, overlap_processors=None, eight_bit_activations=False)).breakdown["expert"]
    assert wide / exposed == pytest.approx(8 / 6, rel=0.06)  # two of four all-to-alls are in 8 bits


def test_router_groups_limit_the_nodes_to_which_a_token_is_sent():
    groups = ProcessGroups(Collectives(cluster("2048xh800")), [Layout.parse(LAYOUT.format(120))])
    assert groups.ranks("ep") == 64
    every, limited = (8 * groups.distinct_places("ep", 8, which)[0] for which in ((1, 1), (4, 8)))
    assert every == pytest.approx(8 * (1 - (7 / 8) ** 8))
    assert limited == pytest.approx(4 * (1 - (3 / 4) ** 8)) and limited < 4
    assert groups.distinct_places("ep", 8, (8, 16)) * 8 == pytest.approx(every)  # groups are halves of nodes


def test_module_of_multi_token_prediction_is_priced_with_its_flops():
    batch = MicroBatch.of(CONFIG, Layout.parse("dp1"), 1, SEQUENCE, engine=ENGINE, kernel="flash-3")
    layer = total_flops(layer_operations(batch, CONFIG.layers), "forward")
    added = total_flops(prediction_operations(batch, True), "forward")
    assert added == pytest.approx(prediction_flops(CONFIG, SEQUENCE) * SEQUENCE, rel=1e-6) and added > layer
    assert prediction_operations(replace(batch, config=replace(CONFIG, prediction_layers=0)), True) == []


def test_other_engines_compute_the_logits_of_both_heads_once():
    """Only the engine `meshwright` may compute logits again in the backward, those of the head and of the module."""
    layout = Layout.parse("dp2048 zero1 ep64 fp8")
    problem = Problem(CONFIG, cluster("2048xh800"), SEQUENCE, BATCH, ENGINE, precision="fp8")
    for engine, times in (("hai-llm", 0), ("megatron-core", 0), ("meshwright", 2)):
        compute = (
            LayerTimes(replace(problem, engine=ENGINES[engine]), [StageCandidate(layout, 1)]).last[:, :, 0].sum(axis=1)
        )
        logits = 2 * CONFIG.vocabulary * CONFIG.hidden * SEQUENCE / Rates.of(problem.cluster, "fp8").wide_product
        again, kept = compute[:, 0]
        assert again - kept == pytest.approx(times * logits, rel=0.02, abs=1e-6), engine


def test_bidirectional_pipelines_hold_micro_batches_of_one_stage_each():
    """DualPipe holds p + 1 micro-batches (arXiv:2412.19437, table 2) of one of a rank's two stages, 1F1B p on its first
    rank."""
    found = []
    for schedule in ("dualpipe", "1f1b"):
        layout = Layout.parse(f"dp128 zero1 ep64 pp16:{schedule} mb120 ac:full fp8")
        problem = Problem(
            CONFIG, cluster("2048xh800"), SEQUENCE, BATCH, ENGINES["megatron-core"], False, "adamw", "fp8", 1.0, False
        )  # fmt: skip
        items = memory_of(problem, layout, 0).items
        stored = sum(item.bytes for item in items if item.name.startswith("layer.input"))
        found.append(stored / (2 * SEQUENCE * CONFIG.hidden))
    layers = found[1] / 16  # of the first stage
    assert layers % 1 == 0 and 17 * (layers - 1) < found[0] < 17 * (layers + 1)
