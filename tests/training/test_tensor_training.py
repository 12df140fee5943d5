"""Tensor-parallel training: the steps of one device, and checkpoints that any layout reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.checkpoint import find_newest, verify_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.data import prepare
from tests.conftest import exhaustive
from tests.training import training_cases as cases

CHANGES = {
    "model_tied": False, "model_vocabulary": 499, "train_steps": 4, "train_validate_every": 2, "train_clip": 0.5,
    "checkpoint_every": 2, "checkpoint_keep": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tensor")


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
        "dp2 zero3 tp2:nosp mb2",
        *exhaustive("dp2 zero2 tp2 ac:full", "tp4:nosp mb2 ac:selective", "tp4", "dp2 zero1 tp2"),
    ],
)
def test_tensor_parallel_steps_match_one_device(four, home, alone, layout):
    place = home / layout.replace(" ", "-").replace(":", "-")
    outcomes = run(four, place, f"{layout} fp32")
    cases.assert_same_steps(place, alone[0])
    cases.assert_same_state(outcomes, alone[1], least_norm=1e-3)


def test_run_changes_layouts_and_reads_same_data(two, four, home, alone):
    """Two steps each on tp2, dp2 zero1, tp4:nosp and one device, through checkpoints."""
    place = home / "travelling"
    travels = [(two, "tp2", 2), (two, "dp2 zero1", 4), (four, "tp4:nosp", 6), (None, "dp1", 8)]
    for ranks, layout, steps in travels:
        outcomes = run(ranks, place, f"{layout} fp32", train_steps=steps, train_schedule="constant")
        if steps > 2:
            assert f"resumed from step-{steps - 2:06d}: {steps - 2} of {steps} steps are done" in outcomes[0]["said"]
    still = home / "still"
    run(None, still, "dp1 fp32", train_steps=8, train_schedule="constant")
    cases.assert_same_steps(place, still)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tensor_parallel_checkpoint_loads_bitwise_on_every_layout(two, four, home, family):
    """Other layouts load and save a checkpoint of tp2 without a changed byte."""
    model = {"family": family, "layers": 2, "hidden": 40, "heads": 4, "intermediate": 72, "vocabulary": 499}
    begun = home / f"begun {family}"
    written = cases.whole_state(run(two, begun, "tp2 fp32", train_steps=2, model=model, train_schedule="constant"))
    for ranks, layout in (
        (None, "dp1"),
        (two, "tp2:nosp"),
        (four, "dp2 zero3 tp2"),
        (four, "tp4"),
        (four, "dp4 zero1"),
    ):
        place = home / f"{family} {layout}".replace(":", "-")
        shutil.copytree(begun, place)
        outcomes = run(ranks, place, f"{layout} fp32", train_steps=2, model=model, train_schedule="constant")
        assert cases.same(cases.whole_state(outcomes), written), layout
    checkpoint = find_newest(begun / "run/checkpoints")
    assert checkpoint is not None and verify_checkpoint(checkpoint) == []


def test_transformers_loads_tensor_parallel_checkpoint_with_equal_validation_loss(two, home):
    from transformers import AutoModelForCausalLM

    place = home / "transformers"
    outcomes = run(two, place, "tp2 fp32")
    recipe = cases.recipe(place, "tp2")
    rows = prepare(recipe.data, recipe.run.seed).split("validation").read_batch(np.arange(13))
    model = AutoModelForCausalLM.from_pretrained(outcomes[0]["result"]["checkpoint"], dtype=torch.float32)
    assert model.get_input_embeddings().weight.shape[0] == 499, "no row that only fills up"
    with torch.no_grad():
        logits = model(torch.from_numpy(rows.tokens)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(rows.targets).flatten(), ignore_index=-100
    )
    assert float(loss) == pytest.approx(outcomes[0]["result"]["validation_loss"], rel=1e-5)


def test_bf16_keeps_replicated_parameters_equal_on_all_ranks(four, home):
    """Ranks of tp that hold the same masters hold the same bits after every update."""
    text = cases.recipe(home / "alike", "tp4 bf16", **CHANGES).to_toml()
    held = four.run(cases.train_and_show, text)
    for first, others in zip(held[0], zip(*held[1:], strict=True), strict=True):
        for other in others:
            if (first.start, first.columns) == (other.start, other.columns):
                assert torch.equal(first.tensor, other.tensor), first.name
    assert any(
        all((one.start, one.columns) == (held[0][i].start, held[0][i].columns) for one in (h[i] for h in held))
        for i in range(len(held[0]))
    )


@cases.traced_and_generated
def test_compiled_model_steps_match_eager_steps(two, home, fault):
    model = {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64}
    eager, compiled = home / f"eager for {fault}", home / f"compiled {fault}"
    run(two, eager, "tp2 fp32", model=model, train_compile=False, train_steps=3)
    run(two, compiled, "tp2 fp32", model=model, train_compile=True, train_steps=3, fault=fault)
    cases.assert_same_steps(compiled, eager)


def test_hugging_face_weights_are_sharded_as_table_says(two, four, home, alone):
    """Training starts with the values of a checkpoint of another layout."""
    directory = str(alone[0] / "run/checkpoints/step-000002")
    traces = []
    for ranks, layout in ((None, "dp1"), (four, "dp2 zero1 tp2")):
        place = home / f"from {layout}"
        changes = {"model": {"from": directory, "load_weights": True}, "train_steps": 2, "train_validate_every": 0}
        text = cases.recipe(place, f"{layout} fp32", **{"train_clip": 0.5} | changes).to_toml()
        outcomes = [cases.train(text)] if ranks is None else ranks.run(cases.train, text)
        assert outcomes[0]["error"] == ""
        traces.append(place)
    cases.assert_same_steps(traces[1], traces[0])
