"""Plans by the line: a request as a JSON object, its answer as another (`meshwright plan --jobs`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelWarning, UserError
from meshwright.layout import Layout
from meshwright.limits import shorten, shorten_repr
from meshwright.names import unknown
from meshwright.planner.answers import MOST_TOP, document, nothing_fits
from meshwright.planner.estimate import priced, problem_of, recipe_layout
from meshwright.planner.models import is_recipe, layout_of_recipe, recipe_of, values_from_recipe
from meshwright.planner.search import search
from meshwright.untrusted import parse_json

FIELDS = {
    "model": (str, dict), "cluster": (str, dict), "sequence": (int,), "batch": (int,), "layout": (str,),
    "engine": (str,), "compile": (bool,), "optimizer": (str,), "top": (int,), "precision": (str,),
    "documents": (int, float),
}  # fmt: skip
_OWN = "the recipe's own layout"
"""Beside what a request says."""

NEEDED = ("model", "cluster", "sequence", "batch")


def answer(line: str) -> dict[str, Any]:
    """What `plan --json` says of one request, or {"error": ...} in a line: no request ends those after it.

    "warnings": the texts of the request's `ModelWarning`s, where there are any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        try:
            found = _answer(_request(line))
        except UserError as error:
            found = {"error": _one_line(str(error))}
        except Exception as error:
            found = {"error": _one_line(f"a fault of the planner: {type(error).__name__}: {error}")}
    for other in caught:
        if not issubclass(other.category, ModelWarning):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    lines = [_one_line(str(each.message)) for each in caught if issubclass(each.category, ModelWarning)]
    return found | ({"warnings": list(dict.fromkeys(lines))} if lines else {})


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]


def _request(line: str) -> Mapping[str, Any]:
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
    if is_recipe(found.get("model")):
        recipe = recipe_of(found["model"])
        found |= values_from_recipe(
            recipe, {key: found.get(key) for key in ("sequence", "batch", "optimizer", "compile")}
        )
        own = layout_of_recipe(recipe)
        if own is not None and "layout" not in found:
            found = {"precision": own.precision, **found, _OWN: own}
    for key in NEEDED:
        if key not in found:
            raise UserError(f"{key} is missing; a request has {', '.join(NEEDED)}")
    return found


def _kind(key: str) -> str:
    words = {str: "text", dict: "an object", int: "a whole number", bool: "true or false", float: "a number"}
    return " or ".join(dict.fromkeys(words[each] for each in FIELDS[key]))


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    layout = Layout.parse(request["layout"]) if "layout" in request else None
    problem = problem_of(
        request["model"], request["cluster"], sequence=request["sequence"], batch=request["batch"],
        engine=request.get("engine", "meshwright"), compile=request.get("compile", False),
        optimizer=request.get("optimizer", "adamw"),
        precision=(layout.precision if layout else None) or request.get("precision"),
        documents=request.get("documents", 1.0),
    )  # fmt: skip
    if layout is not None:
        return document(problem, [priced(problem, layout)])
    top = request.get("top", 5)
    if not 1 <= top <= MOST_TOP:
        raise UserError(f"top: takes a whole number from 1 to {MOST_TOP}, not {shorten_repr(top)}")
    found = search(problem, top)
    if not found.best:
        raise UserError(nothing_fits(found))
    found_document = document(problem, found.best, found)
    if _OWN in request:
        cost = recipe_layout(problem, request[_OWN])
        found_document["recipe_layout"] = {"error": cost} if isinstance(cost, str) else cost.document()
    return found_document
