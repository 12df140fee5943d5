"""Processor time that other processes take during a measurement, so that a disturbed one can be repeated."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def read_busy_seconds() -> float:
    """Return the seconds that all processors together have worked since the start of the machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / _TICKS  # without idle and waiting for a disk


def read_session_seconds(session: int) -> float:
    """Return the processor seconds of a session's processes, and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS


class OtherLoad:
    """Meter of the processor time that is neither this process's nor that of one session. Attribute `share`: fraction
    of all processors' time since the last call of `begin`, set by `end`."""

    def __init__(self, session: int) -> None:
        self._session, self.share = session, 0.0
        self._began, self._others = 0.0, 0.0

    def begin(self) -> None:
        """Begin a measurement."""
        self._began, self._others = time.perf_counter(), self._read()

    def end(self) -> float:
        """End the measurement; return `share`."""
        seconds = time.perf_counter() - self._began
        self.share = max(0.0, self._read() - self._others) / seconds / (os.cpu_count() or 1)
        return self.share

    def _read(self) -> float:
        own = os.times()
        return read_busy_seconds() - read_session_seconds(self._session) - own.user - own.system
