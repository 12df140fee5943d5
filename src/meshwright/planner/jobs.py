"""Plans in batches: one request a line as a JSON object, one answer a line (`meshwright plan --jobs`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelWarning, UserError
from meshwright.limits import shorten
from meshwright.names import unknown
from meshwright.planner.api import plan
from meshwright.planner.models import is_recipe
from meshwright.planner.show.answers import no_fit_error
from meshwright.untrusted import parse_json

FIELDS = {
    "model": (str, dict), "cluster": (str, dict), "sequence": (int,), "batch": (int,), "layout": (str,),
    "engine": (str,), "compile": (bool,), "optimizer": (str,), "top": (int,), "precision": (str,),
    "documents": (int, float), "reserve": (str, int, float), "adapter": (dict,),
}  # fmt: skip
NEEDED = ("model", "cluster", "sequence", "batch")


def answer(line: str) -> dict[str, Any]:
    """Return the JSON answer to one planning request: the document of `meshwright plan --json`, or {"error": text}.
    line: JSON object with the arguments of `plan`.

    The key "warnings" lists the texts of `ModelWarning`s that the request caused, if any.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        try:
            found = _answer(_request(line))
        except UserError as error:
            found = {"error": _one_line(str(error))}
        except Exception as error:
            found = {"error": _one_line(f"internal error of the planner: {type(error).__name__}: {error}")}
    for other in caught:
        if not issubclass(other.category, ModelWarning):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    lines = [_one_line(str(each.message)) for each in caught if issubclass(each.category, ModelWarning)]
    return found | ({"warnings": list(dict.fromkeys(lines))} if lines else {})


def _one_line(text: str) -> str:
    """Return `text` on one line, cut to 1000 characters."""
    return " ".join(text.split())[:1000]


def _request(line: str) -> Mapping[str, Any]:
    """Parse and check a planning request, one line of JSON. Raises `UserError` for an unknown or missing field, or one
    of the wrong type."""
    try:
        found = parse_json(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"a request is a JSON object, not {type(found).__name__}")
    found = {key: value for key, value in found.items() if value is not None}
    for key, value in found.items():
        if key not in FIELDS:
            raise UserError(unknown("field", key, FIELDS))
        if not isinstance(value, FIELDS[key]) or (isinstance(value, bool) and bool not in FIELDS[key]):
            raise UserError(f"{key}: takes {_kind(key)}, not {shorten(json.dumps(value))}")
    needed = NEEDED[:2] if is_recipe(found.get("model")) else NEEDED  # a recipe holds the others
    for key in needed:
        if key not in found:
            raise UserError(f"{key} is missing; a request needs {', '.join(NEEDED)}")
    return found


def _kind(key: str) -> str:
    """Return a description of the JSON types that the field `key` of a planning request may have, such as "text or an
    object"."""
    words = {str: "text", dict: "an object", int: "a whole number", bool: "true or false", float: "a number"}
    return " or ".join(words[each] for each in FIELDS[key] if each is not int or float not in FIELDS[key])


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document of the plan that a request (arguments of `plan`) asks for. Raises `UserError` if no
    layout fits."""
    found = plan(**request)
    if found.search is not None and not found.estimates:
        raise UserError(no_fit_error(found.search))
    return found.to_json_dict()
