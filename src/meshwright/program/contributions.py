"""Symbolic execution of a collective program: which chunk, with whose contributions, each slot holds after each level.

Levels (`order.PostingOrder`) run in order, all transfers of a level together. A transfer runs at the higher level of
its two groups; reductions are applied when the last transfer of their group has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.program import contract
from meshwright.program.collective import LOCAL, CollectiveProgram, Kind
from meshwright.program.columns import count_in_runs
from meshwright.program.order import Integers, Mask, PostingOrder, expand_ranges

Chunks: TypeAlias = NDArray[np.int32]
Sets: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True)
class SlotMoves:
    """Copies and reductions of single slots (buffers for one chunk), into which the transfers and local steps of a
    collective program are split; columns with one entry per slot.

    Attributes:
        source, target: Slot read and slot written, numbered over all ranks: rank x (slots per rank) + slot.
        reader, writer: Index of the step that reads (a send) and of the step that writes (a receive); equal for a local
            step.
        read_level, write_level: Dependency level at which the source is read and the target is written. A reduction is
            written at the level at which all transfers of its group (steps that a rank posts together) have ended.
        reduces: True to add to the target, False to overwrite it.
        turn: Position, from 0, of a reduction among all reductions of its group into the same target.
    """

    read_level: Integers  # level of the read
    write_level: Integers  # level of the write: a reduction waits for the whole group
    turn: Integers  # number of earlier reductions of the group into the same slot
    reduces: Mask
    source: Integers
    target: Integers
    reader: Integers  # index of the step that reads
    writer: Integers  # index of the step that writes

    def select(self, index: Integers | Mask | slice) -> SlotMoves:
        """Return the entries of all columns that `index` (index array, mask or slice) selects, as a new `SlotMoves`."""
        return SlotMoves(**{name: column[index] for name, column in vars(self).items()})


def build_transfer_moves(
    program: CollectiveProgram, sends: Integers, receives: Integers, order: PostingOrder, read_level: Integers
) -> SlotMoves:
    """Split each transfer into moves, one for each slot (buffer for one chunk), from which the program is evaluated
    level by level. A level is a set of transfers all of whose dependencies are in earlier levels. The moves are sorted
    by level; within a level, moves that overwrite their target come before reductions.

    program: the collective program. sends, receives: [transfers], step indices of the two ends. order: level of each
    group (steps that a rank posts together). read_level: [transfers], level at which the sender's slots are read. Each
    signal of a barrier is one move."""
    s, slots = program.steps, program.slots
    barrier = program.operation == "barrier"
    data = np.flatnonzero((s.count[sends] > 0) | barrier)
    data = data[np.lexsort((s.kind[receives[data]] == Kind.REDUCE, read_level[data]))]
    sends, receives, read_level = sends[data], receives[data], read_level[data]
    write_level = np.zeros(len(order.level), np.int64)  # by group: level of its last transfer
    for steps in (sends, receives):
        np.maximum.at(write_level, s.group_index[steps], read_level)
    first = s.rank[sends] * slots + s.slot[sends]
    which, source = expand_ranges(first, first + np.maximum(s.count[sends], 1))
    away = (s.rank[receives] - s.rank[sends]) * slots + s.slot[receives] - s.slot[sends]
    writer, target = receives[which], source + away[which]
    reduces = (s.kind[writer] == Kind.REDUCE) | barrier
    group = s.group_index[writer]
    return SlotMoves(
        read_level[which],
        write_level[group],
        _count_earlier_reductions(group, target, reduces),
        reduces,
        source,
        target,
        sends[which],
        writer,
    )


def _count_earlier_reductions(group: Integers, target: Integers, reduces: Mask) -> Integers:
    """Return [moves]: for each slot move that is a reduction, the number of earlier reductions by the same group (steps
    that a rank posts together) into the same target slot (buffer for one chunk); 0 for other moves.

    group: [moves], index of the group of the step that writes. target: [moves], slot written. reduces: [moves], True
    for reductions.
    """
    turn = np.zeros(len(target), np.int64)
    index = np.flatnonzero(reduces)
    index = index[np.lexsort((group[index], target[index]))]
    new = (np.diff(target[index], prepend=-1) != 0) | (np.diff(group[index], prepend=-1) != 0)
    turn[index] = count_in_runs(new)
    return turn


def build_local_moves(program: CollectiveProgram, order: PostingOrder) -> SlotMoves:
    """Split all local copies and combines into moves of single slots (buffers for one chunk) and return these, sorted
    by level and, within a level, copies before combines. A combine adds a slot to another slot of the same rank.

    order: dependency level of each group (steps that a rank posts together) of the program.
    """
    s, slots = program.steps, program.slots
    step = np.flatnonzero(s.has_kind(LOCAL))
    step = step[np.lexsort((s.kind[step] == Kind.COMBINE, order.level[s.group_index[step]]))]
    first = s.rank[step] * slots + s.source[step]
    which, source = expand_ranges(first, first + s.count[step])
    target = source + (s.slot[step] - s.source[step])[which]
    step = step[which]
    level, reduces = order.level[s.group_index[step]], s.kind[step] == Kind.COMBINE
    return SlotMoves(
        level,
        level,
        _count_earlier_reductions(s.group_index[step], target, reduces),
        reduces,
        source,
        target,
        step,
        step,
    )


class ContributionTracker:
    """Symbolic execution of a collective program: tracks chunk number and contributing ranks of every slot (buffer of
    one chunk) of every rank.

    program: steps of all ranks. memory (attribute): contents of all slots after the moves that `run` has executed so
    far; at first, the input that the operation assumes.
    """

    def __init__(self, program: CollectiveProgram) -> None:
        """Fill the slots with the input that the operation assumes; arguments: see the class."""
        self.program, self.memory = program, contract.build_initial_memory(program)
        # The same memory with the slots of all ranks in a row.
        self._chunk = self.memory.chunk.reshape(-1)
        self._sets = self.memory.origins.reshape(len(self._chunk), -1)

    def run(self, across: SlotMoves, inside: SlotMoves, watch: Callable[[int], None] | None = None) -> None:
        """Execute all slot moves on `memory`, one dependency level after the other.

        across: moves of slots (buffers for one chunk) between ranks. inside: moves within a rank (local copies and
        combines). watch: called with the number of each level after the level; None: not called. Raises `ProgramError`
        at the first step that reads an empty slot, reduces different chunks into each other, or adds the contribution
        of a rank a second time.
        """
        levels = int(max(across.write_level.max(initial=-1), inside.read_level.max(initial=-1))) + 1
        starts = np.searchsorted(across.read_level, np.arange(levels + 1)).tolist()
        local_starts = np.searchsorted(inside.read_level, np.arange(levels + 1)).tolist()
        some_wait = bool((across.reduces & (across.write_level > across.read_level)).any())
        waiting: dict[int, list[tuple[SlotMoves, Chunks, Sets]]] = {}
        for level in range(levels):
            if starts[level] < starts[level + 1]:
                moves, chunk, sets = self._apply_copies(across.select(slice(starts[level], starts[level + 1])))
                if some_wait:
                    for later in np.unique(moves.write_level[moves.write_level > level]).tolist():
                        due = moves.write_level == later
                        waiting.setdefault(later, []).append((moves.select(due), chunk[due], sets[due]))
                    now = moves.write_level == level
                    moves, chunk, sets = moves.select(now), chunk[now], sets[now]
                self._apply_reductions(moves, chunk, sets)
            for moves, chunk, sets in waiting.pop(level, ()):
                self._apply_reductions(moves, chunk, sets)
            if local_starts[level] < local_starts[level + 1]:
                self._apply_reductions(
                    *self._apply_copies(inside.select(slice(local_starts[level], local_starts[level + 1])))
                )
            if watch:
                watch(level)

    def _read_slots(self, moves: SlotMoves) -> tuple[Chunks, Sets]:
        """Return chunk number [moves] and set of contributing ranks [moves, 64-bit words] in the source slot (buffer
        for one chunk) of each move.

        Raises `ProgramError` for an empty slot.
        """
        chunk = self._chunk[moves.source]
        if (chunk < 0).any():
            move = _find_first_failure(chunk < 0, moves.reader)
            raise self.program.make_error(
                int(moves.reader[move]), f"{self._format_slot(moves.source[move])} is still empty"
            )
        return chunk, self._sets[moves.source]

    def _apply_copies(self, moves: SlotMoves) -> tuple[SlotMoves, Chunks, Sets]:
        """Apply to `memory` all entries of `moves` that overwrite their target slot (buffer for one chunk). Return the
        remaining moves (the reductions) and the contents of their source slots: (moves, chunk numbers [moves], sets of
        contributing ranks [moves, 64-bit words])."""
        chunk, sets = self._read_slots(moves)
        reduces = int(np.searchsorted(moves.reduces, True))  # overwriting moves come first
        self._chunk[moves.target[:reduces]], self._sets[moves.target[:reduces]] = chunk[:reduces], sets[:reduces]
        return moves.select(slice(reduces, None)), chunk[reduces:], sets[reduces:]

    def _apply_reductions(self, moves: SlotMoves, chunk: Chunks, sets: Sets) -> None:
        """Add the contributions that slot moves have read to their target slots (buffers for one chunk); several
        reductions into one slot are applied one after the other.

        moves: reductions to apply. chunk: [moves], chunk numbers read. sets: [moves, 64-bit words], sets of
        contributing ranks read.
        """
        for turn in range(int(moves.turn.max(initial=-1)) + 1):
            turn = moves.turn == turn
            if turn.all():
                self._accumulate(moves, chunk, sets)
            else:
                self._accumulate(moves.select(turn), chunk[turn], sets[turn])

    def _accumulate(self, moves: SlotMoves, chunk: Chunks, sets: Sets) -> None:
        """Add contributions to the target slots (buffers for one chunk) of `moves`, no two of which have the same
        target.

        chunk: [moves], chunk numbers read. sets: [moves, 64-bit words], sets of contributing ranks read. Raises
        `ProgramError` for an empty target, for a target that holds another chunk, and for a target that already has a
        contribution of the same rank (allowed for a barrier).
        """
        present, held = self._chunk[moves.target], self._sets[moves.target]
        if self.program.operation != "barrier":  # a repeated signal is harmless
            wrong, twice = present != chunk, (held & sets).any(axis=1)
            if wrong.any() or twice.any():
                move = _find_first_failure(wrong | twice, moves.writer)
                step, slot = int(moves.writer[move]), self._format_slot(moves.target[move])
                if present[move] < 0:
                    reason = f"reduces into {slot}, which is still empty"
                elif wrong[move]:
                    reason = f"reduces chunk {chunk[move]} into chunk {present[move]} in {slot}"
                else:
                    owners = format_owners(contract.list_ranks(held[move] & sets[move]))
                    reason = f"adds {owners} part of chunk {chunk[move]} to {slot} a second time"
                raise self.program.make_error(step, reason)
        self._sets[moves.target] = held | sets

    def _format_slot(self, slot: np.int64) -> str:
        """Return text such as `data[3]` for a slot (buffer for one chunk), given its number over all ranks: rank x
        slots per rank + slot."""
        return self.program.format_slots(int(slot) % self.program.slots)


def _find_first_failure(bad: Mask, step: Integers) -> int:
    """Return the index of the failed slot move whose step comes first in the program.

    bad: [moves], True for failed moves. step: [moves], index of the step to which each move belongs.
    """
    candidates = np.flatnonzero(bad)
    return int(candidates[np.argmin(step[candidates])])


def format_owners(ranks: list[int]) -> str:
    """Format ranks in the possessive: `rank 3's`, `rank 0's, 1's and 2's`, `rank 0's, 1's, 2's and 5 others'`."""
    parts = [f"{rank}'s" for rank in ranks]
    if len(parts) > 4:
        parts = [*parts[:3], f"{len(parts) - 3} others'"]
    return "rank " + (f"{', '.join(parts[:-1])} and " if len(parts) > 1 else "") + parts[-1]
