"""The sizes for which a runner allocates its buffers and KV pool. Torch-free."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MADV_POPULATE_WRITE = 23
_PIECE = 16 << 20  # bytes that a thread populates per call
MADVISE = ctypes.CDLL(None).madvise
"""madvise(2) of libc: (address, size in bytes, advice) -> 0, or -1 after an error; releases the GIL."""
MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes for which a runner allocates its KV pool and buffers.

    Attributes:
        blocks: Number of KV blocks in the pool.
        token_budget: Most tokens of a step.
        max_sequences: Most sequences of a step.
        max_length: Most tokens of a sequence.
        logit_rows: Most rows of logits of a step, if more than `max_sequences`; default 0: as many as that.
        touched: True: the whole KV pool becomes resident when it is allocated; False: page by page as it is used.
    """

    blocks: int
    token_budget: int
    max_sequences: int
    max_length: int
    logit_rows: int = 0
    touched: bool = True

    @property
    def logits(self) -> int:
        """Number of rows of logits to allocate: the larger of `logit_rows` and `max_sequences`."""
        return max(self.logit_rows, self.max_sequences)


@contextmanager
def reserve_pool(caches: Sequence[npt.NDArray[Any]]) -> Iterator[None]:
    """Context manager that makes the memory of new, zeroed KV caches [blocks, ...] resident, in two background threads,
    so that no later step can run out of memory. Leaving the context waits for the threads, or after an error makes them
    stop early. On Linux before 5.14, leaving the context writes to each page instead."""
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
    """Make the pages of an array resident without changing its content, without the GIL. Return False if the system
    does not support it."""
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return MADVISE(begin, memory.ctypes.data + memory.nbytes - begin, _MADV_POPULATE_WRITE) == 0
