"""Verification of layouts with collective programs: they match one device, and planted faults are caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.recipe import load_recipe
from meshwright.verification.run import run_verification

pytestmark = pytest.mark.usefixtures("first_case_alone")

RING = ("collectives.all_reduce=ring", "collectives.reduce_scatter=ring", "collectives.all_gather=ring")
OTHERS = (
    "collectives.all_reduce=rabenseifner",
    "collectives.reduce_scatter=recursive-halving",
    "collectives.all_gather=recursive-doubling",
)


@pytest.mark.parametrize(
    ("layout", "table"),
    [("dp2 mb2", RING), ("dp4 zero1", OTHERS), ("dp4 zero3 hs2 mb2", RING), ("dp3 zero2", RING)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layout_with_programs_matches_one_device(tiny_recipe: Path, layout: str, table: tuple[str, ...]):
    document = run_verification(load_recipe(tiny_recipe, [f"layout={layout}", *table]))
    assert document["passed"], document["failure"]
    assert document["worst"]["relative_error"] < 1e-10


@pytest.mark.parametrize("kinds", ["fewer", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_every_fault_planted_in_a_program_is_caught(
    tiny_recipe: Path, kinds: str, two_layers: None, request: pytest.FixtureRequest
):
    if kinds == "fewer":
        request.getfixturevalue("fewer_kinds")
    document = run_verification(load_recipe(tiny_recipe, ["layout=dp4 zero1 hs2", *OTHERS]), mutate=True)
    assert document["passed"], document["failure"]
    assert document["mutations"]["missed"] == []
    assert document["mutations"]["caught"] >= 16


def test_programs_of_recipe_are_refused_before_ranks_start(tiny_recipe: Path):
    wanted = load_recipe(tiny_recipe, ["layout=dp4", "collectives.all_reduce=3d-torus"])
    with pytest.raises(UserError, match='override "collectives.all_reduce=3d-torus": collectives.all_reduce: 3d-torus'):
        run_verification(wanted)
    with pytest.raises(UserError, match="no such file"):
        run_verification("dp2", model=load_recipe(tiny_recipe, ["collectives.all_reduce=@nothing.txt"]))
