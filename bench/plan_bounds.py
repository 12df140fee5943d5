"""Bounds of predicted step times from published runs, for `src/meshwright/planner/cost/bounds.toml`: quantiles of
measured over predicted seconds by kind of run, every source with the same weight, and one factor that makes them hold
for runs to which no rate was fitted (conformal prediction).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.published_runs import UNSEEN, Run, sources
from meshwright.planner.api import plan
from meshwright.planner.cost.bounds import LIMITS, BoundsTable, StepProperties, parse_bounds_table
from meshwright.planner.cost.step_time import StepTime, problem_for
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe

Pair = tuple[Run, StepTime]
BOUNDS = Path(__file__).parents[1] / "src" / "meshwright" / "planner" / "cost" / "bounds.toml"
OUTSIDE = 0.1
"""Share of runs that quantiles leave outside, before `conformal_shift` widens them."""
COVERED = 0.9
"""Share of a new project's runs that the bounds hold, if it is like those whose sources no rate was fitted to."""
HELD_BACK = ("MaxText", "PaxML", "Kubernetes", "Llama 3", "NVIDIA/NeMo docs")
"""How the names of sources begin that no constant of the planner was fitted to, beside those of unseen_runs.csv."""
WIDEN = 0.25
NARROW, WAITING = 0.6, 0.02
"""Exponent of the bounds of steps that wait for nothing, and the share of waiting from which it is 1: chosen, as
`OUTSIDE`, by the coverage and width of bounds that only other projects gave."""
LEAST_PROJECTS, LEAST_RUNS = 3, 15
SPREAD = BoundsTable((), frozenset(), WIDEN, NARROW, WAITING)
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
    layout = one.layouts[0]
    problem = problem_for(one.config, layout, one.cluster, one.sequence, one.batch, engine=one.engine)
    return StepProperties.of(problem, layout, step.seconds, 1 - step.breakdown["compute"] / step.seconds)


def scores(pairs: list[Pair]) -> list[tuple[str, float]]:
    """Return, of every run that no rate was fitted to, its project and the least factor by which both bounds have to be
    wider to hold the run: the bounds that the runs of all other projects give."""
    development = sources(UNSEEN, "development") | sources(UNSEEN, "fresh")
    unfitted = [pair for pair in pairs if pair[0].source.startswith(HELD_BACK) or pair[0].source in development]
    found = []
    for whose in sorted({project(one) for one, _ in unfitted}):
        others = table([pair for pair in pairs if project(pair[0]) != whose], 1.0)
        for one, step in unfitted:
            if project(one) == whose:
                bounds, ratio = others.bounds(request(one, step)), one.seconds / step.seconds
                found.append((whose, max(ratio / bounds.high, bounds.low / ratio)))
    return found


def conformal_shift(scored: list[tuple[str, float]], without: str | None = None) -> float:
    """Return the factor of both bounds by split conformal prediction: the quantile `COVERED` (n + 1) / n of the scores
    of n projects, each with the same weight. Projects, not runs, are what a new one is exchangeable with.

    scored: project and score of each run (`scores`); without: project that is left out. Of fewer
    than 9 projects the result is the largest score, which covers less."""
    runs_of = Counter(whose for whose, _ in scored if whose != without)
    ordered = sorted((score, whose) for whose, score in scored if whose != without)
    passed = accumulate(1 / runs_of[whose] for _, whose in ordered)
    needed = COVERED * (len(runs_of) + 1)
    factors = (score for (score, _), weight in zip(ordered, passed, strict=True) if weight >= needed)
    return max(1.0, next(factors, max(ordered, default=(1.0, ""))[0]))


def quantiles(ratios: list[float], weights: list[float]) -> tuple[float, float]:
    """The ratios between which 1 - `OUTSIDE` of the weight is, half of the rest on each side; 1 is between them."""
    rest, total, found = OUTSIDE / 2, sum(weights), []
    for ordered in (sorted(zip(ratios, weights, strict=True)), sorted(zip(ratios, weights, strict=True), reverse=True)):
        passed = 0.0
        for ratio, weight in ordered:
            passed += weight / total
            if passed > rest:
                found.append(ratio)
                break
    return min(found[0], 1.0), max(found[1], 1.0)


def pooled(runs: list[tuple[Run, StepTime, StepProperties]]) -> tuple[float, float]:
    """Return the quantiles of measured over predicted seconds, as if all steps waited, every source with equal
    weight."""
    runs_of = Counter(one.source for one, *_ in runs)
    ratios = [(one.seconds / step.seconds) ** (1 / SPREAD.spread(each)) for one, step, each in runs]
    return quantiles(ratios, [1 / runs_of[one.source] for one, *_ in runs])


def kinds(pairs: Iterable[Pair]) -> Iterator[dict[str, Any]]:
    """Yield the kinds of enough runs and projects, the narrowest first; the last has all. Quantiles are halfway to
    those of all dense models or of all mixtures: their own, of few projects, hold less of a new one. pairs: runs,
    predictions."""
    asked = [(one, step, request(one, step)) for one, step in pairs]
    pools = {experts: [each for each in asked if each[2].experts == experts] for experts in (False, True)}
    bounds = {experts: pooled(each if len(each) >= LEAST_RUNS else asked) for experts, each in pools.items()}
    bounds[None] = pooled(asked)
    for fields in TOGETHER:
        alike: dict[tuple[Any, ...], list[tuple[Run, StepTime, StepProperties]]] = defaultdict(list)
        for each in asked:
            alike[tuple(getattr(each[2], name) for name in fields)].append(each)
        for values, members in sorted(alike.items()):
            projects = len({project(one) for one, *_ in members})
            if len(fields) > 1 and (projects < LEAST_PROJECTS or len(members) < LEAST_RUNS):
                continue
            pool = bounds[values[fields.index("experts")] if "experts" in fields else None]
            low, high = (math.sqrt(a * b) for a, b in zip(pool, pooled(members), strict=True))
            limits = {
                name: sign * max(sign * getattr(each, name) for *_, each in members) for name, sign in LIMITS.items()
            }
            yield dict(zip(fields, values, strict=True)) | {
                "low": math.floor(low * 1000) / 1000,
                "high": math.ceil(high * 1000) / 1000,
                "runs": len(members),
                "projects": projects,
                "limits": limits | {"seconds": math.floor(limits["seconds"] * 1000) / 1000},
            }


def content(pairs: list[Pair], shift: float) -> dict[str, Any]:
    """The content of bounds.toml. shift: factor of both bounds (`conformal_shift`)."""
    engines = sorted({one.engine.name for one, _ in pairs})
    constants = {"widen": WIDEN, "narrow": NARROW, "waiting": WAITING, "shift": math.ceil(shift * 1000) / 1000}
    return constants | {"engines": engines, "own": own(), "kinds": list(kinds(pairs))}


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


def table(pairs: list[Pair], shift: float) -> BoundsTable:
    """The bounds that these runs give. shift: factor of both."""
    return parse_bounds_table(content(pairs, shift))


def write(pairs: list[Pair]) -> None:
    """Write bounds.toml."""
    found = content(pairs, conformal_shift(scores(pairs)))
    lines = [
        "# Factors on predicted seconds between which measured ones of published runs are, by kind of run: written by",
        "# bench/plan_accuracy.py --bounds, explained in bounds.py. limits: the runs' largest; of seconds the least;",
        "# own: runs of this repository.",
        *(f"{name} = {found[name]}" for name in ("widen", "narrow", "waiting", "shift")),
        f"engines = [{', '.join(map(text, found['engines']))}]",
        *(f"own.{name} = {text(each)}" for name, each in found["own"].items()),
    ]
    for kind in found["kinds"]:
        lines += ["", "[[kinds]]", *(f"{name} = {text(value)}" for name, value in kind.items())]
    BOUNDS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {text(each)}" for name, each in value.items()) + " }"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
