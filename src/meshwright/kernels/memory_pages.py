"""Memory by the page: huge pages, pages that are made resident at once, pages that are released. Torch-free."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_PIECE = 16 << 20  # bytes that a thread populates per call
_MADVISE = ctypes.CDLL(None).madvise  # madvise(2): (address, bytes, advice) -> 0, or -1 after an error; without the GIL
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Allocate zeroed memory of `size` bytes, aligned to a huge page, and backed by huge pages where the system has
    them; return it as uint8 [size]."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE
    return whole[begin : begin + size]


@contextmanager
def reserve_pool(caches: Sequence[npt.NDArray[Any]]) -> Iterator[None]:
    """Context manager that backs new, zeroed KV caches with physical memory, so that no later step can run out of
    memory. caches: arrays [blocks, ...].

    Two background threads touch the pages while the body runs; leaving the context waits for them, or stops them early
    after an error. On Linux before 5.14, the pages are written to when the context is left."""
    memory = [each.reshape(-1).view(np.uint8) for each in caches]
    # A list's iterator gives each piece to one thread. While a piece is populated no other thread can map memory.
    pieces = [each[at : at + _PIECE] for each in memory for at in range(0, len(each), _PIECE)]
    left = iter(pieces)
    threads = ThreadPoolExecutor(2, "kv-pool")
    populated = [threads.submit(lambda: all(map(_populate_pages, left))) for _ in range(2)]
    threads.shutdown(wait=False)
    try:
        yield
        if False in [each.result() for each in populated]:
            for each in memory:
                each[:: mmap.PAGESIZE] = 0
    finally:
        pieces.clear()  # else the end of the process would wait for all of them


def _populate_pages(memory: npt.NDArray[Any]) -> bool:
    """Back the pages of the array `memory` with physical memory, without changing its content and without holding
    Python's GIL. Return False if the operating system does not support it."""
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_MADVISE(begin, memory.ctypes.data + memory.nbytes - begin, _MADV_POPULATE_WRITE) == 0)


def release_pages(address: int, size: int) -> None:
    """Release the physical memory of a memory-mapped file, for the pages that lie entirely in an address range; a later
    access reads them from the file again. address: first address of the range. size: number of bytes in the range."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        _MADVISE(begin, end - begin, mmap.MADV_DONTNEED)
