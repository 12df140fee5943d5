"""How long a pipeline program takes under many durations at once, where nothing but that is asked.

Which groups can run after which does not depend on how long they last. So the groups of a program are sorted once into
waves, each of which needs only what earlier waves made, and a wave is worked out at once for all its ranks and for all
durations. Every time is the sum of the same numbers in the same order as in `simulate_pipeline`, bit for bit.
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
from meshwright.program.progress import Waits
from meshwright.program.simulate_pipeline import group_durations, prepared, simulate_pipeline

FEW = 8
"""Ranks times durations up to which it is quicker to let rank after rank run than to go wave by wave."""


class Makespans:
    """The makespans that somebody has asked for, so that nobody asks the simulator twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[PipelineProgram, bytes], float] = {}

    def of(self, program: PipelineProgram, durations: Durations) -> float:
        """Of one."""
        self.ask(program, [durations])
        return self._known[program, _key(durations)]

    def ask(self, program: PipelineProgram, durations: Sequence[Durations]) -> None:
        """Of several, of which `of` then knows."""
        unknown = {key: each for each in durations if (program, key := _key(each)) not in self._known}
        if unknown:
            found = makespans(program, list(unknown.values()))
            self._known |= {(program, key): float(each) for key, each in zip(unknown, found, strict=True)}


def _key(durations: Durations) -> bytes:
    columns = (
        durations.forward, durations.input_gradient, durations.weight_gradient, durations.transfer, durations.update,
        durations.overlapped, durations.parts,
    )  # fmt: skip
    arrays = [np.empty(0) if each is None else np.asarray(each, np.float64) for each in columns]
    return b"".join(bytes(f"{each.shape}", "ascii") + each.tobytes() for each in arrays)


def makespans(program: PipelineProgram, durations: Sequence[Durations]) -> Floats:
    """`simulate_pipeline(program, each).makespan` of each of the durations. Raises what that raises."""
    if program.has_transfers or program.ranks * len(durations) <= FEW:
        return np.array([simulate_pipeline(program, each).makespan for each in durations])
    _, wait = prepared(program)
    waves, s = _waves(program), program.steps
    groups = len(s.group_rank)
    lasts = np.stack([group_durations(program, each) for each in durations], axis=1)[waves.order]
    delays = np.zeros((len(wait.reader) + 1, len(durations)))
    for column, each in enumerate(durations):
        delays[:-1, column] = each.table("transfer", program)[s.replica[wait.maker], wait.boundary]
    later = [(place, delays[crossing]) for place, crossing in zip(waves.needs, waves.crossings, strict=True)]
    end = np.zeros((groups + 1, len(durations)))  # the last one: of what there is from the beginning
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
        raise UserError("durations: they add up to more than a number can hold; take another unit of time")
    return found


class _Waves(NamedTuple):
    """Groups in the order of their waves. In terms of that order, `len(order)` for what is there from the beginning:
    bounds: where each wave ends; before: the group before each on its rank; needs: the groups on other ranks that each
    waits for, one array for the first, one for the second ..., and `crossings`, by which value of `Waits` (-1: none).
    """

    order: Integers
    bounds: list[int]
    before: Integers
    needs: list[Integers]
    crossings: list[Integers]


@lru_cache(maxsize=32)
def _waves(program: PipelineProgram) -> _Waves:
    _, wait = prepared(program)
    s = program.steps
    groups, ranks = len(s.group_rank), program.ranks
    needs, crossings = _needs(program, wait)

    # Groups with a place after the last one of each rank, which no rank gets beyond.
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
        simulate_pipeline(program, Durations(1.0, 1.0, 1.0))  # says who waits for whom
        raise AssertionError("some groups cannot run, and yet the program ends")
    back = np.full(groups + ranks, groups)
    back[order] = np.arange(groups)
    number = np.append(back[place], groups)  # by group: its place in the order
    order = np.searchsorted(place, order)
    first = np.diff(s.group_rank, prepend=-1) != 0
    before = number[np.where(first, groups, np.arange(groups) - 1)][order]
    return _Waves(
        order, np.cumsum([len(each) for each in found]).tolist(), before,
        [number[each][order] for each in needs], [each[order] for each in crossings],
    )  # fmt: skip


def _needs(program: PipelineProgram, wait: Waits) -> tuple[list[Integers], list[Integers]]:
    """By group, the groups on other ranks that it waits for and the values of `Waits` by which it does, -1 for none:
    an array for the first of each, one for the second ..."""
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
