"""The sizes for which a runner allocates its buffers and KV pool. Torch-free."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that a runner allocates for.

    Attributes:
        blocks: KV blocks of the pool.
        token_budget: Most tokens of a step.
        max_sequences: Most sequences of a step.
        max_length: Most tokens of a sequence.
        logit_rows: Most rows of logits of a step, if more than `max_sequences`.
        touched: Write to the whole pool at once, so that its memory is the process's; else as it is used.
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


def touch_pages(memory: npt.NDArray[Any]) -> None:
    """Write to each page of a new, zeroed array, so that it is the process's from now on. Other Python threads run
    meanwhile."""
    memory.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0
