"""Being asked to stop: a signal is noted, the step under way ends, all ranks save together."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SAME_INTERRUPT_SECONDS = 1.0  # a terminal and a launcher may both pass on one Ctrl-C


class StopRequest:
    """Notes SIGTERM, and SIGINT unless somebody else answers it (a rank's launcher does), while it is entered.

    A second interrupt does not wait: it raises `KeyboardInterrupt`. Outside the main thread nothing is noted.
    """

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False
        self._first = 0.0  # when the first interrupt came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.interrupted and now - self._first > SAME_INTERRUPT_SECONDS:
                raise KeyboardInterrupt
            if not self.interrupted:
                self.interrupted, self._first = True, now
