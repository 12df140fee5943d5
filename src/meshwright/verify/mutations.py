"""Faults planted at every collective call of a layout, one at a time. A verifier that cannot fail proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.recipe import CollectivesRecipe
from meshwright.verify.compare import compare
from meshwright.verify.problem import Problem
from meshwright.verify.ranks import RankResult, run_rank
from meshwright.verify.reference import Reference

_SHIFT = "the log of a sum of exponentials does not depend on what is subtracted from all of them"
NEUTRAL: dict[tuple[str, str, str], str] = {
    ("loss.maximum", "all_reduce", kind): f"{_SHIFT}, and all ranks still subtract the same"
    for kind in ("double", "drop", "stale")
}
"""(site, operation, kind) -> why that fault changes nothing. A test holds that these are all."""

POISONED_STEP = 1
BATCH = 16  # faults for which the ranks are asked at once


def plant_all(
    problem: Problem,
    layout: Layout,
    reference: Callable[..., Reference],
    ranks: LocalRanks,
    log: Callable[[str], None],
    collectives: CollectivesRecipe | None = None,
) -> dict[str, Any]:
    """Every kind of fault at every call site of the layout, at all its calls and at a single one; and a value that is
    not finite on one rank, at which all must skip the step. Returns planted, caught, neutral, missed and faults.

    Most faults show after one step; the others get all the steps of the problem.
    """
    report: dict[str, Any] = {"planted": 0, "caught": 0, "neutral": 0, "missed": [], "faults": []}

    def run(problem: Problem, faults: Sequence[Fault | None], poison: int | None = None) -> list[list[RankResult]]:
        """By fault, then by rank."""
        of_ranks = ranks.run(run_rank, problem, str(layout), collectives, faults, poison)
        return [list(results) for results in zip(*of_ranks, strict=True)]

    def try_out(problem: Problem, faults: Sequence[Fault]) -> Iterator[tuple[Fault, bool, str | None]]:
        """Each fault, whether it struck, and what was noticed."""
        for fault, results in zip(faults, run(problem, faults), strict=True):
            struck = any(result.struck for result in results)
            yield fault, struck, compare(reference(problem), results, layout).failure if struck else None

    (healthy,) = run(problem, [None])
    short = dataclasses.replace(problem, steps=1)
    for batch in _batches(faults_of(*_calls_of_all(healthy))):
        found: dict[Fault, str | None] = {
            fault: failure for fault, _, failure in try_out(short, batch) if failure is not None
        }
        silent = [fault for fault in batch if fault not in found]
        # A stale result needs an earlier one of the same size: where there is none in all steps, there is none such.
        if silent:
            found |= {fault: failure for fault, struck, failure in try_out(problem, silent) if struck}
        for fault in batch:
            if fault in found:
                neutral = NEUTRAL.get((fault.site, fault.operation, fault.kind))
                _note(report, layout, str(fault), found[fault], neutral, log)
    (results,) = run(problem, [None], POISONED_STEP)
    together = compare(reference(problem, frozenset({POISONED_STEP})), results, layout)
    noticed_by = "all ranks skip the step" if together.passed else None
    _note(report, layout, "a loss that is not a number on one rank", noticed_by, None, log)
    return report


def _calls_of_all(results: Sequence[RankResult]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls of the first step and of all steps: of each kind those of the rank that makes the most (ranks of other
    stages may make none)."""
    found: list[list[dict[str, Any]]] = []
    for tables in ([result.calls_first_step for result in results], [result.calls for result in results]):
        most: dict[tuple[str, str], dict[str, Any]] = {}
        for call in (call for table in tables for call in table):
            key = call["site"], call["operation"]
            if key not in most or call["calls"] > most[key]["calls"]:
                most[key] = call
        found.append(list(most.values()))
    return found[0], found[1]


def _batches(faults: list[Fault]) -> Iterator[list[Fault]]:
    """Some at a time, so that who waits sees what is going on."""
    for start in range(0, len(faults), BATCH):
        yield faults[start : start + BATCH]


def faults_of(calls_first_step: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[Fault]:
    """What can go wrong with these calls: each site and operation, each kind, at all calls and in the middle of the
    first step."""
    faults = []
    in_first_step = {(call["site"], call["operation"]): call["calls"] for call in calls_first_step}
    for call in calls:
        site, operation = call["site"], call["operation"]
        for kind in KINDS:
            faults.append(Fault(site, operation, kind))
            single = in_first_step.get((site, operation), 0)
            if single > 1:
                faults.append(Fault(site, operation, kind, call=single // 2 + 1))
    return faults


def _note(
    report: dict[str, Any],
    layout: Layout,
    fault: str,
    failure: str | None,
    neutral: str | None,
    log: Callable[[str], None],
) -> None:
    report["planted"] += 1
    outcome = "caught" if failure is not None else "neutral" if neutral is not None else "missed"
    if outcome == "missed":
        report["missed"].append(f"{layout}: {fault}")
    else:
        report[outcome] += 1
    said = failure or neutral or "nothing was noticed"
    report["faults"].append({"layout": str(layout), "fault": fault, "outcome": outcome, "said": said})
    log(f"  {fault:<62} {outcome}: {said}")
