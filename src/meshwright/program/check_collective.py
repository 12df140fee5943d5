"""Verification of collective programs: correct result of the operation, and no deadlock even with synchronous sends.

Checks that each step is valid, every send has a receive, no groups wait for each other in a cycle, no result depends on
the step order within a group, and every contribution is reduced exactly once into every slot that requires it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.program import contract
from meshwright.program.collective import ARRIVING, LOCAL, SENDING, CollectiveProgram, Kind, MatchedCollective
from meshwright.program.contributions import (
    ContributionTracker,
    build_local_moves,
    build_transfer_moves,
    format_owners,
)
from meshwright.program.matching import order_steps
from meshwright.program.order import Integers, Mask, PostingOrder, ProgramError, expand_ranges

_MAX_SLOTS_MOVED = 10**8  # summed over steps: a few GiB and a minute


@dataclass(frozen=True)
class CheckedCollective(MatchedCollective):
    """Verified collective program, with its matched sends and receives and an order in which they can run.

    Attributes:
        program: Steps of all ranks.
        sends, receives: [transfers], step indices of the two ends of each transfer.
        level: [transfers], dependency level of each transfer; a transfer depends only on transfers of lower levels.
        order: Order in which groups (steps that a rank posts together) can be posted.
    """

    level: Integers
    order: PostingOrder

    @property
    def rounds(self) -> int:
        """Number of rounds of the collective program: number of transfers in its longest chain of dependent
        transfers."""
        return self.order.depth

    def bytes_sent(self, total_bytes: float) -> NDArray[np.float64]:
        """Return the bytes that each rank sends, indexed by rank. total_bytes: size in bytes of the operation's full
        vector."""
        s = self.program.steps
        slots = np.bincount(s.rank[self.sends], weights=s.count[self.sends], minlength=self.program.ranks)
        return np.asarray(slots * (total_bytes / self.program.chunks), np.float64)


def check_collective(program: CollectiveProgram) -> CheckedCollective:
    """Verify that a collective program computes its operation and cannot deadlock; return it with its matched sends and
    receives.

    Raises `ProgramError` (rank, step, reason) at the first violation, and `UserError` for a program too large to check.
    Time grows with the number of chunks moved by all steps; memory is about ranks x slots x ranks / 8 bytes, where a
    slot is a buffer for one chunk.
    """
    p = program
    contract.check_header(p.operation, p.ranks, p.chunks, p.root, p.scratch, p.reduction, "program")
    _check_steps(program)
    if (moved := int(p.steps.count.sum())) > _MAX_SLOTS_MOVED:
        raise UserError(
            f"program: its steps use {moved} slots, and a check is limited to {_MAX_SLOTS_MOVED}; use fewer ranks "
            "or chunks"
        )
    checked = _match_steps(program)
    _check_races(program)
    flow = ContributionTracker(program)
    flow.run(
        build_transfer_moves(program, checked.sends, checked.receives, checked.order, checked.level),
        build_local_moves(program, checked.order),
    )
    _check_postcondition(program, flow.memory)
    return checked


def _check_steps(program: CollectiveProgram) -> None:
    """Raise `ProgramError` for the first step that is invalid by itself: unknown kind, rank or slot (buffer for one
    chunk), or a field value that does not fit its kind.

    Local steps (copy, combine) must not share a group (steps that a rank posts together) with transfers; a barrier may
    have only signals.
    """
    s, ranks, slots = program.steps, program.ranks, program.slots
    across, inside = s.has_kind(SENDING + ARRIVING), s.has_kind(LOCAL)
    empty = s.has_kind((Kind.SIGNAL, Kind.WAIT))

    def beyond(first: Integers) -> Mask:
        """Return a mask [steps]: True for each step whose slots (buffers for one chunk) are not all in one of the
        buffers data, output and scratch; False for signals and waits, which use no slots.

        first: [steps], first slot that each step uses; the number of slots is its `count`.
        """
        last = first + s.count - 1
        starts = np.array([0, program.output, program.first_scratch][0 if program.has_output else 1 :])
        same = np.searchsorted(starts, first, side="right") == np.searchsorted(starts, last, side="right")
        outside: Mask = (first < 0) | (last >= slots) | ~same
        return outside & ~empty

    known_ranks = f"ranks are 0 to {ranks - 1}"
    buffers = f"a rank has data[0:{program.chunks}]"
    buffers += f", output[0:{program.chunks}]" if program.has_output else ""
    buffers += f" and scratch[0:{program.scratch}]" if program.scratch else ""
    mixed = np.zeros(len(s.group_rank), np.bool_)
    mixed[s.group_index[across]] = True
    for bad, reason in (
        ((s.rank < 0) | (s.rank >= ranks), f"there is no rank {{rank}}; {known_ranks}"),
        (~across & ~inside, "there is no step of kind {kind}"),
        (across & ((s.peer < 0) | (s.peer >= ranks)), f"there is no rank {{peer}}; {known_ranks}"),
        (across & (s.peer == s.rank), "a rank cannot send to or receive from itself; use copy"),
        (~empty & (program.operation == "barrier"), "a barrier moves no data, only signals"),
        (empty & ((s.slot != 0) | (s.count != 0)), "a signal carries no slots"),
        (across & (s.source != -1), "only a local step (copy, combine) has a source slot"),
        (inside & (s.peer != -1), "a local step has no peer"),
        (~empty & (s.count < 1), "{count} slots; a step needs at least one"),
        (beyond(s.slot) | (inside & beyond(s.source)), f"reaches beyond a rank's slots; {buffers}"),
        (inside & (np.abs(s.slot - s.source) < s.count), "the slots read and the slots written overlap"),
        (inside & mixed[s.group_index], "a local step must be in a group without transfers"),
    ):
        program.refuse(bad, reason)


def _match_steps(program: CollectiveProgram) -> CheckedCollective:
    """Match each send with its receive, and compute an order in which all groups (steps that a rank posts together) can
    be posted.

    Returns the program with its matched transfers and this order; nothing else is verified yet. Raises `ProgramError`
    for a send or receive without a counterpart, different slot counts (numbers of chunks) at both ends, and a deadlock.
    """
    s = program.steps
    matched = MatchedCollective.from_program(program)
    sends, receives = matched.sends, matched.receives
    for differs, what in (
        ((s.kind[sends] == Kind.SIGNAL) != (s.kind[receives] == Kind.WAIT), "is of another kind"),
        (s.count[sends] != s.count[receives], "has another number of slots"),
    ):
        if differs.any():
            at = int(np.argmax(differs))
            raise program.make_error(
                int(sends[at]), f"is matched with {program.locate(int(receives[at]))}, which {what}"
            )
    order = order_steps(program, sends, receives)
    level = np.maximum(order.level[s.group_index[sends]], order.level[s.group_index[receives]])
    return CheckedCollective(program, sends, receives, level, order)


def _check_races(program: CollectiveProgram) -> None:
    """Raise `ProgramError` if a result depends on the order of steps within a group (steps that a rank posts together),
    which run concurrently.

    If a receive or a copy writes a slot (buffer for one chunk), no other step of the group may use it. If a combine
    (local addition) writes a slot, no other local step may read it.
    """
    s = program.steps
    is_local = s.has_kind(LOCAL)
    writers = np.flatnonzero(is_local | s.has_kind((Kind.RECEIVE, Kind.REDUCE)))
    readers = np.flatnonzero(is_local | (s.kind == Kind.SEND))
    slot = np.concatenate([s.slot[writers], np.where(is_local, s.source, s.slot)[readers]])
    step = np.concatenate([writers, readers])
    first = s.group_index[step] * program.slots + slot
    which, place = expand_ranges(first, first + s.count[step])
    step, writes = step[which], which < len(writers)
    exclusive = writes & s.has_kind((Kind.RECEIVE, Kind.COPY))[step]
    combines = writes & (s.kind[step] == Kind.COMBINE)
    for claims, others, allowed in ((exclusive, np.ones_like(writes), 1), (combines, ~writes, 0)):
        claimed = np.unique(place[claims])
        if len(claimed) == 0:
            continue
        at = np.minimum(np.searchsorted(claimed, place), len(claimed) - 1)
        both = claimed[at] == place
        racing = both & (np.bincount(at[both & others], minlength=len(claimed)) > allowed)[at]
        if not racing.any():
            continue
        one = int(np.flatnonzero(racing & claims)[0])
        other = next(int(i) for i in np.flatnonzero(racing & others & (place == place[one])) if i != one)
        contested = program.format_slots(int(place[one] % program.slots))
        reason = (
            f"writes {contested}, which {program.describe(int(step[other]))} of the same group "
            f"{'writes' if writes[other] else 'reads'}; the steps of a group run concurrently: move one of them to an "
            "earlier or later group"
        )
        raise program.make_error(int(step[one]), reason)


def _check_postcondition(program: CollectiveProgram, memory: contract.SymbolicMemory) -> None:
    """Raise `ProgramError` unless every rank ends with the operation's result: each slot of the result holds the right
    chunk, with exactly the required ranks' contributions.

    memory: chunk number and contributing ranks of every slot (buffer for one chunk) after the last step.
    """
    need = contract.build_required_slots(program)
    chunk, sets = memory.chunk[need.rank, need.slot], memory.origins[need.rank, need.slot]
    wanted = contract.make_single_rank_sets(need.origin, program.ranks)
    wanted[need.origin == contract.ALL] = contract.make_full_set(program.ranks)
    bad = (chunk != need.chunk) | (sets != wanted).any(axis=1)
    if not bad.any():
        return
    at = int(np.argmax(bad))
    rank, slot = int(need.rank[at]), int(need.slot[at])
    missing, extra = contract.list_ranks(wanted[at] & ~sets[at]), contract.list_ranks(sets[at] & ~wanted[at])
    if program.operation == "barrier":
        raise _make_end_error(
            program, rank, f"has received no signal, direct or indirect, from rank {', '.join(map(str, missing))}"
        )
    name, of = program.format_slots(slot), f"chunk {need.chunk[at]}"
    if need.origin[at] != contract.ALL:
        of += f" of rank {need.origin[at]}"
    if chunk[at] < 0:
        reason = f"{name} is empty at the end; required is {of}"
    elif chunk[at] != need.chunk[at] or (missing and extra):
        owners = format_owners(contract.list_ranks(sets[at]))
        reason = f"{name} holds {owners} part of chunk {chunk[at]} at the end; required is {of}"
    elif missing:
        reason = f"{name} lacks {format_owners(missing)} part of chunk {chunk[at]}"
    else:
        reason = f"{name} also has {format_owners(extra)} part of chunk {chunk[at]}"
    raise _make_end_error(program, rank, reason + _describe_last_write(program, rank, slot))


def _make_end_error(program: CollectiveProgram, rank: int, reason: str) -> ProgramError:
    """Return a `ProgramError` with message `reason` about the buffers of rank `rank` after its last step."""
    of_rank = program.steps.of_rank(rank)
    groups = int(program.steps.group[of_rank[-1]]) + 1 if of_rank else 0
    return ProgramError(rank, groups, "end", reason)


def _describe_last_write(program: CollectiveProgram, rank: int, slot: int) -> str:
    """Return text to append to an error message, which names the last step of `program` that writes slot number `slot`
    (buffer for one chunk) on rank `rank`: `; last written in step 3 (...)` or `; no step writes it`."""
    s = program.steps
    writes = (Kind.RECEIVE, Kind.REDUCE, *LOCAL)
    for step in reversed(s.of_rank(rank)):
        if s.kind[step] in writes and s.slot[step] <= slot < s.slot[step] + s.count[step]:
            return f"; last written in step {s.group[step]} ({program.describe(step)})"
    return "; no step writes it"
