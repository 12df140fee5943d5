"""Stop signals (SIGTERM and SIGINT) that a launcher or server receives while its ranks run. Free of torch."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from typing import Any


class StopSignals:
    """Context manager that records SIGTERM and SIGINT instead of ending the process, and restores the previous handlers
    at its exit. No effect outside the main thread.

    received: numbers of the signals so far. wakeup: socket that becomes readable when a signal arrives, to be watched
    by a selector.
    """

    def __init__(self) -> None:
        """Start without signals; handlers are set by `with`."""
        self.received: list[int] = []
        self.wakeup, self._write = socket.socketpair()
        self.wakeup.setblocking(False)
        self._write.setblocking(False)
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        """True once SIGTERM or SIGINT has arrived."""
        return bool(self.received)

    def __enter__(self) -> StopSignals:
        """Set the signal handlers."""
        with suppress(ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.wakeup.close()
        self._write.close()

    def _on_signal(self, number: int, frame: object) -> None:
        """Signal handler: record the signal `number` and wake up the launcher. frame: ignored."""
        self.received.append(number)
        with suppress(OSError):
            self._write.send(b"!")

    def drain(self) -> None:
        """Discard the pending bytes of the socket `wakeup` (one byte for each signal that has arrived). The socket is
        then readable again only after the next signal."""
        with suppress(BlockingIOError):
            while self.wakeup.recv(64):
                pass
