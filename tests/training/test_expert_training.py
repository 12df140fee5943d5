"""Expert-parallel training: the steps of one device, and checkpoints that any layout reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.checkpoint import find_newest, verify_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.recipe import load_recipe_text
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.trainer import Trainer
from tests.conftest import exhaustive
from tests.training import training_cases as cases

SIZES = {"layers": 2, "hidden": 40, "heads": 4, "kv_heads": 2, "vocabulary": 499, "experts": 4, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", **SIZES, "intermediate": 24},
    "qwen2_moe": {"family": "qwen2_moe", **SIZES, "intermediate": 48, "expert_intermediate": 12, "dense_layers": [0]},
    "dots1": {"family": "dots1", **SIZES, "intermediate": 48, "expert_intermediate": 12, "dense_layers": [0]},
    "qwen3_moe": {"family": "qwen3_moe", **SIZES, "intermediate": 48, "expert_intermediate": 12},
}
CHANGES = {
    "train_steps": 6, "train_validate_every": 3, "train_clip": 0.5, "train_schedule": "constant", "checkpoint_every": 3,
    "checkpoint_keep": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("experts")


def run(ranks: LocalRanks | None, place: Path, layout: str, **changes):
    return cases.run_without_error(ranks, place, f"{layout} fp32", **CHANGES | changes)


@pytest.mark.parametrize("family", ["mixtral", *exhaustive("dots1")])
def test_run_changes_layouts_with_steps_of_one_device(four, home, family):
    """Two steps on each layout, through checkpoints; router biases follow the load summed over ranks."""
    still, place = home / f"still {family}", home / f"travelling {family}"
    model, often = MODELS[family], {"checkpoint_every": 2, "train_validate_every": 2}
    travels = ["dp4 ep2:etp2", "dp2 tp2 zero3 ep2 mb2", "dp4 zero2 ep4 ac:full", "dp4 zero1 hs2 ep2"]
    run(None, still, "dp1", model=model, train_steps=2 * len(travels), **often)
    for number, layout in enumerate(travels):
        outcomes = run(four, place, layout, model=model, train_steps=2 * number + 2, **often)
        if number:
            assert any(line.startswith(f"resumed from step-{2 * number:06d}: ") for line in outcomes[0]["said"])
    cases.assert_same_steps(place, still)


def test_expert_parallel_checkpoint_loads_bitwise_on_every_layout(four, home):
    begun, model = home / "begun", MODELS["qwen2_moe"]
    written = cases.whole_state(run(four, begun, "dp2 tp2 zero1 ep2:etp2", train_steps=2, model=model))
    for layout in ("dp1", "dp4 zero3 ep4", "tp4:nosp ep2", "dp2 tp2", "dp4 zero2 hs2 ep1:etp2"):
        place = home / f"read by {layout}".replace(":", "-")
        shutil.copytree(begun, place)
        outcomes = run(None if layout == "dp1" else four, place, layout, train_steps=2, model=model)
        assert cases.same(cases.whole_state(outcomes), written), layout
    checkpoint = find_newest(begun / "run/checkpoints")
    assert checkpoint is not None and verify_checkpoint(checkpoint) == []


@pytest.mark.parametrize("family", ["qwen2_moe", *exhaustive("mixtral", "qwen3_moe")])
def test_transformers_loads_expert_parallel_checkpoint_with_equal_validation_loss(four, home, family):
    from transformers import AutoModelForCausalLM

    place = home / f"transformers {family}"
    outcomes = run(four, place, "dp2 tp2 zero3 ep2:etp2", model=MODELS[family], train_steps=3)
    recipe = cases.recipe(place, "dp1")
    rows = prepare(recipe.data, recipe.run.seed).split("validation").read_batch(np.arange(13))
    model = AutoModelForCausalLM.from_pretrained(
        outcomes[0]["result"]["checkpoint"], dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.from_numpy(rows.tokens)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(rows.targets).flatten(), ignore_index=-100
    )
    assert float(loss) == pytest.approx(outcomes[0]["result"]["validation_loss"], rel=1e-5)


def held_and_said(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that this rank holds after two steps, and those that the table predicts."""
    wanted = load_recipe_text(text, "recipe")
    mesh = Mesh.create(wanted.parsed_layout)
    data = prepare(wanted.data, wanted.run.seed)
    trainer = Trainer(LanguageModelTask(wanted, wanted.parsed_layout, resolve_model_config(wanted, data), data, mesh))
    for _ in range(2):
        trainer.step()
    sizes = trainer.memory(), trainer.predicted_bytes()
    mesh.close()
    return sizes


@pytest.mark.parametrize(
    "layout",
    ["dp2 tp2 zero3 ep2 bf16", "dp4 zero1 hs2 ep1:etp2", *exhaustive("dp4 zero2 ep2 mb2", "dp4 ep4")],
)
def test_rank_memory_matches_parameter_table(four, home, layout):
    place = home / f"bytes {layout}".replace(":", "-")
    text = cases.recipe(place, layout, model=MODELS["mixtral"] | {"layers": 4}).to_toml()
    for held, said in four.run(held_and_said, text):
        assert held == said
