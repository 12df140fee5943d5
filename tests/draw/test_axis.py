"""Axes: ticks at round numbers within the range, and positions of values."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.draw.axis import Axis, choose_ticks, make_linear_axis, make_log_axis


@pytest.mark.parametrize(
    ("low", "high"), [(1.59, 8.65), (150, 326), (30e6, 12e9), (0.007, 0.0071), (5, 800), (0.1, 9e6), (3, 3)]
)
def test_logarithmic_axis_has_round_ticks_within_its_range(low: float, high: float):
    axis = make_log_axis([low, high], "", str)
    ticks = [tick for tick, _ in axis.ticks]
    assert 2 <= len(ticks) <= 14 and ticks == sorted(ticks)
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    assert (axis.compute_fraction(axis.low), axis.compute_fraction(axis.high)) == (0, pytest.approx(1))
    assert 0 < axis.compute_fraction(low) <= axis.compute_fraction(high) < 1


def test_ticks_of_logarithmic_axis_are_round_in_its_unit():
    axis = make_log_axis([3 * 1024.0, 900 * 1024.0], "", lambda count: f"{count:g} KiB", unit=1024)
    assert (10 * 1024, "10 KiB") in axis.ticks and (500 * 1024, "500 KiB") in axis.ticks


@pytest.mark.parametrize("most", [1, 2, 5, 8, 30])
@pytest.mark.parametrize(("low", "high"), [(0, 10.4), (-3, 17), (0, 1e-7), (1e30, 3e30), (0.9, 1.1), (0, 99)])
def test_round_numbers_are_few_even_and_within(low: float, high: float, most: int):
    found = choose_ticks(low, high, most)
    assert len(found) <= most + 1
    assert all(low - 1e-9 * (high - low) <= tick <= high + 1e-9 * (high - low) for tick in found)
    steps = {f"{(b - a):.6g}" for a, b in pairwise(found)}
    assert len(steps) <= 1 and all(step.strip("-0.")[0] in "125" for step in steps)


def test_linear_axis_covers_its_range_and_margins():
    axis = make_linear_axis(0, 10, "unit", above=0.04)
    assert (axis.low, axis.high, [label for _, label in axis.ticks]) == (0, 10.4, ["0", "5", "10"])
    assert make_linear_axis(1, 3, below=0.5, above=0.5).compute_fraction(2) == 0.5
    assert [label for _, label in make_linear_axis(0, 3000, most=3).ticks] == ["0", "1,000", "2,000", "3,000"]


@pytest.mark.parametrize("value", [0.0, 2.0, -5.0, 1e30])
@pytest.mark.parametrize("margins", [{}, {"above": 0.04}, {"below": 0.04, "above": 0.04}])
def test_a_range_of_one_value_is_widened(value: float, margins: dict[str, float]):
    axis = make_linear_axis(value, value, **margins)
    assert axis.low <= value <= axis.high and axis.high > axis.low
    assert 0 <= axis.compute_fraction(value) <= 1


def test_values_below_a_logarithmic_axis_lie_at_its_start():
    assert Axis(1, 100, logarithmic=True).compute_fraction(0) == 0


@pytest.mark.parametrize("high", [1, 2, 3, 5, 12, 200])
def test_ticks_at_whole_numbers_alone(high: int):
    ticks = [tick for tick, _ in make_linear_axis(0, high, most=8, whole=True).ticks]
    assert 1 < len(ticks) <= 9 and all(tick == int(tick) for tick in ticks)
