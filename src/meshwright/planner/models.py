"""Models that can be planned: a preset's name, a Hugging Face directory or config.json, its content, or a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.limits import make_limit_error, shorten_repr
from meshwright.names import LISTED, TOKENIZERS, unknown
from meshwright.spec.adapter_json import check_initial_adapter
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_fields import format_foreign_architecture_warning
from meshwright.spec.config_from_recipe import config_from_recipe, with_adapter
from meshwright.spec.config_json import config_from_huggingface, config_from_path, read_config
from meshwright.spec.distillation import add_projections
from meshwright.spec.families import FAMILIES
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset
from meshwright.untrusted import read_json

if TYPE_CHECKING:
    from meshwright.recipe import Recipe


BYTE_VOCABULARY = 257
"""Vocabulary size of a byte-level tokenizer: 256 bytes and the end of a text."""


def model_of(wanted: ModelConfig | str | Path | Mapping[str, Any]) -> ModelConfig:
    """Return the model config that `wanted` describes: name of a preset, a Hugging Face directory, a config.json or its
    content, or the path of a recipe.

    Raises `UserError`, with the most similar name, for an unknown model, and for a model that cannot be planned.
    """
    if isinstance(wanted, ModelConfig):
        return wanted
    if isinstance(wanted, Mapping):
        return config_from_huggingface(wanted, "model")
    text = str(wanted)
    if text in PRESETS:
        return preset(text)
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model {text[:80]!r}: no such file ({error})") from None
    if (recipe := find_recipe(path)) is not None:
        return config_of(recipe)[0]
    if path.exists() or path.suffix == ".json" or "/" in text:
        return config_from_path(path)
    close = difflib.get_close_matches(text.lower(), list(PRESETS), 1)
    hint = "" if close else "; expected a preset, a Hugging Face directory, a config.json or a recipe"
    raise UserError(unknown("model", text, PRESETS, LISTED) + hint)


def model_document(config: ModelConfig) -> dict[str, int]:
    """Return {"parameters": number of a model's parameters, "active_parameters": number that each token uses} for
    JSON."""
    table = parameter_table(config)
    return {"parameters": table.numel, "active_parameters": table.active_numel}


def adapted_model(
    wanted: ModelConfig | str | Path | Mapping[str, Any], adapter: Mapping[str, Any] | Sequence[str]
) -> ModelConfig:
    """Return the config of a model with an adapter. wanted: name of a preset, a Hugging Face directory, a config.json
    or its content, or the path of a recipe; adapter: keys of a recipe's table [adapter], or overrides such as
    "adapter.rank=16". Raises `UserError` if they are invalid or do not fit the model."""
    from meshwright.recipe.adapter import read_adapter

    given = read_adapter(adapter)
    config = with_adapter(model_of(wanted), given)
    if given.from_path is not None:
        check_initial_adapter(given.from_path, config)
    return config


def model_substitution_note(wanted: ModelConfig | str | Path | Mapping[str, Any]) -> str | None:
    """Return a note for users if a Hugging Face configuration names an architecture, or code in its repository, that is
    planned as another architecture; else None. wanted: name of a preset, directory, config.json or its content, as
    accepted by `model_of`."""
    if isinstance(wanted, ModelConfig) or str(wanted) in PRESETS:
        return None
    data = wanted if isinstance(wanted, Mapping) else read_config(wanted)
    return format_foreign_architecture_warning(data, FAMILIES[data["model_type"]])


def find_recipe(wanted: object, overrides: Sequence[str] = ()) -> Recipe | None:
    """Return the argument `model` of `plan` as a recipe: a recipe itself, or the one loaded from the path of a recipe
    file (.toml); None if it is a preset, config.json or configuration. overrides: KEY=VALUE texts, as on the command
    line, for a recipe's file. Raises `UserError` for any other type."""
    if isinstance(wanted, str | Path) and Path(wanted).suffix == ".toml":
        from meshwright.recipe import load_recipe

        return load_recipe(wanted, overrides)
    if isinstance(wanted, ModelConfig | str | Path | Mapping):
        return None
    from meshwright.recipe import Recipe

    if not isinstance(wanted, Recipe):
        raise UserError(f"model: takes a preset, a path, a configuration or a recipe, not {shorten_repr(wanted)}")
    return wanted


def config_of(recipe: Recipe) -> tuple[ModelConfig, str | None]:
    """Return (model config of a recipe, text about an assumed vocabulary size or None). The maximum vocabulary is
    assumed for a tokenizer that is not yet trained.

    Raises `UserError` if the vocabulary size is unknown, or if the checkpoint in `adapter.from` has another adapter. If
    that directory is missing, the recipe's run must have a checkpoint, from which it resumes."""
    model, data = recipe.model, recipe.data
    assumed = None
    if model.vocabulary is not None:
        vocabulary = model.vocabulary
    elif data.tokenizer == "bytes":
        vocabulary = BYTE_VOCABULARY
    elif data.tokenizer in TOKENIZERS:
        vocabulary = data.vocabulary
        if model.from_path is None:
            assumed = f"assumed vocabulary {vocabulary:,}, the maximum of the {data.tokenizer} tokenizer to be trained"
    elif model.from_path is not None:
        vocabulary = 1  # the model says its own; whether the tokenizer's files fit it is seen when data are prepared
    else:
        vocabulary, assumed = _of_files(data.tokenizer, model.preset)
    config = add_projections(config_from_recipe(model, data.sequence, vocabulary, recipe.adapter), recipe)
    initial = recipe.adapter.from_path
    if initial is not None and (Path(initial).exists() or not any(recipe.run_directory.glob("checkpoints/step-*"))):
        check_initial_adapter(initial, config)
    return config, assumed


def _of_files(tokenizer: str, preset_name: str | None) -> tuple[int, str | None]:
    """Return (vocabulary size, text about an assumption or None) of the tokenizer at the path `tokenizer`. If it cannot
    be read, the size of the model preset `preset_name` is assumed; if `preset_name` is None, `UserError` is raised."""
    try:
        return tokenizer_vocabulary(tokenizer), None
    except UserError as error:
        if preset_name is None:
            raise UserError(f"{error}; or set model.vocabulary") from None
        own = preset(preset_name).vocabulary
        return own, f"assumed vocabulary {own:,}, that of {preset_name}: {error}"


def tokenizer_vocabulary(tokenizer: str) -> int:
    """Return the vocabulary size (highest token id + 1) of a tokenizer. tokenizer: path of a tokenizer.json or its
    directory. Raises `UserError` if it is unreadable."""
    path = Path(tokenizer).expanduser()
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        found = read_json(file)
        vocabulary = found["model"]["vocab"]  # {token: id}, or a unigram model's [[token, score], ...]
        listed = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        ids: list[int] = [*listed, *(token["id"] for token in found.get("added_tokens") or ())]
        if any(type(each) is not int or each < 0 for each in ids):
            raise ValueError("a token id is a whole number from 0")
        if too_large := make_limit_error("vocabulary", max(ids) + 1):
            raise UserError(f"data.tokenizer: {file}: {too_large}")
        return max(ids) + 1
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = "not a tokenizer.json"
    raise UserError(
        f'data.tokenizer: "{tokenizer}" cannot be read ({reason}); known: {", ".join(TOKENIZERS)}, or a tokenizer.json'
    )
