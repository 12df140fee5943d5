"""Makespans (total times) of one pipeline schedule under many sets of step durations together.

The order in which groups (steps run together on a rank) can run does not depend on their durations. The groups are
sorted once into waves, each of which reads only what earlier waves produce; a wave is then computed for all its ranks
and all sets of durations together. Every time is the sum of the same numbers in the same order as in
`simulate_pipeline`, so results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.errors import UserError
from meshwright.program.durations import Durations, Floats
from meshwright.program.order import Integers
from meshwright.program.pipeline import PipelineProgram
from meshwright.program.progress import RemoteReads
from meshwright.program.simulate_pipeline import analyze_program, compute_group_durations, simulate_pipeline

SERIAL_LIMIT = 8
"""Product of ranks and sets of durations up to which `simulate_pipeline` is faster than computing in waves."""


class MakespanCache:
    """Cache of simulated makespans (total times) of pipeline schedules; the key is the schedule with its step
    durations."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._known: dict[tuple[PipelineProgram, bytes], float] = {}

    def get(self, program: PipelineProgram, durations: Durations) -> float:
        """Return the makespan (total time) of the schedule `program` in the unit of the durations; simulate it if it is
        not in the cache."""
        self.compute(program, [durations])
        return self._known[program, _make_key(durations)]

    def compute(self, program: PipelineProgram, durations: Sequence[Durations]) -> None:
        """Simulate the schedule `program` under several sets of step durations at once, and store the makespans (total
        times) in the cache. This is faster than a simulation for each set."""
        unknown = {key: each for each in durations if (program, key := _make_key(each)) not in self._known}
        if unknown:
            found = compute_makespans(program, list(unknown.values()))
            self._known |= {(program, key): float(each) for key, each in zip(unknown, found, strict=True)}


def _make_key(durations: Durations) -> bytes:
    """Return a cache key for a set of durations: shapes and bytes of all its fields."""
    columns = (
        durations.forward, durations.input_gradient, durations.weight_gradient, durations.transfer, durations.update,
        durations.overlapped, durations.parts,
    )  # fmt: skip
    arrays = [np.empty(0) if each is None else np.asarray(each, np.float64) for each in columns]
    return b"".join(bytes(f"{each.shape}", "ascii") + each.tobytes() for each in arrays)


def compute_makespans(program: PipelineProgram, durations: Sequence[Durations]) -> Floats:
    """Return the makespan of a pipeline schedule under each set of step durations, in the unit of that set:
    [len(durations)].

    Entry i equals `simulate_pipeline(program, durations[i]).makespan`. Raises the errors of `simulate_pipeline`.
    """
    if program.has_transfers or program.ranks * len(durations) <= SERIAL_LIMIT:
        return np.array([simulate_pipeline(program, each).makespan for each in durations])
    _, wait = analyze_program(program)
    waves, s = _sort_into_waves(program), program.steps
    groups = len(s.group_rank)
    lasts = np.stack([compute_group_durations(program, each) for each in durations], axis=1)[waves.order]
    delays = np.zeros((len(wait.reader) + 1, len(durations)))
    for column, each in enumerate(durations):
        delays[:-1, column] = each.tabulate("transfer", program)[s.replica[wait.maker], wait.boundary]
    later = [(place, delays[crossing]) for place, crossing in zip(waves.needs, waves.crossings, strict=True)]
    end = np.zeros((groups + 1, len(durations)))  # the last row is time 0, for groups without a predecessor
    begun = 0
    for bound in waves.bounds:
        now = end.take(waves.before[begun:bound], axis=0)
        for place, delay in later:
            made = end.take(place[begun:bound], axis=0)
            made += delay[begun:bound]
            np.maximum(now, made, out=now)
        np.add(now, lasts[begun:bound], out=end[begun:bound])
        begun = bound
    found: Floats = end.max(axis=0)
    if not np.isfinite(found).all():
        raise UserError("durations: their sum overflows; use a larger unit of time")
    return found


class _WaveOrder(NamedTuple):
    """Groups (steps that run together on a rank) sorted into waves. A group depends only on groups of earlier waves, so
    all groups of a wave are simulated at once.

    Attributes:
        order: [groups], group indices, wave by wave. A position is an index into this array; all other arrays have one
            entry per position.
        bounds: End (exclusive) of each wave, as a position.
        before: [groups], position of the previous group on the same rank; `len(order)` if there is none.
        needs: List of arrays [groups]. Entry g of the i-th array is the position of the i-th group on another rank for
            which group g waits; `len(order)` if group g waits for fewer groups.
        crossings: List of arrays [groups], parallel to `needs`: index in `RemoteReads` of the read that causes the
            wait; -1 if there is none.
    """

    order: Integers
    bounds: list[int]
    before: Integers
    needs: list[Integers]
    crossings: list[Integers]


@lru_cache(maxsize=32)
def _sort_into_waves(program: PipelineProgram) -> _WaveOrder:
    """Sort the groups of the schedule `program` (steps run together on a rank) into waves, each of which depends only
    on earlier waves. Raises ProgramError for a deadlock.
    """
    _, wait = analyze_program(program)
    s = program.steps
    groups, ranks = len(s.group_rank), program.ranks
    needs, crossings = _list_remote_predecessors(program, wait)

    # Positions of groups, with one sentinel after each rank's last group that never runs.
    place = np.arange(groups) + s.group_rank
    never, always = groups + ranks, groups + ranks + 1
    awaits = [np.full(groups + ranks, never) for _ in needs] or [np.full(groups + ranks, never)]
    for whole, each in zip(awaits, needs or [np.full(groups, -1)], strict=True):
        whole[place] = np.where(each < 0, always, place[each])
    done = np.zeros(groups + ranks + 2, np.bool_)
    done[always] = True
    at = np.searchsorted(s.group_rank, np.arange(ranks)) + np.arange(ranks)
    found: list[Integers] = []
    while True:
        able = done[awaits[0][at]]
        for each in awaits[1:]:
            able &= done[each[at]]
        now = at[able]
        if not len(now):
            break
        found.append(now)
        done[now] = True
        at += able
    order = np.concatenate(found) if found else np.zeros(0, np.int64)
    if len(order) < groups:
        simulate_pipeline(program, Durations(1.0, 1.0, 1.0))  # raises the error that names the cycle
        raise AssertionError("some groups cannot run, but the simulation ends")
    back = np.full(groups + ranks, groups)
    back[order] = np.arange(groups)
    number = np.append(back[place], groups)  # by group: its position in the order
    order = np.searchsorted(place, order)
    first = np.diff(s.group_rank, prepend=-1) != 0
    before = number[np.where(first, groups, np.arange(groups) - 1)][order]
    return _WaveOrder(
        order, np.cumsum([len(each) for each in found]).tolist(), before,
        [number[each][order] for each in needs], [each[order] for each in crossings],
    )  # fmt: skip


def _list_remote_predecessors(program: PipelineProgram, wait: RemoteReads) -> tuple[list[Integers], list[Integers]]:
    """List, for each group (steps run together on a rank), the groups on other ranks that it waits for. program: the
    schedule. wait: reads of values that other ranks compute.

    Returns (groups, reads), both padded tables as lists of columns: groups[i][g] is the i-th group on another rank that
    group g waits for, reads[i][g] the index in `wait` of the read that causes it; -1 if there is none."""
    s = program.steps
    groups = len(s.group_rank)
    readers, makers = s.group_index[wait.reader], s.group_index[wait.leaves]
    needs, crossings = list[Integers](), list[Integers]()
    left = np.argsort(readers, kind="stable")
    while len(left):
        first = np.diff(readers[left], prepend=-1) != 0
        now, left = left[first], left[~first]
        for columns, values in ((needs, makers[now]), (crossings, now)):
            columns.append(np.full(groups, -1))
            columns[-1][readers[now]] = values
    return needs, crossings
