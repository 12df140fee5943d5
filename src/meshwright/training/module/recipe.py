"""The recipe of a foreign module: that of a model of ours without [model] and [data], which a script has instead."""

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
    """Layout, [run], [train], [collectives] and [checkpoint]."""

    model: None = None  # type: ignore[assignment]
    data: None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if self.train.compile:
            raise ValueError("train.compile is for Meshwright's own models; call module.compile() where it is built")
        if self.train.objective not in (None, "next-token"):
            raise ValueError(
                f'train.objective "{self.train.objective}" is for models of Meshwright; the script gives the loss here'
            )
        return self

    @property
    def objective(self) -> str:
        """That of no preferences: the script's own loss."""
        return "next-token"


MODULE_SCHEMA = Schema(ModuleRecipe, elsewhere=SCHEMA.elsewhere)


def module_recipe(
    recipe: Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    name: str = "module",
    directory: str = "",
    trust: bool = False,
) -> ModuleRecipe:
    """A recipe from its tables or its file, with overrides such as `train.steps=100`. `name`, `directory`: of the run,
    unless the recipe says them. `trust`: code that a file names may run; tables are the script's own. `UserError` in
    one line."""
    if isinstance(recipe, (str, Path)):
        where = str(recipe)
        tables = read_toml(Path(recipe), "recipe")
    else:
        where = "recipe"
        tables = {key: dict(value) if isinstance(value, Mapping) else value for key, value in recipe.items()}
    said_by: dict[str, str] = {}
    for override in overrides:
        key = MODULE_SCHEMA.override(tables, override)
        said_by.pop(key, None)
        said_by[key] = override
    for table in ("model", "data"):
        if tables.get(table) is not None:
            raise UserError(f"{where}: [{table}] belongs to Meshwright's own models; here the script makes it")
    run = tables.setdefault("run", {})
    if isinstance(run, dict) and "name" not in run:
        run["name"] = name
        if directory:
            run.setdefault("directory", directory)
    found = MODULE_SCHEMA.check(tables, lambda key: f'override "{said_by[key]}"' if key in said_by else where)
    found._source_path, found._overrides = Path(where), said_by
    found._trusted = trust or isinstance(recipe, Mapping)
    if found.layout == "auto":
        raise UserError(f"{found.where('layout')}: a module of your own has no automatic layout; name one, such as dp2")
    return found


def module_recipe_text(text: str, where: str) -> ModuleRecipe:
    """A recipe from its text, as `to_toml` writes it."""
    return MODULE_SCHEMA.check(parse_toml(text, where), lambda key: where)
