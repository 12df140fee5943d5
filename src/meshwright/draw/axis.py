"""Axes: a range of values, linear or logarithmic, with labelled ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Linear or logarithmic axis of a chart, over the values from `low` to `high` (both included).

    ticks: (value, label) of each tick mark. title: text next to the axis. logarithmic: True for a logarithmic scale.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    title: str = ""
    logarithmic: bool = False

    def compute_fraction(self, value: float) -> float:
        """Return the position of `value` along the axis as a fraction of the axis's length: 0 at `low`, 1 at `high`,
        below 0 or above 1 for values outside. On a logarithmic axis, the position of values below `low` is 0."""
        if self.logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_linear_axis(
    low: float,
    high: float,
    title: str = "",
    *,
    below: float = 0.0,
    above: float = 0.0,
    most: int = 5,
    whole: bool = False,
) -> Axis:
    """Return a linear axis from `low` to `high` with ticks at round numbers.

    title: text at the axis. below, above: space added below `low` and above `high`, as a fraction of `high` - `low`
    (of max(1, |high|) if `low` equals `high`). An axis that would be empty is extended upwards by max(1, |high|). most:
    maximum number of intervals between ticks. whole: True for ticks at whole numbers alone, as for numbers of steps.
    """
    span = high - low or max(1.0, abs(high))
    low, high = low - below * span, (high if high > low or above else low + span) + above * span
    most = max(1, min(most, int(high - low))) if whole else most
    return Axis(low, high, [(tick, f"{tick:,.9g}") for tick in choose_ticks(low, high, most)], title)


def make_log_axis(values: Sequence[float], title: str, show: Callable[[float], str], unit: float = 1.0) -> Axis:
    """Return a logarithmic axis that contains all `values` (each above 0) and some space beyond them at both ends: 4%
    of the range on the logarithmic scale, more if the range is narrow.

    title: text next to the axis. unit: number by which `values` are divided for display (1e9 shows bytes as GB); ticks
    lie at round numbers of the displayed quantity. show: function that formats a tick's label, given the displayed
    number.
    """
    low, high = min(values), max(values)
    air = max(1.02, (high / low) ** 0.04, 1.5 * low / high)
    low, high = low / air, high * air
    ticks = [(number * unit, show(number)) for number in choose_log_ticks(low / unit, high / unit)]
    return Axis(low, high, ticks, title, logarithmic=True)


def choose_ticks(low: float, high: float, most: int) -> list[float]:
    """Return the ticks of a linear axis: the multiples, within [low, high], of a round step (1, 2 or 5 times a power of
    ten). most: maximum number of intervals between ticks."""
    raw = max(high - low, 1e-300) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis within [low, high]: powers of ten; also multiples such as 2 and 5 times a
    power of ten if `high` / `low` is at most 10,000. If `high` / `low` is less than 4: the ticks of a linear axis."""
    if high < 4 * low:
        return choose_ticks(low, high, 8)
    mantissas = (1,) if high > 1e4 * low else (1, 2, 5) if high > 20 * low else (1, 2, 3, 4, 6, 8)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [part * 10.0**power for power in powers for part in mantissas if low <= part * 10.0**power <= high]
