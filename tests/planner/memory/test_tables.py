"""The tables of tensors: conditions and sizes by hand, and names that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.planner.cost.micro_batch import MicroBatch, layer_kind
from meshwright.planner.memory.dimensions import list_dimensions, list_properties
from meshwright.planner.memory.tables import compute_size, holds, load_table, make_tensor, parse_items
from meshwright.spec.presets import preset

# Those of a pass, of the loss and of a stage, beside those of a layer.
MORE_DIMENSIONS = {
    "split", "computed", "most_copies", "bounds", "ring_bounds", "head_rows", "longest", "sliced", "head_width",
    "kept_weight", "weight_bytes", "summed_bytes", "chunk_bytes", "table",
}  # fmt: skip
MORE_PROPERTIES = {
    "split", "mixtures", "several_chunks", "keeps_gradient", "again", "compiled_loss", "keeps_hidden", "keeps_weight",
    "computes_weight",
}  # fmt: skip


@pytest.mark.parametrize(
    ("conditions", "true"),
    [((), True), (("a",), True), (("!a",), False), (("a & c",), False), (("a & !c",), True), (("c | b",), True),
     (("c & a | !c & b",), True), (("a", "c"), False), (("a", "b"), True)],
)  # fmt: skip
def test_condition_holds_as_written(conditions: tuple[str, ...], true: bool) -> None:
    assert holds(conditions, {"a", "b"}) is true


def test_size_is_sum_of_products() -> None:
    dimensions: dict[str, Any] = {"tokens": 10, "hidden": 4, "width": np.array([3, 5])}
    assert compute_size("tokens", dimensions) == 10
    assert compute_size("2 tokens hidden + -1 tokens + 7", dimensions) == 2 * 10 * 4 - 10 + 7
    assert compute_size("1.5 hidden width + hidden", dimensions).tolist() == [22.0, 34.0]
    assert make_tensor("t", "wide 2 tokens width", {"tokens": 10, "width": 3}) == ("t", (2, 10, 3), "wide")
    with pytest.raises(KeyError, match="height"):
        compute_size("tokens height", dimensions)


def test_group_joins_conditions_of_its_items() -> None:
    groups = {"outer": ["@inner ? a", "last"], "inner": ["first = 2 x ? b", ""]}
    found = [tuple(item) for item in parse_items(["@outer ? c", "own"], groups)]
    assert found == [("first", "2 x", ("c", "a", "b")), ("last", "", ("c",)), ("own", "", ())]


def every_layer() -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
    """Yield the dimensions and properties of layers of many families, layouts and devices."""
    families = ("llama-tiny", "gpt2-tiny", "bert-tiny", "qwen3-tiny", "mistral-tiny", "mixtral-tiny", "dots1-tiny",
                "qwen2-moe-tiny", "gemma2-tiny", "llama4-tiny")  # fmt: skip
    layouts = ("dp1", "tp2 ac:full", "cp2 ac:selective", "cp2:ulysses", "dp2 ep2")
    for name, layout, device, packed in product(families, layouts, ("cpu", "cuda"), (False, True)):
        config = preset(name)
        if config.encoder and layout != "dp1":
            continue
        batch = MicroBatch.of(config, Layout.parse(layout), 2, 256, device=device, packed=packed)
        for layer in range(config.layers):
            yield list_dimensions(batch, layer_kind(config, layer)), list_properties(batch, layer_kind(config, layer))


def test_rows_name_dimensions_and_properties_that_exist() -> None:
    """A wrong name in a condition would only leave a tensor out."""
    dimensions, properties = set(MORE_DIMENSIONS), set(MORE_PROPERTIES)
    for sizes, true in every_layer():
        dimensions |= set(sizes)
        properties |= true
    properties |= {"adapter", "labelled", "classes_head"}
    table = load_table("tensors.toml")
    types, words = {"x", "wide", "index", "int32", "bool"}, re.compile(r"[a-z_]\w*")
    for items in table["saved"].values():
        for item in parse_items(items, {}):
            assert item.value.split()[0] in types, item
            assert set(words.findall(item.value.partition(" ")[2])) <= dimensions, item
            assert {word for each in item.conditions for word in words.findall(each)} <= properties, item
    rows = [row for name, section in table.items() if name not in ("saved", "groups") for row in section]
    assert len(rows) > 15
    for row in rows:
        assert set(row) <= {"name", "if", "tensors", "freed", "held"}
        conditions = [row.get("if", "")]
        for key in ("tensors", "freed", "held"):
            for item in parse_items(row.get(key, ()), table["groups"]):
                conditions += item.conditions
                assert set(words.findall(item.value)) <= dimensions, item
                assert bool(item.value) == (key == "tensors"), item
        assert {word for each in conditions for word in words.findall(each)} <= properties, row
