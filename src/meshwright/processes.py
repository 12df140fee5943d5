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


STOPPED = ("T", "t")
"""States of a stopped thread in /proc: by a signal such as SIGSTOP, and by a debugger."""


def read_sleep(process: int, main_only: bool = False) -> str:
    """Return a text that stays the same while all threads of a process sleep or are stopped: the state of its main
    thread (`STOPPED`, or S if it sleeps), how often that thread has left the CPU, and the bytes that the process has
    written. Return "" while a thread computes, waits for a CPU, or reads from a disk, while a process that is not
    stopped has children (such as a compiler), and if /proc does not show all of this. process: process ID on this
    machine. main_only: True: look at the main thread alone, which is enough to see that the process is stopped."""
    place = Path(f"/proc/{process}")
    try:
        main = (place / "status").read_text()
        state, switches = main.partition("\nState:\t")[2][:1], main.rpartition("\nvoluntary_ctxt_switches:")[2]
        if main_only or state in STOPPED:
            return state + switches
        for thread in os.listdir(place / "task"):
            status = (place / "task" / thread / "status").read_text()
            runs = "State:\tR" in status or "State:\tD" in status
            # It wakes up 100 times a second, also without messages; the bytes show if it sends one.
            polls = "Name:\tgloo_tcp_loop" in status
            if (runs and not polls) or (place / "task" / thread / "children").read_text():
                return ""
        return state + switches + (place / "io").read_text().partition("wchar:")[2].partition("\n")[0]
    except OSError:
        return ""
