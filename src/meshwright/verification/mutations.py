"""Mutation test of the verifier: deliberate bugs (faults) are planted at every collective call of a layout and in local
code, one at a time, and each must be detected."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.recipe import CollectivesRecipe
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.compare import Comparison, compare
from meshwright.verification.local_faults import LOCAL_FAULTS, LocalFault
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import RankResult, run_rank
from meshwright.verification.reference import Reference
from meshwright.verification.wrong_groups import make_wrong_groups

_SHIFT = "log-sum-exp does not depend on the value that is subtracted from all logits"
NEUTRAL: dict[tuple[str, str, str], str] = {
    (site, "all_reduce", kind): f"{_SHIFT}, and all ranks still subtract the same value"
    for site in ("loss.maximum", "distill.maximum")
    for kind in ("double", "drop", "stale")
} | {
    ("validation.loss", "all_reduce", "double"): "loss and targets are summed in one call; their quotient is unchanged",
    ("start.program", "all_reduce", "double"): "equal digests of the pipeline's program stay equal",
}
"""(site, operation, kind) -> reason why the fault changes no result. A test checks that the table is complete."""
NEUTRAL_WHERE_LOSSES_AGREE: dict[tuple[str, str, str], str] = {
    ("validation.loss", "all_reduce", kind): "all ranks have the same quotient of loss and targets before the sum"
    for kind in ("skip", "drop")
}
"""Further neutral faults if every rank holds an equal share of the same loss: all ranks are in one tp group, or, for
preference pairs, one tp x cp group."""

AnyFault = TypeVar("AnyFault", Fault, LocalFault)
SECONDS_OF_A_BATCH = 600.0  # time limit on a busy machine
BATCH = 12  # faults per request to the ranks


def plant_all_faults(
    maker: CaseBuilder,
    reference: Callable[[Problem], Reference],
    ranks: LocalRanks,
    log: Callable[[str], None],
    collectives: CollectivesRecipe | None = None,
    planted: set[tuple[str, ...]] | None = None,
) -> dict[str, Any]:
    """Plant faults (deliberate bugs) one at a time, train with each, and report which of them the verification detects.
    Every kind of fault is planted at every collective call site of the layout, once in all calls of the site and once
    in a single call. Then every fault in local code (`LOCAL_FAULTS`) is planted.

    maker: builds the training problems. reference: returns the single-device results of a problem. ranks: processes
    that train. log: called with a line for each fault. collectives: the recipe's choice of collective algorithms; None:
    the defaults. planted: keys of faults that were already planted on another model and are skipped; the keys of the
    new faults are added to this set. None: no fault is skipped.

    Returns {"planted", "caught", "neutral": numbers of faults, "missed": list of descriptions, "faults": one record per
    fault}. Caught faults were detected. Neutral faults cannot change a result of training (`explain_neutral_fault`).
    Faults that altered no value during training are left out.
    """
    planting = _FaultRuns(maker, reference, ranks, collectives)
    report: dict[str, Any] = {"planted": 0, "caught": 0, "neutral": 0, "missed": [], "faults": []}
    before = set() if planted is None else set(planted)
    for fault, found in planting.run_collective_faults(before):
        neutral = explain_neutral_fault(fault, maker.layout, paired=maker.preference is not None)
        _report_fault(report, maker.layout, str(fault), found.failure, neutral, log)
    for local, found in planting.run_local_faults(before):
        _report_fault(report, maker.layout, str(local), found.failure, None, log)
    if planted is not None:
        planted |= planting.planted
    return report


def explain_neutral_fault(fault: Fault, layout: Layout, paired: bool = False) -> str | None:
    """Return the reason, as text, why a fault in a collective call cannot change any result of training on the layout;
    None if the verification must detect the fault. paired: True if training is on preference pairs."""
    sharing = layout.tp * (layout.cp if paired else 1)
    known = NEUTRAL | (NEUTRAL_WHERE_LOSSES_AGREE if sharing == layout.world_size else {})
    return known.get((fault.site, fault.operation, fault.kind))


class _FaultRuns:
    """Runner that trains one model on one layout with deliberate bugs, one at a time.

    maker: builds the training problems. reference: function (problem) -> single-device results. ranks: processes that
    run the layout's ranks. collectives: the recipe's choice of collective algorithms; None: the defaults. Attribute
    `planted`: keys of the bugs run so far that changed at least one value."""

    def __init__(
        self,
        maker: CaseBuilder,
        reference: Callable[[Problem], Reference],
        ranks: LocalRanks,
        collectives: CollectivesRecipe | None,
    ) -> None:
        """Store the arguments, described in the class; no fault has been run yet."""
        self.maker, self.reference, self.ranks, self.collectives = maker, reference, ranks, collectives
        self.planted: set[tuple[str, ...]] = set()

    def run_collective_faults(self, before: set[tuple[str, ...]]) -> Iterator[tuple[Fault, Comparison]]:
        """Train with each fault that can be planted in a collective call, one at a time. Each fault is first tried with
        one training step; if the comparison does not reveal the fault, it is tried again with all steps of the training
        problem. Yield (fault, comparison with the single-device run) for every fault that altered a value on some rank.
        before: keys (`_make_fault_key`) of faults to leave out."""
        problem = self.maker.make_sgd_problem(layers=3)
        (healthy,) = self._run_with_faults(problem, [None])
        short = dataclasses.replace(problem, steps=1)
        every = [
            fault for fault in list_possible_faults(self.maker.layout, healthy) if _make_fault_key(fault) not in before
        ]
        for batch in _split_into_batches(every):
            found = self._compare_effective(short, batch)
            # All steps for faults that one did not reveal, and for stale results, which need an earlier call.
            again = [f for f in batch if (f.kind == "stale" if f not in found else found[f].step is None)]
            if again:
                found |= self._compare_effective(problem, again)
            yield from ((fault, found[fault]) for fault in batch if fault in found)
            self.planted |= {_make_fault_key(fault) for fault in batch if fault in found}

    def run_local_faults(self, before: set[tuple[str, ...]]) -> Iterator[tuple[LocalFault, Comparison]]:
        """Train with each fault of `LOCAL_FAULTS` (bugs outside collective calls), one at a time. Yield (fault,
        comparison with the single-device run) for every fault that altered a value on some rank. before: keys of faults
        to leave out; the key of a local fault is the tuple (name,)."""
        for case, make in (
            ("updates", lambda: self.maker.make_update_problem(layers=3)),
            ("momentum", self.maker.make_momentum_problem),
            ("dtypes", self.maker.make_dtype_problem),
            ("long sequences", self.maker.make_long_sequence_problem),
        ):
            faults = [
                LocalFault(name) for name, plan in LOCAL_FAULTS.items() if plan.case == case and (name,) not in before
            ]
            for batch in _split_into_batches(faults):
                found = self._compare_effective(make(), batch)
                yield from found.items()
                self.planted |= {(fault.name,) for fault in found}

    def _compare_effective(self, problem: Problem, faults: Sequence[AnyFault]) -> dict[AnyFault, Comparison]:
        """Train on `problem` (model, data, optimizer) once with each fault; return {fault: comparison with the
        single-device run} for the faults that altered a value on some rank."""
        return {
            fault: compare(self.reference(problem), results, self.maker.layout)
            for fault, results in zip(faults, self._run_with_faults(problem, faults), strict=True)
            if any(result.affected_calls for result in results)
        }

    def _run_with_faults(self, problem: Problem, faults: Sequence[Fault | LocalFault | None]) -> list[list[RankResult]]:
        """Train on `problem` (model, data, optimizer) once with each fault (None: without fault); return the results,
        [fault][rank]."""
        with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as directory:
            layout = str(self.maker.layout)
            of_ranks = self.ranks.run(
                run_rank, problem, layout, self.collectives, faults, directory, timeout=SECONDS_OF_A_BATCH
            )
        return [list(results) for results in zip(*of_ranks, strict=True)]


def _split_into_batches(faults: Sequence[AnyFault]) -> Iterator[Sequence[AnyFault]]:
    """Yield the faults in consecutive batches of at most `BATCH`, the number that the ranks run in one request."""
    for start in range(0, len(faults), BATCH):
        yield faults[start : start + BATCH]


def _make_fault_key(fault: Fault) -> tuple[str, ...]:
    """Return the tuple that identifies a fault in a collective call: (call site, operation, kind of fault, flag). The
    flag is "True" if the fault is planted in all calls of the site, else "False"."""
    return fault.site, fault.operation, fault.kind, str(fault.call is None)


def _merge_calls(tables: Iterable[list[dict[str, Any]]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Merge the ranks' records of collective calls; return {(site, operation): record}. The record of the rank with the
    most such calls is taken, since ranks of other pipeline stages may make none. tables: for each rank, its list of
    records ("site", "operation", "calls" ...)."""
    most: dict[tuple[str, str], dict[str, Any]] = {}
    for call in chain.from_iterable(tables):
        key = call["site"], call["operation"]
        if key not in most or call["calls"] > most[key]["calls"]:
            most[key] = call
    return most


def list_possible_faults(layout: Layout, results: Sequence[RankResult]) -> list[Fault]:
    """Return all faults that can be planted in the collective calls of a layout: for each call site, operation and kind
    of fault ("skip", "stale" ...: `KINDS`), one fault that affects every call and, if the first step has several such
    calls, one fault that affects only the middle call. results: results of each rank in a run without fault."""
    faults = []
    in_first_step = _merge_calls(result.calls_first_step for result in results)
    for (site, operation), call in _merge_calls(result.calls for result in results).items():
        single = in_first_step[site, operation]["calls"] if (site, operation) in in_first_step else 0
        for kind in KINDS:
            groups: tuple[tuple[int, ...], ...] = ()
            if kind == "wrong group":
                if operation == "transfer":
                    continue  # a message of the wrong micro-batch is covered by "stale"
                alike = [_get_call_signature(result, site, operation) for result in results]
                groups = tuple(make_wrong_groups(layout, call["axis"], operation != "all_reduce", alike))
                if not groups and operation in ("all_reduce", "rotate"):
                    continue  # reordering the ranks changes neither a sum nor a ring
            fault = Fault(site, operation, kind, axis=call["axis"], groups=groups)
            faults.append(fault)
            if single > 1:
                faults.append(dataclasses.replace(fault, call=single // 2 + 1))
    return faults


def _get_call_signature(result: RankResult, site: str, operation: str) -> tuple[tuple[int, int], ...]:
    """Return the calls of a rank at one call site with one operation, as tuples (number of calls, payload bytes). A
    fault may move a call to other process groups only between ranks with equal results of this function; else a call
    would wait forever for its partner. result: the rank's results."""
    return tuple(
        (call["calls"], call["payload_bytes"])
        for call in result.calls
        if (call["site"], call["operation"]) == (site, operation)
    )


def _report_fault(
    report: dict[str, Any],
    layout: Layout,
    fault: str,
    failure: str | None,
    neutral: str | None,
    log: Callable[[str], None],
) -> None:
    """Add the outcome of one fault ("caught", "neutral" or "missed") to `report` and log it. layout: layout of the run.
    fault: the fault's name; failure: the verifier's message, None if it passed; neutral: reason why the fault changes
    no result, None if it must be caught."""
    report["planted"] += 1
    outcome = "caught" if failure is not None else "neutral" if neutral is not None else "missed"
    if outcome == "missed":
        report["missed"].append(f"{layout}: {fault}")
    else:
        report[outcome] += 1
    reason = failure or neutral or "no difference detected"
    report["faults"].append({"layout": str(layout), "fault": fault, "outcome": outcome, "said": reason})
    log(f"  {fault:<62} {outcome}: {reason}")
