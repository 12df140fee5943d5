"""Recorder of collective calls that the host only queues on a device (CUDA): a thread records when the device has
completed each call, and reports a call that takes too long. Torch-free."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from meshwright.flight_recorder.wrapped_calls import CallRecorder, WrappedCalls

LOOK_SECONDS = 0.1  # between checks of the device


class Event(Protocol):
    """Interface of a device event, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Queue the event on the device's current stream, after all work queued so far."""

    def query(self) -> bool:
        """Return True if the device has completed all work queued before the event."""


class DeviceCalls(WrappedCalls):
    """Recorder of this process's collective calls on a GPU. There the host's wait for a call returns before the call is
    complete; this recorder uses device events to record when the GPU has completed each call, and to find a call that
    runs for too long.

    calls: recorder to which the calls and their completion are written. make_event: function that makes a device event.
    seconds: time limit of one call, counted from the time at which the GPU begins the call. overdue: function called at
    most once, in the thread that runs `watch`, with the number of the first call that exceeds the limit."""

    def __init__(
        self, calls: CallRecorder, make_event: Callable[[], Event], seconds: float, overdue: Callable[[int], object]
    ) -> None:
        """Start without calls in flight; arguments: see the class."""
        super().__init__(calls)
        self._make_event, self.seconds, self._overdue = make_event, seconds, overdue
        self._queued: deque[tuple[int, Event]] = deque()
        self._passed: deque[Event] = deque()  # events for reuse
        self._since: float | None = None  # time at which the device reached the oldest queued call
        self._closed = threading.Event()

    def done(self, number: int) -> None:
        """Queue an event on the device's current stream after the call `number`. Once the device has passed the event,
        `find_overdue` records the call as complete."""
        event = self._passed.popleft() if self._passed else self._make_event()
        event.record()
        self._queued.append((number, event))

    def find_overdue(self, now: float) -> int | None:
        """Record which calls the device has completed since the last check. Return the number of the call that the
        device is running if that call has exceeded the time limit, else None. now: present time in seconds, by the same
        clock at every check."""
        while self._queued and self._queued[0][1].query():
            number, event = self._queued.popleft()
            self._calls.done(number)
            self._passed.append(event)
            self._since = None
        if not self._queued:
            return None
        number = self._queued[0][0]
        if self._since is None:
            self._since = now
            self._calls.wait(number)  # from now on: before, the device ran earlier calls
        return number if now - self._since > self.seconds else None

    def watch(self) -> None:
        """Call `find_overdue` every `LOOK_SECONDS` (0.1 s) until `close` is called, the device raises an error, or a
        call is overdue. Run this in a separate thread."""
        while not self._closed.wait(LOOK_SECONDS):
            try:
                number = self.find_overdue(time.monotonic())
            except RuntimeError:
                return  # a device error, which the computing thread raises as well
            if number is not None:
                self._calls.give_up()
                self._overdue(number)
                return

    def close(self) -> None:
        """End `watch`, so that a device that is being shut down is not queried."""
        self._closed.set()
