"""Crossovers: vector sizes at which the fastest algorithm changes, and a chart of time over size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

from meshwright.collectives.choose import Chooser
from meshwright.collectives.quantities import format_bytes, format_seconds

SMALLEST, LARGEST = 2**10, 2**30  # bytes: default range
_STEP = 4.0  # ratio of adjacent sizes
_CLOSE = 1.02  # relative precision of a crossover


@dataclass(frozen=True)
class Crossover:
    """Size in bytes from which algorithm `after` is faster than `before`."""

    size: int
    before: str
    after: str


@dataclass
class Curves:
    """Simulated time over size on one network. seconds: algorithm -> time at each size; bound: lower bound at each
    size."""

    chooser: Chooser
    sizes: list[float]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bound: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, chooser: Chooser, least: float = SMALLEST, most: float = LARGEST, within: float = math.inf) -> Curves:
        """Simulate all algorithms that accept the ranks, at ratios of four from `least` to `most` bytes, both ends
        included.

        within: skip (as infinite) algorithms whose closed form exceeds the best time at a size by this factor.
        """
        steps = max(1, math.ceil(math.log(most / least, _STEP)))
        sizes = [least * (most / least) ** (step / steps) for step in range(steps + 1)]
        curves = cls(chooser, sizes, bound=[chooser.compute_lower_bound(size) for size in sizes])
        for size in sizes:
            best = math.inf
            forms = {name: chooser.compute_closed_form(name, size) for name in chooser.algorithms}
            for name in sorted(forms, key=lambda one: forms[one]):
                candidate = None if forms[name] > within * best else chooser.find_candidate(name, size)
                seconds = math.inf if candidate is None else candidate.seconds
                best = min(best, seconds)
                curves.seconds.setdefault(name, []).append(seconds)
        curves.seconds = {name: curves.seconds[name] for name in chooser.algorithms}  # in the order of the library
        return curves

    @classmethod
    def quick(cls, chooser: Chooser, least: float = SMALLEST, most: float = LARGEST) -> Curves:
        """As `over`, for crossovers only: skips algorithms far from the best by their closed form."""
        inner, outer = chooser.network.tiers
        return cls.over(chooser, least, most, within=1.1 if inner == outer else 2.5)

    def best(self, index: int) -> str:
        """Return the fastest algorithm at a size index; of equals, the first in the library."""
        return _first_least({name: seconds[index] for name, seconds in self.seconds.items()})

    def crossovers(self) -> list[Crossover]:
        """Return the crossovers, by bisection between adjacent sizes."""
        found: list[Crossover] = []
        for index in range(len(self.sizes) - 1):
            ends = (self.sizes[index], self.best(index)), (self.sizes[index + 1], self.best(index + 1))
            least = [min(seconds[at] for seconds in self.seconds.values()) for at in (index, index + 1)]
            near = [
                name
                for name, seconds in self.seconds.items()
                if seconds[index] <= 2 * least[0] and seconds[index + 1] <= 2 * least[1]
            ]
            found += self._between(*ends, {*near, ends[0][1], ends[1][1]})
        return found

    def _between(self, low: tuple[float, str], high: tuple[float, str], names: set[str]) -> list[Crossover]:
        """Return the crossovers between two (size, best algorithm) pairs, by bisection among algorithms near the best
        at both."""
        if low[1] == high[1]:
            return []
        if high[0] / low[0] < _CLOSE:
            return [Crossover(round(math.sqrt(low[0] * high[0])), low[1], high[1])]
        size = math.sqrt(low[0] * high[0])
        timed = {name: self.chooser.find_candidate(name, size) for name in self.seconds if name in names}
        middle = size, _first_least({name: one.seconds for name, one in timed.items() if one is not None})
        return [*self._between(low, middle, names), *self._between(middle, high, names)]


def _first_least(seconds: dict[str, float]) -> str:
    """Return the algorithm with the lowest time; of equals, the first."""
    least = min(seconds.values()) * (1 + 1e-9)
    return next(name for name, value in seconds.items() if value <= least)


# --- the picture

Scale: TypeAlias = Callable[[float], float]  # of a quantity to pixels

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 560, 74, 190, 46, 84
_LINE = 15  # between labels
_HUES = (214, 24, 150, 280, 350, 190, 90, 320, 50, 240)
_STYLE = """
.mc { font: 12px ui-sans-serif, system-ui, sans-serif; background: #fff; --ink: #222; --dim: #69727d; --grid: #e3e6ea;
  --tone: 40%; --paper: #fff }
.mc text { fill: var(--ink) } .mc .dim { fill: var(--dim) } .mc .title { font-size: 15px; font-weight: 600 }
.mc .grid { stroke: var(--grid) } .mc .curve { fill: none; stroke-width: 1.3; stroke: var(--dim); stroke-opacity: .6 }
.mc .best { stroke-width: 2.6; stroke: hsl(var(--hue) 65% var(--tone)); stroke-opacity: 1 }
.mc text.best { fill: hsl(var(--hue) 65% var(--tone)); font-weight: 600; stroke: none }
.mc rect.best { fill: hsl(var(--hue) 65% var(--tone)); stroke: none } .mc .on { fill: var(--paper); font-size: 11px }
.mc .bound { fill: none; stroke: var(--ink); stroke-width: 1.6; stroke-dasharray: 5 4 }
.mc .lead { stroke: var(--dim); stroke-opacity: .5; stroke-width: 1; fill: none }
.mc .asked { stroke: var(--ink); stroke-dasharray: 2 3 }
.mc .named { stroke: var(--ink); stroke-width: 2; stroke-opacity: 1 } .mc text.named { stroke: none; font-weight: 600 }
.mc circle { fill: var(--ink); stroke: var(--paper); stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  .mc { background: #15191e; --ink: #e4e7ea; --dim: #9aa3ad; --grid: #2a323a; --tone: 64%; --paper: #10161d }
}
"""


def draw_crossovers(
    curves: Curves,
    crossovers: list[Crossover],
    asked: float | None = None,
    named: tuple[str, float] | None = None,
) -> str:
    """Time over size, both logarithmic, as one SVG: the algorithms that are best somewhere in colour, the others thin,
    the lower bound dashed, each named where it ends; below, who is best where.

    asked: a size to mark. named: the algorithm that was asked for and its seconds at that size, which a dot marks; its
    curve stands out if there is one (a program from a file has none).
    """
    ends = [curves.best(0), *(crossover.after for crossover in crossovers)]
    best = list(dict.fromkeys(ends))
    hue = {name: _HUES[number % len(_HUES)] for number, name in enumerate(best)}
    values = [
        value
        for seconds in [*curves.seconds.values(), curves.bound, [named[1]] if asked and named else []]
        for value in seconds
        if 0 < value < math.inf
    ] or [1.0]
    low_x, high_x = math.log10(curves.sizes[0]), math.log10(curves.sizes[-1])
    low_y, high_y = math.log10(min(values)) - 0.08, math.log10(max(values)) + 0.08
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(size: float) -> float:
        return _LEFT + (math.log10(size) - low_x) / (high_x - low_x) * plot_width

    def y(seconds: float) -> float:
        return _TOP + (high_y - math.log10(max(seconds, 10**low_y))) / (high_y - low_y) * plot_height

    def line(seconds: list[float], style: str) -> str:
        there = [pair for pair in zip(curves.sizes, seconds, strict=True) if math.isfinite(pair[1])]
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in there)
        return f'<polyline class="{style}" points="{points}"'

    network = curves.chooser.network
    name = f"{curves.chooser.operation} on {network.ranks} ranks, {network.name}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mc" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'role="img"><title>{escape(name)}</title><style>{_STYLE}</style>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(name)}</text>',
        f'<text class="dim" x="{_LEFT}" y="36">seconds over bytes of the vector, simulated</text>',
        *_axes(curves, x, y, low_y, high_y),
    ]
    wanted = named[0] if named else ""
    for algorithm in sorted(curves.seconds, key=lambda one: (one in best, one == wanted)):
        style = f'best curve" style="--hue:{hue[algorithm]}' if algorithm in best else "curve"
        style = "named curve" if algorithm == wanted and algorithm not in best else style
        parts.append(f"{line(curves.seconds[algorithm], style)}><title>{escape(algorithm)}</title></polyline>")
    parts.append(f"{line(curves.bound, 'bound')}><title>lower bound</title></polyline>")
    parts += _labels(curves, hue, y, wanted)
    parts += _best_below(curves, crossovers, hue, x)
    if asked and curves.sizes[0] <= asked <= curves.sizes[-1]:
        at = f"{x(asked):.1f}"
        parts.append(f'<line class="asked" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        said = format_bytes(asked)
        if named and named[1] > 0:
            said += f": {named[0]} takes {format_seconds(named[1])}"
            parts.append(f'<circle cx="{at}" cy="{y(named[1]):.1f}" r="4.5"><title>{escape(said)}</title></circle>')
        # Where curves run high, above them.
        if x(asked) > _LEFT + plot_width / 2:
            place = f'x="{x(asked) + 4:.1f}" y="{_TOP - 5}" text-anchor="end"'
        else:
            place = f'x="{x(asked) + 4:.1f}" y="{_TOP + 12}"'
        parts.append(f"<text {place}>{escape(said)}</text>")
    return "\n".join([*parts, "</svg>", ""])


def _axes(curves: Curves, x: Scale, y: Scale, low_y: float, high_y: float) -> list[str]:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for power in range(math.ceil(low_y), math.floor(high_y) + 1):
        at = y(10.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        label = format_seconds(10.0**power * (1 + 1e-12))
        parts.append(f'<text class="dim" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    first, last = math.log2(curves.sizes[0]), math.log2(curves.sizes[-1])
    step = 2 if last - first <= 24 else 4
    for power in range(step * math.ceil(first / step - 1e-9), math.floor(last + 1e-9) + 1, step):
        at = x(2.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        label = format_bytes(2.0**power)
        parts.append(f'<text class="dim" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    return parts


def _labels(curves: Curves, hue: dict[str, int], y: Scale, wanted: str) -> list[str]:
    """Names at the right end, moved apart where curves end together, with a line to the curve's end. A curve that was
    not followed so far, as too slow, has its name when the mouse is over it."""
    last = {name: seconds[-1] for name, seconds in curves.seconds.items() if math.isfinite(seconds[-1])}
    ends = sorted([(y(seconds), name) for name, seconds in last.items()] + [(y(curves.bound[-1]), "")])
    places: list[float] = []
    for at, _ in ends:
        places.append(max(at, places[-1] + _LINE) if places else at)
    overflow = places[-1] - (_HEIGHT - _BOTTOM)
    if overflow > 0:
        limit = float(_HEIGHT - _BOTTOM)
        for number in reversed(range(len(places))):
            places[number] = min(places[number], limit)
            limit = places[number] - _LINE
    parts, right = [], _WIDTH - _RIGHT
    for (at, name), place in zip(ends, places, strict=True):
        style = f'class="best" style="--hue:{hue[name]}"' if name in hue else 'class="dim"' if name else ""
        style = 'class="named"' if name and name == wanted and name not in hue else style
        parts.append(f'<path class="lead" d="M{right + 1} {at:.1f} L{right + 16} {place:.1f}"/>')
        parts.append(f'<text {style} x="{right + 20}" y="{place + 4:.1f}">{escape(name or "lower bound")}</text>')
    return parts


def _best_below(curves: Curves, crossovers: list[Crossover], hue: dict[str, int], x: Scale) -> list[str]:
    """A strip that says who is best where, with the sizes at which that changes."""
    top = _HEIGHT - _BOTTOM + 32
    starts = [curves.sizes[0], *(crossover.size for crossover in crossovers)]
    names = [curves.best(0), *(crossover.after for crossover in crossovers)]
    parts = [f'<text class="dim" x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">best</text>']
    last = -math.inf
    for start, end, name in zip(starts, [*starts[1:], curves.sizes[-1]], names, strict=True):
        left, width = x(start), x(end) - x(start)
        parts.append(
            f'<rect class="best" style="--hue:{hue[name]}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="20">'
            f"<title>{escape(name)} from {format_bytes(start)} to {format_bytes(end)}</title></rect>"
        )
        if width > 6.6 * len(name):
            parts.append(
                f'<text class="on" x="{left + width / 2:.1f}" y="{top + 14}" text-anchor="middle">{escape(name)}</text>'
            )
        if start > curves.sizes[0] and left - last > 60:
            last = left
            parts.append(
                f'<text x="{left:.1f}" y="{top + 35}" text-anchor="middle">{format_bytes(start)}</text>'
                f'<line class="lead" x1="{left:.1f}" x2="{left:.1f}" y1="{top + 20}" y2="{top + 25}"/>'
            )
    return parts
