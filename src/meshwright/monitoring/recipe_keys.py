"""Keys of a run's recipe that differ from the defaults, or between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from meshwright.errors import UserError
from meshwright.toml import format_toml_value, parse_toml


def list_differing_keys(recipe: str) -> dict[str, str] | None:
    """Return the keys of a recipe (TOML text) whose values are not the defaults, as {dotted key: value as TOML}; None
    if the text is not TOML."""
    flat = _flatten_recipe(recipe)
    return None if flat is None else {key: value for key, value in flat.items() if value != _list_defaults().get(key)}


def compare_recipes(recipes: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys whose values differ between recipes (TOML texts), as {dotted key: list of its values in the
    recipes, as TOML text, "–" where the key is not set}. `run.name` and `run.directory` are left out."""
    flats = [_flatten_recipe(recipe) or {} for recipe in recipes]
    keys = dict.fromkeys(key for flat in flats for key in flat if key not in ("run.name", "run.directory"))
    values = {key: [flat.get(key, "–") for flat in flats] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}


@cache
def _list_defaults() -> dict[str, str]:
    """Return the default values of a recipe's keys, as {dotted key: value as TOML}."""
    from meshwright.recipe import SCHEMA

    fields = {key: field.get_default(call_default_factory=True) for key, field in SCHEMA.keys.items() if
              not field.is_required()}  # fmt: skip
    plain = (bool, int, float, str, list, tuple)
    return {key: format_toml_value(value) for key, value in fields.items() if isinstance(value, plain)}


def _flatten_recipe(text: str) -> dict[str, str] | None:
    """Parse the recipe `text` and return {dotted key: value as TOML}; None if it is not TOML."""
    try:
        tables = parse_toml(text, "recipe")
    except UserError:
        return None
    return {key: format_toml_value(value) for key, value in flatten(tables, ".").items()}


def flatten(table: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """Flatten the nested dicts `table` to {path: value}, with paths such as "train.steps" for the separator ".".
    prefix: text before each path."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            flatten(value, separator, f"{prefix}{key}{separator}")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat
