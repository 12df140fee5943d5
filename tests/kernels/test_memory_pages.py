"""Claims on the memory of the KV pool."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.kernels import memory_pages


def count_resident_bytes() -> int:
    """Resident set of this process (proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("populates", [True, False])
def test_reserved_pool_is_resident_and_zero(monkeypatch: pytest.MonkeyPatch, populates: bool):
    if not populates:
        monkeypatch.setattr(memory_pages, "_MADV_POPULATE_WRITE", 1 << 20)  # no such advice
    size = 64 << 20
    caches = [np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(64, -1) for _ in range(2)]
    before = count_resident_bytes()
    with memory_pages.reserve_pool(caches):
        pass
    assert count_resident_bytes() - before > 0.95 * 2 * size
    assert not any(cache.any() for cache in caches)


def test_pool_is_no_longer_made_resident_after_an_error(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the process would end only once all of it is."""
    populated, goes_on = [], threading.Event()
    monkeypatch.setattr(
        memory_pages, "_populate_pages", lambda piece: goes_on.wait(5) and populated.append(piece) is None
    )
    monkeypatch.setattr(memory_pages, "_PIECE", 1)
    with pytest.raises(OSError, match="damaged"), memory_pages.reserve_pool([np.zeros(100, np.uint8)]):
        raise OSError("damaged")
    goes_on.set()
    time.sleep(0.05)
    assert len(populated) <= 2  # those that the threads had begun
