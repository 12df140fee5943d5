"""Reader of the planner's tables of operators and tensors (TOML files).

A condition consists of properties of a layer: "a & !b | c" (not before and before or). A size is a sum of products of
numbers and dimensions: "2 tokens width + tokens hidden"; "/ tp" divides. A text "VALUE ? CONDITION" exists where the
condition holds, a table where that of its key `if` does; "@NAME" in a list stands for the items of a group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Set
from functools import cache, lru_cache
from typing import Any, NamedTuple

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.cost.operators import Row, SavedTensor, in_eight_bits
from meshwright.toml import read_packaged_toml

LINEAR = "linear_rows", "outputs", "inputs", "products"
"""Names of the sizes of a linear layer and of the number of equal ones, in the rows of its kernels."""
KERNEL_SIZES = {"flops": "0.0", "bytes": "0", "elements": "0", "count": "1"}
"""Sizes in a row of [kernels], with the values of those that it leaves out."""


class Item(NamedTuple):
    """One entry "NAME = VALUE" of a list in a planner table. name: text before "="; value: text after "=", "" without
    "="."""

    name: str
    value: str


def select(value: Any, true: Set[str], groups: Mapping[str, Any]) -> Any:
    """Evaluate the conditions in a value of a planner table: remove what does not apply, and the conditions. Return the
    remaining value, or None if nothing of it applies.

    value: text "VALUE ? CONDITION", a list of texts, or a table with a condition under the key `if`. true: names of the
    properties that hold, such as "gated"; conditions test them. groups: {NAME: list} that replaces the item "@NAME" of
    a list."""
    if isinstance(value, str):
        text, _, condition = value.partition("?")
        return text.strip() if holds(condition, true) else None
    if isinstance(value, list):
        chosen = [one for each in value if (one := select(each, true, groups)) not in (None, "")]
        named = (select(groups[one[1:]], true, groups) if str(one).startswith("@") else [one] for one in chosen)
        return [one for each in named for one in each]
    if isinstance(value, Mapping):
        if not holds(value.get("if", ""), true):
            return None
        row = {key: select(each, true, groups) for key, each in value.items() if key != "if"}
        return {key: each for key, each in row.items() if each is not None}
    return value


def select_items(texts: Iterable[str], true: Set[str], groups: Mapping[str, Any]) -> tuple[Item, ...]:
    """Return the parsed entries "NAME = VALUE ? CONDITION" whose condition holds. true: names of the properties that
    hold, such as "gated". groups: {NAME: list} that replaces the entry "@NAME"."""
    return tuple(map(parse_item, select(list(texts), true, groups)))


def parse_item(text: str) -> Item:
    """Split the text "NAME = VALUE" into its name and value."""
    name, _, value = (part.strip() for part in text.partition(" = "))
    return Item(name, value)


@cache
def _parse_condition(condition: str) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
    """Parse a condition such as "a & !b | c" into its alternatives (separated by "|"). Return for each (properties that
    must hold, properties that must not hold). The condition holds if one alternative does."""
    found = []
    for every in condition.split("|"):
        words = [word.strip() for word in every.split("&")]
        needed = frozenset(word for word in words if word and word[0] != "!")
        found.append((needed, frozenset(word[1:] for word in words if word[:1] == "!")))
    return tuple(found)


def holds(condition: str, true: Set[str]) -> bool:
    """Return True if a condition such as "gated & !ring" holds; "" always holds. true: names of the properties that
    hold."""
    if not condition:
        return True
    return any(needed <= true and refused.isdisjoint(true) for needed, refused in _parse_condition(condition))


@cache
def _parse_size(size: str) -> list[tuple[list[str | float], list[str]]]:
    """Parse a formula of a size, such as "2 tokens width + tokens / tp", into the terms of its sum. A term is a pair:
    its factors, numbers and names of dimensions, and the names of the dimensions that divide it."""
    found = []
    for term in size.replace("/ ", "/").split(" + "):
        words = term.split()
        factors = [parse_factor(word) for word in words if word[0] != "/"]
        found.append((factors, [word[1:] for word in words if word[0] == "/"]))
    return found


def parse_factor(word: str) -> str | float:
    """Return a factor of a formula: a number, or the name of a dimension unchanged."""
    if not re.fullmatch(r"-?\d+(\.\d+)?", word):
        return word
    return float(word) if "." in word else int(word)


def compute_size(size: str, dimensions: Mapping[str, Number]) -> Number:
    """Return the value of a formula such as "2 tokens width + tokens hidden", a sum of products. "/ tp" divides a
    product by a dimension, and rounds down. dimensions: {name: value}."""
    total: Number = 0
    for factors, divisors in _parse_size(size):
        product = math.prod([dimensions[each] if isinstance(each, str) else each for each in factors])
        for axis in divisors:
            product = product // dimensions[axis]
        total = total + product
    return total


def parse_tensor(item: Item) -> SavedTensor:
    """Return the tensor of a table entry whose value is such as "x rows tokens 2*width": element type, then one size
    for each dimension of the shape. The shape of the result has these sizes as text; `SavedTensor.compute` turns them
    into numbers."""
    kind, *axes = item.value.split()
    return SavedTensor(item.name, tuple(axis.replace("*", " ") for axis in axes), kind)


# --- rows of `operators.toml`

Let = tuple[tuple[str, str], ...]
"""(dimension, size that takes its place)."""


@lru_cache(maxsize=1024)
def list_rows(section: str, true: frozenset[str], prefix: str, let: Let) -> list[Row]:
    """Return the rows of a section of `operators.toml`. A section is a list of rows; each row describes one operator,
    or names another section (`use`), whose rows then take its place.

    true: names of the properties that hold, such as "gated"; rows whose condition does not hold are left out. prefix:
    text put before operator names that begin with ".", such as "attention" before ".qkv". let: (dimension, replacement)
    pairs; a dimension is the name of a size, such as "width"."""
    found: list[Row] = []
    for number, words in enumerate(_list_words()[section]):
        row = _read_row(section, number, true & words, prefix, let)
        if row is None:
            continue
        used = "use" in row
        found += list_rows(row["use"], true.union(row.get("flags", ())), row["name"], row["let"]) if used else [row]
    return found


@cache
def _read_row(section: str, number: int, true: frozenset[str], prefix: str, let: Let) -> Row | None:
    """Return row `number` of a section of `operators.toml`, or None if its condition does not hold. Names have their
    prefix, sizes their replaced dimensions, and the row's tensors, collectives and kernels are parsed.

    true: names of the properties that hold, of those that the row tests. prefix: text put before names that begin with
    ".". let: (dimension, replacement) pairs; a dimension is the name of a size, such as "width"."""
    table = read_packaged_toml("planner/cost/operators.toml")
    row = select(table[section][number], true, table["groups"])
    if row is None:
        return None
    own, within = dict(let) | row.get("let", {}), true.union(row.get("flags", ()))

    def name(text: str) -> str:
        """Return a name in full."""
        return prefix + text if text.startswith(".") or not text else text

    def tensor(text: str) -> SavedTensor:
        """Return a tensor whose shape is not computed yet."""
        found = parse_tensor(parse_item(text))
        return SavedTensor(name(found.name), tuple(map(size, found.shape)), found.kind)

    def size(text: str) -> str:
        """Return a size with replaced dimensions."""
        return re.sub(r"\w+", lambda word: own.get(word[0], word[0]), text) if own else text

    row |= {"name": name(row.get("name", "")), "let": tuple(own.items())}
    row |= {key: tuple(map(tensor, row.get(key, ()))) for key in ("saved", "kept")}
    called = name(row.get("called", [row["name"]])[0])
    kernels = [row | {"name": "{}"}] if "work" in row else []
    if "kernels" in row:
        kernels += select(table["kernels"][row["kernels"]], within, {})
    if "linear" in row:
        own |= zip(LINEAR, [*(size(each.replace("*", " ")) for each in row["linear"].split()), "1"], strict=False)
        within |= {"casts"} if in_eight_bits(called) else set()
        kernels = select(table["kernels"]["linear"], within, {}) + kernels
        row["parameters"] = select(row.get("parameters", ["@linear_parameters"]), within, table["groups"])
    row["parameters"] = tuple(map(size, row.get("parameters", ())))
    row["kernels"] = [
        each
        | {key: size(each.get(key, default)) for key, default in KERNEL_SIZES.items()}
        | {"name": name(each.get("name", "{}").format(called)), "shape": list(map(size, each["shape"].split()))}
        for each in ({"shape": ""} | kernel for kernel in kernels)
    ]
    row["calls"] = [
        each | {"sites": [(at.format(name(site)), size(sent)) for at, sent in map(parse_item, each["sites"])]}
        for kind, _, site in (text.partition(" ") for text in row.get("calls", ()))
        for each in select(table["calls"][kind], within, {})
    ]  # fmt: skip
    return dict(row)


@cache
def _list_words() -> dict[str, list[frozenset[str]]]:
    """Return {section of `operators.toml`: for each of its rows, all words in it and in the groups, collectives and
    kernels to which it refers}. They include every property (such as "gated") that a condition of the row tests."""
    table = read_packaged_toml("planner/cost/operators.toml")
    named = [(name, _find_words(each)) for kind in ("groups", "calls", "kernels") for name, each in table[kind].items()]
    return {
        section: [words.union(*(each for name, each in named if name in words)) for words in map(_find_words, rows)]
        for section, rows in table.items()
        if isinstance(rows, list)
    }


def _find_words(value: object) -> frozenset[str]:
    """Return all words in a value of a planner table."""
    return frozenset(re.findall(r"\w+", str(value)))
