"""Profiling of a rank's collective calls: records the times at which each is posted, waited for and complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwright.comm.mesh import CommunicationState, calls_in_flight
from meshwright.flight_recorder.wrapped_calls import CallRecorder, WrappedCalls


@dataclass(slots=True)
class TimedCall:
    """Times of one collective call, in nanoseconds since 1970 on this host's clock.

    site: label of the call. operation: such as "all_reduce". axis: name of the mesh axis. payload_bytes: bytes of the
    whole vector. posted: when the call was made. waited: when the process began to wait for it; None if it has not
    waited. done: when the call was found complete; None if it has not been found complete."""

    site: str
    operation: str
    axis: str
    payload_bytes: int
    posted: int
    waited: int | None = None
    done: int | None = None


class CallTimer(WrappedCalls):
    """Wrapper of a process's flight recorder (`calls`) that also records the times of each call. Attribute `timed`: the
    calls so far with their times, in posting order.
    """

    def __init__(self, calls: CallRecorder) -> None:
        super().__init__(calls)
        self._numbers: dict[int, TimedCall] = {}
        self.timed: list[TimedCall] = []

    def post(self, group: int, site: str, operation: str, axis: str, payload_bytes: int, dtype: Any, shape: Any) -> int:
        """Record a posted call and its time; return its number in the flight recorder.

        group: number that identifies the call's ranks in the flight recorder. site: label of the call. operation: such
        as "all_reduce". axis: name of the mesh axis. payload_bytes: bytes of the whole vector. dtype, shape: dtype and
        shape of the tensor."""
        number = self._calls.post(group, site, operation, axis, payload_bytes, dtype, shape)
        call = self._numbers[number] = TimedCall(site, operation, axis, payload_bytes, time.time_ns())
        self.timed.append(call)
        return number

    def wait(self, number: int) -> None:
        """Record that the process begins to wait for the call with the flight-recorder number `number` and when."""
        if (call := self._numbers.get(number)) is not None:
            call.waited = time.time_ns()
        self._calls.wait(number)

    def done(self, number: int) -> None:
        """Record that the call with the flight-recorder number `number` is complete, and the time."""
        self._calls.done(number)
        if (call := self._numbers.get(number)) is not None:
            call.done = time.time_ns()


@contextmanager
def time_calls(communicator: CommunicationState) -> Iterator[list[TimedCall]]:
    """Context manager that yields a list, to which each collective call of the communicator is appended with its times
    while the context is active.

    On exit, the context manager waits for calls in flight, unless an error occurred."""
    calls = communicator.calls
    timer = CallTimer(calls)
    communicator.calls = timer
    try:
        yield timer.timed
        settle_calls(communicator)
    finally:
        communicator.calls = calls


def settle_calls(communicator: CommunicationState) -> None:
    """Wait until all of the communicator's calls in flight are complete. Raises RankLost."""
    for call in [call for call, whose in calls_in_flight.items() if whose is communicator]:
        call.wait()
