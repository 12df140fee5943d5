"""SIGTERM and SIGINT to the launcher while its ranks run. Free of torch."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from typing import Any


class StopSignals:
    """The two signals while it is entered: counted, to be passed on. Outside the main thread there is nothing to do."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupted = False
        self.wakeup, self._write = socket.socketpair()
        self.wakeup.setblocking(False)
        self._write.setblocking(False)
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        return self.count > 0

    def __enter__(self) -> StopSignals:
        with suppress(ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.wakeup.close()
        self._write.close()

    def _caught(self, number: int, frame: object) -> None:
        self.count += 1
        self.interrupted = self.interrupted or number == signal.SIGINT
        with suppress(OSError):
            self._write.send(b"!")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while self.wakeup.recv(64):
                pass
