"""What the records of a source must hold besides their text: keys and the types of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "list": (list,),
    "table": (dict,),
}


class Unfit(NamedTuple):
    """Stands where the text of a record would, and says what is wrong with the record."""

    problem: str


def record_problem(record: Any, required: Mapping[str, str], text_key: str) -> str | None:
    """What is wrong with a record that should be an object with text under `text_key` and the `required` keys, whose
    values are of the named type (of `names.RECORD_TYPES`); None when nothing is."""
    if not isinstance(record, dict):
        return f"is {_kind(record)}, not a table"
    for key, wanted in {text_key: "text", **required}.items():
        value: Any = record
        for name in [key] if key in record else key.split("."):  # "a.b": the key b inside a
            if not isinstance(value, dict) or name not in value:
                return f'no key "{key}"'
            value = value[name]
        fits = isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
        if not fits:
            return f'"{key}" is {_kind(value)}, not {wanted}'
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ("boolean", "text", "integer", "number", "list", "table")
    return next((kind for kind in kinds if isinstance(value, _TYPES[kind])), f"a {type(value).__name__}")
