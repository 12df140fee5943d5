"""Recipe of a run that trains a user's module: a recipe without [model] and [data], which the script provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from meshwright.errors import UserError
from meshwright.recipe import SCHEMA, Recipe
from meshwright.tables import Schema
from meshwright.toml import parse_toml, read_toml


class ModuleRecipe(Recipe):
    """Recipe (settings) of a run that trains a user's module: layout, [run], [train], [adapter], [collectives] and
    [checkpoint]. It has no [model] and [data], which the script provides."""

    model: None = None  # type: ignore[assignment]
    data: None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        """Validate the recipe: reject keys that only Meshwright's own models support (compile, CUDA graphs, other
        objectives, quantized base weights under an adapter). Return the recipe."""
        if self.adapter.base != "bf16":
            raise ValueError(f'adapter.base "{self.adapter.base}" packs built-in models; here the base stays as it is')
        if self.train.compile:
            raise ValueError("train.compile is for built-in models; call module.compile() in build")
        if self.train.cuda_graphs:
            raise ValueError("train.cuda_graphs is for built-in models; a module may wait for the GPU in its forward")
        if self.train.tensor_overlap != "off":
            raise ValueError("train.tensor_overlap is for built-in models, whose products are split over tp")
        if self.train.objective not in (None, "next-token"):
            raise ValueError(
                f'train.objective "{self.train.objective}" is for built-in models; here the script defines the loss'
            )
        return self

    @property
    def objective(self) -> str:
        """Name of the training objective, always "next-token", so that code shared with language models applies no
        preference loss. The script defines the real loss."""
        return "next-token"


MODULE_SCHEMA = Schema(ModuleRecipe, elsewhere=SCHEMA.elsewhere)


def make_module_recipe(
    recipe: Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    name: str = "module",
    directory: str = "",
    trust: bool = False,
) -> ModuleRecipe:
    """Return a validated recipe from its tables (nested dicts) or from a TOML file, with overrides such as
    "train.steps=100".

    `name`, `directory`: defaults of `run.name` and `run.directory`. `trust`: allow a file to run code that it names;
    tables are always trusted. `UserError` in one line for an invalid key or value.
    """
    if isinstance(recipe, (str, Path)):
        where = str(recipe)
        tables = read_toml(Path(recipe), "recipe")
    else:
        where = "recipe"
        tables = {key: dict(value) if isinstance(value, Mapping) else value for key, value in recipe.items()}
    set_by: dict[str, str] = {}
    for override in overrides:
        key = MODULE_SCHEMA.override(tables, override)
        set_by.pop(key, None)
        set_by[key] = override
    for table in ("model", "data"):
        if tables.get(table) is not None:
            raise UserError(f"{where}: [{table}] is for built-in models; here the script provides it")
    run = tables.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = name
        if directory:
            run.setdefault("directory", directory)
    found = MODULE_SCHEMA.check(tables, lambda key: f'override "{set_by[key]}"' if key in set_by else where)
    found._source_path, found._overrides = Path(where), set_by
    found._trusted = trust or isinstance(recipe, Mapping)
    if found.layout == "auto":
        raise UserError(f"{found.where('layout')}: a user module has no automatic layout; give one, such as dp2")
    return found


def parse_module_recipe(text: str, where: str) -> ModuleRecipe:
    """Parse a recipe from the TOML text that `to_toml` writes. where: name of the text in errors."""
    return MODULE_SCHEMA.check(parse_toml(text, where), lambda key: where)
