"""Results as JSON documents: the same for `--json` on the command line and for `to_json_dict()` in Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1


def to_json_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `values`, a command's result, to a dictionary of JSON types, with `"schema": 1` first.

    Arrays and scalars of numpy and torch become lists and numbers, paths become text, nan and inf become None.
    """
    return {"schema": SCHEMA_VERSION, **_to_json_types(values)}


def _to_json_types(value: Any) -> Any:
    """Convert a value and everything nested in it to JSON types: arrays become lists, paths text, nan and inf None."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_types(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _to_json_types(value.tolist()) if hasattr(value, "tolist") else str(value)
