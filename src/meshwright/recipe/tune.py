"""Recipe table [tune]: the search space of `meshwright tune`, its sampler, its pruner and its budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from meshwright.names import PRUNERS, SAMPLERS, nearest
from meshwright.tables import Count, Positive, Schema, Table, named
from meshwright.toml import format_toml_value

_KINDS = ("log", "uniform", "choice")
_OPTIONS = ("step", "when")
_SEARCHED_TABLES = ("train", "model", "adapter", "data")
_NOT_SEARCHED = {  # key, or start of keys -> why its best value cannot be found by comparing validation losses
    "data": "all trials have to be validated on the same text",
    "model.from": "all trials have to start from the same weights",
    "model.load_weights": "all trials have to start from the same weights",
    "model.mup_base_hidden": "it says at which width the other settings were found",
    "adapter.from": "all trials have to start from the same weights",
    "train.objective": "losses of different objectives cannot be compared",
    "train.preference_beta": "the loss itself depends on it",
    "train.preference_margin": "the loss itself depends on it",
    "train.preference_smoothing": "the loss itself depends on it",
    "train.desirable_weight": "the loss itself depends on it",
    "train.undesirable_weight": "the loss itself depends on it",
    "train.loss_scale": "it does not change the loss",
    "train.loss_scale_every": "it does not change the loss",
    "train.maximum_skipped": "it does not change the loss",
    "train.validate_every": "all trials have to be validated at the same steps",
    "train.validation_sequences": "all trials have to be validated on the same text",
    "train.compile": "it does not change the loss",
    "train.deterministic": "it does not change the loss",
    "train.cuda_graphs": "it does not change the loss",
    "train.tensor_overlap": "it does not change the loss",
    "train.log_every": "it does not change the loss",
    "train.slow_rank_factor": "it does not change the loss",
    "train.profile": "it does not change the loss",
    "train.profile_ranks": "it does not change the loss",
}


@dataclass(frozen=True)
class Dimension:
    """One dimension of the search space: a recipe key with the values that it can take.

    Attributes:
        key: Dotted key of the recipe, such as "train.learning_rate".
        kind: "log" (log-uniform), "uniform" or "choice".
        low, high: Bounds of a range, both included.
        step: Distance between the allowed values of a range; None: every value is allowed.
        choices: The values of a choice.
        when: Conditions, as (another searched key, values of that key for which this key is searched); empty: it is
            always searched.
    """

    key: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    choices: tuple[Any, ...] = ()
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def list_extreme_values(self) -> tuple[Any, ...]:
        """Return the values that must be validated: both bounds of a range, or all choices. If these are valid, all
        other values of the dimension are valid."""
        return self.choices or (self.low, self.high)

    def is_active(self, values: Mapping[str, Any]) -> bool:
        """Return True if all conditions of `when` are met, so that a trial samples this key. values: {key: value} of
        the trial for the searched keys listed before this one."""
        return all(key in values and values[key] in allowed for key, allowed in self.when)


def _normalize_space(space: Any) -> Any:
    """Flatten a search space that was written as nested tables (`train.learning_rate = {...}` in TOML) to {dotted key:
    its table}, and check each table. Raises ValueError for the first mistake."""
    if not isinstance(space, Mapping):
        return space  # pydantic reports it
    flat = dict(_flatten_space(space, ""))
    dimensions: dict[str, Dimension] = {}
    for key, table in flat.items():
        dimensions[key] = _parse_dimension(key, table, dimensions)
    return flat


def _flatten_space(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (dotted key, table) for each dimension of a search space written as nested tables. prefix: start of the
    keys, such as "train."."""
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(
                f"{prefix}{name}: should be a table such as {{ log = [1e-4, 1e-2] }}, not {format_toml_value(table)}"
            )
        words = (*_KINDS, *_OPTIONS)
        if not table or any(word in words or not isinstance(value, Mapping) for word, value in table.items()):
            yield prefix + name, dict(table)
        else:
            yield from _flatten_space(table, f"{prefix}{name}.")


def _parse_dimension(key: str, table: Mapping[str, Any], before: Mapping[str, Dimension]) -> Dimension:
    """Check one entry of the search space, the recipe key `key` with its table `table`, and convert it to a
    `Dimension`. before: the dimensions listed before it, on which its conditions may depend. Raises ValueError with the
    key and the reason."""
    unknown = next((word for word in table if word not in (*_KINDS, *_OPTIONS)), None)
    if unknown is not None:
        close = nearest(unknown, (*_KINDS, *_OPTIONS))
        hint = f"did you mean {close}?" if close else f"known are {', '.join((*_KINDS, *_OPTIONS))}"
        raise ValueError(f"{key}: {unknown} is no part of a search space; {hint}")
    kinds = [kind for kind in _KINDS if kind in table]
    if len(kinds) != 1:
        raise ValueError(f"{key}: needs exactly one of {', '.join(_KINDS)}, not {' and '.join(kinds) or 'none'}")
    kind, values, when = kinds[0], table[kinds[0]], _parse_conditions(key, table.get("when", {}), before)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) < 2:
        raise ValueError(f"{key}: {kind} takes a list of at least two values, not {format_toml_value(values)}")
    if kind == "choice":
        if "step" in table:
            raise ValueError(f"{key}: step belongs to uniform; a choice lists its values")
        texts = [format_toml_value(value) for value in values]
        if twice := next((text for text in texts if texts.count(text) > 1), None):
            raise ValueError(f"{key}: choice lists {twice} twice")
        return Dimension(key, kind, choices=tuple(values), when=when)
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != 2 or len(values) != 2 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{key}: {kind} takes the lowest and the highest value, not {format_toml_value(values)}")
    low, high = numbers
    if low >= high:
        raise ValueError(f"{key}: {kind} = {format_toml_value(values)}: the first bound has to be below the second")
    if kind == "log" and low <= 0:
        raise ValueError(f"{key}: log = {format_toml_value(values)}: bounds of a logarithmic range are above 0")
    step = table.get("step")
    if step is not None:
        if kind == "log":
            raise ValueError(f"{key}: step belongs to uniform; a logarithmic range has none")
        if not isinstance(step, int | float) or isinstance(step, bool) or not 0 < step <= high - low:
            raise ValueError(f"{key}: step should be a number between 0 and {high - low:g}")
        if abs((high - low) / step - round((high - low) / step)) > 1e-9:
            raise ValueError(f"{key}: step {step:g} does not lead from {low:g} to {high:g}")
    return Dimension(key, kind, low, high, step, when=when)


def _parse_conditions(key: str, when: Any, before: Mapping[str, Dimension]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Check `when`, the conditions of the dimension `key`, {other key: value or list of values}; return them as tuples
    (key, values). before: the dimensions listed before it. Raises ValueError if a condition names a key that is not a
    choice listed before, or a value that this key cannot take."""
    if not isinstance(when, Mapping):
        raise ValueError(f'{key}: when should be a table such as {{ "train.optimizer" = "sgd" }}')
    conditions = []
    for name, wanted in when.items():
        if name not in before or not before[name].choices:
            raise ValueError(f"{key}: when names {name}, which is not a choice listed before {key}")
        allowed = tuple(wanted) if isinstance(wanted, list) else (wanted,)
        if other := [value for value in allowed if value not in before[name].choices]:
            raise ValueError(f"{key}: when {name} = {format_toml_value(other[0])}: it is none of that key's choices")
        conditions.append((name, allowed))
    return tuple(conditions)


class TuneRecipe(Table):
    """Table [tune] of a recipe: the hyper-parameter search of `meshwright tune`, which minimises the validation loss
    after the last step. Training itself ignores it.

    Attributes:
        space: {dotted key of the recipe: {"log" | "uniform": [low, high]} or {"choice": [values]}}, with "step"
            (spacing of a uniform range) and "when" ({key of a choice listed before: value or values for which the key
            of this entry is searched}).
        trials, steps, tokens, seconds: Budget of the whole study, over all workers; the search ends when the first of
            these is used up. Training steps and tokens are never exceeded. Seconds are those of training processes,
            summed over the workers; when they are used up, running trials are stopped.
        seed: Seed of the sampler.
        sampler: "tpe" or "random".
        pruner: "median" (a trial is stopped if its best loss so far is above the median of the earlier trials' losses
            at the same step), "halving" (asynchronous successive halving) or "none".
        startup: Number of trials that complete before any is pruned; as many are sampled at random first.
        keep: Number of the best trials whose checkpoints are kept.
    """

    space: Annotated[dict[str, Any], BeforeValidator(_normalize_space)] = {}
    trials: Count | None = None
    steps: Count | None = None
    tokens: Count | None = None
    seconds: Positive | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    sampler: Annotated[str, named("sampler", SAMPLERS)] = "tpe"
    pruner: Annotated[str, named("pruner", PRUNERS)] = "median"
    startup: Count = 5
    keep: Count = 1

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The searched keys with their values, in the order of the recipe."""
        found: dict[str, Dimension] = {}
        for key, table in self.space.items():
            found[key] = _parse_dimension(key, table, found)
        return tuple(found.values())

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        """Check that a search space has a budget; return the table. Raises ValueError otherwise."""
        if self.space and not any((self.trials, self.steps, self.tokens, self.seconds)):
            raise ValueError("has a space and no budget: give trials (such as 20), steps, tokens or seconds")
        return self


def check_searched_keys(dimensions: Sequence[Dimension], schema: Schema[Any]) -> None:
    """Check the recipe keys that `dimensions` search. Each key must exist and affect training. Keys that affect how the
    result is measured, such as the validation data, are refused. Ranges of whole numbers must have whole bounds.
    schema: the keys of a recipe. Raises ValueError with the key and the reason."""
    known = schema.keys
    for dimension in dimensions:
        key, numbers = dimension.key, (dimension.low, dimension.high, dimension.step or 1)
        if key not in known:
            named = [name for name in known if "." in name and not name.startswith("tune.")]
            close = schema.elsewhere.get(key.rpartition(".")[2]) or nearest(key, named)
            raise ValueError(f"{key} is no key of a recipe" + (f"; did you mean {close}?" if close else ""))
        reason = next((why for name, why in _NOT_SEARCHED.items() if key == name or key.startswith(f"{name}.")), None)
        if key == "layout":
            reason = "every layout computes the same loss (`meshwright plan` finds the fastest)"
        elif key.partition(".")[0] not in _SEARCHED_TABLES or key in _SEARCHED_TABLES:
            reason = "it is not a setting of the model or of its training"
        if reason:
            raise ValueError(f"{key} cannot be searched: {reason}")
        if not dimension.choices and not schema.accepts(key, float) and not all(map(_is_whole, numbers)):
            raise ValueError(f"{key} takes whole numbers: write its bounds and its step as integers")


def _is_whole(number: float) -> bool:
    """Return True if `number`, read from a TOML file, was written as an integer (10, not 10.0)."""
    return isinstance(number, int)
