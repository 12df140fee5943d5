"""What a plan may be asked of: a preset's name, a Hugging Face directory or config.json, its content, or a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.model.config import ModelConfig, config_from_recipe
from meshwright.model.presets import PRESETS, preset
from meshwright.names import TOKENIZERS, unknown

if TYPE_CHECKING:
    from meshwright.layout import Layout
    from meshwright.recipe import Recipe


def model_of(wanted: ModelConfig | str | Path | Mapping[str, Any]) -> ModelConfig:
    """The model. `UserError` with the nearest name where there is none, and with what could not be priced of a
    configuration."""
    if isinstance(wanted, ModelConfig):
        return wanted
    if isinstance(wanted, Mapping):
        return ModelConfig.from_huggingface(wanted, "model")
    text = str(wanted)
    if text in PRESETS:
        return preset(text)
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model {text[:80]!r}: no such file ({error})") from None
    if path.suffix == ".toml":
        return _of_recipe(path)
    if path.exists() or path.suffix == ".json" or "/" in text:
        return ModelConfig.from_path(path)
    close = difflib.get_close_matches(text.lower(), list(PRESETS), 1)
    hint = "" if close else "; it takes a preset, a Hugging Face directory, a config.json or a recipe"
    raise UserError(unknown("model", text, PRESETS) + hint)


def is_recipe(wanted: object) -> bool:
    """Whether a recipe is meant."""
    return isinstance(wanted, (str, Path)) and Path(wanted).suffix == ".toml"


def _of_recipe(path: Path) -> ModelConfig:
    return config_of(recipe_of(path))


def recipe_of(wanted: str | Path) -> Recipe:
    """The recipe of a file, for which `is_recipe`."""
    from meshwright.recipe import load_recipe

    return load_recipe(wanted)


def layout_of_recipe(recipe: Recipe) -> Layout | None:
    """The layout that it names; None where the planner is to choose."""
    return None if recipe.layout == "auto" else recipe.parsed_layout


def said_by(recipe: Recipe, said: Mapping[str, Any]) -> dict[str, Any]:
    """What a request does not say (None), as the recipe says it."""
    own = {
        "sequence": recipe.data.sequence, "batch": recipe.train.batch, "optimizer": recipe.train.optimizer,
        "compile": recipe.train.compile,
    }  # fmt: skip
    return {name: own[name] if value is None else value for name, value in said.items()}


def config_of(recipe: Recipe) -> ModelConfig:
    """The model of a recipe; where only prepared data would say how large the tokenizer is, as large as it may get."""
    of_bytes = 257  # and the end of text
    vocabulary = recipe.model.vocabulary or (of_bytes if recipe.data.tokenizer == "bytes" else recipe.data.vocabulary)
    if recipe.model.from_path is not None and recipe.data.tokenizer not in TOKENIZERS:
        vocabulary = 1  # the model says its own; whether the tokenizer's files fit it is seen when data are prepared
    return config_from_recipe(recipe.model, recipe.data.sequence, vocabulary)
