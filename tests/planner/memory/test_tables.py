"""The tables of tensors: conditions and sizes by hand, and names that exist."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.memory import published, saved, temporaries
from meshwright.planner.memory.ledger import ledger
from meshwright.planner.memory.tables import compute_size, holds, load_table, make_tensor, parse_items
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.presets import preset


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


Names = dict[str, set[str]]


def record_names(monkeypatch: pytest.MonkeyPatch) -> tuple[Names, Names]:
    """Return by section of the table the names of all dimensions, and of all properties that are true at least once,
    with which the ledgers of many families, layouts, devices and options look its tensors up."""
    dimensions, properties = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    list_saved, list_temporaries = saved._listed, temporaries.Pass.snapshots

    def record_saved(section: str, sizes: dict[str, Any], true: frozenset[str]) -> Any:
        dimensions[section].update(sizes)
        properties[section].update(true)
        return list_saved(section, sizes, true)

    def record_temporaries(each: temporaries.Pass, section: str) -> Any:
        dimensions[section].update(each.dimensions)
        properties[section].update(each.properties)
        return list_temporaries(each, section)

    monkeypatch.setattr(saved, "_listed", record_saved)
    monkeypatch.setattr(temporaries.Pass, "snapshots", record_temporaries)
    families = ("llama-tiny", "gpt2-tiny", "qwen3-tiny", "mixtral-tiny", "dots1-tiny", "qwen2-moe-tiny", "gemma2-tiny",
                "llama4-tiny")  # fmt: skip
    layouts = ("dp1", "tp2 ac:full", "cp2 ac:selective", "cp2:ulysses", "dp2 ep2", "pp2:zb-h1 mb4")
    options: tuple[dict[str, Any], ...] = (
        {}, {"device": "cuda", "documents": True}, {"device": "cuda", "precision": "fp32"}, {"pairs": True},
        {"compile": True},
    )  # fmt: skip
    adapted = (
        dataclasses.replace(preset("llama-tiny"), adapter=AdapterConfig(rank=4)),
        dataclasses.replace(preset("llama-tiny"), adapter=AdapterConfig(rank=4, packed="nf4")),
        dataclasses.replace(preset("qwen2-moe-tiny"), adapter=AdapterConfig(rank=4, targets=("q_proj",))),
    )
    labelled = dataclasses.replace(preset("bert-tiny"), head="classes", labels=("a", "b"))
    for config in (*map(preset, families), *adapted, labelled, preset("bert-tiny")):
        for text, more, longest in product(layouts, options, (64, 4096)):
            sequence = min(longest, config.max_positions or longest)
            with suppress(UserError):  # not every family has every layout
                ledger(config, Layout.parse(text), batch=8, sequence=sequence, **({"precision": "bf16"} | more))
    return dimensions, properties


def test_rows_name_dimensions_and_properties_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name in a condition, in the table or in the code, would only leave a tensor out."""
    dimensions, properties = record_names(monkeypatch)
    table = load_table("tensors.toml")
    types, words = {"x", "wide", "index", "int32", "bool"}, re.compile(r"[a-z_]\w*")
    for section, items in table["saved"].items():
        for item in parse_items(items, {}):
            assert item.value.split()[0] in types, item
            assert set(words.findall(item.value.partition(" ")[2])) <= dimensions[section], (section, item)
            assert {word for each in item.conditions for word in words.findall(each)} <= properties[section], item
    sections = table.keys() - {"saved", "groups"}
    assert sum(len(table[section]) for section in sections) > 15
    for section in sections:
        for row in table[section]:
            assert set(row) <= {"name", "if", "tensors", "freed", "held"}
            conditions = [row.get("if", "")]
            for key in ("tensors", "freed", "held"):
                for item in parse_items(row.get(key, ()), table["groups"]):
                    conditions += item.conditions
                    assert set(words.findall(item.value)) <= dimensions[section], (section, item)
                    assert bool(item.value) == (key == "tensors"), item
            assert {word for each in conditions for word in words.findall(each)} <= properties[section], (section, row)


def test_published_activations_name_properties_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = set[str]()

    def record(conditions: tuple[str, ...], true: set[str]) -> bool:
        properties.update(true)
        return holds(conditions, true)

    monkeypatch.setattr(published, "holds", record)
    models = ("llama-tiny", "gpt2-tiny", "qwen3-tiny", "mixtral-tiny")
    for engine, name, text in product(ENGINES.values(), models, ("dp1", "dp1 ac:full", "dp1 ac:selective")):
        batch = MicroBatch.of(preset(name), Layout.parse(text), 2, 64, engine=engine, dtype="bfloat16", device="cuda")
        for kernel in ("flash-2", "scores"):
            found = published.published_layer(dataclasses.replace(batch, kernel=kernel), batch.config.experts > 0)
            assert min(found.values()) > 0
    table, words = load_table("published.toml"), re.compile(r"[a-z_]\w*")
    for name in table.keys() - {"groups"}:
        for item in parse_items(table[name], table["groups"]):
            assert {word for each in item.conditions for word in words.findall(each)} <= properties, item
