"""The collective calls of a rank while a profile is taken: the ring of calls, and beside it when each was posted,
waited for and done, however many they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwright.comm.mesh import Communicator, calls_under_way
from meshwright.flight_recorder.call_ring import CallWriter


@dataclass(slots=True)
class WatchedCall:
    """One call. Times are nanoseconds since 1970 on this host's clock. waited: since when the process waits for it."""

    site: str
    operation: str
    axis: str
    payload_bytes: int
    posted: int
    waited: int | None = None
    done: int | None = None


class WatchedCalls:
    """Stands in the place of a communicator's `calls`, and passes everything on."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._numbers: dict[int, WatchedCall] = {}
        self.seen: list[WatchedCall] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def post(self, group: int, site: str, operation: str, axis: str, payload_bytes: int, dtype: Any, shape: Any) -> int:
        """As `CallWriter.post`."""
        number = self._calls.post(group, site, operation, axis, payload_bytes, dtype, shape)
        call = self._numbers[number] = WatchedCall(site, operation, axis, payload_bytes, time.time_ns())
        self.seen.append(call)
        return number

    def wait(self, number: int) -> None:
        """As `CallWriter.wait`."""
        if (call := self._numbers.get(number)) is not None:
            call.waited = time.time_ns()
        self._calls.wait(number)

    def done(self, number: int) -> None:
        """As `CallWriter.done`."""
        self._calls.done(number)
        if (call := self._numbers.get(number)) is not None:
            call.done = time.time_ns()


@contextmanager
def watching(communicator: Communicator) -> Iterator[list[WatchedCall]]:
    """The calls of `communicator` that are posted inside, as they come. At the end those still under way are waited
    for, unless an error ends it."""
    calls = communicator.calls
    watched = WatchedCalls(calls)
    communicator.calls = watched  # type: ignore[assignment]
    try:
        yield watched.seen
        settle_calls(communicator)
    finally:
        communicator.calls = calls


def settle_calls(communicator: Communicator) -> None:
    """Wait for all calls under way; who made one finds it done. Raises RankLost."""
    for call in [call for call, whose in calls_under_way.items() if whose is communicator]:
        call.wait()
