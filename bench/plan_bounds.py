"""Bounds of predicted step times from published runs, for `src/meshwright/planner/cost/bounds.toml`: how errors grow
with the difficulty of a step, every project with the same weight, scaled so that bounds hold runs to which no rate was
fitted (conformal prediction with normalised scores).
"""

from __future__ import annotations

import json
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
from meshwright.planner.api import plan
from meshwright.planner.cost.bounds import LIMITS, BoundsTable, StepProperties, parse_bounds_table
from meshwright.planner.cost.step_time import StepTime, problem_for
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe

Pair = tuple[Run, StepTime]
BOUNDS = Path(__file__).parents[1] / "src" / "meshwright" / "planner" / "cost" / "bounds.toml"
COVERED = 0.9
"""Share of a new project's runs that the bounds hold, if it is like those whose sources no rate was fitted to."""
KNOWN = ("development", "fresh", "fresh-2")
"""Parts of unseen_runs.csv that give bounds; no rate was fitted to them. The part "test" decides nothing."""
HELD_BACK = ("MaxText", "PaxML", "Kubernetes", "Llama 3", "NVIDIA/NeMo docs")
"""How the names of sources begin that no constant of the planner was fitted to, beside those of unseen_runs.csv."""
WIDEN = 0.25
LEAST_PROJECTS, LEAST_RUNS = 3, 15
RIDGE, LEAST_ERROR = 0.05, 0.005
"""Penalty on coefficients, which keeps what few projects show small; smallest error (of the logarithm) in the fit. The
penalty was chosen, as the properties that `StepProperties.measure_difficulty` lists, by the coverage and width of
bounds that only other projects gave."""
ASKED = ("experts", "architecture", "eight_bit")
TOGETHER = (ASKED, ("experts", "eight_bit"), ("experts",), ())
"""Sets of properties that define kinds of runs, the narrowest kinds first. Each run belongs to one of the last two:
mixtures form one kind as long as too few projects have published any."""
ORGANISATIONS = {
    "NVIDIA": ("NVIDIA", "docs.nvidia.com", "MaxText", "PaxML", "Megatron", "Reducing Activation"),
    "Meta": ("pytorch", "Llama 3"),
}
"""How the names of the sources of an organisation begin, which has several."""
MEASURED = Path(__file__).parent / "results" / "gpu_plan.json"
"""This repository's own steps on one H100, written by bench/gpu/plan_on_gpu.py."""
MEASURED_MODEL = {
    "family": "llama", "tied": True, "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 8, "intermediate": 2816,
    "vocabulary": 32000,
}  # fmt: skip
"""Model of the measured steps, on batches of 8 sequences of 2,048 tokens: `SHAPE` of bench/gpu/plan_on_gpu.py."""


def project(one: Run) -> str:
    """Return whose run it is: the organisation and the engine. Tables of one organisation for one engine are not
    independent of each other, and are left out together."""
    source = one.source
    organisation = next((name for name, begin in ORGANISATIONS.items() if source.startswith(begin)), None)
    return f"{organisation or re.split(r'[@ ,/]', source)[0]}, {one.engine.name}"


def request(one: Run, step: StepTime) -> StepProperties:
    """Return what decides the bounds of a run."""
    return _properties(one, step.seconds)


@cache
def _properties(one: Run, seconds: float) -> StepProperties:
    layout = one.layouts[0]
    problem = problem_for(one.config, layout, one.cluster, one.sequence, one.batch, engine=one.engine)
    return StepProperties.of(problem, layout, seconds)


def fit_spread(properties: np.ndarray, sizes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the coefficients b [properties] of expected sizes exp(x b): a gamma regression with a logarithmic link, by
    Fisher scoring (McCullagh and Nelder 1989, section 8), with the penalty `RIDGE` on all but the first, which alone
    may be negative: no difficulty makes a bound narrower.

    properties: x [runs, properties], 1 in the first column; sizes [runs]: of errors, above 0; weights [runs], of sum
    1."""
    penalty = RIDGE * np.eye(properties.shape[1])
    penalty[0, 0] = 0.0
    found = np.zeros(properties.shape[1])
    found[0] = math.log(float(weights @ sizes))
    curvature = properties.T @ (weights[:, None] * properties) + penalty
    for _ in range(200):
        gradient = properties.T @ (weights * (1 - sizes * np.exp(-properties @ found))) + penalty @ found
        free = (found > 0) | (gradient < 0)
        free[0] = True
        step = np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
        found[free] -= np.clip(step, -0.5, 0.5)
        found[1:] = np.maximum(found[1:], 0.0)
    return found


def spreads(pairs: list[Pair]) -> dict[str, dict[str, float]]:
    """Return the coefficients of both bounds (`BoundsTable.below`, `above`): fitted to the errors of all runs, and
    scaled by one factor so that bounds hold those to which no rate was fitted."""
    architectures = known_architectures(pairs)
    asked = [request(one, step) for one, step in pairs]
    values = [each.measure_difficulty(each.architecture not in architectures) for each in asked]
    logarithms = np.array([math.log(one.seconds / step.seconds) for one, step in pairs])
    runs_of = Counter(project(one) for one, _ in pairs)
    weights = np.array([1 / runs_of[project(one)] / len(runs_of) for one, _ in pairs])
    properties = np.array([list(each.values()) for each in values])
    sides = {
        name: fit_spread(properties, np.maximum(sign * logarithms, 0) + LEAST_ERROR, weights)
        for name, sign in (("below", -1), ("above", 1))
    }
    below, above = (np.exp(properties @ each) for each in sides.values())
    scores = np.maximum(-logarithms / below, logarithms / above)
    factor = conformal_factor(
        [(project(one), float(score)) for (one, _), score in zip(pairs, scores, strict=True) if unfitted(one)]
    )
    for each in sides.values():
        each[0] += math.log(factor)
    return {name: dict(zip(values[0], map(float, each.round(3)), strict=True)) for name, each in sides.items()}


def unfitted(one: Run) -> bool:
    """Return True for a run to whose source no rate was fitted."""
    return one.source.startswith(HELD_BACK) or one.source in _known_sources()


@cache
def _known_sources() -> frozenset[str]:
    return frozenset(source for part in KNOWN for source in sources(UNSEEN, part))


def conformal_factor(scored: list[tuple[str, float]]) -> float:
    """Return the factor of both logarithms by split conformal prediction: the quantile `COVERED` (n + 1) / n of the
    scores of n projects, each with the same weight. Projects, not runs, are what a new one is exchangeable with.

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
    found = {(request(one, step).architecture, project(one)) for one, step in pairs}
    projects = Counter(architecture for architecture, _ in found)
    return sorted(name for name, count in projects.items() if count >= LEAST_PROJECTS)


def kinds(pairs: Iterable[Pair]) -> Iterator[dict[str, Any]]:
    """Yield the kinds of enough runs and projects, the narrowest first; the last has all. pairs: runs, predictions."""
    asked = [(project(one), request(one, step)) for one, step in pairs]
    for fields in TOGETHER:
        alike: dict[tuple[Any, ...], list[tuple[str, StepProperties]]] = defaultdict(list)
        for whose, each in asked:
            alike[tuple(getattr(each, name) for name in fields)].append((whose, each))
        for values, members in sorted(alike.items()):
            projects = len({whose for whose, _ in members})
            if len(fields) > 1 and (projects < LEAST_PROJECTS or len(members) < LEAST_RUNS):
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
    """The content of bounds.toml, without this repository's own runs."""
    engines = sorted({one.engine.name for one, _ in pairs})
    known = {"widen": WIDEN, "engines": engines, "architectures": known_architectures(pairs)}
    return known | spreads(pairs) | {"kinds": list(kinds(pairs))}


def own_ratios() -> dict[str, float]:
    """Return measured over predicted seconds of every own step, as the planner predicts it now without a probe."""
    recipe = Recipe.from_tables(
        {
            "layout": "dp1",
            "model": MEASURED_MODEL,
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": 2048},
            "train": {"steps": 1, "batch": 8, "learning_rate": 1e-3},
        }
    )
    config = config_from_recipe(recipe.model, 2048, 32000)
    found = {}
    for name, run in json.loads(MEASURED.read_text(encoding="utf-8"))["runs"].items():
        asked = plan(config, "1xh100-sxm", run["layout"], sequence=2048, batch=8, compile=run["compiled"])
        found[name] = run["seconds"] / asked.best.time.seconds
    return found


def own() -> dict[str, dict[str, Any]]:
    """Return the least and the most measured over predicted seconds of the engine `meshwright`."""
    ratios = own_ratios().values()
    low, high = math.floor(min(ratios) * 1000) / 1000, math.ceil(max(ratios) * 1000) / 1000
    return {"meshwright": {"low": low, "high": high, "runs": len(ratios)}}


def table(pairs: list[Pair]) -> BoundsTable:
    """The bounds that these runs give."""
    return parse_bounds_table(content(pairs))


def write(pairs: list[Pair]) -> None:
    """Write bounds.toml."""
    found = content(pairs)
    lines = [
        "# Factors on predicted seconds between which measured ones are expected, from published runs: written by",
        "# bench/plan_accuracy.py --bounds, explained in bounds.py. limits: the runs' largest; of seconds and tokens",
        "# the least; own: runs of this repository.",
        *(f"{name} = {text(found[name])}" for name in ("widen", "engines", "architectures", "below", "above")),
        *(f"own.{name} = {text(each)}" for name, each in own().items()),
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
