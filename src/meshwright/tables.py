"""Typed tables of a file that a person writes: checked by pydantic, every mistake said in one line of our own words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeGuard, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from meshwright.errors import UserError
from meshwright.limits import limit_error, shorten, shorten_repr
from meshwright.names import nearest, unknown
from meshwright.toml import parse_toml, toml_value


class Table(BaseModel):
    """Base of a typed table. Values are not converted (a number in quotes is a mistake); nan and inf are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def at_most(name: str) -> AfterValidator:
    """Marks a number that must not be beyond the limit called `name` in `limits.LIMITS`."""

    def check(value: float) -> float:
        if problem := limit_error(name, value, ""):
            raise ValueError(problem.strip())
        return value

    return AfterValidator(check)


@dataclass(frozen=True)
class Size(GroupedMetadata):
    """Marks a number from `ge` to the limit called `name` in `limits.LIMITS`."""

    name: str
    ge: int = 1

    def __iter__(self) -> Iterator[object]:
        yield Ge(self.ge)
        yield at_most(self.name)


Count = Annotated[int, Size("count")]
CountOrZero = Annotated[int, Size("count", 0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


def named(kind: str, known: Sequence[str]) -> AfterValidator:
    """Marks a string that must be one of the published names."""

    def check(word: str) -> str:
        if word not in known:
            raise ValueError(unknown(kind, word, known))
        return word

    return AfterValidator(check)


def matching(pattern: str, meaning: str) -> AfterValidator:
    """Marks a string that must match a regular expression; `meaning` is what a person calls that."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"should be {meaning}, not {toml_value(text)}")
        return text

    return AfterValidator(check)


Root = TypeVar("Root", bound=Table)


@dataclass(frozen=True)
class Schema(Generic[Root]):
    """A root table, the keys that it knows, and what to say when they are used wrongly."""

    root: type[Root]
    elsewhere: Mapping[str, str]  # what other programs call a key, and its dotted name here

    @cached_property
    def keys(self) -> dict[str, FieldInfo]:
        """Every dotted key, those of tables included, in the order of the definition."""
        return _keys(self.root, "")

    def check(self, tables: Mapping[str, Any], where: Callable[[str], str]) -> Root:
        """The typed root that `tables` say; `UserError` about the first mistake, at the place `where(key)`."""
        try:
            return self.root.model_validate(dict(tables))
        except ValidationError as error:
            problems = error.errors(include_url=False)
        # A mistyped key is also a missing one: the typo is what to tell.
        problem = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        key = self._key(problem)
        others = len({self._key(problem) for problem in problems} - {key})
        more = f" (and {others} more key{'s' if others > 1 else ''} to mend)" if others else ""
        raise UserError(": ".join(part for part in (where(key), *self._said_wrong(key, problem)) if part) + more)

    def override(self, tables: dict[str, Any], text: str) -> str:
        """Put an override such as `train.steps=100` into `tables`; returns its dotted key. A bare word is a string."""
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise UserError(f'override "{text}": an override is written table.key=value, as in train.steps=100')
        *path, last = key.split(".")
        for depth, name in enumerate(path):
            tables = tables.setdefault(name, {})
            if not isinstance(tables, dict):
                raise UserError(f'override "{text}": {".".join(path[: depth + 1])} is a value, not a table')
        tables[last] = self.read_override_value(key, value)
        return key

    def read_override_value(self, key: str, text: str) -> Any:
        """Return the value that the text of an override gives `key`: TOML, or a bare word."""
        try:
            value = parse_toml(f"value = {text}", key)["value"]
        except UserError:
            return text
        takes_text = key in self.keys and str in _plain_types(self.keys[key].annotation)
        return text if takes_text and not isinstance(value, (str, list)) else value  # run.name=5 names a run "5"

    def _key(self, problem: Any) -> str:
        """The dotted key of one of pydantic's findings, without the union member that its path may end with."""
        key = ""
        for part in problem["loc"]:
            if key in self.keys and not is_table(self.keys[key].annotation):
                break
            key = f"{key}.{part}" if key else str(part)
        return key

    def _said_wrong(self, key: str, problem: Any) -> list[str]:
        """The key and what is wrong with it; inside a list of tables the number of the table and the key there."""
        rows = _table_of_rows(self.keys[key].annotation) if key in self.keys else None
        inside = [part for part in problem["loc"][key.count(".") + 1 :] if isinstance(part, int)] if rows else []
        if rows is None or not inside:
            return [key, self._reason(key, problem)]
        place = problem["loc"].index(inside[0])
        inner, there = Schema(rows, {}), {**problem, "loc": problem["loc"][place + 1 :]}
        name = inner._key(there)
        said = inner._reason(name, there) if name else f"should be a table, not {_said(problem['input'])}"
        return [f"{key} number {inside[0] + 1}", name, said]

    def _reason(self, key: str, problem: Any) -> str:
        """What is wrong with the value of `key`, in our words."""
        if problem["type"] == "extra_forbidden":
            return self._unknown(key, is_table=isinstance(problem["input"], Mapping))
        if problem["type"] == "value_error":
            return str(problem["ctx"]["error"])
        field = self.keys[key]
        if problem["type"] == "missing":
            if is_table(field.annotation):
                needed = [name for name, inner in field.annotation.model_fields.items() if inner.is_required()]
                return "this table is missing" + (f"; it needs {', '.join(needed)}" if needed else "")
            return f"this key is missing; it should be {_describe(field.annotation, field.metadata)}"
        return f"should be {_describe(field.annotation, field.metadata)}, not {_said(problem['input'])}"

    def _unknown(self, key: str, is_table: bool) -> str:
        table, _, name = key.rpartition(".")
        inside = [known.rpartition(".")[2] for known in self.keys if known.rpartition(".")[0] == table]
        suggestion = nearest(name, inside)
        if suggestion and table:
            suggestion = f"{table}.{suggestion}"
        if not suggestion:  # the right name in the wrong table, or another program's name
            anywhere = (known for known in self.keys if known.rpartition(".")[2] == name)
            suggestion = next(anywhere, self.elsewhere.get(name))
        what = "table" if is_table else "key"
        if suggestion:
            return f"unknown {what}; did you mean {suggestion}?"
        return f"unknown {what} (known here: {', '.join(inside)})"


def is_table(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _table_of_rows(kind: Any) -> type[Any] | None:
    """The table that a list holds rows of, if that is what `kind` is."""
    if get_origin(kind) is Annotated:
        return _table_of_rows(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return next(filter(None, map(_table_of_rows, get_args(kind))), None)
    if get_origin(kind) is list and is_table(get_args(kind)[0]):
        return get_args(kind)[0]  # type: ignore[no-any-return]
    return None


def _keys(table: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, field in table.model_fields.items():
        key = prefix + (field.alias or name)
        keys[key] = field
        if is_table(field.annotation):
            keys |= _keys(field.annotation, f"{key}.")
    return keys


def _plain_types(kind: Any) -> list[Any]:
    """The types that a (possibly annotated) union accepts."""
    if get_origin(kind) is Annotated:
        return _plain_types(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [plain for member in get_args(kind) for plain in _plain_types(member)]
    return [get_origin(kind) or kind]


def _describe(kind: Any, limits: Sequence[Any]) -> str:
    """What a value of this type is, for a person: "a whole number, at least 1"."""
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _describe(kind, [*limits, *(limit for item in more for limit in getattr(item, "metadata", [item]))])
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_describe(member, limits) for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is list:
        length = next((f" of {limit.max_length}" for limit in limits if hasattr(limit, "max_length")), "")
        return f"a list{length}, each {_describe(get_args(kind)[0], [])}"
    text = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}.get(kind, "a table")
    bounds = [
        f"{word} {getattr(limit, name)}"
        for limit in limits
        for name, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
        if hasattr(limit, name)
    ]
    return f"{text}, {' and '.join(bounds)}" if bounds else text


def _said(value: Any) -> str:
    """A wrong value as the person wrote it."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (str, float, list, bool)):
        return shorten(toml_value(value), 200)
    return shorten_repr(value)
