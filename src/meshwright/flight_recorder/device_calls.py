"""Recorder of collective calls that the host only queues on a device (CUDA): a thread records when the device is
through each call, and reports the one that takes too long. Torch-free."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from meshwright.flight_recorder.call_ring import CallWriter

LOOK_SECONDS = 0.1  # between looks at the device


class Event(Protocol):
    """Interface of a device's event, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Queue the event on the device, behind all that the current stream has been given."""

    def query(self) -> bool:
        """Return True if the device has reached the event."""


class DeviceCalls:
    """Wrapper of the call recorder `calls` on a device, where a wait of the host returns before the call is complete:
    records the true completion of each call, and as waited for the one that the device is in.

    make_event: makes an event of the device. seconds: limit of one call, counted from when the device came to it.
        overdue: called once, in the watching thread, with the number of a call that takes longer.
    """

    def __init__(
        self, calls: CallWriter, make_event: Callable[[], Event], seconds: float, overdue: Callable[[int], object]
    ) -> None:
        self._calls, self._make_event, self.seconds, self._overdue = calls, make_event, seconds, overdue
        self._queued: deque[tuple[int, Event]] = deque()
        self._passed: deque[Event] = deque()  # to be recorded again
        self._since: float | None = None  # when the device came to the first of them
        self._closed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def done(self, number: int) -> None:
        """Queue the completion of the call with this number: complete is what the current stream was given before."""
        event = self._passed.popleft() if self._passed else self._make_event()
        event.record()
        self._queued.append((number, event))

    def find_overdue(self, now: float) -> int | None:
        """Record the calls that the device has passed since the last look; return the number of the call it is in if
        that has taken longer than the limit, else None. now: seconds of any clock."""
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
            self._calls.wait(number)  # it waits since now: before, the device was busy with others
        return number if now - self._since > self.seconds else None

    def watch(self) -> None:
        """Look at the device again and again until `close`, or until a call is overdue and has been reported."""
        while not self._closed.wait(LOOK_SECONDS):
            try:
                number = self.find_overdue(time.monotonic())
            except RuntimeError:
                return  # an error of the device, which the computing thread meets too
            if number is not None:
                self._calls.give_up()
                self._overdue(number)
                return

    def close(self) -> None:
        """End the watch; it must not ask a device that is being shut down."""
        self._closed.set()
