"""Runs a collective program on sets instead of numbers: which chunk, and whose parts of it, each slot holds when.

Levels (`order.Schedule`) are run in turn, all transfers of a level at once. A transfer takes place at the later of its
two groups' levels; reductions are applied when the last transfer of their group has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.program import contract
from meshwright.program.collective import LOCAL, CollectiveProgram, Kind
from meshwright.program.order import Integers, Mask, PostingOrder, ProgramError, concatenate_ranges

Chunks: TypeAlias = NDArray[np.int32]
Sets: TypeAlias = NDArray[np.uint64]


def error(program: CollectiveProgram, step: int, reason: str) -> ProgramError:
    """What is wrong with one step."""
    s = program.steps
    return ProgramError(int(s.rank[step]), int(s.group[step]), program.describe(step), reason)


def spread(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Every range first .. first + count written out: (which range, its next number)."""
    return np.repeat(np.arange(len(first)), count), concatenate_ranges(first, first + count)


@dataclass(frozen=True)
class Moves:
    """What is read and written, one entry a slot. Slots are numbered through all ranks."""

    key: Integers  # level of the read
    done: Integers  # level of the write: a reduction waits for the whole group
    place: Integers  # of reductions: how many steps of the group before this one reduce into the same slot
    adds: Mask
    source: Integers
    target: Integers
    reader: Integers  # step that reads
    writer: Integers  # step that writes

    def at(self, index: Integers | Mask | slice) -> Moves:
        return Moves(**{name: column[index] for name, column in vars(self).items()})


def transfers(
    program: CollectiveProgram, sends: Integers, receives: Integers, order: PostingOrder, key: Integers
) -> Moves:
    """The moves of matched sends and receives, by key, reductions last. A barrier's signals are moves of its slot."""
    s, slots = program.steps, program.slots
    barrier = program.operation == "barrier"
    data = np.flatnonzero((s.count[sends] > 0) | barrier)
    data = data[np.lexsort((s.kind[receives[data]] == Kind.REDUCE, key[data]))]
    sends, receives, key = sends[data], receives[data], key[data]
    done = np.zeros(len(order.level), np.int64)  # of a group: when its last transfer is over
    for steps in (sends, receives):
        np.maximum.at(done, s.group_index[steps], key)
    which, source = spread(s.rank[sends] * slots + s.slot[sends], np.maximum(s.count[sends], 1))
    away = (s.rank[receives] - s.rank[sends]) * slots + s.slot[receives] - s.slot[sends]
    writer, target = receives[which], source + away[which]
    adds = (s.kind[writer] == Kind.REDUCE) | barrier
    group = s.group_index[writer]
    return Moves(key[which], done[group], _repeats(group, target, adds), adds, source, target, sends[which], writer)


def _repeats(group: Integers, target: Integers, adds: Mask) -> Integers:
    """How many reductions of the same group into the same slot stand before each one."""
    place = np.zeros(len(target), np.int64)
    index = np.flatnonzero(adds)
    index = index[np.lexsort((group[index], target[index]))]
    new = (np.diff(target[index], prepend=-1) != 0) | (np.diff(group[index], prepend=-1) != 0)
    first = np.flatnonzero(new)
    place[index] = np.arange(len(index)) - np.repeat(first, np.diff(np.append(first, len(index))))
    return place


def local(program: CollectiveProgram, order: PostingOrder) -> Moves:
    """The moves of copies and combines, by level, combines last."""
    s, slots = program.steps, program.slots
    step = np.flatnonzero(s.has_kind(LOCAL))
    step = step[np.lexsort((s.kind[step] == Kind.COMBINE, order.level[s.group_index[step]]))]
    which, source = spread(s.rank[step] * slots + s.source[step], s.count[step])
    target = source + (s.slot[step] - s.source[step])[which]
    step = step[which]
    level, adds = order.level[s.group_index[step]], s.kind[step] == Kind.COMBINE
    return Moves(level, level, _repeats(s.group_index[step], target, adds), adds, source, target, step, step)


class Contributions:
    """A program under way: `memory` is what the slots hold."""

    def __init__(self, program: CollectiveProgram) -> None:
        self.program, self.memory = program, contract.initial(program)
        # The same memory with the slots of all ranks in a row.
        self._chunk = self.memory.chunk.reshape(-1)
        self._sets = self.memory.origins.reshape(len(self._chunk), -1)

    def run(self, across: Moves, inside: Moves, watch: Callable[[int], None] | None = None) -> None:
        """Take every move. watch: called after each level with its number. Raises `ProgramError` at the first step
        that reads a slot that holds nothing, reduces different chunks together or adds a rank's part twice."""
        levels = int(max(across.done.max(initial=-1), inside.key.max(initial=-1))) + 1
        starts = np.searchsorted(across.key, np.arange(levels + 1)).tolist()
        local_starts = np.searchsorted(inside.key, np.arange(levels + 1)).tolist()
        some_wait = bool((across.adds & (across.done > across.key)).any())
        waiting: dict[int, list[tuple[Moves, Chunks, Sets]]] = {}
        for level in range(levels):
            if starts[level] < starts[level + 1]:
                moves, chunk, sets = self._copy(across.at(slice(starts[level], starts[level + 1])))
                if some_wait:
                    for later in np.unique(moves.done[moves.done > level]).tolist():
                        due = moves.done == later
                        waiting.setdefault(later, []).append((moves.at(due), chunk[due], sets[due]))
                    now = moves.done == level
                    moves, chunk, sets = moves.at(now), chunk[now], sets[now]
                self._reduce(moves, chunk, sets)
            for moves, chunk, sets in waiting.pop(level, ()):
                self._reduce(moves, chunk, sets)
            if local_starts[level] < local_starts[level + 1]:
                self._reduce(*self._copy(inside.at(slice(local_starts[level], local_starts[level + 1]))))
            if watch:
                watch(level)

    def _read(self, moves: Moves) -> tuple[Chunks, Sets]:
        chunk = self._chunk[moves.source]
        if (chunk < 0).any():
            move = _first(chunk < 0, moves.reader)
            raise error(self.program, int(moves.reader[move]), f"{self._name(moves.source[move])} holds nothing yet")
        return chunk, self._sets[moves.source]

    def _copy(self, moves: Moves) -> tuple[Moves, Chunks, Sets]:
        """Read what all moves read, then write what overwrites; the rest, reductions, and what they read."""
        chunk, sets = self._read(moves)
        adds = int(np.searchsorted(moves.adds, True))  # what overwrites stands before what reduces
        self._chunk[moves.target[:adds]], self._sets[moves.target[:adds]] = chunk[:adds], sets[:adds]
        return moves.at(slice(adds, None)), chunk[adds:], sets[adds:]

    def _reduce(self, moves: Moves, chunk: Chunks, sets: Sets) -> None:
        """Reductions into one slot, one after the other."""
        for place in range(int(moves.place.max(initial=-1)) + 1):
            turn = moves.place == place
            if turn.all():
                self._add(moves, chunk, sets)
            else:
                self._add(moves.at(turn), chunk[turn], sets[turn])

    def _add(self, moves: Moves, chunk: Chunks, sets: Sets) -> None:
        """Reduce values into slots that are all different."""
        there, held = self._chunk[moves.target], self._sets[moves.target]
        if self.program.operation != "barrier":  # hearing twice does no harm
            wrong, twice = there != chunk, (held & sets).any(axis=1)
            if wrong.any() or twice.any():
                move = _first(wrong | twice, moves.writer)
                step, slot = int(moves.writer[move]), self._name(moves.target[move])
                if there[move] < 0:
                    raise error(self.program, step, f"reduces into {slot}, which holds nothing yet")
                if wrong[move]:
                    raise error(self.program, step, f"reduces chunk {chunk[move]} into chunk {there[move]} in {slot}")
                parts = whose(contract.members(held[move] & sets[move]))
                raise error(self.program, step, f"adds {parts} part of chunk {chunk[move]} to {slot} a second time")
        self._sets[moves.target] = held | sets

    def _name(self, slot: np.int64) -> str:
        return self.program.format_slots(int(slot) % self.program.slots)


def _first(bad: Mask, step: Integers) -> int:
    """The bad move whose step stands first."""
    candidates = np.flatnonzero(bad)
    return int(candidates[np.argmin(step[candidates])])


def whose(ranks: list[int]) -> str:
    """`rank 3's`, `rank 0's, 1's and 2's`, `rank 0's, 1's, 2's and 5 others'`."""
    parts = [f"{rank}'s" for rank in ranks]
    if len(parts) > 4:
        parts = [*parts[:3], f"{len(parts) - 3} others'"]
    return "rank " + (f"{', '.join(parts[:-1])} and " if len(parts) > 1 else "") + parts[-1]
