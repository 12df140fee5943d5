"""Verification of distillation: layouts match one device, which computes the loss by its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.spec.presets import preset
from meshwright.training.distillation_loss import DistillationLoss
from meshwright.verification import mutations
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.compare import compare
from meshwright.verification.ranks import run_rank
from meshwright.verification.reference import Reference
from meshwright.verification.teaching import DistillationSettings

KL, JSD = DistillationLoss("forward_kl", 2.0, 0.3), DistillationLoss("jsd", 1.5, 0.0, beta=0.3)
REVERSE = DistillationLoss("reverse_kl", 1.0, 0.5)
HIDDEN = replace(JSD, hidden_weight=0.7, layer_map=((0, 0),))


def check(ranks: LocalRanks, text: str, loss: DistillationLoss, held: str = "same", **models: str) -> Any:
    layout = Layout.parse(text)
    student, teacher = (preset(models.get(name, "llama-3-8b")) for name in ("student", "teacher"))
    maker = CaseBuilder(layout, student, teaching=DistillationSettings(loss, teacher, held))
    problem = replace(maker.make_sgd_problem(3), steps=2)
    results = ranks.run(run_rank, problem, text)
    return compare(Reference(problem), [result for (result,) in results], layout)


@pytest.mark.parametrize(
    "text, loss, held",
    [
        ("dp2 zero3 mb2", HIDDEN, "same"),
        ("dp2 zero1", REVERSE, "zero3"),
        ("tp2", HIDDEN, "same"),
        ("tp2:nosp", HIDDEN, "same"),
        ("tp2", replace(HIDDEN, divergence="forward_kl"), "replicated tp1"),
        ("cp2", HIDDEN, "same"),
        ("pp2 mb4", KL, "same"),
        ("pp2:dualpipe-v mb4", JSD, "same"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layouts_compute_the_distillation_of_one_device(two: LocalRanks, text: str, loss: DistillationLoss, held: str):
    found = check(two, text, loss, held, teacher="qwen3-0.6b")
    assert found.passed, found.failure
    assert found.worst_error < 1e-10 and found.loss_error < 1e-10


def test_sharded_vocabulary_of_odd_size_matches_one_device(four: LocalRanks):
    found = check(four, "dp2 zero3 tp2 mb2", HIDDEN, teacher="qwen3-0.6b")
    assert found.passed, found.failure


@pytest.mark.parametrize(
    "text, student, teacher",
    [("ep2 dp2", "qwen1.5-moe-a2.7b", "mixtral-8x7b-v0.1"), ("ep2 dp2 zero3", "qwen1.5-moe-a2.7b", "gpt2")],
)
def test_mixtures_of_experts_teach_and_learn(two: LocalRanks, text: str, student: str, teacher: str):
    found = check(two, text, KL, student=student, teacher=teacher)
    assert found.passed, found.failure


@pytest.mark.usefixtures("two_layers", "fewer_kinds")
@pytest.mark.parametrize(
    "text, sites", [("tp2", ("distill.",)), ("dp2 zero3", ("data.parameters",))], ids=["tp2", "dp2 zero3"]
)
def test_every_fault_in_calls_of_loss_and_teacher_is_caught(
    two: LocalRanks, monkeypatch: pytest.MonkeyPatch, text: str, sites: tuple[str, ...]
):
    every = mutations.list_possible_faults
    monkeypatch.setattr(
        mutations, "list_possible_faults", lambda *of: [each for each in every(*of) if each.site.startswith(sites)]
    )
    maker = CaseBuilder(
        Layout.parse(text), preset("llama-3-8b"), teaching=DistillationSettings(HIDDEN, preset("qwen3-0.6b"))
    )
    report = mutations.plant_all_faults(maker, Reference, two, lambda line: None)
    assert report["missed"] == [] and report["caught"] > 2 and report["neutral"] == (text == "tp2")
