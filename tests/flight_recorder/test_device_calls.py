"""Calls queued on a device: completed when the device has run them, waited for in order, reported when overdue."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from meshwright.flight_recorder import device_calls
from meshwright.flight_recorder.call_ring import CallWriter, create_memory_file, read_calls
from meshwright.flight_recorder.device_calls import DeviceCalls
from meshwright.flight_recorder.rank_report import Snapshot


class Stream:
    """Fake device stream. given: number of queued events; reached: number of events that the device has passed."""

    def __init__(self) -> None:
        self.given = self.reached = self.events = 0

    def make_event(self) -> StreamEvent:
        self.events += 1
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, 0

    def record(self) -> None:
        self.stream.given += 1
        self.place = self.stream.given

    def query(self) -> bool:
        return self.stream.reached >= self.place


class Rank:
    """One rank's ring buffer and fake device. reported: numbers of calls reported as overdue."""

    def __init__(self, rank: int, ranks: int, seconds: float = 10.0) -> None:
        self.descriptor = create_memory_file(rank, ranks)
        self.stream, self.reported = Stream(), list[int]()
        writer = CallWriter(self.descriptor)
        self.calls = DeviceCalls(writer, self.stream.make_event, seconds, self.reported.append)
        self.group = self.calls.register_group(tuple(range(ranks)))

    def call(self, site: str = "data.gradients") -> int:
        """Post, wait and done, as a handle does on CUDA, where the host does not block."""
        number: int = self.calls.post(self.group, site, "all_reduce", "data", 48, "float32", (12,))
        self.calls.wait(number)
        self.calls.done(number)
        return number


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank(rank, 2) for rank in range(2)]
    yield made
    for rank in made:
        os.close(rank.descriptor)


def test_calls_are_done_when_the_device_has_passed_them(ranks: list[Rank]):
    rank, _ = ranks
    first, second, third = (rank.call() for _ in range(3))
    assert rank.calls.find_overdue(0.0) is None
    assert [call.done for call in read_calls(rank.descriptor).calls] == [None] * 3
    assert read_calls(rank.descriptor).waiting.number == first, "the device runs the oldest call"

    rank.stream.reached = 2
    assert rank.calls.find_overdue(1.0) is None
    seen = read_calls(rank.descriptor)
    assert (seen.last_done.number, seen.waiting.number) == (second, third)

    rank.stream.reached = 3
    assert rank.calls.find_overdue(99.0) is None and read_calls(rank.descriptor).waiting is None
    rank.call()
    assert rank.stream.events == 3, "passed events are reused"


def test_time_limit_starts_when_device_reaches_call(ranks: list[Rank]):
    rank, _ = ranks
    first, second = rank.call(), rank.call()
    assert rank.calls.find_overdue(0.0) is None and rank.calls.find_overdue(9.0) is None
    assert rank.calls.find_overdue(10.5) == first
    rank.stream.reached = 1
    assert rank.calls.find_overdue(11.0) is None and rank.calls.find_overdue(20.5) is None
    assert rank.calls.find_overdue(21.5) == second


def test_watch_reports_an_overdue_call_once(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_calls, "LOOK_SECONDS", 0.001)
    rank, _ = ranks
    rank.calls.seconds = 0.01
    number = rank.call()
    rank.calls.watch()
    assert rank.reported == [number] and read_calls(rank.descriptor).gave_up


def test_watch_ends_when_closed_or_when_the_device_fails(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_calls, "LOOK_SECONDS", 0.001)
    closed, failing = ranks
    closed.call()
    closed.calls.close()
    closed.calls.watch()

    def fail(event: StreamEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    failing.call()
    monkeypatch.setattr(StreamEvent, "query", fail)
    failing.calls.watch()
    assert closed.reported == failing.reported == []
    assert not read_calls(closed.descriptor).gave_up and not read_calls(failing.descriptor).gave_up


def test_rank_that_queued_fewer_calls_is_blamed(ranks: list[Rank]):
    for rank in ranks:
        for _ in range(3):
            rank.call()
        rank.stream.reached = 3
    for _ in range(4):  # rank 0's host runs ahead of its device
        ranks[0].call("tensor.forward")
    for rank in ranks:
        rank.calls.find_overdue(0.0)
    verdict = Snapshot.take({at: rank.descriptor for at, rank in enumerate(ranks)}).verdict
    assert verdict is not None and (verdict.kind, verdict.blamed, verdict.index) == ("behind", (1,), 4)
    assert "rank 1 has not entered call 4" in verdict.line and "rank 0 has been waiting" in verdict.line
