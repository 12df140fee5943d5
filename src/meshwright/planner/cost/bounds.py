"""Bounds of predicted step times: factors on the prediction within which measured times are expected, from published
runs.

Published runs are grouped into kinds: dense or mixture of experts, device architecture, fp8 or wider. For each kind
`bounds.toml` has quantiles of measured / predicted seconds (every source has equal weight), as geometric means with
those of all dense models or all mixtures, and the extremes of the kind's runs, beyond which the bounds widen. Steps
that hardly wait for communication are predicted better, so their bounds are narrower. `bench/plan_accuracy.py` writes
the file, and tests it by predicting the runs of every project from the runs of the others.

The rates were fitted to most of these runs, so their quantiles are too narrow for others. One factor widens both, that
of split conformal prediction from runs of sources to which no rate was fitted: if a new project is like theirs, 90 % of
its runs are expected between the bounds, fewer as the engines of some were chosen with these runs in sight. No
published run used the engine `meshwright`: its bounds also include this repository's own measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.rates import architecture_family, constants
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.problem import Problem
from meshwright.toml import read_packaged_toml

LIMITS = {"devices": 1, "sequence": 1, "context": 1, "seconds": -1}
"""Properties whose largest (1) or smallest (-1) value among a kind's runs limits the bounds: devices, tokens of a
sequence, devices that share a sequence (cp), step seconds."""
_OUTSIDE = {
    "devices": "has as many devices as {} (most: {})",
    "sequence": "has sequences as long as {} tokens (longest: {})",
    "context": "splits a sequence over as many devices as {} (most: {})",
    "seconds": "has a step as short as {} s (shortest: {} s)",
}


class StepProperties(NamedTuple):
    """Properties of a predicted training step from which the error bounds of the prediction are chosen.

    Attributes:
        experts: True for a mixture-of-experts model.
        architecture: Architecture of the devices, such as "Hopper".
        eight_bit: True for fp8 training.
        engine: Name of the training engine, such as "megatron".
        devices: Number of devices.
        sequence: Tokens of a sequence.
        context: Number of devices that share a sequence (cp).
        seconds: Predicted seconds of the step, without calibration.
        waiting: Fraction of `seconds` in which devices do not compute (exposed communication, bubble, optimizer). Set
            to 1 if cp > 1, as attention is then predicted less well.
    """

    experts: bool
    architecture: str
    eight_bit: bool
    engine: str
    devices: int
    sequence: int
    context: int
    seconds: float
    waiting: float = 1.0

    @classmethod
    def of(cls, problem: Problem, layout: Layout, seconds: float, waiting: float = 1.0) -> StepProperties:
        """Return the properties of a step under a layout for a planning problem. seconds: predicted seconds of the step
        without calibration; waiting: fraction of these seconds in which devices do not compute, 1 if unknown."""
        return cls(
            bool(problem.config.experts), architecture_family(problem.cluster.device.architecture),
            problem.precision == "fp8", problem.engine.name, problem.cluster.devices, problem.sequence, layout.cp,
            seconds, waiting if layout.cp == 1 else 1.0,
        )  # fmt: skip


_PROPERTIES = ("experts", "architecture", "eight_bit")


@dataclass(frozen=True, slots=True)
class RunKind:
    """Statistics of published training runs of one kind, such as dense models on Hopper in fp8. Also used for the runs
    that this project measured with one engine.

    Attributes:
        low, high: Lower and upper quantile of measured / predicted step seconds, scaled as if all steps waited for
            communication. For this project's own runs: smallest and largest ratio.
        runs, projects: Number of runs, and of projects (an organisation with one engine) that published them.
        limits: {property in `LIMITS`: largest value in the runs}; for "seconds" the smallest value.
        experts, architecture, eight_bit: Values of these fields of `StepProperties` in all runs; None if they differ.
    """

    low: float
    high: float
    runs: int
    projects: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)
    experts: bool | None = None
    architecture: str | None = None
    eight_bit: bool | None = None

    def has(self, step: StepProperties) -> bool:
        """Return True if a step is of this kind: `experts`, `architecture` and `eight_bit` are equal, or None in the
        kind."""
        return all(getattr(self, name) in (None, getattr(step, name)) for name in _PROPERTIES)

    @property
    def name(self) -> str:
        """Name of the kind, such as "dense, Hopper, fp8"."""
        words = (
            {None: "", True: "experts", False: "dense"}[self.experts],
            self.architecture or "",
            {None: "", True: "fp8", False: "16 or 32 bits"}[self.eight_bit],
        )
        return ", ".join(filter(None, words)) or "all"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower and upper factor by which the measured seconds of a step may differ from the predicted ones.

    Attributes:
        low, high: Factors on the predicted seconds.
        kind: Published runs from which the factors are computed; None on CPUs and on machines measured by `meshwright
            probe`.
        outside: Lines of text, one for each property of the step that exceeds every run of `kind`.
        widened: True if the factors were widened because of `outside`; False if the engine's own runs are wider
            already.
        engine_published: True if any published run used the step's engine.
        engine_runs: Number of runs of the engine, measured in this project, whose ratios the factors include.
        distance: Sum over `outside` of log2(value / largest value in the runs of `kind`), for the step's seconds of
            log2(smallest value / value). Plus 1 if `kind` mixes architectures, as the device's has too few runs.
    """

    low: float
    high: float
    kind: RunKind | None = None
    outside: tuple[str, ...] = ()
    widened: bool = False
    engine_published: bool = False
    engine_runs: int = 0
    distance: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return {"bounds": table} for `plan --json`; an empty dict if `kind` is None."""
        if self.kind is None:
            return {}
        known = {"kind": self.kind.name, "runs": self.kind.runs, "projects": self.kind.projects}
        engine = {"engine_published": self.engine_published, "engine_runs": self.engine_runs}
        return {"bounds": known | engine | {"outside": list(self.outside), "distance": round(self.distance, 3)}}


@dataclass(frozen=True, slots=True)
class BoundsTable:
    """Content of bounds.toml, from which the bounds of predictions are computed. A bound is a quantile of the published
    runs (`RunKind.low`, `RunKind.high`) raised to an exponent, and a factor.

    Attributes:
        kinds: Kinds of published runs, most specific first.
        engines: Names of all engines that published runs used.
        widen: Relative increase of the exponent for each doubling of a property beyond the runs of the kind, and if the
            kind mixes architectures.
        narrow: Exponent of steps that never wait for communication.
        waiting: Fraction of waiting from which the exponent is 1; below, it falls linearly to `narrow`.
        shift: Factor by which both bounds are wider than the quantiles, for projects that no rate was fitted to.
        own: {engine name: runs measured in this project}.
    """

    kinds: tuple[RunKind, ...]
    engines: frozenset[str]
    widen: float
    narrow: float
    waiting: float
    shift: float = 1.0
    own: Mapping[str, RunKind] = field(default_factory=dict)

    def spread(self, step: StepProperties) -> float:
        """Return the exponent of the bounds of a step whose properties lie within the published runs: between `narrow`
        (the step never waits for communication) and 1."""
        return self.narrow + (1 - self.narrow) * min(1.0, max(0.0, step.waiting) / self.waiting)

    def bounds(self, step: StepProperties) -> Bounds:
        """Return the bounds of a predicted step. They come from the first kind of runs to which the step belongs, and
        are widened for properties that exceed every run of this kind."""
        kind = next(kind for kind in self.kinds if kind.has(step))
        outside: list[str] = []
        distance = 0.0
        if kind.architecture is None:
            distance += 1
            precision = "fp8" if step.eight_bit else "16 or 32 bits"
            what = "mixtures" if step.experts else "dense models"
            outside.append(f"too few published runs of {what} on {step.architecture or 'this device'} in {precision}")
        for name, sign in LIMITS.items():
            value, limit = getattr(step, name), kind.limits[name]
            if sign * value > sign * limit:
                distance += abs(math.log2(value / limit))
                what = _OUTSIDE[name].format(_number(value), _number(limit))
                outside.append(f"no published run ({kind.name}) {what}")
        own, spread = self.own.get(step.engine, RunKind(1.0, 1.0, 0)), self.spread(step)
        least, most = kind.low**spread / self.shift, kind.high**spread * self.shift
        known, (low, high) = (
            (min(least**power, own.low), max(most**power, own.high)) for power in (1.0, 1 + self.widen * distance)
        )
        published = step.engine in self.engines
        return Bounds(low, high, kind, tuple(outside), (low, high) != known, published, own.runs, distance)


def _number(value: float) -> str:
    """Format `value` for text: a whole number with thousands separators, others with three significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


@cache
def read_bounds_table() -> BoundsTable:
    """Return the parsed content of the packaged file bounds.toml; cached."""
    return parse_bounds_table(read_packaged_toml("planner/cost/bounds.toml"))


def parse_bounds_table(table: Mapping[str, Any]) -> BoundsTable:
    """Build the table of the bounds of predicted step times, measured / predicted by kind of run, from the parsed TOML
    of bounds.toml."""
    own = {name: RunKind(**each) for name, each in table.get("own", {}).items()}
    rest = {name: table[name] for name in ("widen", "narrow", "waiting", "shift")} | {"own": own}
    return BoundsTable(tuple(RunKind(**each) for each in table["kinds"]), frozenset(table["engines"]), **rest)


def bound_seconds(cluster: Cluster, step: StepProperties) -> tuple[float, float, float, Bounds]:
    """Return (expected, low, high, bounds): predicted seconds of a step, expected × bounds.low, expected × bounds.high,
    and the bounds themselves. If the cluster has a calibration, it changes all three times.

    The bounds are the range of measured / predicted seconds in published runs of the step's kind. For a machine
    measured by `meshwright probe` they are two constants; the upper constant is raised if other programs used the
    processors during the measurement."""
    calibrated, measured, band = cluster.calibration, cluster.measured, constants()["band"]
    found = read_bounds_table().bounds(step) if measured is None else Bounds(band["low"], band["high"])
    high = found.high / (1 - (measured.disturbed or 0.0 if measured is not None else 0.0))
    if calibrated is None:
        return step.seconds, step.seconds * found.low, step.seconds * high, found
    return *calibrated.bounds(step.seconds, found.low, high), found
