"""Processes that Meshwright starts on this machine. Free of torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path


def die_with_parent() -> None:
    """Ask the kernel to kill this process (SIGKILL) when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)


def read_sleep(process: int) -> str:
    """Return a text that stays the same while all threads of a process sleep or are stopped: how often its main thread
    has left the CPU, and the bytes that the process has written. Return "" while a thread computes, waits for a CPU, or
    reads from a disk, while the process has children (such as a compiler), and if /proc does not show all of this.
    process: process ID on this machine."""
    place = Path(f"/proc/{process}")
    try:
        for thread in os.listdir(place / "task"):
            status = (place / "task" / thread / "status").read_text()
            runs = "State:\tR" in status or "State:\tD" in status
            # It wakes up 100 times a second, also without messages; the bytes show if it sends one.
            polls = "Name:\tgloo_tcp_loop" in status
            if (runs and not polls) or (place / "task" / thread / "children").read_text():
                return ""
        switches = (place / "task" / str(process) / "status").read_text().rpartition("\nvoluntary_ctxt_switches:")[2]
        return switches + (place / "io").read_text().partition("wchar:")[2].partition("\n")[0]
    except OSError:
        return ""
