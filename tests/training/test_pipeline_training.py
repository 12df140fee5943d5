"""Pipeline-parallel training: the steps of one device, and checkpoints that any layout reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.checkpoint import find_newest, verify_checkpoint
from meshwright.comm.local import LocalRanks
from tests.conftest import exhaustive
from tests.training import training_cases as cases

MODEL = {
    "family": "llama", "layers": 5, "hidden": 40, "heads": 4, "kv_heads": 2, "intermediate": 72, "tied": True,
    "vocabulary": 499,
}  # fmt: skip
CHANGES = {
    "model": MODEL, "train_steps": 4, "train_validate_every": 2, "train_clip": 0.5, "checkpoint_every": 2,
    "checkpoint_keep": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def alone(home):
    """Four steps on one device, with a save after every second."""
    place = home / "alone"
    outcomes = run(None, place, "dp1 fp32")
    return place, cases.whole_state(outcomes)


def run(ranks: LocalRanks | None, place: Path, layout: str, crash_after: int = 0, **changes):
    return cases.run_without_error(ranks, place, layout, crash_after, **CHANGES | changes)


@pytest.mark.parametrize(
    "layout",
    [
        *("dp2 zero3 pp2:zb-v mb2", "tp2 pp2:chimera mb2 ac:selective"),
        *exhaustive("pp4 mb4", "dp2 zero1 pp2:interleaved mb2"),  # other kinds: test_run_changes_layouts...
    ],
)
def test_pipeline_steps_match_one_device(four, home, alone, layout):
    """Thirteen validation sequences in micro-batches of two, or of one, the last of which are padded."""
    place = home / layout.replace(" ", "-").replace(":", "-")
    outcomes = run(four, place, f"{layout} fp32")
    cases.assert_same_steps(place, alone[0])
    cases.assert_same_state(outcomes, alone[1], least_norm=1e-3)
    for outcome in outcomes:
        assert outcome["result"].get("error") is None


def test_run_changes_layouts_and_reads_same_data(four, home):
    """Two steps each on two kinds of pipelines, on replicas and on one device, through checkpoints."""
    place = home / "travelling"
    travels = [(four, "dp2 pp2 mb2", 2), (four, "dp4 zero2", 4), (four, "pp4:dualpipe mb8", 6), (None, "dp1", 8)]
    for ranks, layout, steps in travels:
        outcomes = run(ranks, place, f"{layout} fp32", train_steps=steps, train_schedule="constant")
        if steps > 2:
            assert f"resumed from step-{steps - 2:06d}: {steps - 2} of {steps} steps are done" in outcomes[0]["said"]
    still = home / "still"
    run(None, still, "dp1 fp32", train_steps=8, train_schedule="constant")
    cases.assert_same_steps(place, still)


def test_pipeline_checkpoint_loads_bitwise_on_every_layout(four, home):
    """Other layouts load and save a checkpoint of two stages without a changed byte."""
    begun = home / "begun"
    written = cases.whole_state(run(four, begun, "dp2 zero3 pp2 mb2 fp32", train_steps=2, train_schedule="constant"))
    for ranks, layout in (
        (None, "dp1"),
        (four, "pp4 mb2"),
        (four, "tp2 pp2:gems mb2"),
        (four, "dp2 zero2 pp2:zb-v mb2"),
        (four, "dp4 zero1"),
    ):
        place = home / f"read by {layout}".replace(":", "-")
        shutil.copytree(begun, place)
        outcomes = run(ranks, place, f"{layout} fp32", train_steps=2, train_schedule="constant")
        assert cases.same(cases.whole_state(outcomes), written), layout
    checkpoint = find_newest(begun / "run/checkpoints")
    assert checkpoint is not None and verify_checkpoint(checkpoint) == []


def test_interrupted_run_resumes_bit_for_bit(four, home):
    whole, broken = home / "whole", home / "broken"
    expected = cases.whole_state(run(four, whole, "dp2 zero2 pp2:zb-v mb2 bf16"))
    run(four, broken, "dp2 zero2 pp2:zb-v mb2 bf16", crash_after=3)
    outcomes = run(four, broken, "dp2 zero2 pp2:zb-v mb2 bf16")
    assert cases.trace(broken) == cases.trace(whole)
    assert cases.same(cases.whole_state(outcomes), expected)


def test_hugging_face_weights_load_onto_their_stages(four, home, alone):
    """Training starts with the values of a checkpoint of another layout, with learned positions and biases."""
    directory = str(alone[0] / "run/checkpoints/step-000002")
    traces = []
    for ranks, layout in ((None, "dp1"), (four, "dp2 zero1 pp2 mb2")):
        place = home / f"from {layout}"
        changes = {"model": {"from": directory, "load_weights": True}, "train_steps": 2, "train_validate_every": 0}
        run(ranks, place, f"{layout} fp32", **changes)
        traces.append(place)
    cases.assert_same_steps(traces[1], traces[0])
