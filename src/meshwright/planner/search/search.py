"""The best layouts of a model on a cluster: closed forms price the whole space, the ledger and the simulator decide.

Candidates are taken in the order of their closed forms. Each is priced exactly (`estimate.priced`); where the simulator
differs from a schedule's closed form, all candidates of that schedule and number of stages are corrected by as much and
take their new places. The search ends when nothing that is left can be better than what was found.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import RECOMPUTE
from meshwright.planner.cost.process_groups import Array
from meshwright.planner.cost.step_time import Step
from meshwright.planner.memory.rank_memory import context_bytes, memory_of, slack, unlike_ranks
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate, priced
from meshwright.planner.search.screen import Priced, screen
from meshwright.planner.search.selection import describe_losses, fastest_of_kinds
from meshwright.program.makespan import MakespanCache
from meshwright.spec.refuse import refuse

FINAL = 20
"""So many are decided by the simulator."""

MOST_PRICED = 120
"""Exact prices that a search may take."""

MOST_TOLD, MOST_LOOKED_AT = 3, 6
"""Fast layouts that do not fit: told of, and priced exactly."""

MOST_CHANGES = 3
"""In how many things at most a layout that fits may differ from one that does not, to be told as its mend."""

MOST_ADVICE = 4
"""Changes of which the ledger is asked, of each number of changes."""

DOUBT_ABOVE, DOUBT_BELOW = 1.15, 1 / 0.9
"""A closed form of memory may be so many times the ledger's, or the ledger's so many times it, where the ledger has not
been asked of a layout like it (tests/planner/search/test_search.py)."""


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


def on_device(problem: Problem, peak: Array) -> Array:
    """Return the bytes on a device, CUDA context and fragmentation included, for tensors of `peak` bytes (an array)."""
    return peak * (1.0 + slack(problem.cluster)) + context_bytes(problem)


def _nothing(problem: Problem) -> str:
    """Return the error line for a planning problem whose batch no layout can divide."""
    devices = problem.cluster.devices
    return (
        f"no layout of {devices} devices can split batch {problem.batch} of sequence {problem.sequence}: each of dp "
        "replicas needs a sequence; use a larger batch or fewer devices"
    )


class Decided:
    """The best candidate layouts of a search with exact predictions: seconds by the simulator, memory by the ledger if
    the closed form is near the limit. every: closed-form predictions of all candidates; wanted: number of layouts to
    decide."""

    def __init__(self, problem: Problem, every: Priced, wanted: int) -> None:
        self.problem, self.every = problem, every
        self.room = problem.room
        self.best: list[tuple[float, int, Layout]] = []
        self.difference: dict[int, float] = {}
        self.makespans = MakespanCache()
        self.kinds, self._memory = self._kinds(), self._memory_kinds()
        self.factors: dict[int, float] = {}
        self.stopped = False
        self._wanted, self.budget, self.asked = wanted, MOST_PRICED, 0
        self._needed = on_device(problem, every.bytes)
        self._left = self._needed <= self.room * DOUBT_ABOVE
        # Closed forms, corrected by what the simulator said of their kind; infinite where that is known.
        self.told = np.where(self._left, every.seconds, np.inf)
        self._decide()

    @property
    def differences(self) -> list[float]:
        """Relative errors of closed-form times against the simulator, best layouts first."""
        return [self.difference[at] for _, at, _ in self.best]

    def _decide(self) -> None:
        """Predict candidates exactly, fastest by closed form first, until as many as wanted are decided or the budget
        is used."""
        every, problem, wanted = self.every, self.problem, self._wanted
        needed, left, told = self._needed, self._left, self.told
        kinds, factors = self.kinds, self.factors
        for _ in range(self.budget):
            self.asked += 1
            at = int(told.argmin())
            if told[at] == np.inf or (len(self.best) >= wanted and told[at] > self.best[wanted - 1][0]):
                break
            closed = told[at]
            told[at], left[at] = np.inf, False
            layout = self.layout(at)
            if not self.takes(layout):
                continue
            if needed[at] * DOUBT_BELOW > self.room:
                exact = device_bytes(problem, layout, self.room)
                self._learn(at, exact)
                if exact > self.room:
                    continue
            seconds = self.seconds(at, layout)
            kind, ratio = int(kinds[at]), seconds / float(every.seconds[at])
            if kind not in factors or abs(ratio / factors[kind] - 1) > 0.002:
                alike = (kinds == kind) & left
                told[alike] = every.seconds[alike] * ratio
                if (
                    kind not in factors and abs(ratio - 1) > 0.002
                ):  # what it is to be compared with is the corrected one
                    closed = seconds
                factors[kind] = ratio
            self.difference[at] = closed / seconds - 1
            insort(self.best, (seconds, at, layout))
        else:
            self.stopped = True

    def leave_out(self, alike: Array, budget: int) -> int:
        """Exclude the candidates of a mask (`alike`), and decide the best of the others. budget: most exact predictions
        to make; return how many were made."""
        before, self.budget = self.asked, budget
        self.told[alike], self._left[alike], self._wanted = np.inf, False, 1
        self.best = [entry for entry in self.best if not alike[entry[1]]]
        self._decide()
        return self.asked - before

    def _learn(self, at: int, exact: float) -> None:
        """Scale the closed-form memory of all candidates of the same kind as candidate `at` (index), whose `exact`
        bytes are known."""
        alike = self._memory == self._memory[at]
        self._needed[alike] *= exact / self._needed[at]
        too_large = alike & self._left & (self._needed > self.room * DOUBT_ABOVE)
        self.told[too_large], self._left[too_large] = np.inf, False

    def _kinds(self) -> Array:
        """Return an integer for each candidate, equal for equal pipelines and micro-batches per pipeline rank (rounded
        to a power of two): their closed-form times have similar errors."""
        every = self.every
        inner = np.array([one.layout.tp * one.layout.cp * 1.0 / one.rows for one in every.candidates])[every.candidate]
        ranks = np.array([pipe.ranks for pipe in every.pipes])[every.pipe]
        micro = self.problem.batch / self.problem.cluster.devices * inner * ranks
        rounds = np.clip(np.log2(micro / ranks) + 16, 0, 63).astype(np.int64)
        return np.asarray(every.pipe * 64 + rounds)

    def _memory_kinds(self) -> Array:
        """Return an integer for each candidate, equal for equal schedules and recompute: their closed-form memory has
        similar errors."""
        schedules = list(dict.fromkeys(pipe.schedule for pipe in self.every.pipes))
        of_pipe = np.array([schedules.index(pipe.schedule) for pipe in self.every.pipes])[self.every.pipe]
        of_way = np.array([RECOMPUTE.index(one.layout.recompute) for one in self.every.candidates])[
            self.every.candidate
        ]
        return np.asarray(of_pipe * len(RECOMPUTE) + of_way)

    def takes(self, layout: Layout) -> bool:
        """Return True if training accepts the layout (or, for models and engines that can only be planned, if it is
        feasible)."""
        problem = self.problem
        try:
            refuse(layout, problem.config, problem.batch, problem.sequence, planning=problem.only_planned)
        except UserError:
            return False
        return True

    def fits(self, layout: Layout) -> bool:
        """Return True if training accepts the layout and it fits into device memory."""
        return self.takes(layout) and device_bytes(self.problem, layout, self.room) <= self.room

    def seconds(self, at: int, layout: Layout) -> float:
        """Return the simulated seconds of a step. at, layout: index of the candidate, and its layout."""
        return self._step(at, layout).price(parts=False).seconds

    def expected(self) -> Array:
        """Return the closed-form seconds of all candidates, corrected by the simulator's results for similar ones."""
        factor = np.ones(int(self.kinds.max()) + 1)
        factor[list(self.factors)] = list(self.factors.values())
        return np.asarray(self.every.seconds * factor[self.kinds])

    def _step(self, at: int, layout: Layout) -> Step:
        """Return the step-time predictor of one candidate, which reuses results of earlier candidates. at: index of the
        candidate. layout: its layout."""
        pieces = self.every.pieces.take(int(self.every.candidate[at]))
        return Step(self.problem, layout, pieces=pieces, makespans=self.makespans)

    def layout(self, at: int) -> Layout:
        """Return the layout of the candidate with index `at`."""
        return self.every.layout(at)

    def undecided(self, best: list[Estimate], top: int) -> int:
        """Return the number of candidates that may beat the last of `best` but were not decided when the search
        stopped. top: number of layouts asked for."""
        if not self.stopped:
            return 0
        return int((self.told < (best[-1].time.seconds if len(best) >= top else np.inf)).sum())

    def estimates(self, top: int) -> list[Estimate]:
        """Return the full estimates of the `top` best layouts; those that turn out not to fit are replaced by the next
        best."""
        found: dict[int, Estimate] = {}
        while True:
            fit: list[Estimate] = []
            too_large: dict[int, float] = {}
            for _, at, layout in self.best:
                if at not in found and (size := self._too_large(layout)) is not None:
                    too_large[at] = size
                    continue
                if at not in found:
                    found[at] = priced(self.problem, layout, self._step(at, layout))
                fit.append(found[at])
                if len(fit) == top:
                    break
            self.best = [entry for entry in self.best if entry[1] not in too_large]
            if len(fit) == top or not too_large or self.stopped:
                return fit
            for at, size in too_large.items():
                self._learn(at, size)
            self._decide()

    def _too_large(self, layout: Layout) -> float | None:
        """Return the device bytes of the first pipeline rank that needs more than a device may use; None if none
        does."""
        layout = layout.with_(precision=self.problem.precision)
        sizes = (memory_of(self.problem, layout, rank).device_bytes for rank in unlike_ranks(self.problem, layout))
        return next((size for size in sizes if size > self.room), None)


def device_bytes(problem: Problem, layout: Layout, room: float = math.inf) -> int:
    """Return the device bytes of a layout by the ledger: the larger of the first and the last pipeline rank.

    room: limit in bytes; if the first rank exceeds it, the last is not computed.
    """
    most = 0
    for rank in sorted({0, layout.pp - 1}):
        most = max(most, memory_of(problem, layout, rank).device_bytes)
        if most > room:
            break
    return most


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
        chosen = _mended(decided, columns, at, fit, expected)
        if chosen is None:
            yield Advice(layout, seconds, size, None, None, None)
        else:
            instead = decided.layout(chosen)
            changes = [_CHANGES[name](instead) for name in columns if columns[name][chosen] != columns[name][at]]
            change = " and ".join(dict.fromkeys(changes))
            yield Advice(layout, seconds, size, change, instead, decided.seconds(chosen, instead))


def _mended(decided: Decided, columns: Mapping[str, Array], at: int, fit: Array, expected: Array) -> int | None:
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
