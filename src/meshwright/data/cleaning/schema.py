"""Validation of records against a schema: required keys and the types of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "list": (list,),
    "table": (dict,),
}


def find_record_problem(record: Any, required: Mapping[str, str], text_key: str) -> str | None:
    """Check a parsed record against a schema; return the violation as a clause such as 'no key "text"', None if it
    conforms. The record must have text under the key `text_key`.

    required: {key: type of its value} of the other required keys. Types are "text", "number", "integer", "boolean",
    "list" and "table" (JSON object). The key "a.b" is key b inside the object under a.
    """
    if not isinstance(record, dict):
        return f"is {_name_type(record)}, not a table"
    for key, wanted in {text_key: "text", **required}.items():
        value: Any = record
        for name in [key] if key in record else key.split("."):  # "a.b": the key b inside a
            if not isinstance(value, dict) or name not in value:
                return f'no key "{key}"'
            value = value[name]
        fits = isinstance(value, _TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
        if not fits:
            return f'"{key}" is {_name_type(value)}, not {wanted}'
    return None


def _name_type(value: Any) -> str:
    """Return the type of a parsed JSON value as the schema names it: "null", "boolean", "text", "integer", "number",
    "list" or "table".
    """
    if value is None:
        return "null"
    kinds = ("boolean", "text", "integer", "number", "list", "table")
    return next((kind for kind in kinds if isinstance(value, _TYPES[kind])), f"a {type(value).__name__}")
