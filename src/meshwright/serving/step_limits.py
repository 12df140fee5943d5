"""The sizes for which a runner allocates its buffers and KV pool. Torch-free."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MADV_POPULATE_WRITE = 23
_MADVISE = ctypes.CDLL(None).madvise
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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


def reserve_pool(caches: Sequence[npt.NDArray[Any]]) -> None:
    """Make the memory of new, zeroed KV caches [blocks, ...] resident at once, in two threads, so that no later step
    can run out of memory. On Linux before 5.14 each page is written to instead."""
    with ThreadPoolExecutor(2) as threads:
        populated = list(threads.map(_populate_pages, caches))
    if not all(populated):
        for each in caches:
            each.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0


def _populate_pages(memory: npt.NDArray[Any]) -> bool:
    """Make the pages of an array resident without changing its content, without the GIL. Return False if the system
    does not support it."""
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return _MADVISE(begin, memory.ctypes.data + memory.nbytes - begin, _MADV_POPULATE_WRITE) == 0
