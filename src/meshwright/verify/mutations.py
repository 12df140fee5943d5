"""Faults planted at every collective call of a layout, one at a time. A verifier that cannot fail proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.local import LocalRanks
from meshwright.comm.wrong_groups import other_groups
from meshwright.layout import Layout
from meshwright.recipe import CollectivesRecipe
from meshwright.verify.compare import Comparison, compare
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

    def try_out(problem: Problem, faults: Sequence[Fault]) -> dict[Fault, Comparison]:
        """What came of each fault that struck."""
        return {
            fault: compare(reference(problem), results, layout)
            for fault, results in zip(faults, run(problem, faults), strict=True)
            if any(result.struck for result in results)
        }

    (healthy,) = run(problem, [None])
    short = dataclasses.replace(problem, steps=1)
    for batch in _batches(faults_of(layout, healthy)):
        found = try_out(short, batch)
        # Those that no step showed, and stale results, which need an earlier one of the same size: there may be none.
        again = [f for f in batch if (f.kind == "stale" if f not in found else found[f].step is None)]
        if again:
            found |= try_out(problem, again)
        for fault in batch:
            if fault in found:
                neutral = NEUTRAL.get((fault.site, fault.operation, fault.kind))
                _note(report, layout, str(fault), found[fault].failure, neutral, log)
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


def faults_of(layout: Layout, results: Sequence[RankResult]) -> list[Fault]:
    """What can go wrong with the calls of a run that nothing spoilt: each site and operation, each kind, at all calls
    and in the middle of the first step."""
    faults = []
    calls_first_step, calls = _calls_of_all(results)
    in_first_step = {(call["site"], call["operation"]): call["calls"] for call in calls_first_step}
    for call in calls:
        site, operation = call["site"], call["operation"]
        for kind in KINDS:
            groups: tuple[tuple[int, ...], ...] = ()
            if kind == "wrong group":
                if operation == "transfer":
                    continue  # between two ranks; a message of another micro-batch is a stale one
                alike = [_signature(result, site, operation) for result in results]
                groups = tuple(other_groups(layout, call["axis"], operation != "all_reduce", alike))
                if not groups and operation in ("all_reduce", "rotate"):
                    continue  # the same ranks in another order have the same sum, and make the same ring
            fault = Fault(site, operation, kind, axis=call["axis"], groups=groups)
            faults.append(fault)
            single = in_first_step.get((site, operation), 0)
            if single > 1:
                faults.append(dataclasses.replace(fault, call=single // 2 + 1))
    return faults


def _signature(result: RankResult, site: str, operation: str) -> tuple[tuple[int, int], ...]:
    """How often a rank made these calls, and of how many bytes."""
    return tuple(
        (call["calls"], call["payload_bytes"])
        for call in result.calls
        if (call["site"], call["operation"]) == (site, operation)
    )


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
