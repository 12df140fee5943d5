"""The best layouts of a model on a cluster: closed forms price the whole space, the ledger and the simulator decide.

Candidates are taken in the order of their closed forms. Each is priced exactly (`estimate.priced`); where the simulator
differs from a schedule's closed form, all candidates of that schedule and number of stages are corrected by as much and
take their new places. The search ends when nothing that is left can be better than what was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import RECOMPUTE
from meshwright.planner.cost.process_groups import Array
from meshwright.planner.problem import Problem
from meshwright.planner.search.decided import Decided, device_bytes, on_device
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.search.screen import Priced, screen
from meshwright.planner.search.selection import describe_losses, fastest_of_kinds
from meshwright.spec.refuse import refuse

FINAL = 20
"""So many are decided by the simulator."""

MOST_TOLD, MOST_LOOKED_AT = 3, 6
"""Fast layouts that do not fit: told of, and priced exactly."""

MOST_CHANGES = 3
"""Most differences between a layout that does not fit and the one suggested in its place."""

MOST_ADVICE = 4
"""Changes of which the ledger is asked, of each number of changes."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A fast layout that does not fit into device memory, and a change that makes it fit.

    layout, seconds, bytes: the layout, its step time, its device memory; change: such as "ac:full", None if none is
    known; instead, instead_seconds: the fastest fitting layout with the fewest differences, and its step time.
    """

    layout: Layout
    seconds: float
    bytes: float
    change: str | None
    instead: Layout | None
    instead_seconds: float | None


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search over all layouts. best: estimates of different kinds of layouts, fastest first; reasons: why
    each is slower than the first; searched: number of layouts; seconds: that the search took.

    differences: relative errors of the closed-form times against the simulator; advice: fast layouts that do not fit;
    priced: closed-form time and memory of all layouts; undecided: number of layouts that may be better, left when the
    search reached its limit of exact predictions.
    """

    problem: Problem
    best: tuple[Estimate, ...]
    reasons: tuple[str, ...]
    searched: int
    seconds: float
    differences: tuple[float, ...] = ()
    advice: tuple[Advice, ...] = ()
    priced: Priced | None = field(default=None, repr=False)
    undecided: int = 0


def search(problem: Problem, top: int = 5) -> Found:
    """Search all layouts of a planning problem; return the up to `top` best that fit and that training accepts (the
    fastest of each kind, then the next fastest), and advice. `best` of the result is empty if none fits."""
    begun = time.perf_counter()
    # What no layout mends: more tokens than there are positions.
    refuse(Layout(), problem.config, 1, problem.sequence, planning=True)
    every = screen(problem)
    if not len(every.candidate):
        raise UserError(_nothing(problem))
    decided = Decided(problem, every, max(top, FINAL))
    differences = tuple(decided.differences)
    best = fastest_of_kinds(decided, top)
    advice = sorted(_advice(decided, best[0].time.seconds if best else np.inf), key=lambda one: one.seconds)
    return Found(
        problem, tuple(best), tuple(describe_losses(best)), len(every.candidate), time.perf_counter() - begun,
        differences, tuple(advice), every, decided.undecided(best, top),
    )  # fmt: skip


def _nothing(problem: Problem) -> str:
    """Return the error line for a planning problem whose batch no layout can divide."""
    devices = problem.cluster.devices
    return (
        f"no layout of {devices} devices can split batch {problem.batch} of sequence {problem.sequence}: each of dp "
        "replicas needs a sequence; use a larger batch or fewer devices"
    )


def _advice(decided: Decided, first: float) -> Iterator[Advice]:
    """Yield advice on the fastest layouts that do not fit, if faster than `first` seconds, each with another tp, cp, pp
    or recompute."""
    problem, every, room = decided.problem, decided.every, decided.room
    fit = on_device(problem, every.bytes) <= room
    expected = decided.expected()
    told = np.where(fit, np.inf, expected)
    columns = _columns(problem, every)
    found = 0
    for _ in range(MOST_LOOKED_AT):
        at = int(told.argmin())
        if told[at] >= first or found == MOST_TOLD:
            return
        layout = decided.layout(at)
        if not decided.takes(layout):
            told[at] = np.inf
            continue
        seconds = decided.seconds(at, layout)
        if seconds >= first:  # as may be all of its kind
            told[decided.kinds == decided.kinds[at]] *= seconds / told[at]
            told[at] = np.inf
            continue
        told[_alike(columns, at, "tp", "cp", "pp", "recompute")] = np.inf
        if (size := device_bytes(problem, layout)) <= room:
            continue
        found += 1
        chosen = _find_change(decided, columns, at, fit, expected)
        if chosen is None:
            yield Advice(layout, seconds, size, None, None, None)
        else:
            instead = decided.layout(chosen)
            changes = [_CHANGES[name](instead) for name in columns if columns[name][chosen] != columns[name][at]]
            change = " and ".join(dict.fromkeys(changes))
            yield Advice(layout, seconds, size, change, instead, decided.seconds(chosen, instead))


def _find_change(decided: Decided, columns: Mapping[str, Array], at: int, fit: Array, expected: Array) -> int | None:
    """Return the index of the fastest fitting candidate with the fewest differences from candidate `at`; None if there
    is none with up to three.

    columns: properties of all candidates; fit: whether each may fit; expected: seconds of each.
    """
    unlike = np.asarray(sum((column != column[at]).astype(np.int8) for column in columns.values()))
    for changes in range(1, MOST_CHANGES + 1):
        near = np.flatnonzero(fit & (unlike == changes))
        for each in near[np.argsort(expected[near])][:MOST_ADVICE].tolist():
            if decided.fits(decided.layout(each)):
                return int(each)
    return None


def _alike(columns: Mapping[str, Array], at: int, *names: str) -> Array:
    """Return a mask of the candidates that equal candidate `at` (index) in the columns `names`, such as "tp"."""
    return np.asarray(np.logical_and.reduce([columns[name] == columns[name][at] for name in names]))


_CHANGES: dict[str, Callable[[Layout], str]] = {
    "recompute": lambda one: f"ac:{one.recompute}",
    "zero": lambda one: f"zero{one.zero}" + (f" hs{one.hybrid}" if one.hybrid else ""),
    "rows": lambda one: f"mb{one.micro_batches}",
    "schedule": lambda one: f"pp{one.pp}{one._format_schedule()}",
    "tp": lambda one: f"tp{one.tp}",
    "cp": lambda one: f"cp{one.cp}",
    "pp": lambda one: f"pp{one.pp}",
    "experts": lambda one: f"ep{one.ep}:etp{one.etp}",
    "sequence": lambda one: "sequence-parallel norms" if one.tensor_sequence_parallel else "tp:nosp",
}


def _columns(problem: Problem, every: Priced) -> dict[str, Array]:
    """Return the properties in which candidates may differ as arrays over all candidates, by name ("tp", "zero"
    ...)."""

    def of_way(get: Any) -> Array:
        """Return a property of each candidate's stage layout as an array."""
        return np.array([get(one) for one in every.candidates])[every.candidate]

    def of_pipe(get: Any) -> Array:
        """Return a property of each candidate's pipeline as an array."""
        return np.array([get(pipe) for pipe in every.pipes])[every.pipe]

    schedules = dict[tuple[str, int], int]()
    return {
        "tp": of_way(lambda way: way.layout.tp), "cp": of_way(lambda way: way.layout.cp),
        "pp": of_pipe(lambda pipe: pipe.ranks), "rows": of_way(lambda way: way.rows),
        "recompute": of_way(lambda way: RECOMPUTE.index(way.layout.recompute)),
        "zero": every.zero * 2 + (every.hybrid > 0),
        "schedule": of_pipe(lambda pipe: schedules.setdefault((pipe.schedule, pipe.chunks), len(schedules))),
        "sequence": of_way(lambda way: way.layout.tensor_sequence_parallel * 2 + (way.layout.cp_method == "ring")),
        "experts": of_way(lambda way: way.layout.ep * 1000 + way.layout.etp),
    }  # fmt: skip
