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
from meshwright.planner.cost.blocks import layer_operators
from meshwright.planner.cost.dimensions import FORMULAS, Dimensions, find_properties
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch, layer_examples
from meshwright.planner.cost.tables import (
    compute_size,
    holds,
    parse_item,
    parse_tensor,
    select,
)
from meshwright.planner.memory import published, saved, temporaries
from meshwright.planner.memory.ledger import ledger
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.presets import PRESETS, preset
from meshwright.spec.teacher import TeacherWork
from meshwright.toml import read_packaged_toml


@pytest.mark.parametrize(
    ("condition", "true"),
    [("", True), ("a", True), ("!a", False), ("a & c", False), ("a & !c", True), ("c | b", True),
     ("c & a | !c & b", True)],
)  # fmt: skip
def test_condition_holds_as_written(condition: str, true: bool) -> None:
    assert holds(condition, {"a", "b"}) is true


def test_size_is_sum_of_products() -> None:
    dimensions: dict[str, Any] = {"tokens": 10, "hidden": 4, "width": np.array([3, 5])}
    assert compute_size("tokens", dimensions) == 10
    assert compute_size("2 tokens hidden + -1 tokens + 7", dimensions) == 2 * 10 * 4 - 10 + 7
    assert compute_size("1.5 hidden width + hidden", dimensions).tolist() == [22.0, 34.0]
    parsed, sizes = parse_tensor(parse_item("t = wide 2 tokens 2*width")), {"tokens": 10, "width": 3}
    alone = {size: compute_size(size, sizes) for size in parsed.shape}
    assert parsed.compute(alone) == ("t", (2, 10, 6), "wide")
    with pytest.raises(KeyError, match="height"):
        compute_size("tokens height", dimensions)


def test_group_joins_conditions_of_its_items() -> None:
    groups = {"outer": ["@inner ? a", "last"], "inner": ["first = 2 x ? b", ""]}
    for true, found in (("abc", ["first = 2 x", "last", "own"]), ("ac", ["last", "own"]), ("ab", ["own"])):
        assert select(["@outer ? c", "own"], set(true), groups) == found


def test_table_keeps_what_exists() -> None:
    row = {"if": "a", "size": "2 x ? b", "other": "3 x ? c", "list": ["one ? !a", "two"]}
    assert select(row, {"a", "b"}, {}) == {"size": "2 x", "list": ["two"]}
    assert select(row, {"b"}, {}) is None


def list_items(texts: list[str], groups: dict[str, list[str]], outer: str = "") -> list[tuple[str, str, str]]:
    """Return (name, value, conditions) of all items of a list, those of groups included."""
    found = []
    for text in texts:
        item, _, condition = text.partition("?")
        if item.startswith("@"):
            found += list_items(groups[item[1:].strip()], groups, f"{outer} {condition}")
        else:
            found.append((*parse_item(item), f"{outer} {condition}"))
    return found


Names = dict[str, set[str]]
_TABLE = read_packaged_toml("planner/cost/dimensions.toml")
DIMENSIONS = {*_TABLE["fields"], *_TABLE["sizes"], *FORMULAS}


def record_names(monkeypatch: pytest.MonkeyPatch) -> tuple[Names, Names]:
    """Return by section of the table the names of all dimensions, and of all properties that are true at least once,
    with which the ledgers of many families, layouts, devices and options look its tensors up."""
    dimensions, properties = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    list_saved, list_temporaries = saved._listed, temporaries.Pass.snapshots

    def record_saved(section: str, sizes: Dimensions) -> Any:
        dimensions[section].update(sizes, DIMENSIONS)
        properties[section].update(sizes.true)
        return list_saved(section, sizes)

    def record_temporaries(each: temporaries.Pass, section: str) -> Any:
        dimensions[section].update(each.dimensions, DIMENSIONS)
        properties[section].update(each.dimensions.true)
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
        dataclasses.replace(
            preset("qwen2-moe-tiny"), adapter=AdapterConfig(rank=4, targets=("q_proj", "*.experts.*_proj"))
        ),
    )
    student = preset("llama-tiny")
    for taught in (TeacherWork(student, projected=1), TeacherWork(student, top_k=4)):
        ledger(student, Layout.parse("dp1 bf16"), batch=8, sequence=64, teacher=taught)
    predicts = dataclasses.replace(preset("deepseek-v3-tiny"), prediction_layers=1)
    ledger(predicts, Layout.parse("dp1 bf16"), batch=8, sequence=64)
    labelled = dataclasses.replace(preset("bert-tiny"), head="classes", labels=("a", "b"))
    for config in (*map(preset, families), *adapted, labelled, preset("bert-tiny")):
        for text, more in product(layouts, options):
            sequence = min(4096, config.max_positions or 4096)
            with suppress(UserError):  # not every family has every layout
                ledger(config, Layout.parse(text), batch=8, sequence=sequence, **({"precision": "bf16"} | more))
    return dimensions, properties


def test_rows_name_dimensions_and_properties_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name in a condition, in the table or in the code, would only leave a tensor out."""
    dimensions, properties = record_names(monkeypatch)
    every = list_property_names()
    for names in properties.values():
        names |= every
    table = read_packaged_toml("planner/memory/tensors.toml")
    types, words = {"x", "wide", "index", "int32", "bool"}, re.compile(r"[a-z_]\w*")
    for section, items in table["saved"].items():
        for _, value, condition in list_items(items, {}):
            assert value.split()[0] in types, value
            assert set(words.findall(value.partition(" ")[2])) <= dimensions[section], (section, value)
            assert set(words.findall(condition)) <= properties[section], (section, condition)
    sections = table.keys() - {"saved", "groups"}
    assert sum(len(table[section]) for section in sections) > 15
    for section in sections:
        for row in table[section]:
            assert set(row) <= {"name", "if", "tensors", "freed", "held"}
            conditions = row.get("if", "")
            for key in ("tensors", "freed", "held"):
                for _, value, condition in list_items(row.get(key, ()), table["groups"]):
                    conditions += f" {condition}"
                    assert set(words.findall(value)) <= dimensions[section], (section, value)
                    assert bool(value) == (key == "tensors"), value
            assert set(words.findall(conditions)) <= properties[section], (section, row)


def test_published_activations_name_properties_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    properties, choose = set[str](), published.select_items

    def record(texts: list[str], true: set[str], groups: dict[str, list[str]]) -> Any:
        properties.update(true)
        return choose(texts, true, groups)

    monkeypatch.setattr(published, "select_items", record)
    layouts = product(("llama-tiny", "gpt2-tiny", "qwen3-tiny"), ("dp1", "dp1 ac:full", "dp1 ac:selective", "tp2"))
    mixtures = product(["qwen2-moe-tiny"], ("dp1", "dp1 ac:full", "dp2 ep2 ac:selective", "tp2"))
    for engine, (name, text) in product(ENGINES.values(), [*layouts, *mixtures]):
        batch = MicroBatch.of(preset(name), Layout.parse(text), 2, 64, engine=engine, dtype="bfloat16", device="cuda")
        for kernel in ("flash-2", "scores"):
            found = published.published_layer(dataclasses.replace(batch, kernel=kernel), batch.config.experts > 0)
            assert min(found.values()) > 0
    table, words = read_packaged_toml("planner/memory/published.toml"), re.compile(r"[a-z_]\w*")
    for name in table.keys() - {"groups"}:
        for item, _, condition in list_items(table[name], table["groups"]):
            assert set(words.findall(condition)) <= properties, item


def list_property_names() -> set[str]:
    """Return the names of all properties of layers."""
    found = set[str]()
    for config, text in product(map(preset, PRESETS), ("dp1", "dp1 ac:full", "dp1 ac:selective")):
        for kernel in ("flash-2", "scores", "tiled"):
            batch = MicroBatch.of(config, Layout.parse(text), 1, 64, kernel=kernel)
            found.update(*(find_properties(batch, kind) for kind in layer_examples(config)))
    return found


def test_operators_name_dimensions_and_properties_that_exist() -> None:
    """A wrong name in a condition would only leave an operator, a tensor or a collective out."""
    table, words = read_packaged_toml("planner/cost/operators.toml"), re.compile(r"[a-z_]\w*")
    properties, sizes, kinds = {"keeps_gradient"}, {*DIMENSIONS, "arrived", "computed", "logits"}, set[str]()
    properties |= list_property_names() | {"routed_adapter", "casts"}
    sizes |= {
        "adapted_rows", "adapted_outputs", "adapted_inputs", "products", "rank", "matrices", "low", "written",
        "saved_rows", "held", "matrix_width", "linear_rows", "outputs", "inputs",
    }  # fmt: skip
    adapted = {
        operator.name for layer in ("llama-tiny", "qwen2-moe-tiny")
        for operator in layer_operators(MicroBatch.of(preset(layer), Layout(), 1, 64), 0)
    }  # fmt: skip
    properties |= {f"adapted_{name.replace('.', '_')}" for name in adapted}
    rows = [row for name, section in table.items() if isinstance(section, list) for row in section]
    properties.update(flag.partition(" ")[0] for row in rows for flag in row.get("flags", ()))
    rows += [row for name in ("calls", "kernels") for section in table[name].values() for row in section]
    assert len(rows) > 100
    for row in [*rows, table["groups"]]:
        for key, value in row.items():
            for text in value if isinstance(value, list) else [value]:
                text, _, condition = str(text).partition("?")
                condition = text if key == "if" else condition
                assert set(words.findall(condition)) <= properties, (row, condition)
                if key in ("linear", "elements", "count", "flops", "bytes", "shape", "parameters", "back_bytes"):
                    assert set(words.findall(text)) <= sizes, (row, text)
                elif " = " in text:
                    value_of = parse_item(text).value
                    assert set(words.findall(value_of)) - {"index", "int32", "bool"} <= sizes, (row, text)
            kinds.add(key)
    assert {"linear", "saved", "kept", "calls", "sites", "flops"} <= kinds
