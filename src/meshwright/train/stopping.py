"""Being asked to stop: a signal is noted, the step under way ends, all ranks save together."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Notes SIGTERM, and SIGINT unless somebody else answers it (a rank's launcher does), while it is entered.

    A second interrupt does not wait: it raises `KeyboardInterrupt`. Outside the main thread nothing is noted.
    """

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False
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
        if number == signal.SIGINT and self.interrupted:
            raise KeyboardInterrupt
        self.requested = True
        self.interrupted = self.interrupted or number == signal.SIGINT
