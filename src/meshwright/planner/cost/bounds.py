"""Bounds of predicted step times: within which factors of their predictions published runs of a kind are, and how far a
request is from all of them.

A kind is dense or with experts, an architecture of devices, and a width (fp8 or 16 and 32 bits). `bounds.toml` has for
each the quantiles of measured over predicted seconds of published runs (every source weighs the same), and what its
runs were. `bench/plan_accuracy.py` writes the file, and tests it: of every project by the runs of the others.

The quantiles guarantee no coverage, as those of a conformal predictor would: the rates were fitted to most of these
runs, and the share that the quantiles leave outside was chosen by the coverage that came out. No published run has the
engine `meshwright`: its bounds also span this repository's own measurements (`EngineRuns`).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.rates import architecture_family, constants
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.problem import Problem

LIMITS = {"devices": 1, "sequence": 1, "context": 1, "seconds": -1}
"""Properties of runs whose largest (1) or smallest (-1) value limits the known ground of a kind: devices, tokens of a
sequence, devices that share one (cp), step seconds."""
_UNITS = {"devices": "devices", "sequence": "tokens a sequence", "context": "devices a sequence", "seconds": "s a step"}


class StepProperties(NamedTuple):
    """What decides the bounds of a predicted step: experts (True for mixtures), architecture (such as "Hopper"),
    eight_bit (True in fp8), engine (its name), devices, sequence (tokens), context (devices that share a sequence),
    seconds (predicted)."""

    experts: bool
    architecture: str
    eight_bit: bool
    engine: str
    devices: int
    sequence: int
    context: int
    seconds: float

    @classmethod
    def of(cls, problem: Problem, layout: Layout, seconds: float) -> StepProperties:
        """Return the request of a layout of a planning problem. seconds: predicted without calibration."""
        return cls(
            bool(problem.config.experts), architecture_family(problem.cluster.device.architecture),
            problem.precision == "fp8", problem.engine.name, problem.cluster.devices, problem.sequence, layout.cp,
            seconds,
        )  # fmt: skip


_PROPERTIES = ("experts", "architecture", "eight_bit")


@dataclass(frozen=True, slots=True)
class RunKind:
    """Published runs of a kind.

    Attributes:
        experts, architecture, eight_bit: Of a request; None where runs of all are together.
        low, high: Factors on predicted seconds, between which measured ones are.
        runs, projects: How many runs, of how many projects: an organisation with one engine.
        limits: The largest of its runs in each of `LIMITS`, or the smallest.
    """

    low: float
    high: float
    runs: int
    projects: int
    limits: Mapping[str, float] = field(default_factory=dict)
    experts: bool | None = None
    architecture: str | None = None
    eight_bit: bool | None = None

    def has(self, one: StepProperties) -> bool:
        """Return True if a request is of this kind."""
        return all(getattr(self, name) in (None, getattr(one, name)) for name in _PROPERTIES)

    @property
    def name(self) -> str:
        """Such as "dense, Hopper, fp8"."""
        words = (
            {None: "", True: "experts", False: "dense"}[self.experts],
            self.architecture or "",
            {None: "", True: "fp8", False: "16 or 32 bits"}[self.eight_bit],
        )
        return ", ".join(filter(None, words)) or "all"


class EngineRuns(NamedTuple):
    """Measurements of an engine that no published run has. low, high: the least and the most measured over predicted
    seconds; runs: their number."""

    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Factors on predicted seconds of a step between which measured ones are expected.

    Attributes:
        low, high: The factors.
        kind: The published runs that they are from, None where `probe` has measured the machine, and on CPUs.
        outside: Lines that say in what a request is outside of those runs, for which the factors are wider.
        engine_published: True if any published run had the request's engine.
        engine_runs: Number of further measurements of the engine, which the factors span too.
    """

    low: float
    high: float
    kind: RunKind | None = None
    outside: tuple[str, ...] = ()
    engine_published: bool = False
    engine_runs: int = 0

    def document(self) -> dict[str, Any]:
        """Return the JSON entry `bounds` of `plan --json`; empty without kind."""
        if self.kind is None:
            return {}
        known = {"kind": self.kind.name, "runs": self.kind.runs, "projects": self.kind.projects}
        engine = {"engine_published": self.engine_published, "engine_runs": self.engine_runs}
        return {"bounds": known | engine | {"outside": list(self.outside)}}


@dataclass(frozen=True, slots=True)
class BoundsTable:
    """Kinds of published runs, the narrowest first, and the engines that any of the runs had; `widen`: share by which
    the bounds (as logarithms) widen for each limit that is doubled, and for a kind without runs; `own`: runs of engines
    that were measured here."""

    kinds: tuple[RunKind, ...]
    engines: frozenset[str]
    widen: float
    own: Mapping[str, EngineRuns] = field(default_factory=dict)

    def bounds(self, one: StepProperties) -> Bounds:
        """Return the bounds of a request."""
        kind = next(kind for kind in self.kinds if kind.has(one))
        outside: list[str] = []
        wider = 1.0
        if kind.architecture is None:
            wider += self.widen
            precision = "fp8" if one.eight_bit else "16 or 32 bits"
            what = "mixtures" if one.experts else "dense models"
            outside.append(f"too few published runs of {what} on {one.architecture or 'this device'} in {precision}")
        for name, sign in LIMITS.items():
            value, limit = getattr(one, name), kind.limits[name]
            if sign * value > sign * limit:
                wider += self.widen * abs(math.log2(value / limit))
                most = "most" if sign > 0 else "least"
                outside.append(f"{_number(value)} {_UNITS[name]}; published runs have {_number(limit)} at {most}")
        low, high = (factor**wider for factor in (kind.low, kind.high))
        own = self.own.get(one.engine, EngineRuns(low, high, 0))
        low, high = min(low, own.low), max(high, own.high)
        return Bounds(low, high, kind, tuple(outside), one.engine in self.engines, own.runs)


def _number(value: float) -> str:
    """Format a whole number in full, and others to three digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


@cache
def read_bounds_table() -> BoundsTable:
    """Return the table of bounds.toml."""
    text = resources.files("meshwright.planner.cost").joinpath("bounds.toml").read_text(encoding="utf-8")
    return parse_bounds_table(tomllib.loads(text))


def parse_bounds_table(table: Mapping[str, Any]) -> BoundsTable:
    """Return the parsed content of bounds.toml."""
    kinds = [RunKind(**each) for each in table["kinds"]]
    own = {name: EngineRuns(**each) for name, each in table.get("own", {}).items()}
    return BoundsTable(tuple(kinds), frozenset(table["engines"]), table["widen"], own)


def find_bounds(cluster: Cluster, one: StepProperties) -> Bounds:
    """Return the bounds of a request: those of published runs of its kind; on CPUs and where `probe` has measured the
    machine, constants."""
    if cluster.kind == "cpu" or cluster.measured is not None:
        band = constants()["band"]
        return Bounds(band["low"], band["high"])
    return read_bounds_table().bounds(one)


def bound_seconds(cluster: Cluster, one: StepProperties) -> tuple[float, float, float, Bounds]:
    """Return (expected, low, high) seconds of a step on a cluster, calibrated, and the bounds behind them. If other
    programs disturbed the machine's measurement, the upper bound is for a run that they disturb as much."""
    found, calibrated = find_bounds(cluster, one), cluster.calibration
    busy = 0.0 if cluster.measured is None else cluster.measured.disturbed or 0.0
    high = found.high / (1 - busy)
    if calibrated is None:
        return one.seconds, one.seconds * found.low, one.seconds * high, found
    return *calibrated.bounds(one.seconds, found.low, high), found
