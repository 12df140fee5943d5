"""Verification of pipeline parallelism: every schedule, and combinations with other axes, match one device."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.names import ASYNCHRONOUS_SCHEDULES, SCHEDULE_CHUNKS
from meshwright.spec.presets import preset
from meshwright.verification import mutations
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.compare import compare, list_copy_groups
from meshwright.verification.mutations import plant_all_faults
from meshwright.verification.problem import Problem, choose_sequence_length, scale_down_config, scale_down_layout
from meshwright.verification.ranks import run_rank
from meshwright.verification.reference import Reference
from tests.conftest import exhaustive

REFERENCES: dict[Any, Reference] = {}
MODELS = ("llama-3-8b", "qwen3-0.6b", "gpt2", "mixtral-tiny")


def problem_of(model: str, layout: Layout, layers: int = 5, batch: int = 8) -> Problem:
    config = scale_down_config(preset(model), layout.tp, layers=layers, ep=layout.ep)
    return Problem(config, batch, "float64", choose_sequence_length(layout), steps=2)


def reference(problem: Problem) -> Reference:
    if problem not in REFERENCES:
        REFERENCES[problem] = Reference(problem)
    return REFERENCES[problem]


def check(ranks: LocalRanks, model: str, text: str, **changes: int) -> None:
    layout = Layout.parse(text)
    problem = problem_of(model, layout, **changes)
    found = compare(reference(problem), [result for (result,) in ranks.run(run_rank, problem, text)], layout)
    assert found.passed, (text, model, found.failure)
    assert found.worst_error < 1e-12 and found.loss_error < 1e-12 and found.gradient_norm_error < 1e-12


NAMES = [name for name in SCHEDULE_CHUNKS if name not in ASYNCHRONOUS_SCHEDULES]


@pytest.mark.parametrize(("index", "name"), enumerate(NAMES), ids=NAMES)
def test_every_schedule_matches_one_device(two, index, name):
    """Models alternate: untied head, tied head, learned positions, mixture of experts."""
    check(two, MODELS[index % 4], f"pp2:{name} mb4")


@pytest.mark.parametrize(
    ("model", "layout", "layers"),
    [
        ("gpt2", "pp4:dualpipe mb8", 5), ("mixtral-tiny", "dp2 zero3 pp2:zb-v mb4 ac:full", 5),
        ("llama-3-8b", "tp2 pp2:interleaved mb2 ac:selective", 5), ("mixtral-tiny", "cp2 pp2 mb2", 5),
        *exhaustive(
            ("qwen3-0.6b", "pp4:chimera mb4", 5), ("qwen3-0.6b", "pp4:v-min mb8", 9),
            ("qwen3-0.6b", "dp2 zero2 pp2:zb-h1 mb2", 5), ("gpt2", "dp2 zero1 pp2:gems mb4", 5),
            ("qwen3-0.6b", "tp2:nosp pp2:zb-v mb2", 5),
        ),
    ],
)  # fmt: skip
def test_pipeline_combines_with_other_axes(four, model, layout, layers):
    check(four, model, layout, layers=layers)


def test_schedule_file_trains_unchanged(two, tmp_path):
    from meshwright.program.pipeline_text import format_pipeline
    from meshwright.schedules.library import generate

    file = tmp_path / "mine.txt"
    file.write_text(format_pipeline(generate("v-half", 2, 4)))
    check(two, "qwen3-0.6b", f"pp2:@{file} mb4")


def test_faults_between_stages_and_in_shared_parameters_are_caught(two, monkeypatch):
    """With a tied embedding and split backward; each fault in all calls and in one. Local faults: test_verify.py."""
    monkeypatch.setattr(mutations, "LOCAL_FAULTS", {})
    layout = Layout.parse("pp2:zb-h1 mb2")
    maker = CaseBuilder(layout, preset("qwen3-0.6b"), batch=4)
    report = plant_all_faults(maker, reference, two, lambda line: None)
    assert report["missed"] == [] and report["neutral"] <= 2  # double: validation.loss, start.program
    struck = {fault["fault"].split(" ")[0] for fault in report["faults"]}
    assert {"pipeline.activations", "pipeline.gradients", "pipeline.gradients.shared", "step.verdict"} <= struck
    shared = [fault["said"] for fault in report["faults"] if fault["fault"].startswith("pipeline.gradients.shared")]
    assert any("partial gradients of shared parameters were not summed over pp" in reason for reason in shared)


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("pp2", [(0, 1)]),
        ("dp2 pp2", [(0, 2), (1, 3)]),
        ("dp2 zero1 pp2", [(0, 2, 1, 3)]),
        ("tp2 pp2", [(0, 2, 1, 3)]),
        ("dp2 zero3 tp2 pp2", [(0, 4, 1, 5, 2, 6, 3, 7)]),
    ],
)
def test_copy_of_the_model_spans_all_stages(text, copies):
    assert list_copy_groups(Layout.parse(text)) == copies


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        ("pp4:dualpipe mb16", "pp4:dualpipe mb8"),
        ("dp2 zero1 tp2 cp2 pp4:zb-v mb8 ac:selective bf16", "dp2 zero1 cp2 pp2:zb-v mb4 ac:selective"),
        ("pp16:chimera mb32", "pp8:chimera mb16"),
        ("dp8 zero3 pp4 mb8", "dp4 zero3 pp2 mb4"),
        ("pp4:@mine.txt mb64", "pp4:@mine.txt mb64"),
    ],
)
def test_large_pipeline_layouts_stay_pipelines_when_scaled_down(text, scaled):
    assert str(scale_down_layout(Layout.parse(text))) == scaled
