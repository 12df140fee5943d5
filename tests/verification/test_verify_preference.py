"""Verification of preference training: layouts match one device, and planted faults are caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.comm.faults import Fault
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.recipe import load_recipe
from meshwright.spec.presets import preset
from meshwright.training.preference_loss import Preference
from meshwright.verification import mutations
from meshwright.verification.compare import compare
from meshwright.verification.problem import Problem, choose_sequence_length, scale_down_config
from meshwright.verification.ranks import run_rank
from meshwright.verification.reference import Reference
from meshwright.verification.run import run_verification
from tests.batches import make_batch
from tests.conftest import exhaustive

pytestmark = pytest.mark.usefixtures("first_case_alone")

PAIRS = ("data.records=preference", "train.preference_beta=0.5")


def verified(recipe: Path, layout: str, *overrides: str, **options: Any) -> dict[str, Any]:
    return run_verification(load_recipe(recipe, [f"layout={layout}", *PAIRS, *overrides]), **options)


@pytest.mark.parametrize(
    "layout",
    [
        *("tp2:nosp ac:full", "dp2 zero3 pp2:zb-v mb4", "tp2 cp2 mb2"),
        *exhaustive(
            "cp2 pp2 mb2 ac:selective",
            "dp2 zero2",
            "dp2 zero3 mb2",
            "tp2",
            "cp2",
            "cp2:ulysses",
            "pp2 mb4",
            "pp2:zb-h1 mb4",
        ),
    ],
)
def test_layout_matches_one_device(tiny_recipe: Path, layout: str, two_layers: None):
    document = verified(tiny_recipe, layout)
    assert document["passed"] and document["worst"]["relative_error"] < 1e-12 and document["loss_error"] < 1e-12


def test_skipped_step_and_resumes_match_one_device(tiny_recipe: Path):
    """With AdamW."""
    document = verified(tiny_recipe, "dp2 zero1 mb2")
    assert document["passed"] and document["worst"]["relative_error"] < 1e-12 and document["loss_error"] < 1e-12


def test_other_preference_losses_and_experts_match_one_device(tiny_recipe: Path, two_layers: None):
    assert verified(tiny_recipe, "cp2 mb2", "train.objective=ipo")["passed"]
    for layout, objective in (("cp2 mb2", "simpo"), ("dp2 zero3 mb2", "orpo")):
        document = verified(tiny_recipe, layout, f"train.objective={objective}")
        assert document["passed"] and document["worst"]["relative_error"] < 1e-12, (layout, objective)
    assert verified(tiny_recipe, "dp2", "train.preference_smoothing=0.2")["passed"]
    wanted = load_recipe(tiny_recipe, ["layout=dp2 cp2 ep2 mb2", *PAIRS])
    for model in ("mixtral-8x7b-v0.1", "dots-llm1"):  # balancing by a loss, and by router biases
        assert run_verification(wanted, model=model)["passed"], model


@pytest.mark.parametrize(
    "layout",
    [
        *("dp2 zero3 mb2 ac:full", "cp2:ulysses pp2:zb-v mb4"),
        *exhaustive("tp2 cp2 mb2"),
    ],
)
def test_kto_matches_one_device_and_its_predicted_bytes(tiny_recipe: Path, layout: str, two_layers: None):
    weights = ("train.desirable_weight=1.3", "train.undesirable_weight=0.8")
    document = verified(tiny_recipe, layout, "data.records=unpaired", *weights)
    assert document["passed"] and document["worst"]["relative_error"] < 1e-12 and document["loss_error"] < 1e-12


@pytest.mark.parametrize(
    ("text", "site", "kinds"),
    [
        ("cp2", "loss.responses", ("skip", "double", "drop", "stale")),
        ("dp2", "validation.loss", ("skip", "drop")),  # rank 1 validates on one sequence, with pairs
    ],
)
def test_every_fault_in_sums_over_responses_is_caught(two: LocalRanks, text: str, site: str, kinds: tuple[str, ...]):
    layout = Layout.parse(text)
    config = scale_down_config(preset("llama-3-8b"), layers=3)
    problem = Problem(config, 8, sequence=choose_sequence_length(layout), preference=Preference("dpo", 0.5))
    faults = [Fault(site, "all_reduce", kind) for kind in kinds]
    reference = Reference(problem)
    by_rank = two.run(run_rank, problem, str(layout), None, faults)
    for fault, results in zip(faults, zip(*by_rank, strict=True), strict=True):
        assert any(result.affected_calls for result in results), fault
        assert compare(reference, results, layout).failure is not None, fault


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("dp2 zero2 mb2", "fewer_kinds"),
        pytest.param("dp2 zero2 mb2", "fewer_local_faults", marks=pytest.mark.exhaustive),
        pytest.param("tp2", "fewer_local_faults", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)]),
    ],
)
def test_every_planted_fault_is_caught_or_neutral(
    tiny_recipe: Path, layout: str, kinds: str, two_layers: None, request: pytest.FixtureRequest
):
    request.getfixturevalue(kinds)
    document = verified(tiny_recipe, layout, mutate=True)
    assert document["passed"] and document["mutations"]["missed"] == []
    sites = {fault["fault"].split(" (")[0] for fault in document["mutations"]["faults"]}
    assert {"data.targets", "step.verdict"} - ({"data.targets"} if layout == "tp2" else set()) <= sites
    assert ("loss.responses" in sites) == ("cp2" in layout)


def test_batches_have_rows_with_zero_one_and_two_pairs():
    problem = Problem(scale_down_config(preset("llama-3-8b")), batch=8, preference=Preference())
    for step in range(2):
        batch = make_batch(problem, step)
        assert batch.reference is not None and batch.reference.shape == (8, 4)
        counts = (batch.document_ids.max(axis=1) + 1) // 2
        assert set(counts.tolist()) == {0, 1, 2}
        for ids, targets, tokens, pairs in zip(batch.document_ids, batch.targets, batch.tokens, counts, strict=True):
            assert (np.diff(ids) >= 0).all() and (np.diff(ids) <= 1).all()
            assert (targets[ids >= 2 * pairs] == -100).all()
            for number in range(2 * pairs):  # every document has a response whose targets are its own tokens
                here = np.flatnonzero(ids == number)
                counted = here[targets[here] != -100]
                assert len(counted) and counted[-1] < here[-1] and (targets[counted] == tokens[counted + 1]).all()


def test_verify_command_covers_objective_of_recipe(
    tiny_recipe: Path, command_line: Any, two_layers: None, monkeypatch: pytest.MonkeyPatch
):
    every = mutations.list_possible_faults
    monkeypatch.setattr(mutations, "KINDS", ("skip",))
    monkeypatch.setattr(mutations, "LOCAL_FAULTS", {})
    monkeypatch.setattr(
        mutations, "list_possible_faults", lambda *of: [each for each in every(*of) if each.site == "loss.responses"]
    )
    text = tiny_recipe.read_text().replace("[data]", '[data]\nrecords = "preference"').replace('"dp1"', '"cp2"')
    tiny_recipe.write_text(text)
    outcome = command_line("verify", tiny_recipe, "--mutate", "--json")
    document = json.loads(outcome.output)
    assert outcome.code == 0 and document["passed"]
    assert "loss.responses (all_reduce): skip" in {fault["fault"] for fault in document["mutations"]["faults"]}
