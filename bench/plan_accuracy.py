"""Predicted step times against published runs: mean and median absolute error of every source, skill
against the null model (every run gets its source's median rate), rank correlation, bounds that hold, rows refused.

    python bench/plan_accuracy.py [--bounds] [-v] shared/data/measured/training_runs.csv

In addition to the table that is named, `bench/data/published_runs.csv` and `unseen_runs.csv` are priced. What the
planner's constants are fitted to, `planner/cost/rates.toml` says; `HELD_BACK` are sources that no constant was fitted
to, though four were chosen with them in sight (sum of attention's times, its flash-2 rates, overlap tax across, ramp of
pairs).
Of each source, the share of runs whose memory is predicted to fit is counted: all of them ran.
The bounds of a source are tested by those that the runs of all other projects give (`held_out`), also by kind of run.
`--bounds` first writes the planner's bounds from all runs but those of the parts "test-2" and "test-3" of
`unseen_runs.csv`, which decide nothing. Peaks of memory that the tables have are compared with what the planner says
the allocator holds.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench import plan_bounds
from bench.plan_bounds import HELD_BACK, project, request
from bench.published_runs import MEMORY, PUBLISHED, UNSEEN, Run, runs
from meshwright.collectives.quantities import GIB
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.bounds import Bounds, BoundsTable, read_bounds_table
from meshwright.planner.cost.step_time import StepTime, default_precision, step_time
from meshwright.planner.memory.ledger import Ledger
from meshwright.planner.memory.rank_memory import fullest_rank, slack_fraction
from meshwright.planner.problem import Problem
from meshwright.spec.refuse import refuse
from meshwright.toml import read_packaged_toml

Predictions = list[tuple[Run, StepTime]]
LEAST_OF_A_SWEEP = 3
Bounded = dict[str, list[Bounds]]


def predicted(one: Run) -> StepTime:
    """Return the predicted step time of a run; where its layout is published only in part, that of the fastest layout
    that agrees with it."""

    def priced(layout: Layout, simulate: bool) -> StepTime:
        refuse(layout, one.config, one.batch, one.sequence, one.cluster.devices, planning=True)
        return step_time(one.config, layout, one.cluster, one.sequence, one.batch, engine=one.engine, simulate=simulate)

    if len(one.layouts) == 1:
        return priced(one.layouts[0], True)
    found: list[tuple[float, Layout]] = []
    for layout in one.layouts:
        try:
            found.append((priced(layout, False).seconds, layout))
        except UserError:
            continue
    if not found:
        raise UserError(f"{one.name}: none of its layouts can be priced")
    return priced(min(found, key=lambda pair: pair[0])[1], True)


def spearman(first: list[float], second: list[float]) -> float | None:
    """Rank correlation; None for fewer than three pairs."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return round(statistics.correlation(*ranks), 4) if len(first) > 2 else None


def report(found: Predictions) -> dict[str, Any]:
    """The figures of one source."""
    errors = [abs(step.seconds / one.seconds - 1) for one, step in found]
    signed = [step.seconds / one.seconds - 1 for one, step in found]
    median = statistics.median(one.rate for one, _ in found)
    null = [abs(one.rate / median - 1) for one, _ in found]
    mean = statistics.mean(errors)
    return {
        "runs": len(found),
        "mean_error": round(mean, 4),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "bias": round(statistics.mean(signed), 4),
        "null_error": round(statistics.mean(null), 4),
        "skill": round(1 - mean / statistics.mean(null), 4) if any(null) else None,
        "rank_correlation": spearman(
            [one.rate for one, _ in found], [one.rate * one.seconds / step.seconds for one, step in found]
        ),
        "bounds_hold": round(statistics.mean(step.low <= one.seconds <= step.high for one, step in found), 4),
        "fit": round(statistics.mean(fits(one) for one, _ in found), 4),
        "median_high_to_low": round(statistics.median(step.high / step.low for _, step in found), 4),
    }


def measure(path: Path, verbose: bool = False, bounds: bool = False) -> dict[str, Any]:
    """The figures of all sources of a table, of all its runs together, and the same of the published ones."""
    tables = [priced(path, verbose), priced(PUBLISHED, verbose)]
    unseen = {part: priced(UNSEEN, verbose, part) for part in (*plan_bounds.KNOWN, *plan_bounds.APART)}
    deciding = [*tables, *(unseen[part] for part in plan_bounds.KNOWN)]
    everything = {source: pairs for found, _ in deciding for source, pairs in found.items()}
    if bounds:
        plan_bounds.write([pair for pairs in everything.values() for pair in pairs])
        read_packaged_toml.cache_clear()
        read_bounds_table.cache_clear()
        return measure(path)
    apart = {source: pairs for part in plan_bounds.APART for source, pairs in unseen[part][0].items()}
    left_out = held_out(everything, everything | apart)
    given, new = (figures(found, refused, left_out) for found, refused in tables)
    known = {source: pairs for found, _ in tables for source, pairs in found.items()}
    back = {source: pairs for source, pairs in known.items() if source.startswith(HELD_BACK)}
    unfitted = {source: pairs for source, pairs in everything.items() if plan_bounds.unfitted(pairs[0][0])}
    return given | {
        "published": new | {"memory": memory(PUBLISHED)},
        "together": summary(known, left_out),
        "held_back": summary(back, left_out),
        "giving_bounds": summary(everything, left_out),
        "giving_bounds_unfitted": summary(unfitted, left_out),
        "kinds": by_kind(everything, left_out),
        "sweeps": sweeps(known),
        "unseen": {
            name: found
            for part, (pairs, refused) in unseen.items()
            for name, found in (
                (part.replace("-", "_"), figures(pairs, refused, left_out) | {"memory": memory(UNSEEN, part)}),
                (f"{part.replace('-', '_')}_kinds", by_kind(pairs, left_out)),
            )
        },
    }


def priced(path: Path, verbose: bool, half: str | None = None) -> tuple[dict[str, Predictions], list[str]]:
    """The runs of each source, or of those of one half, with their predictions, and those that are refused."""
    by_source: dict[str, Predictions] = defaultdict(list)
    refused: list[str] = []
    for one in runs(path, half=half):
        if isinstance(one, tuple):
            refused.append(", ".join(one))
            continue
        try:
            step = predicted(one)
        except UserError as error:
            refused.append(f"{one.source}, {one.name}: {error}")
            continue
        by_source[one.source].append((one, step))
        if verbose:
            parts = " ".join(f"{part} {seconds:.3g}" for part, seconds in step.breakdown.items() if seconds)
            print(
                f"{one.name:18} {one.layouts[0]!s:54} {one.cluster.devices:5}x{one.cluster.device.name:9} "
                f"s{one.sequence:<6} measured {one.seconds:8.3f} predicted {step.seconds:8.3f} "
                f"{step.seconds / one.seconds - 1:+.1%}  {parts}",
                file=sys.stderr,
            )
    return by_source, refused


def figures(found: dict[str, Predictions], refused: list[str], left_out: Bounded) -> dict[str, Any]:
    """Return the errors and coverage of each source, and of all sources together."""
    runs_ = sum(map(len, found.values()))
    sources = {source: report(pairs) | coverage(pairs, left_out[source]) for source, pairs in found.items()}
    return (
        {"sources": sources, "runs": runs_}
        | summary(found, left_out)
        | {"refused": refused, "share_refused": round(len(refused) / (len(refused) + runs_), 4)}
    )


def summary(found: dict[str, Predictions], left_out: Bounded) -> dict[str, Any]:
    """Return the mean error over runs and over sources (mean of their mean errors), and the share of runs within
    bounds."""
    errors = [[abs(step.seconds / one.seconds - 1) for one, step in pairs] for pairs in found.values()]
    pairs = [pair for pairs in found.values() for pair in pairs]
    return {
        "runs": len(pairs),
        "mean_error": round(statistics.mean(chain.from_iterable(errors)), 4),
        "mean_error_of_sources": round(statistics.mean(map(statistics.mean, errors)), 4),
        "bounds_hold": round(statistics.mean(step.low <= one.seconds <= step.high for one, step in pairs), 4),
    } | coverage(pairs, [each for source in found for each in left_out[source]])


def held_out(everything: dict[str, Predictions], judged: dict[str, Predictions] | None = None) -> Bounded:
    """Return, by source, the bounds of the runs `judged`, by default of `everything`, computed from those runs of
    `everything` that other projects published."""
    found: Bounded = {}
    tables: dict[str, BoundsTable] = {}
    for source, pairs in (everything if judged is None else judged).items():
        whose = project(pairs[0][0])
        if whose not in tables:
            others = [pair for each in everything.values() for pair in each if project(pair[0]) != whose]
            tables[whose] = plan_bounds.table(others)
        found[source] = [tables[whose].bounds(request(one, step)) for one, step in pairs]
    return found


def coverage(pairs: Predictions, bounds: list[Bounds]) -> dict[str, Any]:
    """The share of runs between bounds that their own project had no part in, its mean over projects, and how wide
    these are."""
    holds = [
        each.low <= one.seconds / step.seconds <= each.high for (one, step), each in zip(pairs, bounds, strict=True)
    ]
    of_projects: dict[str, list[bool]] = defaultdict(list)
    for (one, _), held in zip(pairs, holds, strict=True):
        of_projects[project(one)].append(held)
    return {
        "held_out_bounds_hold": round(statistics.mean(holds), 4),
        "held_out_bounds_hold_of_projects": round(statistics.mean(map(statistics.mean, of_projects.values())), 4),
        "held_out_high_to_low": round(statistics.median(each.high / each.low for each in bounds), 4),
    }


def by_kind(everything: dict[str, Predictions], left_out: Bounded) -> dict[str, Any]:
    """Return mean error and held-out bounds by kind of run: dense model or mixture, architecture and precision."""
    kinds: dict[str, tuple[Predictions, list[Bounds]]] = defaultdict(lambda: ([], []))
    for source, pairs in everything.items():
        for (one, step), bounds in zip(pairs, left_out[source], strict=True):
            asked = request(one, step)
            name = ("experts" if asked.experts else "dense", asked.architecture, "fp8" if asked.eight_bit else "bf16")
            predictions, bounded = kinds[", ".join(name)]
            predictions.append((one, step))
            bounded.append(bounds)
    return {
        name: {
            "runs": len(pairs),
            "projects": len({project(one) for one, _ in pairs}),
            "mean_error": round(statistics.mean(abs(step.seconds / one.seconds - 1) for one, step in pairs), 4),
        }
        | coverage(pairs, bounds)
        for name, (pairs, bounds) in sorted(kinds.items())
    }


def sweeps(everything: dict[str, Predictions]) -> list[dict[str, Any]]:
    """Return, for each model, cluster and batch with at least `LEAST_OF_A_SWEEP` measured layouts, the fastest layout,
    the one predicted to be fastest, and by which fraction that one took longer."""
    alike: dict[tuple[Any, ...], Predictions] = defaultdict(list)
    for pairs in everything.values():
        for one, step in pairs:
            if one.layouts[0].world_size > 1 and one.engine.fusion != "compiled":
                setting = one.config, one.cluster.device.name, one.cluster.devices, one.sequence, one.batch
                alike[project(one), *setting].append((one, step))
    found = []
    for pairs in alike.values():
        if len({str(one.layouts[0]) for one, _ in pairs}) < LEAST_OF_A_SWEEP:
            continue
        fastest, predicted_fastest = (min(pairs, key=key)[0] for key in (_measured, _predicted))
        found.append(
            {
                "source": fastest.source,
                "model": fastest.name,
                "devices": fastest.cluster.devices,
                "layouts": len(pairs),
                "fastest": str(fastest.layouts[0]),
                "predicted_fastest": str(predicted_fastest.layouts[0]),
                "longer": round(predicted_fastest.seconds / fastest.seconds - 1, 4),
                "rank_correlation": spearman(*([key(pair) for pair in pairs] for key in (_measured, _predicted))),
            }
        )
    return found


def _measured(pair: tuple[Run, StepTime]) -> float:
    return pair[0].seconds


def _predicted(pair: tuple[Run, StepTime]) -> float:
    return pair[1].seconds


def fullest(one: Run, layout: Layout) -> tuple[Ledger, Problem]:
    """Return the memory of a run's fullest rank under one of its layouts, and the planning problem."""
    layout = layout.with_(precision=layout.precision or default_precision(one.cluster))
    problem = Problem(
        one.config, one.cluster, one.sequence, one.batch, one.engine, one.engine.fusion == "compiled", "adamw",
        str(layout.precision), 1.0, False,
    )  # fmt: skip
    return fullest_rank(problem, layout), problem


def fits(one: Run) -> bool:
    """Return True if the memory of any layout that the run may have had is predicted to fit; each run did fit."""
    found = (fullest(one, layout) for layout in one.layouts)
    return any(rank.device_bytes <= problem.usable_bytes for rank, problem in found)


def memory(path: Path, half: str | None = None) -> dict[str, Any]:
    """Return, by source, mean error and bias of the predicted allocator peak (peak and slack)."""
    errors: dict[str, list[float]] = defaultdict(list)
    for one in runs(path, (MEMORY,), half):
        if isinstance(one, tuple):
            continue
        peak = fullest(one, one.layouts[0])[0].peak_bytes * (1 + slack_fraction(one.cluster))
        errors[one.source].append(peak / GIB / one.memory - 1)
    return {
        source: {
            "runs": len(each),
            "mean_error": round(statistics.mean(map(abs, each)), 4),
            "median_error": round(statistics.median(map(abs, each)), 4),
            "bias": round(statistics.mean(each), 4),
        }
        for source, each in errors.items()
    }


if __name__ == "__main__":
    from bench.common import write_result

    arguments = [argument for argument in sys.argv[1:] if argument not in ("-v", "--bounds")]
    where = Path(arguments[0]) if arguments else Path(__file__).parents[2] / "shared/data/measured/training_runs.csv"
    if not where.is_file():
        sys.exit(f"no table of runs at {where}")
    write_result("plan_accuracy", measure(where, verbose="-v" in sys.argv, bounds="--bounds" in sys.argv))
