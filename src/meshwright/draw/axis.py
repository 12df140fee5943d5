"""Axes: a range of values, linear or logarithmic, with labelled ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis over the values from `low` to `high`. ticks: (value, label)."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    title: str = ""
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the position of `value` on the axis as a fraction: 0 at `low`, 1 at `high`."""
        if self.logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(
    low: float, high: float, title: str = "", *, below: float = 0.0, above: float = 0.0, most: int = 5
) -> Axis:
    """Return a linear axis with at most `most` steps between its ticks; a range of one value is widened.

    below, above: space added at the ends, as a fraction of the range.
    """
    span = high - low or max(1.0, abs(high))
    low, high = low - below * span, (high if high > low or above else low + span) + above * span
    return Axis(low, high, [(tick, f"{tick:,.9g}") for tick in round_numbers(low, high, most)], title)


def log_axis(values: Sequence[float], title: str, show: Callable[[float], str], unit: float = 1.0) -> Axis:
    """Return a logarithmic axis over all `values` (above 0), with 4 % of its length free at each end.

    unit: ticks are round multiples of it; show: formats such a multiple.
    """
    low, high = min(values), max(values)
    air = max(1.02, (high / low) ** 0.04, 1.5 * low / high)
    low, high = low / air, high * air
    ticks = [(number * unit, show(number)) for number in log_numbers(low / unit, high / unit)]
    return Axis(low, high, ticks, title, logarithmic=True)


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten in [low, high], with at most `most` steps between them."""
    raw = max(high - low, 1e-300) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


def log_numbers(low: float, high: float) -> list[float]:
    """Return the powers of ten in [low, high], with 2 and 5 or more between them where the range is short."""
    if high < 4 * low:
        return round_numbers(low, high, 8)
    mantissas = (1,) if high > 1e4 * low else (1, 2, 5) if high > 20 * low else (1, 2, 3, 4, 6, 8)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [part * 10.0**power for power in powers for part in mantissas if low <= part * 10.0**power <= high]
