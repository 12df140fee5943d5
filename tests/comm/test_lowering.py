"""Lowering of a program to one rank: both ends have the same messages, and no slot in use is overwritten."""

from __future__ import annotations

import pytest

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.comm.lowering import AwaitReceive, AwaitSend, LocalCopy, Message, RankProgram, Reduce, lower
from meshwright.errors import UserError
from meshwright.program.check_collective import CheckedCollective, check_collective
from meshwright.program.collective import Builder


def every_program(ranks: int) -> list[CheckedCollective]:
    found = []
    for operation, named in ALGORITHMS.items():
        for name in named:
            try:
                found.append(check_collective(generate(operation, name, ranks)))
            except UserError:
                continue
    return found


def posted(part: RankProgram) -> tuple[list[Message], list[Message]]:
    """Sends and receives in the order of posting."""
    sends = [message for group in part.groups for message in group.sends]
    return sends, [message for group in part.groups for message in (*group.receives, *group.ahead)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 9])
@pytest.mark.parametrize("merge", [True, False])
def test_both_ends_lower_to_same_messages_in_order(ranks: int, merge: bool):
    for checked in every_program(ranks):
        parts = [lower(checked, rank, merge) for rank in range(ranks)]
        ends = [posted(part) for part in parts]
        for a in range(ranks):
            for b in range(ranks):
                sent = [message.size for message in ends[a][0] if message.peer == b]
                received = [message.size for message in ends[b][1] if message.peer == a]
                assert sent == received, (checked.program.algorithm, a, b)
        assert [part.sent for part in parts] == checked.bytes_sent(checked.program.chunks).tolist()


def slots(message: Message | Reduce | LocalCopy) -> set[int]:
    return set(range(message.slot, message.slot + message.size))


def is_free(places: set[int], *used: dict[int, set[int]]) -> bool:
    """Return True if no message in `used` has one of the slots `places`."""
    return all(places.isdisjoint(held) for messages in used for held in messages.values())


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("merge", [True, False])
def test_buffers_are_not_overwritten_before_last_read(ranks: int, merge: bool):
    """Replay a rank's events: slots of a posted send or receive are in use until it is waited for."""
    for checked in every_program(ranks):
        for rank in range(ranks):
            reading: dict[int, set[int]] = {}
            filling: dict[int, set[int]] = {}
            staged: dict[int, set[int]] = {}
            part = lower(checked, rank, merge)
            for group in part.groups:
                for sent in group.before:
                    del reading[sent.message.number]
                for message in group.receives:
                    post_receive(message, reading, filling, staged)
                for message in group.sends:
                    assert is_free(slots(message), filling)
                    reading[message.number] = slots(message)
                for message in group.ahead:
                    post_receive(message, reading, filling, staged)
                for event in group.after:
                    if isinstance(event, AwaitReceive):
                        filling.pop(event.message.number, None)
                    elif isinstance(event, AwaitSend):
                        del reading[event.message.number]
                    else:
                        assert is_free(slots(event), reading, filling)
                        if isinstance(event, Reduce):
                            release(event, staged)
            assert not reading and not filling and not any(staged.values()), "everything was waited for"


def post_receive(
    message: Message, reading: dict[int, set[int]], filling: dict[int, set[int]], staged: dict[int, set[int]]
) -> None:
    if message.staging < 0:
        assert is_free(slots(message), reading, filling)
        filling[message.number] = slots(message)
    else:
        places = set(range(message.staging, message.staging + message.size))
        assert is_free(places, staged), "two messages in one place of the staging buffer"
        staged[message.number] = places


def release(event: Reduce, staged: dict[int, set[int]]) -> None:
    places = set(range(event.staging, event.staging + event.size))
    [number] = [number for number, held in staged.items() if places <= held]
    staged[number] -= places


def test_adjacent_chunks_travel_as_one_message():
    rabenseifner = check_collective(generate("all-reduce", "rabenseifner", 8))
    sends, _ = posted(lower(rabenseifner, 0))
    assert [message.size for message in sends] == [4, 2, 1, 1, 2, 4]
    alone, _ = posted(lower(rabenseifner, 0, merge=False))
    assert [message.size for message in alone] == [1] * 14


def test_receive_queues_behind_earlier_receive_from_same_rank():
    program = Builder("broadcast", "by hand", ranks=2, chunks=4)
    with program.round():
        program.transfer(0, 1, chunk=0)
    with program.round():
        program.transfer(0, 1, chunk=0)  # cannot be posted ahead: the first receive still fills the slot
        program.transfer(0, 1, chunk=2, count=2)  # free, but queued behind the message before
    with program.round():
        program.transfer(0, 1, chunk=1)
    checked = check_collective(program.build())
    assert [message.size for message in posted(lower(checked, 0))[0]] == [1, 1, 2, 1]
    assert [message.size for message in posted(lower(checked, 1))[1]] == [1, 1, 2, 1]
