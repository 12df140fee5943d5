"""docs/collectives.md is complete and correct: options, keys, topologies, and the table of algorithms."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.collective import command
from meshwright.collectives.cost import compute_closed_form_seconds
from meshwright.collectives.library import ALGORITHMS, generate, list_options
from meshwright.collectives.report import CollectiveOptions, collective
from meshwright.collectives.topologies import TOPOLOGIES, parse_topology
from meshwright.names import ALGORITHM_ALIASES
from meshwright.program.check_collective import check_collective

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collectives.md"
SIZE, SEGMENTS, ALPHA, BANDWIDTH = 3e6, 8, 7e-6, 10e9


def table(first: str) -> list[list[str]]:
    """Return the rows of the table whose header begins with `first`."""
    for text in re.findall(r"(?:^\|.*\|$\n?)+", PAGE.read_text(), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()]
        if head[0] == first:
            return rows
    raise AssertionError(first)


def names(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


ROWS = table("operation")


def value(text: str, **known: float) -> float:
    """Evaluate a formula of the page, in which adjacent factors are multiplied."""
    text = text.replace("≈", "").replace("·", "*").replace("αᵢ", "p").replace("βᵢ", "q").replace("α", "a")
    text = text.replace("β", "b").replace("log2", "@").strip()
    text = re.sub(r"(?<=[\w)])\s*(?=[(@])(?<!@)", "*", text)
    text = re.sub(r"(?<=[0-9)])(?=[A-Za-z])", "*", text)
    return float(eval(text.replace("@*", "@").replace("@", "log2"), {"log2": math.log2, **known}))


def test_every_algorithm_has_its_row():
    listed = [(row[0].strip("`"), row[1].strip("`")) for row in ROWS]
    assert len(listed) == len(set(listed))
    assert set(listed) == {(operation, name) for operation in ALGORITHMS for name in ALGORITHMS[operation]}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:2]).replace("`", ""))
def test_rounds_bytes_and_closed_forms_match_documentation(row: list[str]):
    operation, algorithm = row[0].strip("`"), row[1].strip("`")
    ranks, side, said = 16, 4, {}
    if algorithm.startswith("3d"):
        ranks, side = 27, 3
    if "segments" in list_options(operation, algorithm) and "k" in row[2]:
        said = {"segments": SEGMENTS}
    kind = re.fullmatch(r"(?:[23]d-)?(torus|mesh)", algorithm)
    if kind:
        dims = (side,) * int(algorithm[0]) if algorithm[0].isdigit() else (ranks,)
        network = f"{kind[1]}:{'x'.join(map(str, dims))},10GB/s,7us"
    elif algorithm.startswith("hierarchical"):
        network = "nodes:4x4,inner=100GB/s,2us,outer=10GB/s,7us"
    else:
        network = f"{'ring' if algorithm == 'bidirectional-ring' else 'switch'},10GB/s,7us"
    checked = check_collective(generate(operation, algorithm, ranks, **said))
    form = compute_closed_form_seconds(operation, algorithm, parse_topology(network, ranks), SIZE, **said)
    known = {"n": ranks, "X": side, "L": math.ceil(math.log2(ranks)), "k": SEGMENTS, "g": 4, "m": 4}
    known |= {"S": SIZE, "a": ALPHA, "b": 1 / BANDWIDTH, "p": 2e-6, "q": 1e-11}
    assert checked.rounds == value(row[2], **known)
    most, stated = float(checked.bytes_sent(SIZE).max()), value(row[3], **known)
    assert 0.75 * stated <= most <= stated * (1 + 1e-9)
    if algorithm != "double-binary-tree":
        assert most == pytest.approx(stated)
    assert form == pytest.approx(value(row[4], **known), rel=0.1 if row[4].startswith("≈") else 1e-9)


def test_every_algorithm_is_explained():
    explained = names([row[0] for row in table("algorithm")])
    assert explained == {name for algorithms in ALGORITHMS.values() for name in algorithms}


def test_algorithm_aliases_are_documented():
    text = PAGE.read_text()
    for aliases in ALGORITHM_ALIASES.values():
        for alias, name in aliases.items():
            assert f"`{alias}`" in text and f"`{name}`" in text


def test_every_topology_and_setting_is_documented_with_valid_shapes():
    rows = table("topology")
    assert [row[0].strip("`").partition(":")[0] for row in rows] == [
        *("switch", "full-mesh", "ring", "torus", "mesh", "nodes", "spine-leaf")
    ]
    assert {row[0].strip("`").partition(":")[0] for row in rows} == set(TOPOLOGIES)
    for row in rows:
        name = row[0].strip("`")
        kind = TOPOLOGIES[name.partition(":")[0]]
        assert names([row[2]]) == {*kind.tiers, *kind.numbers, *kind.flags}
        shape = name.partition(":")[2]
        assert parse_topology(name, math.prod(map(int, shape.split("x"))) if shape else 8)


def test_every_option_is_documented():
    there = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert names([row[0] for row in table("option")]) == there


def test_every_key_is_documented(command_line):
    words = "all-reduce auto --ranks 4 --bytes 1MiB --topology nodes:2 --text --json"
    answer = json.loads(command_line("collective", *words.split()).output)
    documented = names([row[0] for row in table("key")])
    assert set(answer) - {"schema"} <= documented
    settings = collective("broadcast", "ring", 4, 64, options=CollectiveOptions(segments=2)).to_json_dict()
    grid = collective("all-reduce", "2d-torus", 4, 64, options=CollectiveOptions(dims=(2, 2))).to_json_dict()
    everything: dict[str, Any] = {**answer, **settings, **grid}
    assert set(everything) - {"schema"} == documented


def test_documented_example_equals_command_output(command_line):
    [example] = re.findall(r"```console\n\$ meshwright (collective .*?)\n(.+?)```", PAGE.read_text(), re.DOTALL)[:1]
    assert command_line(*example[0].split()).output == example[1]


def test_documented_choice_equals_command_output(command_line):
    found = re.findall(r"```console\n\$ meshwright (collective .*?)\n(.+?)```", PAGE.read_text(), re.DOTALL)
    command_words, said = next(pair for pair in found if "chosen: " in pair[1])
    output = command_line(*command_words.split()).output
    for line in said.splitlines():
        if line != "...":
            assert line.removesuffix(" ...") in output
