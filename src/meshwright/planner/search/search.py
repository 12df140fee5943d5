"""Search for the best layouts of a model on a cluster: closed forms predict the whole space, then the ledger and the
simulator predict the best candidates exactly.

Candidates are predicted exactly in the order of their closed forms. Where the simulator differs from a schedule's
closed form, all candidates of that schedule and number of stages are corrected by the same factor and reordered. The
search ends when no remaining candidate can be better than those found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.communication import Array
from meshwright.planner.cost.step_time import PARTS
from meshwright.planner.memory.rank_memory import peak_device_bytes
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.search.screen import ScreenedLayouts, screen
from meshwright.planner.search.shortlist import Shortlist, add_device_overhead
from meshwright.spec.refuse import refuse

FINAL = 20
"""Number of the fastest candidates whose step time the simulator computes."""

MOST_ADVISED, MOST_LOOKED_AT = 3, 6
"""Maximum numbers of fast layouts that do not fit: to report, and to predict exactly for it."""

MOST_CHANGES = 3
"""Most differences between a layout that does not fit and the one suggested in its place."""

MOST_ADVICE = 4
"""Number of suggested layouts whose memory the ledger computes, for each number of changes."""


MOST_KINDS = 12
"""Number of kinds of which the fastest layout is listed; further layouts of a longer list are the next fastest of any
kind."""


@dataclass(frozen=True, slots=True)
class TooLargeLayout:
    """A fast layout that does not fit into device memory, and a change of the layout that makes it fit.

    Attributes:
        layout, seconds, bytes: The layout that does not fit; its seconds of a step; the bytes that it needs on a
            device.
        change: Change that makes it fit, such as "ac:full"; None if none is known.
        instead, instead_seconds: The layout after the change, and its seconds of a step; None if no change is known. Of
            the layouts that fit with the fewest changes, it is the fastest.
    """

    layout: Layout
    seconds: float
    bytes: float
    change: str | None
    instead: Layout | None
    instead_seconds: float | None

    def document(self) -> dict[str, Any]:
        """Return the JSON entry that `meshwright plan --json` prints for this layout."""
        return {
            "layout": str(self.layout), "step_seconds": self.seconds, "change": self.change,
            "instead": None if self.instead is None else str(self.instead),
            "instead_step_seconds": self.instead_seconds,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search over all layouts of a planning problem.

    Attributes:
        problem: The planning problem.
        best: Estimates of the best layouts, fastest first.
        reasons: For each of `best`, text on why it is slower than the first.
        searched: Number of layouts searched.
        seconds: Duration of the search.
        screened: Closed-form time and memory of all layouts.
        differences: Relative errors of closed-form step times against the simulator.
        advice: Fast layouts that do not fit.
        undecided: Number of layouts that may be faster than the last of `best`, but were not predicted exactly because
            the search reached its limit.
    """

    problem: Problem
    best: tuple[Estimate, ...]
    reasons: tuple[str, ...]
    searched: int
    seconds: float
    screened: ScreenedLayouts = field(repr=False)
    differences: tuple[float, ...] = ()
    advice: tuple[TooLargeLayout, ...] = ()
    undecided: int = 0

    def document(self) -> dict[str, Any]:
        """Return the entries of a search in `meshwright plan --json`, except the list of the best layouts."""
        return {
            "searched": self.searched, "search_seconds": self.seconds, "undecided": self.undecided,
            "too_large": [one.document() for one in self.advice],
        }  # fmt: skip


def search(problem: Problem, top: int = 5) -> SearchResult:
    """Search all layouts of a planning problem for the fastest layouts that fit and that training accepts. The result's
    list `best` has up to `top` layouts: the fastest of each kind of layout (`layout_kinds`), then the next fastest of
    all kinds; it is empty if no layout fits."""
    begun = time.perf_counter()
    # No layout can fix this: more tokens than positions.
    refuse(Layout(), problem.config, 1, problem.sequence, planning=True)
    every = screen(problem)
    if not len(every.candidate):
        raise UserError(
            f"no layout of {problem.cluster.devices} devices can split batch {problem.batch} of sequence "
            f"{problem.sequence}: each of dp replicas needs a sequence; use a larger batch or fewer devices"
        )
    shortlist = Shortlist(problem, every, max(top, FINAL))
    differences = tuple(shortlist.difference[at] for _, at, _ in shortlist.best)
    best = fastest_of_kinds(shortlist, top)
    advice = sorted(_advice(shortlist, best[0].time.seconds if best else np.inf), key=lambda one: one.seconds)
    return SearchResult(
        problem, tuple(best), tuple(describe_losses(best)), len(every.candidate), time.perf_counter() - begun,
        every, differences, tuple(advice), shortlist.undecided(best, top),
    )  # fmt: skip


def _advice(shortlist: Shortlist, first: float) -> Iterator[TooLargeLayout]:
    """Yield fast layouts that do not fit, fastest first, each with a change that makes it fit if there is one. Their
    steps take less than `first` seconds. At most `MOST_ADVISED` are yielded; they differ from each other in tp, cp, pp
    or recompute. shortlist: candidates of the search."""
    problem, every, room = shortlist.problem, shortlist.every, shortlist.room
    fit = add_device_overhead(problem, every.bytes) <= room
    expected = shortlist.expected()
    remaining = np.where(fit, np.inf, expected)
    columns = {names: every.column(*names) for names in _CHANGES}
    found = 0
    for _ in range(MOST_LOOKED_AT):
        at = int(remaining.argmin())
        if remaining[at] >= first or found == MOST_ADVISED:
            return
        layout, closed = every.layout(at), remaining[at]
        remaining[at] = np.inf
        if not problem.accepts(layout):
            continue
        seconds = shortlist.seconds(at, layout)
        if seconds >= first:  # as may be all of its kind
            remaining[shortlist.kinds == shortlist.kinds[at]] *= seconds / closed
            continue
        same = [columns[name,] == columns[name,][at] for name in ("tp", "cp", "ranks", "recompute")]
        remaining[np.logical_and.reduce(same)] = np.inf
        if (size := peak_device_bytes(problem, layout)) <= room:
            continue
        found += 1
        chosen = _find_change(shortlist, columns, at, fit, expected)
        if chosen is None:
            yield TooLargeLayout(layout, seconds, size, None, None, None)
        else:
            instead = every.layout(chosen)
            changes = [_CHANGES[name](instead) for name in columns if columns[name][chosen] != columns[name][at]]
            change = " and ".join(dict.fromkeys(changes))
            yield TooLargeLayout(layout, seconds, size, change, instead, shortlist.seconds(chosen, instead))


def _find_change(
    shortlist: Shortlist, columns: Mapping[tuple[str, ...], Array], index: int, fit: Array, expected: Array
) -> int | None:
    """Return the index of the candidate that fits and differs from candidate `index` in the fewest properties, the
    fastest of several. None if three changed properties do not suffice.

    shortlist: candidates of the search; columns: {properties: array over all candidates}; fit: bool array, True for
    candidates that may fit; expected: predicted seconds of a step for each candidate."""
    problem, room = shortlist.problem, shortlist.room
    unlike = np.asarray(sum((column != column[index]).astype(np.int8) for column in columns.values()))
    for changes in range(1, MOST_CHANGES + 1):
        near = np.flatnonzero(fit & (unlike == changes))
        for each in near[np.argsort(expected[near])][:MOST_ADVICE].tolist():
            layout = shortlist.every.layout(each)
            if problem.accepts(layout) and peak_device_bytes(problem, layout, room) <= room:
                return int(each)
    return None


_CHANGES: dict[tuple[str, ...], Callable[[Layout], str]] = {
    ("tp",): lambda one: f"tp{one.tp}",
    ("cp",): lambda one: f"cp{one.cp}",
    ("ranks",): lambda one: f"pp{one.pp}",
    ("rows",): lambda one: f"mb{one.micro_batches}",
    ("recompute",): lambda one: f"ac:{one.recompute}",
    ("zero",): lambda one: f"zero{one.zero}" + (f" hs{one.hybrid}" if one.hybrid else ""),
    ("schedule", "chunks"): lambda one: f"pp{one.pp}{one._format_schedule()}",
    ("tensor_sequence_parallel", "cp_method"): lambda one: (
        "sequence-parallel norms" if one.tensor_sequence_parallel else "tp:nosp"
    ),
    ("ep", "etp"): lambda one: f"ep{one.ep}:etp{one.etp}",
}
"""Respects in which a suggested layout may differ from one that does not fit: {names for `ScreenedLayouts.column`:
function that returns the notation of a layout's, such as "ac:full"}."""


def fastest_of_kinds(shortlist: Shortlist, top: int) -> list[Estimate]:
    """Return the estimates of `top` layouts, sorted by time: the fastest layout of each kind (`layout_kinds`), then the
    next fastest layouts of all kinds.

    Layouts of one kind differ only in the sizes of the axes, and their times mostly by less than the error bounds.
    shortlist: candidates of the search; further candidates are predicted exactly in it as needed."""
    kinds, remaining, stopped = layout_kinds(shortlist.every), shortlist.pending.copy(), shortlist.stopped
    found: list[Estimate] = []
    others: list[tuple[float, int, Layout]] = []
    budget = shortlist.budget // 3
    for _ in range(min(top, MOST_KINDS)):
        best = shortlist.estimates(1)
        if not best:
            break
        found += best
        alike = kinds == kinds[shortlist.best[0][1]]
        others += [entry for entry in shortlist.best[1:] if alike[entry[1]]]
        if len(found) < top:
            budget -= shortlist.exclude(alike, budget)
    remaining[list(shortlist.difference)] = np.inf  # decided by now
    shortlist.pending, shortlist.stopped = remaining, stopped
    if len(found) < top:
        shortlist.best = sorted(others)[: top + len(found)]
        found += shortlist.estimates(top - len(found))
    return sorted(found, key=lambda one: one.time.seconds)


def layout_kinds(screened: ScreenedLayouts) -> Array:
    """Return one integer per candidate layout, equal for layouts of the same kind. Layouts are of one kind if they
    agree in three things: which axes are larger than 1; recompute; what ZeRO shards (nothing, optimizer states, or
    parameters too). screened: closed-form predictions of the candidates."""
    kinds = 3 * screened.column("recompute") + np.array([0, 1, 1, 2])[screened.zero]
    for axis in ("tp", "cp", "ep", "ranks"):
        kinds = 2 * kinds + (screened.column(axis) > 1)
    return np.asarray(kinds)


def describe_losses(best: Sequence[Estimate]) -> Iterator[str]:
    """Yield text for each of the best estimates on why it is slower than the first: the parts of the step that take
    longer, in % of the first's step."""
    if best:
        yield "the fastest"
    for one in best[1:]:
        first = best[0].time
        more = {part: (one.time.breakdown[part] - first.breakdown[part]) / first.seconds for part in PARTS}
        worse = sorted((part for part in PARTS if more[part] >= 0.001), key=lambda part: -more[part])[:3]
        less = sorted((part for part in PARTS if more[part] <= -0.001), key=lambda part: more[part])[:2]
        most = max(PARTS, key=lambda part: more[part])
        if worse:
            text = ", ".join(f"{part} +{more[part]:.1%}" for part in worse)
            yield f"{text} (less {' and '.join(less)})" if less else text
        else:
            yield f"{most} +{more[most]:.2%}" if more[most] >= 5e-5 else "as fast"
