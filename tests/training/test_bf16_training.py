"""bf16 training learns what float32 training learns: its loss stays within the bound of docs/training.md."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from tests.training import training_cases as cases

FIRST_STEP, LAST_THIRD, VALIDATION = 5e-4, 0.01, 0.025
"""Bounds of |loss of bf16 - loss of float32| in nats per token: before any update, the mean of the last third of the
steps, and on validation text after them. bench/bf16_loss.py measures the distance of right and faulty trainers."""

STEPS = 60
MODEL = {
    "family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "tied": True,
}  # fmt: skip
TRAIN = {
    "steps": STEPS, "batch": 8, "learning_rate": 2e-3, "warmup": 10, "validation_sequences": 32,
    "validate_every": STEPS,
}  # fmt: skip


def train(place: Path, precision: str) -> tuple[list[float], float]:
    """Return the loss of each step and the final validation loss of a small Llama on real text."""
    changes = {"model": MODEL, "train": TRAIN, "data_sequence": 128}
    cases.run_without_error(None, place, f"mb4 {precision}", **changes)
    lines = [line for line in cases.metrics(place) if "loss" in line]
    return [line["loss"] for line in lines], lines[-1]["validation_loss"]


def test_bf16_loss_stays_within_its_bound_of_float32(tmp_path: Path):
    losses, validation = train(tmp_path / "bf16", "bf16")
    expected, expected_validation = train(tmp_path / "fp32", "fp32")
    assert (
        len(losses) == STEPS and expected[-1] < expected[0] - 2
    )  # the loss decreases enough for the curves to diverge
    differences = [ours - theirs for ours, theirs in zip(losses, expected, strict=True)]
    assert differences[0] != 0 and abs(differences[0]) < FIRST_STEP
    assert abs(statistics.fmean(differences[-STEPS // 3 :])) < LAST_THIRD
    assert validation == pytest.approx(expected_validation, abs=VALIDATION)


def test_bf16_micro_batch_gradients_are_summed_in_float32(tmp_path: Path):
    """512 micro-batches of one sequence: a sum in bfloat16 has an error of 3%, ten times that of bfloat16 matmuls. The
    gradient in float32 is that of one micro-batch, which sums nothing."""
    model = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 16, "tied": True}
    found = []
    for layout in ("mb512 bf16", "fp32"):
        text = cases.recipe(tmp_path, layout, model=model, data_sequence=8, train_batch=512).to_toml()
        found.append(torch.cat(cases.first_gradients(text)))
    gradient, expected = found
    assert gradient.dtype == torch.float32
    assert 0 < float((gradient - expected).norm() / expected.norm()) < 0.008
