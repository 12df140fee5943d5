"""Pictures of the buffers of all ranks, round by round: what each slot holds, and which rank sent what to which."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from meshwright.errors import UserError
from meshwright.program import contract
from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import LOCAL, CollectiveProgram, Kind
from meshwright.program.columns import count_in_runs
from meshwright.program.contributions import ContributionTracker, build_local_moves, build_transfer_moves
from meshwright.program.order import Integers, PostingOrder

LETTERS = "abcdefghijklmnop"  # of the ranks
MAX_RANKS = len(LETTERS)
MAX_SLOTS = 64
MAX_ROUNDS = 200


@dataclass(frozen=True)
class Cell:
    """Content of one slot of one rank, as drawn. A slot is the buffer for one chunk of the vector of a collective.

    Attributes:
        label: Text such as `a0+b0` (chunk 0, summed over ranks a and b), empty for an empty slot.
        origins: Ranks whose data are summed in the slot.
        whole: True if the slot holds the operation's final result for its chunk.
        fresh: True if the slot was written since the previous frame (snapshot to draw).
    """

    label: str  # empty where the slot holds nothing
    origins: tuple[int, ...]
    whole: bool
    fresh: bool


@dataclass(frozen=True)
class Arrow:
    """One transfer between two ranks in a drawing of buffers; a local copy if source and target rank are equal.

    Attributes:
        source, target: Sending and receiving rank.
        slot: First slot (buffer for one chunk) that is read on the source.
        into: First slot that is written on the target.
        count: Number of consecutive slots, 0 for a signal without data.
        adds: True to add to the target slots, False to overwrite them.
    """

    source: int
    slot: int
    target: int
    into: int
    count: int
    adds: bool


@dataclass(frozen=True)
class Frame:
    """Snapshot of the buffers of all ranks at one point of a collective program, to be drawn.

    Attributes:
        title: Such as `start`, `round 3 of 6`, `before round 3: on each rank`.
        round: Number of rounds completed.
        arrows: Transfers since the previous frame.
        cells: Contents of each slot (buffer for one chunk) after these transfers, indexed by rank, then by slot.
    """

    title: str
    round: int
    arrows: tuple[Arrow, ...]
    cells: tuple[tuple[Cell, ...], ...]


def build_frames(checked: CheckedCollective) -> list[Frame]:
    """Return snapshots of all ranks' buffers, to be drawn: at the start, after each round of transfers, and after the
    local copies and reductions that precede a round.

    checked: verified collective program. Raises `UserError` above 16 ranks, 64 slots (buffers for one chunk) per rank
    or 200 rounds.
    """
    program = checked.program
    for what, number, most in (
        ("ranks", program.ranks, MAX_RANKS),
        ("slots per rank", program.slots, MAX_SLOTS),
        ("rounds", checked.rounds, MAX_ROUNDS),
    ):
        if number > most:
            raise UserError(
                f"the buffers of {program.operation} {program.algorithm} cannot be drawn: {number} {what}, more than "
                f"the maximum of {most}; use fewer ranks or chunks"
            )
    order, width = _align_levels_with_rounds(checked)
    s = program.steps
    ends = np.stack([order.level[s.group_index[checked.sends]], order.level[s.group_index[checked.receives]]])
    key = ends.max(axis=0)
    flow = ContributionTracker(program)
    shot: list[Frame] = [Frame("start", 0, (), _make_cells(program, flow.memory, set()))]
    fresh: set[tuple[int, int]] = set()
    arrows: list[Arrow] = []

    def append_frame(level: int) -> None:
        """Collect the transfers and local steps of dependency level `level`, which has just been executed; append a
        frame (snapshot of all buffers to draw) at the end of a round's local steps and at the end of its transfers, if
        any were collected."""
        turn, place = divmod(level, width)
        for step in np.flatnonzero(s.has_kind(LOCAL) & (order.level[s.group_index] == level)).tolist():
            arrows.append(_make_arrow(program, step, step))
        for at in np.flatnonzero(key == level).tolist():
            arrows.append(_make_arrow(program, int(checked.sends[at]), int(checked.receives[at])))
        if arrows and place >= width - 2:
            across = place == width - 1
            for arrow in arrows:
                fresh.update((arrow.target, arrow.into + i) for i in range(max(arrow.count, across)))
            title = f"round {turn + 1} of {checked.rounds}"
            if not across:
                title = f"before {title}: on each rank" if turn < checked.rounds else "at the end: on each rank"
            shot.append(Frame(title, turn + across, tuple(arrows), _make_cells(program, flow.memory, fresh)))
            arrows.clear()
            fresh.clear()

    inside = build_local_moves(program, order)
    flow.run(build_transfer_moves(program, checked.sends, checked.receives, order, key), inside, append_frame)
    return shot


def _align_levels_with_rounds(checked: CheckedCollective) -> tuple[PostingOrder, int]:
    """Renumber the dependency levels of a collective program for drawing. All transfers of a round get the same level.
    The local copies and reductions that precede these transfers get the levels just below. Return (posting order with
    the new levels, number of levels per round).

    checked: verified program, in whose posting order a step depends only on steps of lower levels.
    """
    s, rounds = checked.program.steps, checked.order.rounds
    is_local = np.zeros(len(s.group_rank), np.bool_)
    is_local[s.group_index[s.has_kind(LOCAL)]] = True
    follows_local = np.append(False, is_local[:-1] & (np.diff(s.group_rank) == 0))[: len(is_local)]
    place = count_in_runs(~follows_local)  # number of local groups that directly precede each group on its rank
    chain = int(place[is_local].max(initial=0)) + 1
    # Local groups at the end of a short chain are drawn with those of the longest chain, in one frame.
    level: Integers = rounds * (chain + 1) + np.where(is_local, place, chain)
    return PostingOrder(level, rounds, checked.order.depth), chain + 1


def _make_arrow(program: CollectiveProgram, reader: int, writer: int) -> Arrow:
    """Return the arrow that draws one transfer or local step of a collective program.

    reader, writer: indices of the steps that read and write the data (a send and its receive); equal for a local step.
    """
    s = program.steps
    inside = s.kind[writer] in LOCAL
    slot = s.source[reader] if inside else s.slot[reader]
    adds = s.kind[writer] in (Kind.REDUCE, Kind.COMBINE)
    return Arrow(
        int(s.rank[reader]), int(slot), int(s.rank[writer]), int(s.slot[writer]), int(s.count[writer]), bool(adds)
    )


def _make_cells(
    program: CollectiveProgram, memory: contract.SymbolicMemory, fresh: set[tuple[int, int]]
) -> tuple[tuple[Cell, ...], ...]:
    """Return the cells (contents of slots, as drawn) of all ranks, indexed by rank, then by slot. A slot is the buffer
    for one chunk of the vector.

    program: the collective program. memory: chunk and contributing ranks of every slot. fresh: (rank, slot) pairs
    written since the previous frame (snapshot to draw).
    """
    need = contract.build_required_slots(program)
    everyone = tuple(range(program.ranks))
    promised = {
        (rank, slot): (chunk, everyone if origin == contract.ALL else (origin,))
        for rank, slot, chunk, origin in zip(
            need.rank.tolist(), need.slot.tolist(), need.chunk.tolist(), need.origin.tolist(), strict=True
        )
    }

    def make_cell(rank: int, slot: int) -> Cell:
        """Return the cell that draws the content of slot number `slot` (buffer for one chunk) of rank `rank`."""
        chunk = int(memory.chunk[rank, slot])
        origins = tuple(memory.list_contributors(rank, slot))
        whole = promised.get((rank, slot)) == (chunk, origins)
        return Cell(
            format_slot_label(program, chunk, origins), origins if chunk >= 0 else (), whole, (rank, slot) in fresh
        )

    slots = 1 if program.operation == "barrier" else program.slots
    return tuple(tuple(make_cell(rank, slot) for slot in range(slots)) for rank in range(program.ranks))


def sums_contributions(program: CollectiveProgram) -> bool:
    """Return True if the program's operation fills a slot (buffer for one chunk) with contributions of several ranks:
    all-reduce, reduce-scatter and reduce sum data, and barrier collects the set of ranks that have signalled."""
    return program.operation in ("all-reduce", "reduce-scatter", "reduce", "barrier")


def format_slot_label(program: CollectiveProgram, chunk: int, origins: tuple[int, ...]) -> str:
    """Return the text drawn in a slot (buffer for one chunk) that holds chunk number `chunk` (-1: empty text) with
    contributions of the ranks `origins`.

    Ranks are letters: `a0` is rank 0's part of chunk 0, `a0+b0` a sum, `a…e0` a sum over consecutive ranks, `Σ0` the
    sum over all ranks, and `8 parts of 0` a sum of 8 ranks' parts that is too long to write out. For a barrier, the
    ranks from which a signal has come: `a+b`, `all`.
    """
    if chunk < 0:
        return ""
    number = "" if program.operation == "barrier" else str(chunk)
    if len(origins) == program.ranks and program.ranks > 1:
        if program.operation == "barrier":
            return "all"
        if sums_contributions(program):
            return f"Σ{number}"
    if len(origins) <= 4:
        return "+".join(f"{LETTERS[rank]}{number}" for rank in origins)
    terms = []
    for _, run in groupby(enumerate(origins), lambda pair: pair[1] - pair[0]):
        letters = [LETTERS[rank] for _, rank in run]
        terms += [f"{letters[0]}…{letters[-1]}{number}"] if len(letters) > 2 else [f"{x}{number}" for x in letters]
    if len(terms) > 4:
        return f"{len(origins)} parts of {number}" if number else f"{len(origins)} ranks"
    return "+".join(terms)


def format_slot_title(program: CollectiveProgram, slot: int) -> str:
    """Return the column heading for slot number `slot` (buffer for one chunk) in a drawing: `data[3]`, or `heard from`
    for a barrier, whose slot collects the ranks that have signalled."""
    return "heard from" if program.operation == "barrier" else program.format_slots(slot)


def format_legend(program: CollectiveProgram) -> str:
    """Return the sentence that explains the labels of a drawing of the program's buffers: `a is rank 0, d rank 3; a0 is
    rank 0's part of chunk 0.`"""
    ranks = f"{LETTERS[0]} is rank 0" + (
        f", {LETTERS[program.ranks - 1]} rank {program.ranks - 1}" * (program.ranks > 1)
    )
    if program.operation == "barrier":
        return f"{ranks}; a rank leaves the barrier when it has signals, directly or indirectly, from all ranks."
    total = "; Σ0 has the parts of all ranks" if sums_contributions(program) and program.ranks > 1 else ""
    return f"{ranks}; {LETTERS[0]}0 is rank 0's part of chunk 0{total}."
