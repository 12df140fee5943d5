"""Stopwatch for measurements that leaves out the time in which other programs used this process's CPU cores."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

DISTURBED = 0.1
"""Share of a duration that a thread waited for a core, above which the wait is attributed to other programs; shorter
waits are caused by the process's own communication threads and the kernel, as in a run."""

_THREADS = Path("/proc/self/task")


def read_waiting_times(threads: int) -> dict[str, int]:
    """Return how long each thread of this process has waited for a CPU core while ready to run: thread id ->
    nanoseconds since the thread's start. {} if the kernel does not count the waits (Linux `schedstat` does). threads:
    number of computing threads; if 1, only the calling thread is read."""
    names = [_THREADS / name for name in os.listdir(_THREADS)] if threads > 1 else [Path("/proc/thread-self")]
    found = {}
    for name in names:
        with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel does not count
            found[name.name] = int((name / "schedstat").read_text().split()[1])
    return found


class Stopwatch:
    """Stopwatch that starts when it is created. The stopwatch leaves out the time in which a computing thread waited
    for a CPU core used by other programs (Linux only). With a single computing thread, waits caused by the process's
    own communication threads are not left out, since they occur in training too.

    shared (class attribute): True to leave nothing out. Set if the process computes on a GPU, or if the host's ranks
    have more computing threads than cores."""

    shared = False  # set by `measure` for all measurements of this process

    def __init__(self) -> None:
        """Start the stopwatch."""
        self._threads = 0 if self.shared or not _THREADS.is_dir() else torch.get_num_threads()
        self._waiting = read_waiting_times(self._threads) if self._threads else {}
        self._helped = self._read_other_threads_seconds()
        self._begun = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return (seconds passed, how many of these seconds a computing thread waited for a core). Of several threads,
        the thread that waited longest counts."""
        passed = time.perf_counter() - self._begun
        now = read_waiting_times(self._threads) if self._waiting else {}
        waited = max((value - self._waiting.get(thread, value) for thread, value in now.items()), default=0) / 1e9
        return passed, max(0.0, min(waited - (self._read_other_threads_seconds() - self._helped), 0.9 * passed))

    def _read_other_threads_seconds(self) -> float:
        """Return the CPU seconds used so far by the process's threads other than the calling thread, such as
        communication threads; 0 if several threads compute. If a computing thread waits for a core that these threads
        use, the wait is not counted as disturbance by other programs."""
        return time.process_time() - time.thread_time() if self._threads == 1 else 0.0

    def read_seconds(self) -> float:
        """Return the seconds since the start. If the waits for CPU cores used by other programs exceed the fraction
        `DISTURBED` of this time, they are subtracted."""
        passed, waited = self.read()
        return passed - (waited if waited > DISTURBED * passed else 0.0)
