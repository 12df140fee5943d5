"""A recipe's [collectives] table: the right program on the right axes, errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.collectives.library import generate
from meshwright.collectives.named import load_named_programs
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.program.collective_text import format_collective
from meshwright.recipe import CollectivesRecipe


def named(layout: str, **table: str) -> dict[tuple[str, str], str]:
    """(axis, operation) -> algorithm and ranks, as in `ring 4`."""
    found = load_named_programs(CollectivesRecipe(**table), Layout.parse(layout), "recipe.toml: {}".format)
    return {
        key: " or ".join(f"{c.program.algorithm} {c.program.ranks}" for c in value.programs)
        for key, value in found.items()
    }


def refusal(layout: str, **table: str) -> str:
    with pytest.raises(UserError) as error:
        load_named_programs(CollectivesRecipe(**table), Layout.parse(layout), lambda key: "recipe.toml")
    return str(error.value)


def file(place: Path, operation: str, algorithm: str, ranks: int) -> str:
    path = place / f"{operation}-{ranks}.txt"
    path.write_text(format_collective(generate(operation, algorithm, ranks)))
    return f"@{path}"


def test_native_collective_is_default():
    assert named("dp4 zero1") == {}
    assert named("dp4 zero1", all_reduce="native") == {}


def test_algorithm_serves_every_axis_of_more_than_one_rank():
    assert named("dp4 zero3 hs2", all_reduce="ring", all_gather="recursive-doubling") == {
        ("data", "all_reduce"): "ring 4",
        ("shard", "all_reduce"): "ring 2",
        ("replica", "all_reduce"): "ring 2",
        ("data", "all_gather"): "recursive-doubling 4",
        ("shard", "all_gather"): "recursive-doubling 2",
        ("replica", "all_gather"): "recursive-doubling 2",
    }
    assert named("dp1", all_reduce="ring") == {}
    assert ("replica", "all_reduce") not in named("dp4 zero1", all_reduce="ring")


def test_unsupported_axis_stays_native_unless_gradients_use_it():
    found = named("dp8 zero3 hs4", all_gather="2d-mesh")
    assert set(found) == {("data", "all_gather"), ("shard", "all_gather")}, "the replica axis has 2 ranks"
    assert refusal("dp8 zero3 hs4", all_reduce="2d-mesh").startswith(
        "recipe.toml: collectives.all_reduce: 2d-mesh cannot take 2 ranks"
    )


def test_a_file_serves_the_axes_of_its_size(tmp_path: Path):
    program = file(tmp_path, "all-reduce", "ring", 4)
    assert named("dp4", all_reduce=program) == {(axis, "all_reduce"): "ring 4" for axis in ("data", "shard")}
    program = file(tmp_path, "reduce-scatter", "ring", 2)
    assert named("dp4 zero1 hs2", reduce_scatter=program) == {
        (axis, "reduce_scatter"): "ring 2" for axis in ("shard", "replica")
    }


def test_auto_minimises_rounds_for_small_vectors_else_bytes():
    found = load_named_programs(CollectivesRecipe(all_reduce="auto"), Layout.parse("dp8"))["data", "all_reduce"]
    small, large = found.choose_program(1000), found.choose_program(1e9)
    assert small.bytes_sent(1.0).max() > large.bytes_sent(1.0).max() == pytest.approx(2 * 7 / 8), "none sends fewer"
    assert small.program.algorithm == "butterfly"


def test_invalid_program_file_is_one_error_line(tmp_path: Path):
    ring = file(tmp_path, "all-reduce", "ring", 4)
    start = "recipe.toml: collectives."
    assert refusal("dp8", all_reduce=ring) == (f"{start}all_reduce: {ring} has 4 ranks; axis data of this layout has 8")
    assert refusal("dp8 zero1 hs4", all_reduce=ring).endswith("has 4 ranks; axis replica of this layout has 2")
    assert refusal("dp4 zero1", all_gather=ring).endswith("is a program for all-reduce, not for all-gather")
    assert "no such file" in refusal("dp4", all_reduce="@missing.txt")
    text = Path(ring[1:]).read_text()
    broken = tmp_path / "broken.txt"
    broken.write_text("\n".join(line for number, line in enumerate(text.splitlines()) if number != 9) + "\n")
    assert refusal("dp4", all_reduce=f"@{broken}").startswith(f"{start}all_reduce: ")
    broken.write_text(text.replace("chunks 4", "chunks 4\nreduction maximum"))
    assert refusal("dp4", all_reduce=f"@{broken}").endswith("broken.txt computes the maximum; gradients are summed")


def test_algorithm_for_unsupported_rank_count_is_refused():
    assert refusal("dp4", all_reduce="3d-torus").startswith(
        "recipe.toml: collectives.all_reduce: 3d-torus cannot take 4"
    )
