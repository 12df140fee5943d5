"""Stopwatch of measurements that leaves out the time in which other programs had the cores."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

DISTURBED = 0.1
"""Share of a duration for which a thread waited for its core, above which other programs had it; below, it waited for
the process's own communication threads and the kernel, as it does in a run."""

_THREADS = Path("/proc/self/task")


def read_waiting_times(threads: int) -> dict[str, int]:
    """Return the nanoseconds for which each thread of this process was ready to run while others had the cores: thread
    id -> sum since its start. {} where the kernel does not count it (`schedstat`, Linux alone). threads: that compute;
    of a single one only the calling thread is read."""
    names = [_THREADS / name for name in os.listdir(_THREADS)] if threads > 1 else [Path("/proc/thread-self")]
    found = {}
    for name in names:
        with suppress(OSError, ValueError, IndexError):  # the thread has ended, or nothing is counted
            found[name.name] = int((name / "schedstat").read_text().split()[1])
    return found


class Stopwatch:
    """Seconds since it was made. A program that is scheduled instead of a measured one doubles a duration at will and
    says nothing about the machine; the kernel counts how long each thread waited for its core. With one computing
    thread, waits for the process's own communication threads stay a part of the duration, as in a run.

    shared: True if the processes of this measurement have to share cores, so that waiting is a part of what they take:
    nothing is left out then.
    """

    shared = False  # for all measurements of this process; set by `measure`

    def __init__(self) -> None:
        self._threads = 0 if self.shared or not _THREADS.is_dir() else torch.get_num_threads()
        self._waiting = read_waiting_times(self._threads) if self._threads else {}
        self._helped = self._helper_seconds()
        self._begun = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return (seconds passed, those of them for which a thread waited for a core: of several threads, the one that
        waited longest)."""
        passed = time.perf_counter() - self._begun
        now = read_waiting_times(self._threads) if self._waiting else {}
        waited = max((value - self._waiting.get(thread, value) for thread, value in now.items()), default=0) / 1e9
        return passed, max(0.0, min(waited - (self._helper_seconds() - self._helped), 0.9 * passed))

    def _helper_seconds(self) -> float:
        """Return the processor seconds of this process's threads beside the single one that computes; 0 of several."""
        return time.process_time() - time.thread_time() if self._threads == 1 else 0.0

    def seconds(self) -> float:
        """Return the seconds passed without those for which other programs had a thread's core."""
        passed, waited = self.read()
        return passed - (waited if waited > DISTURBED * passed else 0.0)
