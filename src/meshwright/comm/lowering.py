"""Lowering of a checked collective program to one rank's schedule of posts, waits and local work.

Adjacent slots that are sent together become one message. A send is waited for only before its slots change, and
receives of the next group are posted with this group's sends where their slots are free, so that data is in flight
early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import CollectiveProgram, Kind
from meshwright.program.order import Integers


class Message(NamedTuple):
    """Point-to-point message between this rank and another, which carries adjacent slots (a slot is the buffer of one
    chunk of the vector).

    number: index among the rank's messages. peer: index of the other rank. slot: first slot sent or received. size:
    number of slots, 0 for a signal without data. staging: first slot of the staging buffer that receives the message,
    if its data are to be reduced into the slots; -1 if the message goes directly to or from the slots. step: index of
    the first step of the program that is executed by the message.
    """

    number: int
    peer: int
    slot: int
    size: int
    staging: int
    step: int


class AwaitReceive(NamedTuple):
    """Entry of a rank's schedule: wait until `message` has been received."""

    message: Message


class AwaitSend(NamedTuple):
    """Entry of a rank's schedule: wait until the send of `message` is complete, so that the memory it was sent from may
    be overwritten."""

    message: Message


class Reduce(NamedTuple):
    """Entry of a rank's schedule: reduce received data into the vector by the program's reduction (sum, minimum or
    maximum). `size` slots (buffers of one chunk each) of the staging buffer, from slot `staging` on, are reduced into
    the vector's slots from `slot` on."""

    slot: int
    size: int
    staging: int


class LocalCopy(NamedTuple):
    """Entry of a rank's schedule: copy `size` slots (buffers of one chunk each), from slot `source` on, to the slots
    from `slot` on.

    combine: True to reduce the source slots into the destination slots (by the program's reduction: sum, minimum or
    maximum) instead of overwriting the destination."""

    slot: int
    size: int
    source: int
    combine: bool


@dataclass(slots=True)
class Group:
    """Group of messages in a rank's schedule that are posted together, with the waits and local operations around them.
    The fields are executed in this order; a slot is the buffer of one chunk.

    before: waits until earlier sends have read the slots that this group overwrites. receives, sends: messages to post.
    ahead: receives of the next group, posted early. after: waits for messages, local copies and reductions.
    """

    before: list[AwaitSend] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    ahead: list[Message] = field(default_factory=list)
    after: list[AwaitReceive | AwaitSend | Reduce | LocalCopy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Schedule of one rank for a collective program, which `comm.programs.Executable` runs. Sizes are in slots (a slot
    is the buffer of one chunk of the vector).

    groups: groups of messages and local work, in execution order. messages: number of messages sent and received.
    staging: number of slots of the staging buffer. sent: number of slots that the rank sends."""

    groups: list[Group]
    messages: int
    staging: int
    sent: int


def lower(checked: CheckedCollective, rank: int, merge: bool = True) -> RankProgram:
    """Compile the verified collective program `checked` (each rank's sends, receives and reductions) to the schedule of
    rank `rank`: groups of messages, waits, local copies and reductions.

    merge: True: send adjacent slots (buffers of chunks) as one message; False: one message for each slot, for memory in
    which consecutive slots are not adjacent."""
    steps = checked.program.steps
    own = steps.of_rank(rank)
    groups = [Group() for _ in range(int(steps.group[own[-1]]) + 1 if len(own) else 0)]
    arriving: list[list[_TransferEnd]] = [[] for _ in groups]
    messages = 0
    for parts in _group_into_messages(checked, rank, merge):
        first, count = parts[0], sum(part.size for part in parts)
        message = Message(messages, int(steps.peer[first.step]), first.slot, count, -1, first.step)
        messages += 1
        group = int(steps.group[first.step])
        if first.outgoing:
            groups[group].sends.append(message)
        else:
            groups[group].receives.append(message)
            arriving[group] += [part._replace(message=message) for part in parts]
    staging = _schedule_arrivals(groups, arriving)
    for step in own:
        kind = Kind(int(steps.kind[step]))
        if kind in (Kind.COPY, Kind.COMBINE):
            slot, size, source = (int(column[step]) for column in (steps.slot, steps.count, steps.source))
            at_once = size if merge else 1
            groups[int(steps.group[step])].after += [
                LocalCopy(slot + i, at_once, source + i, kind == Kind.COMBINE) for i in range(0, size, at_once)
            ]
    for group_ in groups:
        group_.sends.sort(key=lambda message: (message.step, message.slot))
    _schedule_waits(groups)
    sent = sum(message.size for group_ in groups for message in group_.sends)
    return RankProgram(groups, messages, staging, sent)


class _TransferEnd(NamedTuple):
    """One rank's end (sending or receiving) of one transfer, a pair of a send and a receive step of the program. A
    message carries one or several transfers.

    step: index of the send or receive step. slot, size: first slot and number of slots. outgoing: True for a send.
    reduces: True if the receiver reduces the data into its slots, False if the data overwrite them. offset: position of
    the transfer in its message, in slots. message: the message; None until it is created."""

    step: int
    slot: int
    size: int
    outgoing: bool
    reduces: bool
    offset: int  # slots of the message before it
    message: Message | None = None


def _group_into_messages(checked: CheckedCollective, rank: int, merge: bool) -> Iterator[list[_TransferEnd]]:
    """Group the transfers from and to `rank` in the verified program `checked` into messages; yield each message as the
    list of its transfers.

    Transfers share a message if they are consecutive, in one group of steps, and adjacent in memory on both ranks; so
    sender and receiver form the same messages. Messages from one rank to another are yielded in sending order. merge:
    False: one message for every slot (buffer of one chunk).
    """
    program, s = checked.program, checked.program.steps
    here = (s.rank[checked.sends] == rank) | (s.rank[checked.receives] == rank)
    send, receive = checked.sends[here], checked.receives[here]
    order = np.lexsort((send, s.rank[send] * program.ranks + s.rank[receive]))
    send, receive = send[order], receive[order]
    count, inside = s.count[send], np.zeros(len(send), np.int64)
    if not merge:  # slot by slot
        repeat = np.maximum(count, 1)
        inside = np.arange(int(repeat.sum())) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        send, receive = np.repeat(send, repeat), np.repeat(receive, repeat)
        count = np.repeat(np.minimum(count, 1), repeat)
    ends = [(s.slot[step] + inside, step) for step in (send, receive)]
    joins = np.full(max(len(send) - 1, 0), merge) & (count[1:] > 0) & (s.kind[receive][1:] == s.kind[receive][:-1])
    for slot, step in ends:
        joins &= (s.group_index[step][1:] == s.group_index[step][:-1]) & (s.peer[step][1:] == s.peer[step][:-1])
        joins &= slot[1:] == (slot + count)[:-1]
        joins &= _find_region(program, slot)[1:] == _find_region(program, slot)[:-1]
    parts: list[_TransferEnd] = []
    for index in range(len(send)):
        if index and not joins[index - 1]:
            yield parts
            parts = []
        outgoing = bool(s.rank[send[index]] == rank)
        slot, step = ends[0] if outgoing else ends[1]
        reduces = s.kind[receive[index]] == Kind.REDUCE
        offset = parts[-1].offset + parts[-1].size if parts else 0
        parts.append(
            _TransferEnd(int(step[index]), int(slot[index]), int(count[index]), outgoing, bool(reduces), offset)
        )
    if parts:
        yield parts


def _find_region(program: CollectiveProgram, slot: Integers) -> Integers:
    """Return the memory region of each slot (buffer of one chunk) in `slot`: 0 for data, 1 for output, 2 for scratch;
    of the shape of `slot`. Slots of different regions of `program` are not adjacent in memory.
    """
    return (slot >= program.chunks).astype(np.int64) + (slot >= program.first_scratch)


def _schedule_arrivals(groups: list[Group], arriving: list[list[_TransferEnd]]) -> int:
    """Add to each group of a rank's schedule the waits for its received messages and the reductions of their data into
    the vector, in place. Messages to be reduced are received into a staging buffer; return its size in slots (buffers
    of one chunk).

    groups: the schedule. arriving: received transfers of each group. Reductions run in the order of the program's
    steps. Even and odd groups have separate staging slots, because two consecutive groups may be in flight.
    """
    sizes = [sum(part.size for part in parts if part.reduces) for parts in arriving]
    base = max(sizes[::2], default=0)
    for number, (group, parts) in enumerate(zip(groups, arriving, strict=True)):
        free = number % 2 * base
        staged: dict[Message | None, Message] = {}
        for part in parts:
            if part.reduces and part.offset == 0:
                assert part.message is not None
                staged[part.message] = part.message._replace(staging=free)
                free += part.message.size
        group.receives = [staged.get(message, message) for message in group.receives]
        waited: set[Message | None] = set()
        for part in sorted((part for part in parts if part.reduces), key=lambda part: (part.step, part.slot)):
            message = staged[part.message]
            if message not in waited:
                waited.add(message)
                group.after.append(AwaitReceive(message))
            reduce = Reduce(part.slot, part.size, message.staging + part.offset)
            last = group.after[-1]
            adjacent = isinstance(last, Reduce) and last.slot + last.size == reduce.slot
            if isinstance(last, Reduce) and adjacent and part.offset > 0 and last.staging + last.size == reduce.staging:
                group.after[-1] = last._replace(size=last.size + reduce.size)
            else:
                group.after.append(reduce)
        group.after += [AwaitReceive(message) for message in group.receives if message not in waited]
    return base + max(sizes[1::2], default=0)


def _schedule_waits(groups: list[Group]) -> None:
    """Complete a rank's schedule `groups` in place. Before each step that overwrites slots (chunk buffers), add waits
    for the unfinished sends that read these slots. Where possible, post receives one group early."""
    leaving: list[Message] = []  # sends that have not been waited for

    def leave(slot: int, count: int) -> list[AwaitSend]:
        """Return waits for the unfinished sends that read any of the `count` slots (chunk buffers) from `slot` on, and
        remove these sends from the unfinished ones."""
        over = [message for message in leaving if _slots_overlap(message.slot, message.size, slot, count)]
        for message in over:
            leaving.remove(message)
        return [AwaitSend(message) for message in over]

    for number, group in enumerate(groups):
        for message in group.receives:
            if message.staging < 0:
                group.before += leave(message.slot, message.size)
        leaving += group.sends
        touched = [(message.slot, message.size) for message in leaving]
        after: list[AwaitReceive | AwaitSend | Reduce | LocalCopy] = []
        for event in group.after:
            if isinstance(event, (Reduce, LocalCopy)):
                touched.append((event.slot, event.size))
                after += leave(event.slot, event.size)
            if isinstance(event, LocalCopy):
                touched.append((event.source, event.size))
            if isinstance(event, AwaitReceive) and event.message.staging < 0:
                touched.append((event.message.slot, event.message.size))
            after.append(event)
        group.after = after
        if number + 1 < len(groups):
            _post_early(group, groups[number + 1], touched)
    if groups:
        groups[-1].after += [AwaitSend(message) for message in leaving]


def _post_early(group: Group, following: Group, touched: list[tuple[int, int]]) -> None:
    """Move receives from `following.receives` to `group.ahead`, so that they are posted one group earlier.

    touched: slot ranges (first slot, number of slots) that are read or written while `group` runs. A receive into such
    a range is not moved, nor are later receives from the same rank, because messages from one rank arrive in order.
    """
    held: set[int] = set()
    for message in following.receives:
        in_use = message.staging < 0 and any(_slots_overlap(message.slot, message.size, *other) for other in touched)
        if in_use or message.peer in held:
            held.add(message.peer)
        else:
            group.ahead.append(message)
    following.receives = [message for message in following.receives if message not in group.ahead]


def _slots_overlap(slot: int, count: int, other: int, others: int) -> bool:
    """Return True if the slot ranges [slot, slot + count) and [other, other + others) have a slot in common."""
    return slot < other + others and other < slot + count
