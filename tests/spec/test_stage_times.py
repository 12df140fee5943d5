"""Stage times that the `auto` schedule gets, from FLOPs, and the same program for all callers."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.planner.cost.data_calls import Work
from meshwright.planner.cost.traffic import _StepTraffic
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.schedules.library import generate_for_layout
from meshwright.schedules.transfers import with_transfers
from meshwright.spec.flops import forward_flops_per_token, training_flops_per_token
from meshwright.spec.presets import preset
from meshwright.spec.stage_times import StageTimes, program_for
from meshwright.spec.work import head_flops, layer_flops

ROUNDING = 1e-3  # of a rank's mean forward, for each number


def times(name: str, ranks: int, count: int, sequence: int = 1024, recompute: str = "none") -> np.ndarray:
    """By kind (forward, input gradient, weight gradient) and stage."""
    found = StageTimes(preset(name), ranks, sequence, recompute)(count)
    assert found is not None
    return np.array([found.forward, found.input_gradient, found.weight_gradient])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b-v0.1"])
def test_stage_times_sum_to_all_training_operations(name: str, recompute: str):
    config = preset(name)
    ratio = training_flops_per_token(config, 1024, recompute=recompute)
    ratio /= sum(forward_flops_per_token(config, 1024).values())
    for count in (4, 8):
        found = times(name, 4, count, recompute=recompute)
        assert found[0].sum() == pytest.approx(4, abs=count * ROUNDING)
        assert found.sum() == pytest.approx(4 * ratio, abs=3 * count * ROUNDING)


def test_attention_and_head_have_no_deferred_weight_gradients():
    config = dataclasses.replace(preset("gpt2"), layers=4)
    forward, inputs, weights = times("gpt2", 4, 4)[:, :-1].mean(axis=1)
    flops = layer_flops(config, 0, 1024)
    core = (flops["attention.scores"] + flops["attention.values"]) / sum(flops.values())
    assert (inputs / forward, weights / forward) == pytest.approx((1 + core, 1 - core), rel=0.01)
    last = times("gpt2", 4, 4)[:, -1]
    whole = sum(forward_flops_per_token(preset("gpt2"), 1024).values()) / 4
    assert last[2] + last[1] - 2 * head_flops(config, 1024) / whole == pytest.approx(
        2 * (last[0] - head_flops(config, 1024) / whole), abs=0.01
    )


def test_head_sequence_length_and_recomputation_change_stage_times():
    small = times("gpt2", 4, 4)
    assert small[0, -1] > 1.3 * small[0, 0]  # 50257 token IDs against layers of width 768
    longer = times("gpt2", 4, 4, sequence=8192)
    assert longer[1, 0] / longer[2, 0] > 2 * small[1, 0] / small[2, 0]
    assert times("gpt2", 4, 4, recompute="full")[1, 0] == pytest.approx(small[1, 0] + small[0, 0], abs=2 * ROUNDING)


def test_time_sums_are_exact_on_every_processor():
    found = times("llama-3-8b", 4, 8) * 1024
    assert (found == found.round()).all()


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "pp4:auto mb8"), ("llama-3-8b", "pp4:auto mb8 ac:full")])
def test_program_for_model_beats_program_for_even_stages(name: str, layout: str):
    parsed, config = Layout.parse(layout), preset(name)
    stage_times = StageTimes(config, parsed.pp, 1024, parsed.recompute)

    def makespan(program) -> float:
        return simulate_pipeline(program, stage_times(program.stages)).makespan

    assert makespan(program_for(parsed, config, 1024)) < makespan(generate_for_layout(parsed))


def test_shallow_model_gets_at_most_one_stage_per_layer():
    config = dataclasses.replace(preset("gpt2"), layers=5)
    assert program_for(Layout.parse("pp4:auto mb8"), config, 1024).stages == 4
    assert StageTimes(config, 4, 1024)(8) is None


def test_named_schedules_are_independent_of_model():
    layout = Layout.parse("pp4:zb-v mb8")
    assert program_for(layout, preset("gpt2"), 1024) is generate_for_layout(layout)


def test_byte_prediction_uses_program_of_model():
    layout, config = Layout.parse("pp4:auto mb8"), preset("gpt2")
    step = _StepTraffic(config, layout, Work(batch=8, sequence=1024), 0)
    assert step.program.steps == with_transfers(program_for(layout, config, 1024)).steps
    assert step.program.steps != with_transfers(generate_for_layout(layout)).steps


def test_modules_with_a_model_call_program_for(repository: Path):
    """Exceptions: `verify`, which chooses a model's depth for a program, and the training of user-defined modules."""
    asking = set()
    for path in (repository / "src" / "meshwright").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "meshwright.schedules.library":
                place = path.relative_to(repository / "src" / "meshwright").as_posix()
                asking |= {place for alias in node.names if alias.name == "generate_for_layout"}
    assert asking == {"spec/stage_times.py", "verification/cases.py", "training/module/passes.py"}
