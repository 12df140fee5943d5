"""Bounds of predicted step times from published runs, for `src/meshwright/planner/cost/bounds.toml`: how errors grow
with the difficulty of a step, every project's dense models and mixtures with the same weight, scaled so that bounds
hold runs of projects to which they were not fitted (cross-conformal prediction).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bench.published_runs import UNSEEN, Run, sources
from meshwright.planner.cost.bounds import LIMITS, BoundsTable, StepProperties, parse_bounds_table
from meshwright.planner.cost.step_time import StepTime, problem_for

Pair = tuple[Run, StepTime]
BOUNDS = Path(__file__).parents[1] / "src" / "meshwright" / "planner" / "cost" / "bounds.toml"
COVERED = 0.9
"""Share of a new project's runs that the bounds hold, if it is like the others."""
KNOWN = ("development", "test", "fresh", "fresh-2", "fresh-3", "fresh-4")
"""Parts of unseen_runs.csv that give bounds; few rates were fitted to them."""
APART = ("test-2", "test-3")
"""Parts of unseen_runs.csv that decide nothing."""
HELD_BACK = ("MaxText", "PaxML", "Kubernetes", "Llama 3", "NVIDIA/NeMo docs")
"""Beginnings of names of sources to which no constant was fitted, other than those of unseen_runs.csv."""
WIDEN = 0.8
"""Addition to the logarithm of a bound for each doubling beyond the runs of a kind, as a fraction of an easy step's: a
choice, as too few projects have runs that far from the others'."""
LEAST_PROJECTS = 3
"""Projects from whose runs an architecture is known."""
LEAST_OF_A_KIND, LEAST_RUNS = 6, 15
"""Projects and runs of a kind: fewer say little of how far known ground reaches, and their limits would be near."""
RIDGE = 0.02
"""Penalty on coefficients, which keeps what few projects show small. It was chosen, as the properties that
`StepProperties.measure_difficulty` lists, by the coverage and width of bounds that only other projects gave."""
LEAST = 0.01
"""Smallest logarithm of a bound of an easy step, and residual below which the fit's loss is no longer steep."""
ASKED = ("experts", "architecture", "eight_bit")
TOGETHER = (ASKED, ("experts", "eight_bit"), ("experts",), ())
"""Sets of properties that define kinds of runs, the narrowest kinds first. Each run belongs to one of the last two:
mixtures form one kind as long as too few projects have published any."""
ORGANISATIONS = {
    "NVIDIA": ("NVIDIA", "docs.nvidia.com", "MaxText", "PaxML", "Megatron", "Reducing Activation"),
    "Meta": ("pytorch", "Llama 3"),
}
"""How the names of the sources of an organisation begin, which has several."""


def project(one: Run) -> str:
    """Return whose run it is: the organisation and the engine. Tables of one organisation for one engine are not
    independent of each other, and are left out together."""
    source = one.source
    organisation = next((name for name, begin in ORGANISATIONS.items() if source.startswith(begin)), None)
    engine = one.engine.name.removesuffix("-eager")  # the same recipes, with CUDA graphs or without
    return f"{organisation or re.split(r'[@ ,/]', source)[0]}, {engine}"


def request(one: Run, step: StepTime) -> StepProperties:
    """Return what decides the bounds of a run."""
    return _properties(one, step.seconds)


@cache
def _properties(one: Run, seconds: float) -> StepProperties:
    layout = one.layouts[0]
    problem = problem_for(one.config, layout, one.cluster, one.sequence, one.batch, engine=one.engine)
    return StepProperties.of(problem, layout, seconds)


def fit_quantile(properties: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the coefficients b [fits, properties], none negative, with which x b is the quantile (1 + `COVERED`) / 2
    of the errors: quantile regression (Koenker and Bassett 1978) by iteratively reweighted least squares, with the
    penalty `RIDGE` on all but the first coefficient. No difficulty makes a bound narrower.

    properties: x [runs, properties], 1 in the first column; errors [runs]; weights [fits, runs], of each fit of sum 1
    and 0 for runs that it leaves out."""
    quantile = (1 + COVERED) / 2
    fits, size = len(weights), properties.shape[1]
    penalty = RIDGE * np.eye(size)
    penalty[0, 0] = 0.0
    products = (properties[:, :, None] * properties[:, None, :]).reshape(len(properties), -1)
    found, open_fits = np.zeros((fits, size)), np.arange(fits)
    for _ in range(60):
        rest = errors - found[open_fits] @ properties.T
        steep = weights[open_fits] * np.where(rest > 0, quantile, 1 - quantile) / np.maximum(np.abs(rest), LEAST)
        curvature = (steep @ products).reshape(-1, size, size) + penalty
        after = _solve_without_negative(curvature, (steep * errors) @ properties)
        moved = np.abs(after - found[open_fits]).max(axis=1)
        found[open_fits] = after
        open_fits = open_fits[moved >= 1e-4]
        if not len(open_fits):
            break
    found[:, 0] = np.maximum(found[:, 0], LEAST)
    return found


def _solve_without_negative(matrices: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return solutions [fits, size] of `matrices` [fits, size, size] x = `targets` [fits, size], in which the most
    negative coefficient is set to 0 until none but the first is negative; `fit_quantile` raises the first."""
    free = np.ones(targets.shape, bool)
    while True:
        kept = np.where(free[:, :, None] & free[:, None, :], matrices, np.eye(targets.shape[1]))
        found = np.linalg.solve(kept, np.where(free, targets, 0.0)[..., None])[..., 0]
        worst = 1 + np.argmin(found[:, 1:], axis=1)
        negative = np.flatnonzero(found[np.arange(len(found)), worst] < 0)
        if not len(negative):
            return found
        free[negative, worst[negative]] = False


class Errors:
    """Errors of runs, and bounds that fit those of some projects."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.asked = [request(one, step) for one, step in pairs]
        self.architectures = np.array([each.architecture for each in self.asked])
        self.logarithms = np.array([math.log(one.seconds / step.seconds) for one, step in pairs])
        self.projects = np.array([project(one) for one, _ in pairs])
        self.weighed = np.array([f"{project(one)}, {bool(one.config.experts)}" for one, _ in pairs])

    def fit(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what each set of runs `chosen` [fits, runs] gives: the coefficients [fits, properties] of the lower
        and the upper bound, and the properties [fits, runs, properties] of all runs, of which the devices are known
        from those chosen alone."""
        weights = np.zeros(chosen.shape)
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, each in enumerate(chosen):
            runs_of = Counter(self.weighed[each])
            weights[number, each] = [1 / runs_of[which] / len(runs_of) for which in self.weighed[each]]
            alike[_known(set(zip(self.architectures[each], self.projects[each], strict=True)))].append(number)
        fitted: dict[int, tuple[np.ndarray, ...]] = {}
        for known, numbers in alike.items():
            values = (each.measure_difficulty(known).values() for each in self.asked)
            properties = np.array([list(each) for each in values])
            sides = (fit_quantile(properties, sign * self.logarithms, weights[numbers]) for sign in (-1, 1))
            for number, below, above in zip(numbers, *sides, strict=True):
                fitted[number] = below, above, properties
        below, above, properties = map(np.array, zip(*(fitted[number] for number in range(len(chosen))), strict=True))
        return below, above, properties

    def score(self) -> list[tuple[str, float]]:
        """Return project and score of each run: by how much the logarithms of the bounds that all other projects' runs
        give have to be multiplied to hold it. Empty if there is one project only."""
        names = sorted(set(self.projects))
        if len(names) < 2:
            return []
        left_out = np.array([self.projects == whose for whose in names])
        found: list[tuple[str, float]] = []
        for whose, out, below, above, properties in zip(names, left_out, *self.fit(~left_out), strict=True):
            errors = self.logarithms[out]
            scores = np.maximum(-errors / (properties[out] @ below), errors / (properties[out] @ above))
            found += [(whose, float(score)) for score in scores]
        return found


def spreads(pairs: list[Pair]) -> dict[str, dict[str, float]]:
    """Return the coefficients of both bounds (`BoundsTable.below`, `above`): fitted to the errors of all runs, scaled
    by one factor so that bounds hold the runs of projects to which they were not fitted, and rounded up."""
    errors = Errors(pairs)
    factor = conformal_factor(errors.score())
    (below,), (above,), _ = errors.fit(np.ones((1, len(pairs)), bool))
    names = errors.asked[0].measure_difficulty(())
    found = {}
    for side, each in (("below", below), ("above", above)):
        found[side] = dict(zip(names, factor * each, strict=True)) | {"beyond": WIDEN * factor * each[0]}
    return {
        side: {name: math.ceil(round(value * 1000, 6)) / 1000 for name, value in values.items()}
        for side, values in found.items()
    }


def unfitted(one: Run) -> bool:
    """Return True for a run to whose source no rate was fitted."""
    return one.source.startswith(HELD_BACK) or one.source in _known_sources()


@cache
def _known_sources() -> frozenset[str]:
    return frozenset(source for part in KNOWN for source in sources(UNSEEN, part))


def conformal_factor(scored: list[tuple[str, float]]) -> float:
    """Return the factor of both logarithms by conformal prediction: the quantile `COVERED` (n + 1) / n of the scores of
    n projects, each with the same weight. Projects, not runs, are what a new one is exchangeable with.

    scored: project and score of each run: the factor by which the logarithm of a bound has to be larger to hold the
    run. Of fewer than 9 projects the result is the largest score, which covers less; of none it is 1."""
    runs_of = Counter(whose for whose, _ in scored)
    ordered = sorted((score, whose) for whose, score in scored)
    passed = accumulate(1 / runs_of[whose] for _, whose in ordered)
    needed = COVERED * (len(runs_of) + 1)
    factors = (score for (score, _), weight in zip(ordered, passed, strict=True) if weight >= needed)
    return next(factors, max(ordered, default=(1.0, ""))[0])


def known_architectures(pairs: Iterable[Pair]) -> list[str]:
    """Return the architectures of devices of which at least `LEAST_PROJECTS` projects published runs."""
    return list(_known({(request(one, step).architecture, project(one)) for one, step in pairs}))


def _known(found: set[tuple[str, str]]) -> tuple[str, ...]:
    """Return the architectures that are in at least `LEAST_PROJECTS` of the pairs (architecture, project)."""
    projects = Counter(architecture for architecture, _ in found)
    return tuple(sorted(name for name, count in projects.items() if count >= LEAST_PROJECTS))


def kinds(pairs: Iterable[Pair]) -> Iterator[dict[str, Any]]:
    """Yield the kinds of enough runs and projects, the narrowest first; the last has all. pairs: runs, predictions."""
    asked = [(project(one), request(one, step)) for one, step in pairs]
    for fields in TOGETHER:
        alike: dict[tuple[Any, ...], list[tuple[str, StepProperties]]] = defaultdict(list)
        for whose, each in asked:
            alike[tuple(getattr(each, name) for name in fields)].append((whose, each))
        for values, members in sorted(alike.items()):
            projects = len({whose for whose, _ in members})
            if len(fields) > 1 and (projects < LEAST_OF_A_KIND or len(members) < LEAST_RUNS):
                continue
            limits = {
                name: sign * max(sign * getattr(each, name) for _, each in members) for name, sign in LIMITS.items()
            }
            limits["seconds"] = math.floor(limits["seconds"] * 1000) / 1000
            yield dict(zip(fields, values, strict=True)) | {
                "runs": len(members),
                "projects": projects,
                "limits": limits,
            }


def content(pairs: list[Pair]) -> dict[str, Any]:
    """The content of bounds.toml."""
    engines = sorted({one.engine.name for one, _ in pairs})
    known = {"engines": engines, "architectures": known_architectures(pairs)}
    return known | spreads(pairs) | {"kinds": list(kinds(pairs))}


def table(pairs: list[Pair]) -> BoundsTable:
    """The bounds that these runs give."""
    return parse_bounds_table(content(pairs))


def write(pairs: list[Pair]) -> None:
    """Write bounds.toml."""
    found = content(pairs)
    lines = [
        "# Factors on predicted seconds between which measured ones are expected, from published runs: written by",
        "# bench/plan_accuracy.py --bounds, explained in bounds.py. limits: the runs' largest; of seconds and tokens",
        "# the least.",
        *(f"{name} = {text(found[name])}" for name in ("engines", "architectures", "below", "above")),
    ]
    for kind in found["kinds"]:
        lines += ["", "[[kinds]]", *(f"{name} = {text(value)}" for name, value in kind.items())]
    BOUNDS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {text(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
