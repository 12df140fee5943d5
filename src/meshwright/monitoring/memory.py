"""The C library's memory allocator, set for training on a CPU, and what the kernel says of a process's memory."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_MMAP_THRESHOLD = 1 << 25
"""Bytes; what glibc accepts at most. Larger tensors have pages of their own, which go back when they are freed."""
KERNELS_KEPT = 1024
"""Capacity of oneDNN's kernel cache unless ONEDNN_PRIMITIVE_CACHE_CAPACITY gives another."""


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of handing it back to the kernel after every step: pages that a step gives
    back cost the next one a fault each, some 3 % of a step's time at 30 M parameters. Does nothing elsewhere."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def release_freed_memory() -> None:
    """Hand back to the kernel what glibc keeps of freed memory, now: steps have no use for what a start has freed. Does
    nothing elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def kernel_cache_capacity() -> int:
    """Number of compiled kernels that oneDNN keeps in this process: one for each shape of a product in 16 bits."""
    value = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")
    return int(value) if value.isdecimal() else KERNELS_KEPT


def resident_bytes() -> int | None:
    """Resident set of this process now, in bytes (proc(5)); None where the kernel does not say."""
    return _status("VmRSS")


def peak_resident_bytes() -> int | None:
    """Highest resident set of this process since it began, or since the count was begun anew (proc(5)), in bytes.

    Not getrusage(2), which also counts what the process was before exec(2): a launcher that prepared data is larger
    than the ranks that it starts.
    """
    return _status("VmHWM")


def reset_peak_rss() -> bool:
    """Reset the kernel's peak RSS counter (VmHWM); return whether it worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
