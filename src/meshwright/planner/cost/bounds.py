"""Bounds of predicted step times: factors on the prediction within which measured times are expected, from published
runs.

The logarithms of both factors are sums: each property that makes a step difficult to predict adds to them. These are a
mixture of experts, devices of an architecture with few published runs, an engine that users' own programs drive, few
tokens of a micro-batch on a rank, and the distance from the runs of the step's kind: dense or mixture of experts,
device architecture, fp8 or wider. `bounds.toml` has how much each adds,
fitted to the errors of published runs by quantile regression, and scaled by one factor so that the bounds which other
projects give hold 90 % of a project's runs (conformalised quantile regression: Romano et al. 2019, arXiv:1905.03222,
with scores of left-out projects: Vovk 2015, "Cross-conformal predictors"). `bench/plan_accuracy.py` writes the file,
and tests it by predicting the runs of every project from the runs of the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.rates import architecture_family, constants
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.problem import Problem
from meshwright.toml import read_packaged_toml

LIMITS = {"devices": 1, "sequence": 1, "context": 1, "seconds": -1, "tokens": -1}
"""Properties whose largest (1) or smallest (-1) value among a kind's runs limits the bounds: devices, tokens of a
sequence, devices that share a sequence (cp), step seconds, tokens of a micro-batch on a rank."""
_OUTSIDE = {
    "devices": "no published run ({}) has as many devices as {} (most: {})",
    "sequence": "no published run ({}) has sequences as long as {} tokens (longest: {})",
    "context": "no published run ({}) splits a sequence over as many devices as {} (most: {})",
    "seconds": "no published run ({}) has a step as short as {} s (shortest: {} s)",
    "tokens": "no published run ({}) has as few as {} tokens of a micro-batch on a rank (fewest: {})",
}
WIDEST = 4.0
"""Largest upper factor of bounds, and 1 / smallest lower one. No published run differs more from its prediction;
bounds as wide as this say that the prediction is an order of magnitude only."""
FEW_TOKENS = 4096
"""Tokens of a micro-batch on a rank below which kernels are short, so that what the host does between them counts."""


class StepProperties(NamedTuple):
    """Properties of a predicted training step from which the error bounds of the prediction are chosen.

    Attributes:
        experts: True for a mixture-of-experts model.
        architecture: Architecture of the devices, such as "Hopper".
        eight_bit: True for fp8 training.
        engine: Name of the training engine, such as "megatron".
        user_program: True if the engine's published runs are of users' programs (`Engine.user_programs`).
        devices: Number of devices.
        sequence: Tokens of a sequence.
        context: Number of devices that share a sequence (cp).
        seconds: Predicted seconds of the step, without calibration.
        tokens: Tokens of a micro-batch, divided by the number of ranks that share their computation (cp × tp); at least
            1.
    """

    experts: bool
    architecture: str
    eight_bit: bool
    engine: str
    user_program: bool
    devices: int
    sequence: int
    context: int
    seconds: float
    tokens: int

    @classmethod
    def of(cls, problem: Problem, layout: Layout, seconds: float) -> StepProperties:
        """Return the properties of a step under a layout for a planning problem. seconds: predicted seconds of the step
        without calibration."""
        rows = problem.batch // (layout.dp * layout.micro_batches)
        return cls(
            bool(problem.config.experts), architecture_family(problem.cluster.device.architecture),
            problem.precision == "fp8", problem.engine.name, problem.engine.user_programs, problem.cluster.devices,
            problem.sequence, layout.cp, seconds, max(1, rows * problem.sequence // (layout.cp * layout.tp)),
        )  # fmt: skip

    def measure_difficulty(self, architectures: Collection[str]) -> dict[str, float]:
        """Return {property: value} of what makes the step's time difficult to predict, each 0 for an easy one; "every"
        is 1. architectures: those of which enough projects published runs."""
        return {
            "every": 1.0, "experts": float(self.experts), "few_tokens": float(self.tokens < FEW_TOKENS),
            "unknown_device": float(self.architecture not in architectures), "user_program": float(self.user_program),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunKind:
    """Statistics of published training runs of one kind, such as dense models on Hopper in fp8.

    Attributes:
        runs, projects: Number of runs, and of projects (an organisation with one engine) that published them.
        limits: {property in `LIMITS`: largest value in the runs, or smallest}.
        experts, architecture, eight_bit: Values of these fields of `StepProperties` in all runs; None if they differ.
    """

    runs: int
    projects: int
    limits: Mapping[str, float]
    experts: bool | None = None
    architecture: str | None = None
    eight_bit: bool | None = None

    def has(self, step: StepProperties) -> bool:
        """Return True if a step is of this kind: `experts`, `architecture` and `eight_bit` are equal, or None in the
        kind."""
        return all(getattr(self, key) in (None, getattr(step, key)) for key in ("experts", "architecture", "eight_bit"))

    @property
    def name(self) -> str:
        """Name of the kind, such as "dense, Hopper, fp8"."""
        model = {None: "", True: "experts", False: "dense"}[self.experts]
        precision = {None: "", True: "fp8", False: "16 or 32 bits"}[self.eight_bit]
        return ", ".join(filter(None, (model, self.architecture, precision))) or "all"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower and upper factor by which the measured seconds of a step may differ from the predicted ones.

    Attributes:
        low, high: Factors on the predicted seconds.
        kind: Published runs of the step's kind; None on CPUs and on machines measured by `meshwright probe`.
        outside: Lines of text, one for each property of the step that exceeds every run of `kind`.
        engine_published: True if any published run used the step's engine.
        distance: Sum over `outside` of log2(value / largest value in the runs of `kind`), for the step's seconds of
            log2(smallest value / value). Plus 1 if too few published runs have devices of this architecture.
    """

    low: float
    high: float
    kind: RunKind | None = None
    outside: tuple[str, ...] = ()
    engine_published: bool = False
    distance: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return {"bounds": table} for `plan --json`; an empty dict if `kind` is None."""
        if self.kind is None:
            return {}
        known = {"kind": self.kind.name, "runs": self.kind.runs, "projects": self.kind.projects}
        outside = {"outside": list(self.outside), "distance": round(self.distance, 3)}
        return {"bounds": known | {"engine_published": self.engine_published} | outside}


@dataclass(frozen=True, slots=True)
class BoundsTable:
    """Content of bounds.toml, from which the bounds of predictions are computed.

    Attributes:
        kinds: Kinds of published runs, most specific first.
        engines: Names of all engines that published runs used.
        architectures: Architectures of devices that enough projects published runs of.
        below, above: {property: what it adds to the logarithm of the lower bound, with the opposite sign, and of the
            upper one for each unit of its value}. The properties are those of `StepProperties.measure_difficulty` and
            "beyond": doublings of a property beyond the runs of the kind.
    """

    kinds: tuple[RunKind, ...]
    engines: Collection[str]
    architectures: Collection[str]
    below: Mapping[str, float]
    above: Mapping[str, float]

    def bounds(self, step: StepProperties) -> Bounds:
        """Return the bounds of a predicted step: by its difficulty, and wider for properties that exceed every run of
        the first kind to which it belongs. No factor exceeds `WIDEST`, or is below 1 / `WIDEST`."""
        kind = next(kind for kind in self.kinds if kind.has(step))
        values = step.measure_difficulty(self.architectures) | {"beyond": 0.0}
        unknown = values["unknown_device"]
        outside = [f"too few published runs on {step.architecture or 'this device'}"] if unknown else []
        for name, sign in LIMITS.items():
            value, limit = getattr(step, name), kind.limits[name]
            if sign * value > sign * limit:
                values["beyond"] += abs(math.log2(value / limit))
                outside.append(_OUTSIDE[name].format(kind.name, _number(value), _number(limit)))
        below, above = (
            math.exp(min(sum(side[name] * value for name, value in values.items()), math.log(WIDEST)))
            for side in (self.below, self.above)
        )
        return Bounds(1 / below, above, kind, tuple(outside), step.engine in self.engines, values["beyond"] + unknown)


def _number(value: float) -> str:
    """Format `value` for text: a whole number with thousands separators, others with three significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


@cache
def read_bounds_table() -> BoundsTable:
    """Return the parsed content of the packaged file bounds.toml; cached."""
    return parse_bounds_table(read_packaged_toml("planner/cost/bounds.toml"))


def parse_bounds_table(table: Mapping[str, Any]) -> BoundsTable:
    """Build the table of the bounds of predicted step times from the parsed TOML of bounds.toml."""
    return BoundsTable(**{**table, "kinds": tuple(RunKind(**each) for each in table["kinds"])})


def bound_seconds(cluster: Cluster, step: StepProperties) -> tuple[float, float, float, Bounds]:
    """Return (expected, low, high, bounds): predicted seconds of a step, expected × bounds.low, expected × bounds.high,
    and the bounds themselves. If the cluster has a calibration, it changes all three times.

    The bounds are those of published runs (`BoundsTable`). For a machine measured by `meshwright probe` they are two
    constants; the upper constant is raised if other programs used the processors during the measurement."""
    calibrated, measured, band = cluster.calibration, cluster.measured, constants()["band"]
    found = read_bounds_table().bounds(step) if measured is None else Bounds(band["low"], band["high"])
    high = found.high / (1 - (measured.disturbed or 0.0 if measured is not None else 0.0))
    if calibrated is None:
        return step.seconds, step.seconds * found.low, step.seconds * high, found
    return *calibrated.bounds(step.seconds, found.low, high), found
