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
from meshwright.program.collective import ARRIVING, LOCAL, SENDING, CollectiveProgram, Kind
from meshwright.program.contributions import (
    ContributionTracker,
    build_local_moves,
    build_transfer_moves,
    expand_ranges,
    format_owners,
    make_step_error,
)
from meshwright.program.order import (
    Deadlock,
    Integers,
    Mask,
    PostingOrder,
    ProgramError,
    UnmatchedTransfer,
    find_posting_order,
    match_transfers,
)

_MAX_SLOTS_MOVED = 10**8  # summed over steps: a few GiB and a minute


@dataclass(frozen=True)
class CheckedCollective:
    """Verified collective program, with its matched transfers and the order in which they can run.

    sends, receives: [transfers], indices of the send and receive step of each transfer. level: [transfers], position in
        the dependency order: a transfer depends on lower levels only.
    order: order in which groups (steps that a rank posts together) can be posted.
    """

    program: CollectiveProgram
    sends: Integers
    receives: Integers
    level: Integers
    order: PostingOrder

    @property
    def rounds(self) -> int:
        """Number of rounds of the collective program: number of transfers in its longest chain of dependent
        transfers."""
        return self.order.depth

    def bytes_sent(self, total_bytes: float) -> NDArray[np.float64]:
        """Return the bytes that each rank sends if the operation's vector has `total_bytes` bytes: [ranks]."""
        s = self.program.steps
        slots = np.bincount(s.rank[self.sends], weights=s.count[self.sends], minlength=self.program.ranks)
        return np.asarray(slots * (total_bytes / self.program.chunks), np.float64)


def check_collective(program: CollectiveProgram) -> CheckedCollective:
    """Verify that a collective program computes its operation and cannot deadlock; return it with its matched
    transfers.

    Raises `ProgramError` (rank, step, reason) at the first violation, and `UserError` for a program too large to check.
    Time grows with the slots moved by all steps; memory is about ranks x slots x ranks / 8 bytes.
    """
    p = program
    contract.check_header(p.operation, p.ranks, p.chunks, p.root, p.scratch, p.reduction, "program")
    _check_steps(program)
    if (moved := int(p.steps.count.sum())) > _MAX_SLOTS_MOVED:
        raise UserError(
            f"program: its steps name {moved} slots, and a check takes {_MAX_SLOTS_MOVED}; take fewer ranks or chunks"
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
    """Raise `ProgramError` for the first step that is invalid by itself: unknown kind, rank or slot, wrong field
    values.

    Local steps (copy, combine) must be in groups without transfers; a barrier may have only signals.
    """
    s, ranks, slots = program.steps, program.ranks, program.slots
    across, inside = s.has_kind(SENDING + ARRIVING), s.has_kind(LOCAL)
    empty = s.has_kind((Kind.SIGNAL, Kind.WAIT))

    def refuse(bad: Mask, reason: str) -> None:
        """Raise `ProgramError` with `reason` for the first step for which `bad` [steps] is True, if any."""
        if bad.any():
            step = int(np.argmax(bad))
            words = {name: int(getattr(s, name)[step]) for name in ("rank", "kind", "peer", "count")}
            raise make_step_error(program, step, reason.format(**words))

    def beyond(first: Integers) -> Mask:
        """Return a mask [steps]: True if slots first .. first + count do not lie within one of data, output and
        scratch.

        first: [steps], first slot that each step uses.
        """
        last = first + s.count - 1
        starts = np.array([0, program.output, program.first_scratch][0 if program.has_output else 1 :])
        same = np.searchsorted(starts, first, side="right") == np.searchsorted(starts, last, side="right")
        outside: Mask = (first < 0) | (last >= slots) | ~same
        return outside & ~empty

    last = f"ranks are 0 to {ranks - 1}"
    there = f"a rank has data[0:{program.chunks}]"
    there += f", output[0:{program.chunks}]" if program.has_output else ""
    there += f" and scratch[0:{program.scratch}]" if program.scratch else ""
    refuse((s.rank < 0) | (s.rank >= ranks), f"there is no rank {{rank}}; {last}")
    refuse(~across & ~inside, "there is no step of kind {kind}")
    refuse(across & ((s.peer < 0) | (s.peer >= ranks)), f"there is no rank {{peer}}; {last}")
    refuse(across & (s.peer == s.rank), "a rank does not exchange with itself; copy does that")
    if program.operation == "barrier":
        refuse(~empty, "a barrier moves no data, only signals")
    refuse(empty & ((s.slot != 0) | (s.count != 0)), "a signal carries no slots")
    refuse(across & (s.source != -1), "a source slot is for local steps")
    refuse(inside & (s.peer != -1), "a local step has no peer")
    refuse(~empty & (s.count < 1), "{count} slots; a step takes at least one")
    refuse(beyond(s.slot) | (inside & beyond(s.source)), f"reaches beyond a rank's slots; {there}")
    overlap = inside & (np.abs(s.slot - s.source) < s.count)
    refuse(overlap, "what is read and what is written overlap")
    mixed = np.zeros(len(s.group_rank), np.bool_)
    mixed[s.group_index[across]] = True
    refuse(inside & mixed[s.group_index], "a local step stands in a group without transfers")


def _match_steps(program: CollectiveProgram) -> CheckedCollective:
    """Match each send with its receive, and compute the order in which all groups can be posted.

    Returns the program with both, not yet verified further. Raises `ProgramError` for a send or receive without a
    counterpart, different slot counts at both ends, and a deadlock.
    """
    s = program.steps
    try:
        sends, receives = match_transfers(s.rank, s.peer, s.has_kind(SENDING), s.has_kind(ARRIVING))
    except UnmatchedTransfer as unmatched:
        raise _make_unmatched_error(program, unmatched) from None
    for differs, what in (
        ((s.kind[sends] == Kind.SIGNAL) != (s.kind[receives] == Kind.WAIT), "is not of its kind"),
        (s.count[sends] != s.count[receives], "has another number of slots"),
    ):
        if differs.any():
            at = int(np.argmax(differs))
            meets = f"rank {s.peer[sends[at]]}, step {s.group[receives[at]]} ({program.describe(int(receives[at]))})"
            raise make_step_error(program, int(sends[at]), f"meets {meets}, which {what}")
    group_a, group_b = s.group_index[sends], s.group_index[receives]
    try:
        order = find_posting_order(s.group_rank, group_a, group_b)
    except Deadlock as deadlock:
        raise _make_deadlock_error(program, deadlock.groups, sends, receives) from None
    return CheckedCollective(program, sends, receives, np.maximum(order.level[group_a], order.level[group_b]), order)


def _make_unmatched_error(program: CollectiveProgram, unmatched: UnmatchedTransfer) -> ProgramError:
    """Return the error for a send or receive without a counterpart; its message has the numbers of sends and receives.

    unmatched: exception of `match_transfers`, which holds the index of the step.
    """
    s, step = program.steps, unmatched.step
    rank, peer = s.rank[step], s.peer[step]
    out, back = (SENDING, ARRIVING) if unmatched.is_send else (ARRIVING, SENDING)
    here = int((s.has_kind(out) & (s.rank == rank) & (s.peer == peer)).sum())
    there = int((s.has_kind(back) & (s.rank == peer) & (s.peer == rank)).sum())
    if unmatched.is_send:
        reason = f"rank {peer} has no receive for it (sends from rank {rank} to {peer}: {here}, receives: {there})"
    else:
        reason = f"rank {peer} has no send for it (receives on rank {rank} from {peer}: {here}, sends: {there})"
    return make_step_error(program, step, reason)


def _make_deadlock_error(
    program: CollectiveProgram, circle: tuple[int, ...], sends: Integers, receives: Integers
) -> ProgramError:
    """Return the error for a deadlock, whose message lists every rank of the cycle and the step that it waits for.

    circle: indices of the groups of the cycle, each of which waits for the next one: the group before it on its own
    rank, or a group of another rank with which that group before it exchanges messages. sends, receives: [transfers],
    step indices of matched sends and receives.
    """
    s = program.steps
    rank = s.group_rank
    first = np.searchsorted(s.group_index, np.arange(len(rank) + 1))
    partner = np.full(len(s), -1)
    partner[sends], partner[receives] = receives, sends
    links: list[tuple[int, str]] = []
    for group, other in zip(circle, (*circle[1:], circle[0]), strict=True):
        if rank[group] == rank[other]:
            continue
        meeting = np.arange(first[group - 1], first[group])
        step = int(meeting[s.group_index[partner[meeting]] == other][0])
        stands = program.describe(int(partner[step]))
        text = f"rank {rank[group]}, step {s.group[step]} ({program.describe(step)})"
        links.append((step, f"{text} waits for rank {rank[other]} to reach step {s.group[partner[step]]} ({stands})"))
    start = min(range(len(links)), key=lambda link: links[link][0])
    links = links[start:] + links[:start]
    texts = [text for _, text in links]
    if len(texts) > 8:
        texts = [*texts[:4], f"and so on over {len(texts) - 8} more", *texts[-4:]]
    return make_step_error(program, links[0][0], "deadlock when sends block: " + "; ".join(texts))


def _check_races(program: CollectiveProgram) -> None:
    """Raise `ProgramError` if a result depends on the order of steps within a group, which run concurrently.

    No other step of the group may use a slot that a receive or a copy writes; no other local step may read a slot that
    a combine writes.
    """
    s = program.steps
    is_local = s.has_kind(LOCAL)
    writers = np.flatnonzero(is_local | s.has_kind((Kind.RECEIVE, Kind.REDUCE)))
    readers = np.flatnonzero(is_local | (s.kind == Kind.SEND))
    slot = np.concatenate([s.slot[writers], np.where(is_local, s.source, s.slot)[readers]])
    step = np.concatenate([writers, readers])
    which, place = expand_ranges(s.group_index[step] * program.slots + slot, s.count[step])
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
            f"{'writes' if writes[other] else 'reads'}; the steps of a group have no order: put one of them in a group "
            "before or after"
        )
        raise make_step_error(program, int(step[one]), reason)


def _check_postcondition(program: CollectiveProgram, memory: contract.Memory) -> None:
    """Raise `ProgramError` unless, after the last step, every slot that the operation's result covers holds its chunk
    with exactly the required contributions.

    memory: chunk and contributing ranks of every slot after the last step.
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
        raise _make_end_error(program, rank, f"has not heard from rank {', '.join(map(str, missing))}")
    name, of = program.format_slots(slot), f"chunk {need.chunk[at]}"
    if need.origin[at] != contract.ALL:
        of += f" of rank {need.origin[at]}"
    if chunk[at] < 0:
        reason = f"{name} holds nothing; it has to end with {of}"
    elif chunk[at] != need.chunk[at] or (missing and extra):
        owners = format_owners(contract.list_ranks(sets[at]))
        reason = f"{name} holds {owners} part of chunk {chunk[at]}; it has to end with {of}"
    elif missing:
        reason = f"{name} lacks {format_owners(missing)} part of chunk {chunk[at]}"
    else:
        reason = f"{name} has {format_owners(extra)} part of chunk {chunk[at]}, which does not belong there"
    raise _make_end_error(program, rank, reason + _describe_last_write(program, rank, slot))


def _make_end_error(program: CollectiveProgram, rank: int, reason: str) -> ProgramError:
    """Return a `ProgramError` with message `reason` about the buffers of rank `rank` after its last step."""
    of_rank = program.steps.of_rank(rank)
    groups = int(program.steps.group[of_rank[-1]]) + 1 if of_rank else 0
    return ProgramError(rank, groups, "end", reason)


def _describe_last_write(program: CollectiveProgram, rank: int, slot: int) -> str:
    """Return `; last written in step 3 (...)` or `; no step writes it` for slot `slot` of rank `rank`, to append to a
    message."""
    s = program.steps
    writes = (Kind.RECEIVE, Kind.REDUCE, *LOCAL)
    for step in reversed(s.of_rank(rank)):
        if s.kind[step] in writes and s.slot[step] <= slot < s.slot[step] + s.count[step]:
            return f"; last written in step {s.group[step]} ({program.describe(step)})"
    return "; no step writes it"
