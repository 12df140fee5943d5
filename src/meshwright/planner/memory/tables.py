"""Reader of the tables of tensors in this package's TOML files.

A condition consists of properties of a layer: "a & !b | c" (not before and before or). A size is a sum of products of
numbers and dimensions: "2 tokens width + tokens hidden". In a list, "NAME = VALUE ? CONDITION" is an item that exists
where the condition holds, and "@NAME" stands for the items of a group.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.cost.operators import SavedTensor


class Item(NamedTuple):
    """An item of a list in a table. name: its name; value: text after "=", "" without; conditions: conditions that must
    all hold."""

    name: str
    value: str
    conditions: tuple[str, ...]


@cache
def load_table(name: str) -> dict[str, Any]:
    """Return the content of the TOML file `name` of this package."""
    return tomllib.loads(resources.files("meshwright.planner.memory").joinpath(name).read_text(encoding="utf-8"))


def parse_items(texts: Iterable[str], groups: Mapping[str, list[str]], outer: tuple[str, ...] = ()) -> Iterator[Item]:
    """Yield the items that `texts` describe, those of `groups` included. outer: conditions that hold for all of
    them."""
    for text in texts:
        item, _, condition = (part.strip() for part in text.partition("?"))
        conditions = (*outer, condition) if condition else outer
        if item.startswith("@"):
            yield from parse_items(groups[item[1:]], groups, conditions)
        elif item:
            name, _, value = (part.strip() for part in item.partition(" = "))
            yield Item(name, value, conditions)


@cache
def _parse_condition(condition: str) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """Return the alternatives of a condition, of which one must hold; each is a list of (property, required value)."""
    return tuple(
        tuple((word.strip().lstrip("!"), "!" not in word) for word in every.split("&"))
        for every in condition.split("|")
    )


def holds(conditions: Iterable[str], true: Collection[str]) -> bool:
    """Return True if all conditions hold. true: the properties that are true."""
    return all(
        any(all((name in true) == wanted for name, wanted in every) for every in _parse_condition(condition))
        for condition in conditions
    )


def select_items(items: Iterable[Item], true: Collection[str]) -> tuple[Item, ...]:
    """Return the items whose conditions hold. true: the properties that are true."""
    return tuple(item for item in items if holds(item.conditions, true))


@cache
def _parse_size(size: str) -> tuple[tuple[str | float, ...], ...]:
    """Return the terms of a size, each a list of factors: numbers and names of dimensions."""
    number = re.compile(r"-?\d+(\.\d+)?")
    return tuple(
        tuple(float(each) if "." in each else int(each) if number.fullmatch(each) else each for each in term.split())
        for term in size.split(" + ")
    )


def compute_size(size: str, dimensions: Mapping[str, Number]) -> Number:
    """Return the value of a size, such as "2 tokens width + tokens hidden"."""
    return sum(
        math.prod(dimensions[each] if isinstance(each, str) else each for each in term) for term in _parse_size(size)
    )


def make_tensor(name: str, shape: str, dimensions: Mapping[str, Number]) -> SavedTensor:
    """Return a tensor whose shape is written as in "x rows tokens hidden": element type, then a dimension for each
    axis."""
    kind, *axes = shape.split()
    return SavedTensor(name, tuple(int(axis) if axis.isdigit() else dimensions[axis] for axis in axes), kind)
