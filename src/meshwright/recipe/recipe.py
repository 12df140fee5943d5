"""Loading and validation of recipes; every mistake is one line that names the file or override and the key."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, PrivateAttr, model_validator

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import shorten_repr
from meshwright.names import OBJECTIVES_OF_RECORDS
from meshwright.recipe.adapter import AdapterRecipe
from meshwright.recipe.data import DataRecipe
from meshwright.recipe.distill import DistillRecipe
from meshwright.recipe.other_names import OTHER_NAMES
from meshwright.recipe.tables import (
    CheckpointRecipe,
    CollectivesRecipe,
    ModelRecipe,
    RunRecipe,
    TrackRecipe,
    TrainRecipe,
)
from meshwright.recipe.tune import TuneRecipe, check_searched_keys
from meshwright.tables import Schema, Table
from meshwright.toml import format_toml, format_toml_value, parse_toml, read_toml


def _check_layout(text: str) -> str:
    """Check a recipe's layout, such as "dp2 zero1", or "auto" (chosen by the planner); return the text unchanged.
    Raises `ValueError` if it is not valid.
    """
    if text == "auto":  # `meshwright train` has the planner choose
        return text
    try:
        Layout.parse(text)
    except UserError as error:
        raise ValueError(str(error).removeprefix(f'layout "{text}": ')) from None  # the location has it already
    return text


_IN_PLACE_OF = {"data.source": "sources", "data.sources": "source"}

_KEYS_OF_OBJECTIVES = {  # keys of [train] that only these objectives read
    "preference_beta": tuple(name for names in OBJECTIVES_OF_RECORDS.values() for name in names),
    "preference_margin": ("simpo",),
    "preference_smoothing": ("dpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


class Recipe(Table):
    """A whole training recipe, one field for each table of its TOML file; relative paths are relative to the current
    directory.

    layout: parallel layout as text, such as "dp2 zero1", or "auto" (chosen by `meshwright train`).
    """

    layout: Annotated[str, AfterValidator(_check_layout)] = "dp1"
    run: RunRecipe = RunRecipe()
    model: ModelRecipe
    adapter: AdapterRecipe = AdapterRecipe()
    data: DataRecipe
    train: TrainRecipe
    distill: DistillRecipe = DistillRecipe()
    collectives: CollectivesRecipe = CollectivesRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    track: TrackRecipe = TrackRecipe()
    tune: TuneRecipe = TuneRecipe()

    _source_path: Path | None = PrivateAttr(default=None)
    _trusted: bool = PrivateAttr(default=False)
    _overrides: dict[str, str] = PrivateAttr(default_factory=dict)  # dotted key -> the override that set it

    @model_validator(mode="before")
    @classmethod
    def _default_tokenizer(cls, tables: Any) -> Any:
        """Return the tables of a recipe with the default of data.tokenizer filled in; called before they are validated.
        The default is model.from if its weights are loaded, since weights fit only their own tokenizer; else
        distill.teacher. The tables are returned unchanged if they name a tokenizer, or if neither default applies."""
        names = ("model", "data", "adapter", "distill")
        model, data, adapter, distill = (tables.get(name) if isinstance(tables, Mapping) else None for name in names)
        if not isinstance(model, Mapping) or not isinstance(data, Mapping):
            return tables
        adapted = isinstance(adapter, Mapping) and adapter.get("kind", "none") != "none"
        if (
            (adapted or model.get("load_weights") is True)
            and isinstance(model.get("from"), str)
            and "tokenizer" not in data
        ):
            return {**tables, "data": {**data, "tokenizer": model["from"]}}
        if isinstance(distill, Mapping) and isinstance(distill.get("teacher"), str) and "tokenizer" not in data:
            return {**tables, "data": {**data, "tokenizer": distill["teacher"]}}
        return tables

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        """Check that the tables are consistent; return the recipe. Raises ValueError if validation steps lack a
        validation split, the objective does not suit the kind of records, or an adapter has no base model.
        """
        check_searched_keys(self.tune.dimensions, SCHEMA)
        if self.tune.space and not self.train.validate_every:
            raise ValueError("tune compares validation losses: set train.validate_every")
        if self.adapter.kind != "none" and self.model.from_path is None:
            raise ValueError("adapter needs model.from: the directory of the base model, whose weights it loads")
        if self.train.validate_every and not self.data.validation_fraction:
            raise ValueError("train.validate_every needs validation data, and data.validation_fraction is 0")
        objective, suited = self.train.objective, OBJECTIVES_OF_RECORDS.get(self.data.records, ("next-token",))
        if objective == "next-token" and objective not in suited:
            raise ValueError(
                'train.objective "next-token" would learn the rejected responses too; data.records '
                f'"{self.data.records}" is for {", ".join(suited)}'
            )
        if objective is not None and objective not in suited:
            kind = next(kind for kind, names in OBJECTIVES_OF_RECORDS.items() if objective in names)
            learns = "pairs of responses" if kind == "preference" else "single responses with labels"
            raise ValueError(
                f'train.objective "{objective}" learns from {learns}: it needs data.records = "{kind}", '
                f'not "{self.data.records}"'
            )
        for key, of in _KEYS_OF_OBJECTIVES.items():
            if self.objective not in of and getattr(self.train, key) != TrainRecipe.model_fields[key].default:
                names = " or ".join(f'"{name}"' for name in of)
                raise ValueError(f'train.{key} belongs to objective {names}; "{self.objective}" has none')
        if self.model.mup_base_hidden and self.train.optimizer != "adamw":
            raise ValueError(
                f'model.mup_base_hidden scales the rates of "adamw"; those of "{self.train.optimizer}" scale otherwise'
            )
        if self.distill.teacher is not None and self.data.records in OBJECTIVES_OF_RECORDS:
            raise ValueError(
                f'distill.teacher learns from texts and responses; data.records "{self.data.records}" has none'
            )
        if self.model.prediction_layers and self.objective != "next-token":
            raise ValueError(
                f'model.prediction_layers trains on next tokens; objective "{self.objective}" has no such loss'
            )
        return self

    @property
    def objective(self) -> str:
        """Training objective, such as "next-token" or "dpo": `train.objective` if it is set, else "dpo" for preference
        records, "kto" for unpaired records, "distillation" with a teacher, and otherwise "next-token".
        """
        usual = OBJECTIVES_OF_RECORDS.get(self.data.records, ("next-token",))[0]
        found = self.train.objective or usual
        return "distillation" if found == "next-token" and self.distill.teacher is not None else found

    @property
    def base_directory(self) -> str | None:
        """Directory of the weights that the run starts from: `model.from` if `model.load_weights` is true or the recipe
        has an adapter; otherwise None (random initial weights)."""
        loads = self.model.load_weights or self.adapter.kind != "none"
        return self.model.from_path if loads else None

    @property
    def preference_beta(self) -> float:
        """Beta of the preference objective: `train.preference_beta` if it is set, else 2 for SimPO (as in the paper's
        experiments, arXiv:2405.14734, appendix B) and 0.1 for the other objectives.
        """
        return self.train.preference_beta or (2.0 if self.objective == "simpo" else 0.1)

    @property
    def preference_margin(self) -> float:
        """Target reward margin (gamma) of SimPO: `train.preference_margin` if it is set, else 1. For other objectives,
        which have no margin, the value is 0."""
        given = self.train.preference_margin
        return (1.0 if given is None else given) if self.objective == "simpo" else 0.0

    def __eq__(self, other: object) -> bool:
        """Return True if `other` is a recipe with equal values of all keys; the files that recipes were read from do
        not matter.
        """
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @property
    def parsed_layout(self) -> Layout:
        """The recipe's parallel layout, parsed from its text. Raises `UserError` if it is "auto", which only
        `meshwright train` can resolve."""
        if self.layout == "auto":
            raise UserError(
                f'{self.where("layout")}: layout "auto" is resolved by `meshwright train` only; give one, such as '
                '"dp2 zero1" (`meshwright plan` finds the fastest)'
            )
        return Layout.parse(self.layout)

    @property
    def source_path(self) -> Path | None:
        """Path of the file that the recipe was read from; None if it was built from tables."""
        return self._source_path

    @property
    def trusted(self) -> bool:
        """True if code that the recipe names (such as a tracker's class) may run: allowed by `--trust-recipe`, or by
        `trust=True` when the recipe is loaded."""
        return self._trusted

    def where(self, key: str) -> str:
        """Describe where the value of a key such as "train.steps" was set, as text for error messages: the override
        that set it, else the recipe's file.
        """
        return _describe_origin(self._overrides, key, str(self._source_path or "recipe"))

    @property
    def run_directory(self) -> Path:
        """The run directory: `run.directory` if given, else runs/NAME with the name of the run."""
        return Path(self.run.directory) if self.run.directory else Path("runs") / self.run.name

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], where: str = "recipe", *, trust: bool = False) -> Recipe:
        """Build and validate a recipe from `tables`, nested dictionaries, one for each table of the TOML file. where:
        name of the recipe in errors (`UserError`).

        trust: allow code that the recipe names, such as a tracker's class, to run.
        """
        recipe = SCHEMA.check(tables, lambda key: where)
        recipe._trusted = trust
        return recipe

    def to_toml(self) -> str:
        """Return the whole recipe, defaults included, as TOML text that parses back to an equal recipe."""
        return format_toml(self.to_tables())

    def to_tables(self) -> dict[str, Any]:
        """Return the whole recipe, defaults included, as nested dictionaries from which `from_tables` makes an equal
        recipe."""
        return self.model_dump(by_alias=True, exclude_none=True)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Recipe:
    """Load the recipe file `path` and apply `overrides` such as `train.steps=100` or `layout=dp2 zero1`. If several
    overrides set the same key, the last one wins.

    Values of overrides are TOML; a bare word is a string. trust: True: code that the recipe names, such as a tracker's
    class, may run. Raises `UserError`: one line with the file or override, the key, and the valid values.
    """
    path = Path(path)
    return _apply_overrides(read_toml(path, "recipe"), overrides, {}, path, trust)


def resolve_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    trust: bool = False,
) -> Recipe:
    """Load or convert `recipe`, which is a file, nested dictionaries (tables) or a `Recipe`, and apply `overrides`.

    overrides: values by dotted key, as in `{"train.steps": 100, "layout": "dp2 zero1"}`, or texts as on the command
    line. trust: True: code that the recipe names, such as a tracker's class, may run; a `Recipe` that is already
    trusted stays trusted. Raises `UserError`: one line with the file or override, the key, and the valid values.
    """
    texts = format_overrides(overrides)
    if isinstance(recipe, Recipe):
        where = recipe._source_path
        return _apply_overrides(recipe.to_tables(), texts, recipe._overrides, where, trust or recipe._trusted)
    if isinstance(recipe, Mapping):
        return _apply_overrides(copy.deepcopy(dict(recipe)), texts, {}, None, trust)
    if not isinstance(recipe, str | Path):
        raise UserError(f"recipe: takes a file, tables or a Recipe, not {shorten_repr(recipe)}")
    return load_recipe(recipe, texts, trust=trust)


def _apply_overrides(
    tables: dict[str, Any], overrides: Sequence[str], set_by: Mapping[str, str], path: Path | None, trust: bool
) -> Recipe:
    """Apply overrides such as "train.steps=100" to `tables` (nested dictionaries, changed in place); return the
    validated recipe.

    set_by: {dotted key: override that set it} for overrides already applied to `tables`. path: the recipe's file, None
    if there is none. trust: True: code that the recipe names may run.
    """
    set_by = dict(set_by)
    for override in overrides:
        key = SCHEMA.override(tables, override)
        if key in _IN_PLACE_OF:  # replaces the other key, which the file may have set
            tables["data"].pop(_IN_PLACE_OF[key], None)
        set_by.pop(key, None)  # the last one counts, and is the last in an error line too
        set_by[key] = override
    run = tables.setdefault("run", {})
    if path is not None and isinstance(run, dict) and re.fullmatch(r"[^.].*", path.stem):
        run.setdefault("name", path.stem)

    recipe = SCHEMA.check(tables, lambda key: _describe_origin(set_by, key, str(path or "recipe")))
    recipe._source_path, recipe._overrides, recipe._trusted = path, set_by, trust
    return recipe


def format_overrides(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Format overrides as the command line takes them, as a list of texts such as `train.steps=100`.

    overrides: {dotted key: value}, or a list of such texts (returned unchanged). A string value is quoted only if it
    would otherwise be parsed as another value, such as "5" as the integer 5.
    """
    if isinstance(overrides, str):
        raise UserError(f'overrides: takes a mapping such as {{"train.steps": 100}}, not {shorten_repr(overrides)}')
    if not isinstance(overrides, Mapping):
        return [str(override) for override in overrides]
    return [f"{key}={_format_override_value(str(key), value)}" for key, value in overrides.items()]


def _format_override_value(key: str, value: Any) -> str:
    """Format `value` as the text that follows `key=` in an override. A string that is parsed back to itself is written
    without quotes; all other values are written as TOML. Raises `UserError` for a type that TOML lacks.
    """
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value == value.strip() and SCHEMA.parse_override_value(key, value) == value:
        return value
    try:
        return format_toml_value(value)
    except AssertionError:
        raise UserError(f"override {key}: takes a value of TOML, not {shorten_repr(value)}") from None


def _describe_origin(set_by: Mapping[str, str], key: str, file: str) -> str:
    """Describe where the value of `key` was set, as text for error messages: the override that set it, else the file.
    If `key` is a table of which overrides set some keys, the text names the file and these overrides.

    set_by: {dotted key: override that set it}. file: path as text.
    """
    own = [text for name, text in set_by.items() if key == name or key.startswith(f"{name}.")]
    if own:
        return f'override "{own[-1]}"'
    inside = [f'"{text}"' for name, text in set_by.items() if not key or name.startswith(f"{key}.")]
    if not inside:
        return file
    return f"{file} with override{'s' if len(inside) > 1 else ''} {', '.join(inside)}"


def load_recipe_text(text: str, where: str, *, trust: bool = False) -> Recipe:
    """Parse a recipe from TOML text, as written by `Recipe.to_toml`. where: path of the text, for errors (`UserError`).
    trust: True: code that the recipe names, such as a tracker's class, may run.
    """
    recipe = Recipe.from_tables(parse_toml(text, where), where, trust=trust)
    recipe._source_path = Path(where)
    return recipe


SCHEMA = Schema(Recipe, elsewhere=OTHER_NAMES)
