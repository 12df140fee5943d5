"""Plans in batches: one request a line as a JSON object, one answer a line (`meshwright plan --jobs`)."""

from __future__ import annotations

import warnings
from typing import Any

from meshwright.errors import ModelWarning, UserError
from meshwright.names import unknown
from meshwright.planner.api import PlanOptions, plan
from meshwright.untrusted import parse_json

REQUIRED = ("model", "cluster", "sequence", "batch")
FIELDS = (*REQUIRED, "layout", *PlanOptions.__annotations__)
"""Keys of a request: arguments of `plan`, which checks their values."""


def answer(line: str) -> dict[str, Any]:
    """Return the JSON answer to one planning request: the document of `meshwright plan --json`, or {"error": text}.
    line: JSON object with the arguments of `plan`.

    The key "warnings" lists the texts of `ModelWarning`s that the request caused, if any.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        try:
            found = _answer(line)
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


def _answer(line: str) -> dict[str, Any]:
    """Return the JSON document of the plan that a request, one line of JSON, asks for. Raises `UserError` for an
    invalid request, and if no layout fits."""
    try:
        request = parse_json(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise UserError(f"a request is a JSON object, not {type(request).__name__}")
    request = {key: value for key, value in request.items() if value is not None}
    for key in request:
        if key not in FIELDS:
            raise UserError(unknown("field", key, FIELDS))
    for key in ("model", "cluster"):  # a recipe has the others
        if key not in request:
            raise UserError(f"{key} is missing; a request needs {', '.join(REQUIRED)}")
    found = plan(**request)
    found.check_fits()
    return found.to_json_dict()
