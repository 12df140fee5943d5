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
    """Sizes that a runner allocates for.

    Attributes:
        blocks: KV blocks of the pool.
        token_budget: Most tokens of a step.
        max_sequences: Most sequences of a step.
        max_length: Most tokens of a sequence.
        logit_rows: Most rows of logits of a step, if more than `max_sequences`.
        touched: Make the whole pool resident from the start on; else as it is used.
    """

    blocks: int
    token_budget: int
    max_sequences: int
    max_length: int
    logit_rows: int = 0
    touched: bool = True

    @property
    def logits(self) -> int:
        """Rows of logits to allocate."""
        return max(self.logit_rows, self.max_sequences)


def reserve_pool(caches: Sequence[npt.NDArray[Any]]) -> None:
    """Make the pages of new, zeroed KV caches [blocks, ...] resident before this returns, so that they are the
    process's from now on: by two threads, or, where the system cannot do so without a write (Linux before 5.14), by
    writing to each page."""
    with ThreadPoolExecutor(2) as threads:
        populated = list(threads.map(_populate_pages, caches))
    if not all(populated):
        for each in caches:
            each.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0


def _populate_pages(memory: npt.NDArray[Any]) -> bool:
    """Make the pages of a contiguous array resident without changing it, while other Python threads run; return False
    where the system cannot."""
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return _MADVISE(begin, memory.ctypes.data + memory.nbytes - begin, _MADV_POPULATE_WRITE) == 0
