"""Predicted step times against published runs: mean and median absolute error of every source, skill
against the null model (every run gets its source's median rate), rank correlation, bounds that hold, rows refused.

    python bench/plan_accuracy.py shared/data/measured/training_runs.csv

No constant of the planner is fitted to a run or a source; what it is calibrated on, `planner/cost/rates.toml` says.
Beside the table that is named, `bench/data/published_runs.csv` is priced: runs that chose no rate. The middle of the
bounds is the median of all projects, theirs included; held out, that of the others. Peaks of memory that it has are
compared with what the planner says the allocator holds.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.published_runs import MEMORY, PUBLISHED, Run, runs
from meshwright.collectives.quantities import GIB
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.rates import constants
from meshwright.planner.cost.step_time import StepTime, default_precision, step_time
from meshwright.planner.memory.rank_memory import fullest, slack
from meshwright.planner.problem import Problem
from meshwright.spec.refuse import refuse

Predictions = list[tuple[Run, StepTime]]


def predicted(one: Run) -> StepTime:
    """Of the layout that the planner finds fastest, where the run's own is not known to the last letter."""

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


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks) if len(first) > 2 else float("nan")


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
        "rank_correlation": round(
            spearman([one.rate for one, _ in found], [one.rate * one.seconds / step.seconds for one, step in found]), 4
        ),
        "bounds_hold": round(statistics.mean(step.low <= one.seconds <= step.high for one, step in found), 4),
        "median_high_to_low": round(statistics.median(step.high / step.low for _, step in found), 4),
    }


def measure(path: Path, verbose: bool = False) -> dict[str, Any]:
    """The figures of all sources of a table, of all its runs together, and the same of the published ones."""
    found, refused = priced(path, verbose)
    new, new_refused = priced(PUBLISHED, verbose)
    everything = found | new
    published = figures(new, new_refused, everything) | {"memory": memory(PUBLISHED)}
    return figures(found, refused, everything) | {"published": published}


def priced(path: Path, verbose: bool) -> tuple[dict[str, Predictions], list[str]]:
    """The runs of each source with their predictions, and those that are refused."""
    by_source: dict[str, Predictions] = defaultdict(list)
    refused: list[str] = []
    for one in runs(path):
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


def figures(found: dict[str, Predictions], refused: list[str], everything: dict[str, Predictions]) -> dict[str, Any]:
    """Of each source and of all together; held out against the other projects of `everything`."""
    sources = {source: report(pairs) for source, pairs in found.items()}
    for source, pairs in found.items():
        others = [each for other, each in by_project(everything).items() if other != project(source)]
        sources[source] |= held_out(pairs, others)
    runs_ = [pair for pairs in found.values() for pair in pairs]
    inside = sum(sources[one]["held_out_bounds_hold"] * len(pairs) for one, pairs in found.items())
    return {
        "sources": sources,
        "runs": len(runs_),
        "mean_error": round(statistics.mean(abs(t.seconds / o.seconds - 1) for o, t in runs_), 4),
        "bounds_hold": round(statistics.mean(t.low <= o.seconds <= t.high for o, t in runs_), 4),
        "held_out_bounds_hold": round(inside / len(runs_), 4),
        "refused": refused,
        "share_refused": round(len(refused) / (len(refused) + len(runs_)), 4),
    }


def project(source: str) -> str:
    """Whose runs they are: tables of the same authors hold each other out of nothing."""
    return re.split(r"[@ ,]", source)[0]


def by_project(found: dict[str, Predictions]) -> dict[str, Predictions]:
    together: dict[str, Predictions] = defaultdict(list)
    for source, pairs in found.items():
        together[project(source)] += pairs
    return together


def held_out(found: Predictions, others: list[Predictions]) -> dict[str, Any]:
    """Of a source: the bounds that the other projects alone would give, and how many of its own runs lie between them.
    They are as wide as the planner's (that is a choice, and nothing is fitted for it); around the median of the other
    projects' medians of measured times over predicted ones."""
    if not others:
        return {"held_out_bounds": None, "held_out_bounds_hold": 1.0}
    band = constants()["band"]
    half = math.sqrt(band["high"] / band["low"])
    middle = statistics.median(statistics.median(one.seconds / step.seconds for one, step in runs_) for runs_ in others)
    low, high = middle / half, middle * half
    inside = statistics.mean(low <= one.seconds / step.seconds <= high for one, step in found)
    return {"held_out_bounds": [round(low, 3), round(high, 3)], "held_out_bounds_hold": round(inside, 4)}


def memory(path: Path) -> dict[str, Any]:
    """Of each source the mean error and the bias of what the allocator holds, by the planner: peak and slack."""
    errors: dict[str, list[float]] = defaultdict(list)
    for one in runs(path, (MEMORY,)):
        if isinstance(one, tuple):
            continue
        layout = one.layouts[0].with_(precision=one.layouts[0].precision or default_precision(one.cluster))
        problem = Problem(
            one.config, one.cluster, one.sequence, one.batch, one.engine, one.engine.fusion == "compiled", "adamw",
            str(layout.precision), 1.0, False,
        )  # fmt: skip
        peak = fullest(problem, layout).peak_bytes * (1 + slack(one.cluster))
        errors[one.source].append(peak / GIB / one.memory - 1)
    return {
        source: {
            "runs": len(each),
            "mean_error": round(statistics.mean(map(abs, each)), 4),
            "bias": round(statistics.mean(each), 4),
        }
        for source, each in errors.items()
    }


if __name__ == "__main__":
    from bench.common import write_result

    arguments = [argument for argument in sys.argv[1:] if argument != "-v"]
    where = Path(arguments[0]) if arguments else Path(__file__).parents[2] / "shared/data/measured/training_runs.csv"
    if not where.is_file():
        sys.exit(f"no table of runs at {where}")
    write_result("plan_accuracy", measure(where, verbose="-v" in sys.argv))
