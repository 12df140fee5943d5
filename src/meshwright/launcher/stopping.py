"""Stop requests to a rank: a signal is recorded, the current step ends, all ranks save together."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SAME_INTERRUPT_SECONDS = 1.0  # a terminal and a launcher may both forward one Ctrl-C


class StopRequest:
    """Context manager that records SIGTERM and SIGINT as a request to stop, in the attribute `requested`; the caller
    can then save and end after its current step. No effect outside the main thread.

    Another SIGINT, more than 1 s after the first, raises `KeyboardInterrupt`. Only SIGTERM is recorded if the process
    already has a handler for SIGINT other than Python's default, or ignores SIGINT, as ranks of a launcher do.
    """

    def __init__(self) -> None:
        """Start without a request; handlers are set by `with`."""
        self.requested = False
        self.interrupted = False
        self._first = 0.0  # when the first interrupt came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        """Set the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: set `requested`; on another SIGINT, more than 1 s after the first, raise
        `KeyboardInterrupt`. number: signal. frame: ignored."""
        self.requested = True
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.interrupted and now - self._first > SAME_INTERRUPT_SECONDS:
                raise KeyboardInterrupt
            if not self.interrupted:
                self.interrupted, self._first = True, now
