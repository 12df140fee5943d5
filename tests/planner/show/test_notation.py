"""Legend of the layout notation, and recipe keys of a layout."""

from __future__ import annotations

import tomllib

import pytest

from meshwright.layout import Layout
from meshwright.names import PRECISIONS
from meshwright.planner.api import plan
from meshwright.planner.show.text import notation_legend, recipe_block


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp8 zero3 hs4 bf16", ["dpN", "zero3", "hsN", "bf16"]),
        ("tp2:nosp cp2:ulysses", ["tpN", ":nosp", "cpN", ":ulysses"]),
        ("dp4 ep2:etp2 zero1", ["dpN", "zero1", "epN", ":etpN"]),
        ("pp4:interleaved:3 mb8 ac:full", ["ppN", ":SCHEDULE:V", "mbN", "ac:full"]),
        ("pp2 ac:selective fp8 zero2 dp2", ["dpN", "zero2", "ppN", "ac:selective", "fp8"]),
    ],
)
def test_legend_explains_the_parts_that_occur(text: str, parts: list[str]):
    legend = notation_legend([Layout.parse(text)])
    assert [part for part, _ in legend] == parts and all(meaning for _, meaning in legend)


def test_legend_explains_every_precision():
    for name in PRECISIONS:
        assert notation_legend([Layout.parse(f"dp1 {name}")])[-1][0] == name


def test_recipe_block_sets_layout_sequence_and_batch():
    one = plan("llama-3-8b", "8xh100-sxm", "dp8 zero3 ac:full", sequence=8192, batch=64).best
    tables = tomllib.loads(recipe_block(one))
    assert tables == {"layout": str(one.layout), "data": {"sequence": 8192}, "train": {"batch": 64}}
