"""Claims on the memory of the KV pool."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from meshwright.serving import step_limits


def count_resident_bytes() -> int:
    """Resident set of this process (proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("populates", [True, False])
def test_reserved_pool_is_resident_and_zero(monkeypatch: pytest.MonkeyPatch, populates: bool):
    if not populates:
        monkeypatch.setattr(step_limits, "_MADV_POPULATE_WRITE", 1 << 20)  # no such advice
    size = 64 << 20
    caches = [np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(64, -1) for _ in range(2)]
    before = count_resident_bytes()
    step_limits.reserve_pool(caches)()
    assert count_resident_bytes() - before > 0.95 * 2 * size
    assert not any(cache.any() for cache in caches)
