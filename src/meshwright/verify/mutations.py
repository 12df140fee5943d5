"""Faults planted at every collective call of a layout, one at a time. A verifier that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.recipe import CollectivesRecipe
from meshwright.verify.compare import compare
from meshwright.verify.problem import Problem
from meshwright.verify.ranks import run_rank
from meshwright.verify.reference import Reference

_SHIFT = "the log of a sum of exponentials does not depend on what is subtracted from all of them"
NEUTRAL: dict[tuple[str, str, str], str] = {
    ("loss.maximum", "all_reduce", kind): f"{_SHIFT}, and all ranks still subtract the same"
    for kind in ("double", "drop", "stale")
}
"""(site, operation, kind) -> why that fault changes nothing. A test holds that these are all."""

POISONED_STEP = 1


def plant_all(
    problem: Problem,
    layout: Layout,
    reference: Callable[..., Reference],
    ranks: LocalRanks,
    log: Callable[[str], None],
    collectives: CollectivesRecipe | None = None,
) -> dict[str, Any]:
    """Every kind of fault at every call site of the layout, at all its calls and at a single one; and a value that is
    not finite on one rank, at which all must skip the step. Returns planted, caught, neutral, missed and faults."""
    report: dict[str, Any] = {"planted": 0, "caught": 0, "neutral": 0, "missed": [], "faults": []}
    healthy = ranks.run(run_rank, problem, str(layout), None, None, collectives)
    for fault in faults_of(healthy[0].calls_first_step, healthy[0].calls):
        results = ranks.run(run_rank, problem, str(layout), fault, None, collectives)
        if not any(result.struck for result in results):
            continue  # a stale result needs an earlier one of the same size
        failure = compare(reference(problem), results, layout).failure
        neutral = NEUTRAL.get((fault.site, fault.operation, fault.kind))
        _note(report, layout, str(fault), failure, neutral, log)
    results = ranks.run(run_rank, problem, str(layout), None, POISONED_STEP, collectives)
    together = compare(reference(problem, frozenset({POISONED_STEP})), results, layout)
    noticed = "all ranks skip the step" if together.passed else None
    _note(report, layout, "a loss that is not a number on one rank", noticed, None, log)
    return report


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
