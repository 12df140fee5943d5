"""Measured rates: they round-trip through files, and times between measured sizes are interpolated."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from dataclasses import replace

import pytest

from meshwright.errors import UserError
from meshwright.planner.hardware.measured import (
    CollectiveCurve,
    CopyCurve,
    Curve,
    KernelCurve,
    Measured,
    Products,
    read_measured,
)
from meshwright.toml import format_toml

SIZES = tuple(float(2**exponent) for exponent in range(10, 25, 2))


def of_line(latency: float, rate: float) -> Curve:
    return Curve(SIZES, tuple(latency + size / rate for size in SIZES))


def test_curve_interpolates_latency_and_bandwidth():
    curve = of_line(2e-5, 1e9)
    for size in (1024, 3000, 5e5, 1e7, 2**24):
        assert curve.seconds_at(size) == pytest.approx(2e-5 + size / 1e9, rel=1e-9)
    assert curve.seconds_at(8) == curve.seconds_at(1024)
    assert curve.seconds_at(2**26) == pytest.approx(4 * curve.seconds_at(2**24))


def test_curve_is_monotonic():
    curve = Curve((1.0, 2.0, 4.0, 8.0), (5.0, 3.0, 4.0, 9.0))
    times = [curve.seconds_at(size / 10) for size in range(1, 200)]
    assert times == sorted(times)
    assert (curve.seconds_at(2), curve.seconds_at(4), curve.seconds_at(8)) == (5, 5, 9)


def machine(tokens: float, out: float, inner: float) -> float:
    """Fake device with a launch overhead that is limited by arithmetic or by memory."""
    flops, moved = 2.0 * tokens * out * inner, 4.0 * (tokens * inner + out * inner + tokens * out)
    return 3e-6 + max(flops / 1e11, moved / 2e10)


SHAPES = tuple(itertools.product((32, 256, 2048), (64, 256, 1024), (64, 256, 1024)))


def products(precision: str = "fp32", ranks: int = 2, threads: int = 1, slower: float = 1.0) -> Products:
    return Products(precision, "forward", ranks, threads, SHAPES, tuple(slower * machine(*shape) for shape in SHAPES))


def test_products_are_exact_at_measured_shapes_and_near_between_them():
    found = products()
    assert all(found.seconds_at(*shape) == machine(*shape) for shape in SHAPES)
    between = list(itertools.product((64, 512, 1024), (128, 192, 512), (128, 512, 768)))
    errors = [abs(found.seconds_at(*shape) / machine(*shape) - 1) for shape in between]
    assert max(errors) < 0.2
    assert sum(errors) / len(errors) < 0.05


def test_products_beyond_measured_shapes_are_extrapolated():
    found = products()
    assert found.seconds_at(1, 16, 16) == pytest.approx(machine(1, 16, 16), rel=0.25)  # mostly launch overhead
    assert found.seconds_at(8192, 4096, 4096) == pytest.approx(machine(8192, 4096, 4096), rel=0.05)


def test_products_of_constant_costs_are_exact_everywhere():
    """With constant costs per launch, FLOP and byte, times are exact beyond the measured shapes too."""

    def priced(tokens: float, out: float, inner: float) -> float:
        moved = 2.0 * (tokens * inner + out * inner + tokens * out)
        return 4e-6 + 2.0 * tokens * out * inner / 7e10 + moved / 9e9

    found = Products("bf16", "forward", 1, 1, SHAPES, tuple(priced(*shape) for shape in SHAPES))
    for shape in ((1, 8, 8), (100, 300, 500), (5000, 5000, 70)):
        assert found.seconds_at(*shape) == pytest.approx(priced(*shape), rel=1e-6)


def test_extrapolated_product_times_are_positive():
    """Times that grow faster than FLOPs: a linear fit would be negative for small products."""
    slow = tuple(1e-14 * (2.0 * tokens * out * inner) ** 1.2 for tokens, out, inner in SHAPES)
    found = Products("fp32", "forward", 1, 1, SHAPES, slow)
    assert all(found.seconds_at(tokens, side, side) > 0 for tokens in (1, 8, 64, 300) for side in (8, 50, 100, 500))


def test_slow_shape_affects_only_its_neighbours():
    plain = products()
    seconds = tuple(
        4 * took if shape == (256, 256, 256) else took for shape, took in zip(SHAPES, plain.seconds, strict=True)
    )
    found = replace(plain, seconds=seconds)
    assert found.seconds_at(280, 256, 256) > 3 * plain.seconds_at(280, 256, 256)
    assert found.seconds_at(2000, 1000, 1000) < 1.2 * plain.seconds_at(2000, 1000, 1000)


@pytest.mark.parametrize("count", [1, 2])
def test_few_measured_products_suffice(count: int):
    found = replace(products(), shapes=SHAPES[:count], seconds=tuple(machine(*shape) for shape in SHAPES[:count]))
    assert 0 < found.seconds_at(64, 64, 64) < 1


def example() -> Measured:
    return Measured(
        backend="gloo",
        ranks=2,
        threads=1,
        products=(products(), products(ranks=1, slower=0.8), products(ranks=1, threads=2, slower=0.5)),
        passes=(
            KernelCurve("copy", "fp32", 2, 1, of_line(1e-6, 5e9)),
            KernelCurve("copy", "fp32", 1, 1, of_line(1e-6, 9e9)),
        ),
        collectives=(CollectiveCurve("all-reduce", 2, "inside", of_line(5e-5, 1e9)),),
        copies=(CopyCurve("to-device", of_line(1e-5, 2e10)),),
        disk_write=1e9,
        starts=(("rank", 2.5), ("operation", 1e-6)),
    )


def test_measurements_round_trip():
    assert read_measured(tomllib.loads(format_toml(example().tables())), "here") == example()
    assert read_measured(replace(example(), collectives=(), copies=()).tables(), "here").collectives == ()


def test_measurements_are_selected_by_number_of_busy_ranks():
    found = example()
    assert found.product("fp32").ranks == 2
    assert (found.product("fp32", ranks=1).ranks, found.product("fp32", ranks=1).threads) == (1, 2)
    assert found.product("fp32", ranks=8).ranks == 2
    assert found.product("bf16") is None
    assert found.one_pass("copy", ranks=1).seconds_at(2**24) < found.one_pass("copy").seconds_at(2**24)
    reduced = [one.curve for one in found.collectives if (one.operation, one.ranks) == ("all-reduce", 2)]
    assert [curve.seconds_at(1024) for curve in reduced] == [pytest.approx(5e-5, rel=0.1)]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("products", 0, "seconds"), [1.0], "27 shapes, 1 times"),
        (("products", 0, "seconds", 3), -1.0, "products.seconds takes a number above 0, not -1.0"),
        (("products", 0, "form"), "backward", 'unknown form "backward"'),
        (("products", 0, "shapes", 1), [3, 4], "a shape is (tokens, out, in)"),
        (("passes", 1, "bytes", 0), math.inf, "bytes takes a number above 0, not inf"),
        (("passes", 1, "bytes", 0), 1e12, "sizes are not ascending"),
        (("collectives", 0, "ranks"), "2", "collectives.ranks takes a whole number, at least 1, not '2'"),
        (("starts",), [1], "'list' object has no attribute 'items'"),
        (("backend",), 3, "backend should be text, not 3"),
    ],
)
def test_damaged_file_error_names_the_place(path: tuple[object, ...], value: object, reason: str):
    tables = json.loads(json.dumps(example().tables()))
    inner = tables
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(UserError) as caught:
        read_measured(tables, "this.toml")
    assert str(caught.value) == f"this.toml: the measurements are damaged ({reason}); run `meshwright probe` again"
