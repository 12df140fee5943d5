"""Ring buffer of calls: another process reads every recorded call at any time, even if the writer was killed."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.flight_recorder import call_ring
from meshwright.flight_recorder.call_log import Group, format_ranks
from meshwright.flight_recorder.call_ring import CAPACITY, CallWriter, create_memory_file, create_named_file, read_calls

FLOATS, SHAPE = "float32", (3, 4)


@pytest.fixture
def descriptor():
    made = create_memory_file(2, 4)
    yield made
    os.close(made)


def post(writer: CallWriter, group: int, site: str = "data.gradients", size: int = 48) -> int:
    return writer.post(group, site, "all_reduce", "data", size, FLOATS, SHAPE)


def test_call_is_visible_to_readers_before_it_starts(descriptor):
    assert read_calls(descriptor) is None, "no process has opened it"
    writer = CallWriter(descriptor)
    begun = time.monotonic()
    group = writer.register_group((0, 1, 2, 3))
    assert read_calls(descriptor).last is None

    number = post(writer, group)
    line = f"test_call_ring.py:{post.__code__.co_firstlineno + 1} (post)"
    (call,) = read_calls(descriptor).calls
    assert (call.number, call.index, call.description) == (1, 1, "all_reduce data.gradients over data")
    assert call.group == Group((0, 1, 2, 3)) and call.form == "float32[3, 4]" and call.payload_bytes == 48
    assert call.place.endswith(line) and begun <= call.posted <= time.monotonic()
    assert call.waited is None and call.done is None and not call.waiting

    writer.wait(number)
    assert read_calls(descriptor).waiting.name == "call 1 (all_reduce data.gradients over data)"
    writer.done(number)
    seen = read_calls(descriptor)
    assert seen.waiting is None and seen.last_done.done >= seen.last_done.waited >= call.posted
    assert (seen.rank, seen.ranks, seen.process, seen.torn) == (2, 4, os.getpid(), 0)


def test_calls_are_counted_by_group_of_equal_ranks(descriptor):
    writer = CallWriter(descriptor)
    data, tensor, same = writer.register_group((0, 2)), writer.register_group([2, 3]), writer.register_group([0, 2])
    assert data == same != tensor
    up, down = writer.register_group((0, 2), (0, 2)), writer.register_group((0, 2), (2, 0))
    reductions = writer.register_group((0, 2), purpose="reductions")
    for group in (data, tensor, data, up, same, down, up, reductions):
        post(writer, group)
    seen = read_calls(descriptor)
    collectives = {Group((0, 2)): 3, Group((2, 3)): 1, Group((0, 2), purpose="reductions"): 1}
    assert seen.counts == collectives | {Group((0, 2), (0, 2)): 2, Group((0, 2), (2, 0)): 1}
    assert [call.index for call in seen.calls] == [1, 1, 2, 1, 3, 1, 2, 1]
    assert seen.calls[3].group.members == (0, 2) and seen.calls[5].group.members == (2, 0)


def test_oldest_calls_are_overwritten_and_counts_are_kept(descriptor):
    writer = CallWriter(descriptor)
    once, often = writer.register_group((0, 1)), writer.register_group((2, 3))
    first = post(writer, once)
    last = [post(writer, often, f"site {at % 7}", at) for at in range(CAPACITY + 100)][-1]
    writer.wait(first)  # its record has been overwritten
    writer.done(first)
    seen = read_calls(descriptor)
    assert len(seen.calls) == CAPACITY and seen.torn == 0
    assert [call.number for call in seen.calls] == list(range(last - CAPACITY + 1, last + 1))
    assert all(call.site == f"site {call.payload_bytes % 7}" and call.index == call.number - 1 for call in seen.calls)
    assert all(call.waited is None and call.done is None for call in seen.calls)
    assert seen.counts == {Group((0, 1)): 1, Group((2, 3)): CAPACITY + 100}


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 24, 32, 40])
def test_torn_record_is_distinguished_from_complete_one(descriptor, byte):
    """A writer that is killed while writing a record leaves new and old bytes in it."""
    writer = CallWriter(descriptor)
    group = writer.register_group((0, 1, 2, 3))
    for at in range(CAPACITY + 5):
        post(writer, group, size=at)
    with mmap.mmap(descriptor, 0) as memory:
        memory[call_ring._compute_records_offset(call_ring.GROUPS) + 64 * ((CAPACITY + 5) % CAPACITY) + byte] ^= 0x10
    seen = read_calls(descriptor)
    assert seen.torn == 1
    assert seen.calls[-1].number == CAPACITY + 4, "the newest complete record"
    with mmap.mmap(descriptor, 0) as memory:
        memory[call_ring._compute_records_offset(call_ring.GROUPS) + 64 * ((CAPACITY + 1) % CAPACITY) + byte] ^= 0x10
    seen = read_calls(descriptor)
    assert seen.torn == 2 and [call.number for call in seen.calls] == [CAPACITY + 2, CAPACITY + 3, CAPACITY + 4]


def test_concurrent_reader_sees_complete_calls_in_order(descriptor):
    writer_process = os.fork()
    if writer_process == 0:
        writer = CallWriter(descriptor)
        groups = [writer.register_group((0, 1)), writer.register_group((0, 1, 2, 3))]
        at = 0
        while True:
            at += 1
            number = writer.post(groups[at % 2], f"site {at % 5}", "all_reduce", "data", at, FLOATS, (at % 3,))
            writer.wait(number)
            writer.done(number)
    try:
        newest, full, deadline = 0, 0, time.monotonic() + 20
        while full < 25:
            assert time.monotonic() < deadline
            seen = read_calls(descriptor)
            if seen is None or not seen.calls:
                continue
            assert [call.number for call in seen.calls] == list(range(seen.calls[0].number, seen.calls[-1].number + 1))
            assert seen.calls[-1].number >= newest
            newest = seen.calls[-1].number
            full += len(seen.calls) > CAPACITY // 4
            for call in seen.calls:
                assert call.payload_bytes == call.number and call.site == f"site {call.number % 5}"
                assert call.form == f"float32[{call.number % 3}]" and len(call.group.ranks) == (2, 4)[call.number % 2]
                assert call.waited is None or call.posted <= call.waited
                assert call.done is None or call.posted <= call.done
    finally:
        os.kill(writer_process, signal.SIGKILL)
        os.waitpid(writer_process, 0)
    assert read_calls(descriptor).torn <= 1, "calls of a killed writer must stay readable"


def test_full_name_heap_loses_only_names(descriptor):
    writer = CallWriter(descriptor)
    group = writer.register_group((0, 1))
    for at in range(200):
        post(writer, group, f"{at} " + 1000 * "x")
    seen = read_calls(descriptor)
    assert len(seen.calls) == 200 and seen.counts[Group((0, 1))] == 200
    assert seen.calls[0].site.startswith("0 ") and seen.calls[-1].site == "?"


def test_unbounded_shapes_leave_heap_space_for_other_names(descriptor):
    """As in generation, where lengths differ from call to call."""
    writer = CallWriter(descriptor)
    for at in range(6000):
        writer.post(writer.register_group((0, 1)), "attention", "all_reduce", "tp", 4, FLOATS, (at, 64))
    assert len(writer._forms) < 3000 and len(writer._numbers) < 3010, "the writer's memory must not grow"
    known = max(writer._forms, key=lambda form: form[1])[1]
    writer.post(writer.register_group((0, 9)), "new.site", "all_gather", "dp", 4, FLOATS, known)
    seen = read_calls(descriptor).calls
    assert seen[-1].description == "all_gather new.site over dp" and seen[-1].group.ranks == (0, 9) and seen[-1].place
    assert seen[-1].form == f"float32[{known[0]}, 64]" and seen[-2].form == ""


def test_existing_ring_file_is_replaced_and_junk_rejected(tmp_path: Path):
    path = tmp_path / "rank-0"
    path.write_bytes(b"something else")
    with path.open("rb") as junk:
        assert read_calls(junk.fileno()) is None
        made = create_named_file(path, 0, 2)
        assert read_calls(junk.fileno()) is None, "readers of the old file keep it"
    writer = CallWriter(made)
    post(writer, writer.register_group((0, 1)))
    with path.open("rb") as file:
        assert read_calls(file.fileno()).last.site == "data.gradients"
    os.close(made)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=20, unique=True), st.sampled_from(["", "layers", ">"]))
def test_group_text_round_trips(ranks, purpose):
    paired = purpose == ">"
    group = Group(tuple(ranks), (ranks[0], ranks[-1]) if paired else None, "" if paired else purpose)
    assert Group.from_text(group.to_text()) == group


def test_rank_ranges_are_abbreviated():
    assert (
        format_ranks(range(512)) == "0-511"
        and format_ranks((1, 5, 9, 13)) == "1-13/4"
        and format_ranks((3, 2)) == "3,2"
    )
    assert Group.from_text("nonsense") == Group(())
