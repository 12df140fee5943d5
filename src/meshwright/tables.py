"""Typed tables of TOML files that users write: validated by pydantic, each mistake reported in one line of our own
wording."""

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
from meshwright.limits import make_limit_error, shorten, shorten_repr
from meshwright.names import nearest, unknown
from meshwright.toml import format_toml_value, parse_toml


class Table(BaseModel):
    """Base class (pydantic) of typed TOML tables. Values are not converted (a number in quotes is an error); unknown
    keys, nan and inf are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def at_most(name: str) -> AfterValidator:
    """Return a pydantic validator of numbers that rejects numbers above the limit called `name` in `limits.LIMITS`."""

    def check(value: float) -> float:
        """Return `value`; raise ValueError if it is above the limit."""
        if problem := make_limit_error(name, value, ""):
            raise ValueError(problem.strip())
        return value

    return AfterValidator(check)


@dataclass(frozen=True)
class Size(GroupedMetadata):
    """Pydantic constraint on an integer: at least `ge`, and at most the limit called `name` ("layers") in
    `limits.LIMITS`."""

    name: str
    ge: int = 1

    def __iter__(self) -> Iterator[object]:
        """Yield the two pydantic constraints, minimum and maximum (protocol of `GroupedMetadata`)."""
        yield Ge(self.ge)
        yield at_most(self.name)


Count = Annotated[int, Size("count")]
CountOrZero = Annotated[int, Size("count", 0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


def named(kind: str, known: Sequence[str]) -> AfterValidator:
    """Return a pydantic validator of strings that accepts only the names in `known`. kind: noun for what is named, such
    as "optimizer", for the error message."""

    def check(word: str) -> str:
        """Return `word`; raise ValueError if it is not a known name."""
        if word not in known:
            raise ValueError(unknown(kind, word, known))
        return word

    return AfterValidator(check)


def match_pattern(pattern: str, meaning: str) -> AfterValidator:
    """Return a pydantic validator that rejects strings that the regular expression `pattern` does not match completely.
    meaning: description of valid strings for the error."""

    def check(text: str) -> str:
        """Return `text`; raise ValueError if it does not match the pattern completely."""
        if not re.fullmatch(pattern, text):
            raise ValueError(f"should be {meaning}, not {format_toml_value(text)}")
        return text

    return AfterValidator(check)


Root = TypeVar("Root", bound=Table)


@dataclass(frozen=True)
class Schema(Generic[Root]):
    """Schema of a TOML file format: its keys, and the error messages for mistakes.

    root: class of the root table. elsewhere: {key of another program: dotted key of this format with the same meaning},
    so that the error for an unknown key can suggest the right one.
    """

    root: type[Root]
    elsewhere: Mapping[str, str]  # other programs' name of a key -> our dotted key

    @cached_property
    def keys(self) -> dict[str, FieldInfo]:
        """The pydantic field of each dotted key, such as `train.steps`, including keys that hold tables, in the order
        of definition."""
        return _list_keys(self.root, "")

    def accepts(self, key: str, kind: type) -> bool:
        """Return True if values of the Python type `kind` are valid for the dotted key, by its annotation."""
        return kind in _list_plain_types(self.keys[key].annotation)

    def check(self, tables: Mapping[str, Any], where: Callable[[str], str]) -> Root:
        """Validate `tables`, the parsed TOML file, and return an instance of `root` with its values. Raises `UserError`
        for the first mistake. where: function that maps a dotted key to its location for the message, such as file and
        line."""
        try:
            return self.root.model_validate(dict(tables))
        except ValidationError as error:
            problems = error.errors(include_url=False)
        # A mistyped key is also reported as missing: prefer the message about the typo.
        problem = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        key = self._find_key(problem)
        mistyped = {self._find_key(problem) for problem in problems if problem["type"] == "extra_forbidden"}
        meant = {self._suggest_key(name) for name in mistyped}  # missing only because of the typo
        others = len({self._find_key(problem) for problem in problems} - {key} - meant)
        more = f" (and {others} more key{'s' if others > 1 else ''} to fix)" if others else ""
        raise UserError(": ".join(part for part in (where(key), *self._describe_problem(key, problem)) if part) + more)

    def override(self, tables: dict[str, Any], text: str) -> str:
        """Apply the override `text`, such as `train.steps=100`, to the parsed TOML `tables`, in place; return the
        dotted key that was set. A value that is a bare word is taken as a string. Raises `UserError` for text without
        "=", or a key inside a value that is no table."""
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise UserError(f'override "{text}": an override is written table.key=value, as in train.steps=100')
        *path, last = key.split(".")
        for depth, name in enumerate(path):
            tables = tables.setdefault(name, {})
            if not isinstance(tables, dict):
                raise UserError(f'override "{text}": {".".join(path[: depth + 1])} is a value, not a table')
        tables[last] = self.parse_override_value(key, value)
        return key

    def parse_override_value(self, key: str, text: str) -> Any:
        """Parse `text`, the value of an override of `key`, as TOML. Two cases return `text` itself: it is not valid
        TOML (a bare word), or the key takes strings and the parsed value is neither a string nor a list."""
        try:
            value = parse_toml(f"value = {text}", key)["value"]
        except UserError:
            return text
        takes_text = key in self.keys and str in _list_plain_types(self.keys[key].annotation)
        return text if takes_text and not isinstance(value, (str, list)) else value  # run.name=5 names a run "5"

    def _find_key(self, problem: Any) -> str:
        """Return the dotted key of the TOML file that a pydantic error concerns, without list indices and union
        members. problem: one entry of `ValidationError.errors()`."""
        key = ""
        for part in problem["loc"]:
            if key in self.keys and not is_table(self.keys[key].annotation):
                break
            key = f"{key}.{part}" if key else str(part)
        return key

    def _describe_problem(self, key: str, problem: Any) -> list[str]:
        """Return the parts of the message for a pydantic error, to be joined by colons: [key, reason]. For an error
        inside a list of tables, return [key with the index of the table in the list, key inside the table, reason].
        key: dotted key. problem: one entry of `ValidationError.errors()`."""
        rows = _find_list_item_table(self.keys[key].annotation) if key in self.keys else None
        inside = [part for part in problem["loc"][key.count(".") + 1 :] if isinstance(part, int)] if rows else []
        if rows is None or not inside:
            return [key, self._explain_problem(key, problem)]
        place = problem["loc"].index(inside[0])
        inner, there = Schema(rows, {}), {**problem, "loc": problem["loc"][place + 1 :]}
        name = inner._find_key(there)
        reason = (
            inner._explain_problem(name, there) if name else f"should be a table, not {_format_value(problem['input'])}"
        )
        return [f"{key} number {inside[0] + 1}", name, reason]

    def _explain_problem(self, key: str, problem: Any) -> str:
        """Return the reason why pydantic rejected the value of the dotted key `key`, as text. problem: one entry of
        `ValidationError.errors()`."""
        if problem["type"] == "extra_forbidden":
            return self._describe_unknown_key(key, is_table=isinstance(problem["input"], Mapping))
        if problem["type"] == "value_error":
            return str(problem["ctx"]["error"])
        field = self.keys[key]
        if problem["type"] == "missing":
            if is_table(field.annotation):
                needed = [name for name, inner in field.annotation.model_fields.items() if inner.is_required()]
                return "this table is missing" + (f"; it needs {', '.join(needed)}" if needed else "")
            return f"this key is missing; it should be {_describe_type(field.annotation, field.metadata)}"
        return f"should be {_describe_type(field.annotation, field.metadata)}, not {_format_value(problem['input'])}"

    def _describe_unknown_key(self, key: str, is_table: bool) -> str:
        """Return the error message for an unknown dotted key, with the key that was probably meant. is_table: True if
        the value of the unknown key is a table."""
        what = "table" if is_table else "key"
        if suggestion := self._suggest_key(key):
            return f"unknown {what}; did you mean {suggestion}?"
        return f"unknown {what} (known here: {', '.join(self._list_names(key.rpartition('.')[0]))})"

    def _list_names(self, table: str) -> list[str]:
        """List the names of the keys in a table. table: dotted key of the table; "" for the root table."""
        return [known.rpartition(".")[2] for known in self.keys if known.rpartition(".")[0] == table]

    def _suggest_key(self, key: str) -> str | None:
        """Return the dotted key that was probably meant by the unknown dotted key `key`; None if no key is similar."""
        table, _, name = key.rpartition(".")
        anywhere = (known for known in self.keys if known.rpartition(".")[2] == name)
        if suggestion := self.elsewhere.get(name) or next(anywhere, None):  # its name in another program, or place
            return suggestion
        similar = nearest(name, self._list_names(table))
        return f"{table}.{similar}" if table and similar else similar


def is_table(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Return True if a field's type annotation `kind` is a pydantic class: in a TOML file the field is then a table."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _find_list_item_table(kind: Any) -> type[Any] | None:
    """Return the table class T (a pydantic class) if the type annotation `kind` is `list[T]`, also within Annotated or
    a union; None otherwise."""
    if get_origin(kind) is Annotated:
        return _find_list_item_table(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return next(filter(None, map(_find_list_item_table, get_args(kind))), None)
    if get_origin(kind) is list and is_table(get_args(kind)[0]):
        return get_args(kind)[0]  # type: ignore[no-any-return]
    return None


def _list_keys(table: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    """Return the pydantic fields of all keys of a table class and its inner tables, by dotted key. prefix: start of
    each key, such as `train.`."""
    keys: dict[str, FieldInfo] = {}
    for name, field in table.model_fields.items():
        key = prefix + (field.alias or name)
        keys[key] = field
        if is_table(field.annotation):
            keys |= _list_keys(field.annotation, f"{key}.")
    return keys


def _list_plain_types(kind: Any) -> list[Any]:
    """List the types that the annotation `kind` allows, without Annotated and type arguments: [str, NoneType] for `Name
    | None`, where Name is an annotated string."""
    if get_origin(kind) is Annotated:
        return _list_plain_types(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [plain for member in get_args(kind) for plain in _list_plain_types(member)]
    return [get_origin(kind) or kind]


def _describe_type(kind: Any, limits: Sequence[Any]) -> str:
    """Describe the valid values of a type annotation `kind` in words: "a whole number, at least 1". limits: pydantic
    constraints that apply to the annotation."""
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _describe_type(kind, [*limits, *(limit for item in more for limit in getattr(item, "metadata", [item]))])
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_describe_type(member, limits) for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is list:
        length = next((f" of {limit.max_length}" for limit in limits if hasattr(limit, "max_length")), "")
        return f"a list{length}, each {_describe_type(get_args(kind)[0], [])}"
    text = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}.get(kind, "a table")
    bounds = [
        f"{word} {getattr(limit, name)}"
        for limit in limits
        for name, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
        if hasattr(limit, name)
    ]
    return f"{text}, {' and '.join(bounds)}" if bounds else text


def _format_value(value: Any) -> str:
    """Format a wrong value for an error message as it is written in TOML; "a table" for a table."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (str, float, list, bool)):
        return shorten(format_toml_value(value), 200)
    return shorten_repr(value)
