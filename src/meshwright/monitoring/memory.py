"""Settings of the C library's memory allocator for training on a CPU, and the kernel's figures on a process's
memory."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_MMAP_THRESHOLD = 1 << 25
"""Bytes, the most that glibc accepts. Larger tensors are mapped alone and returned to the kernel when freed."""
KERNELS_KEPT = 1024
"""Capacity of oneDNN's kernel cache unless ONEDNN_PRIMITIVE_CACHE_CAPACITY gives another."""


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory instead of returning it to the kernel. This saves page faults in the next
    step (some 3% of the step time at 30 M parameters). Does nothing without glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def release_freed_memory() -> None:
    """Make glibc return its freed memory to the kernel now (malloc_trim), so that it does not count as resident. Does
    nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def read_kernel_cache_capacity() -> int:
    """Return the maximum number of compiled kernels in this process's oneDNN cache. oneDNN compiles one kernel for each
    shape of a 16-bit matrix product."""
    value = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")
    return int(value) if value.isdecimal() else KERNELS_KEPT


def read_resident_bytes() -> int | None:
    """Return the current resident set size (RSS) of this process in bytes (proc(5)); None if the kernel does not report
    it."""
    return _read_status_bytes("VmRSS")


def read_peak_resident_bytes() -> int | None:
    """Return the peak resident set size (RSS) of this process in bytes, since its start or `reset_peak_rss` (proc(5));
    None if unknown.

    getrusage(2) is not used: its peak includes memory from before exec(2), when the process was still a copy of the
    launcher."""
    return _read_status_bytes("VmHWM")


def reset_peak_rss() -> bool:
    """Reset the kernel's peak RSS counter (VmHWM) of this process; return True if this worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _read_status_bytes(key: str) -> int | None:
    """Return the value of a key of /proc/self/status, such as "VmRSS", converted from KiB to bytes; None if the key is
    missing."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
