"""µP: initial values and learning rates over the width, and the activations that follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from meshwright.data import PreparedData, prepare
from meshwright.errors import UserError
from meshwright.recipe import ModelRecipe, Recipe, load_recipe_text, resolve_recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table
from meshwright.training.optimizer import Optimizer
from meshwright.tuning.coordinates import check_coordinates
from tests.conftest import TINY_RECIPE, Outcome

WIDTHS = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128}


def make_config(ratio: int) -> ModelConfig:
    """A mixture of experts with `ratio` times the base width of 64."""
    sizes = {name: size * ratio for name, size in {**WIDTHS, "expert_intermediate": 32}.items()}
    model = ModelRecipe(family="qwen3_moe", layers=2, head_dim=16, experts=4, mup_base_hidden=64, **sizes)
    return config_from_recipe(model, sequence=64, tokenizer_vocabulary=512)


@pytest.mark.parametrize("ratio", [1, 4])
def test_initial_values_and_rates_are_those_of_the_published_table(ratio: int):
    entries = {entry.name: entry for entry in parameter_table(make_config(ratio)).entries}
    residual = 0.02 / math.sqrt(2 * 2)
    for name, std, rate in (  # arXiv:2203.03466, table 3, column Adam: standard deviations and rates over the fan-in
        ("model.embed_tokens.weight", 0.02, 1),
        ("model.layers.0.self_attn.q_proj.weight", 0.02 / math.sqrt(ratio), 1 / ratio),
        ("model.layers.1.self_attn.o_proj.weight", residual / math.sqrt(ratio), 1 / ratio),
        ("model.layers.0.mlp.experts.3.down_proj.weight", residual / math.sqrt(ratio), 1 / ratio),
        ("model.layers.0.mlp.gate.weight", 0.02 / ratio, 1 / ratio),
        ("lm_head.weight", 0.02 / ratio, 1 / ratio),
        ("model.norm.weight", 0, 1),
    ):
        assert (entries[name].initial.std, entries[name].rate) == (pytest.approx(std), rate), name


class Shard:
    """A shard of two matrix elements and one vector element."""

    def __init__(self, rate: float) -> None:
        self.master, self.gradient = torch.ones(3), torch.tensor([1.0, -2.0, 1.0])
        self.decay_numel, self.rate_factor, self.balancing = 2, rate, ()


def test_optimizer_scales_the_rate_of_matrices_and_keeps_their_decay():
    recipe = load_recipe_text(TINY_RECIPE + "weight_decay = 0.5\n", "tiny.toml")
    wide = Shard(0.25)
    Optimizer([wide], recipe.train).step(0.1)
    # Adam's first update is the rate times the sign of the gradient; the decay is 0.1 x 0.5 at every width.
    assert wide.master.tolist() == pytest.approx([0.95 - 0.025, 0.95 + 0.025, 0.9], abs=1e-6)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recipe, PreparedData]]:
    """A small recipe, and its data."""
    directory = tmp_path_factory.mktemp("coordinates")
    (directory / "text.txt").write_text("".join(f"def answer_{n}():\n    return {n * n}\n" for n in range(400)))
    recipe = resolve_recipe(
        load_recipe_text(TINY_RECIPE, "tiny.toml"),
        {"data.source": str(directory / "text.txt"), "data.cache": str(directory / "cache"),
         **{f"model.{name}": size for name, size in WIDTHS.items()}},
    )  # fmt: skip
    yield recipe, prepare(recipe.data, recipe.run.seed, log=lambda line: None)


def test_activations_change_alike_at_every_width_under_mup_only(prepared: tuple[Recipe, PreparedData], tmp_path: Path):
    recipe, data = prepared
    standard = check_coordinates(recipe, data, (1, 2, 4))
    scaled = check_coordinates(resolve_recipe(recipe, {"model.mup_base_hidden": 64}), data, (1, 2, 4))
    assert standard.find_growth()["attention"] > 1 and standard.find_growth()["mlp"] > 1
    assert all(growth < 0.3 for growth in scaled.find_growth().values())
    assert abs(scaled.find_growth()["logits"]) < 0.3
    assert [values[0] for values in standard.changes.values()] == [values[0] for values in scaled.changes.values()]
    scaled.write(tmp_path / "coordinates.svg")
    assert (tmp_path / "coordinates.svg").read_text().count("<polyline") == 8


def test_command_draws_the_check_and_refuses_other_widths(
    prepared: tuple[Recipe, PreparedData], tmp_path: Path, command_line: Callable[..., Outcome]
):
    file = tmp_path / "recipe.toml"
    file.write_text(prepared[0].to_toml())
    arguments = ("tune", file, "--directory", tmp_path / "study", "--json", "--check-widths")
    document = json.loads(command_line(*arguments, "1,2").output)
    assert document["hidden"] == [64, 128] and set(document["growth"]) == {"embedding", "attention", "mlp", "logits"}
    assert Path(document["picture"]).read_text().startswith("<svg")
    for wrong in ("1", "1,1", "0,2", "1,x"):
        outcome = command_line(*arguments, wrong)
        assert outcome.code == 2 and "takes two or more different multiples of the width" in outcome.errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.tied": True}, "which a tied output head does not allow"),
        ({"model.family": "deepseek_v2", "model.kv_heads": 4}, "which latent attention does not allow"),
        ({"train.optimizer": "sgd"}, 'scales the rates of "adamw"'),
    ],
)
def test_model_that_mup_does_not_fit_is_refused(
    prepared: tuple[Recipe, PreparedData], changes: dict[str, object], message: str
):
    recipe, data = prepared
    with pytest.raises(UserError, match=message):
        check_coordinates(resolve_recipe(recipe, {"model.mup_base_hidden": 64, **changes}), data, (1, 2))
