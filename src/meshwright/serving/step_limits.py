"""Sizes for which a runner allocates its buffers and KV pool. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes for which a runner allocates its KV pool and buffers.

    Attributes:
        blocks: Number of KV blocks in the pool.
        token_budget: Maximum number of tokens of a step.
        max_sequences: Maximum number of sequences of a step.
        max_length: Maximum number of tokens of a sequence.
        logit_rows: Maximum number of rows of logits of a step, if more than `max_sequences`; 0 (default):
            `max_sequences`.
        resident: True: the whole KV pool gets physical memory when it is allocated; False: page by page as it is used.
    """

    blocks: int
    token_budget: int
    max_sequences: int
    max_length: int
    logit_rows: int = 0
    resident: bool = True

    @property
    def logits(self) -> int:
        """Number of rows of logits to allocate: the larger of `logit_rows` and `max_sequences`."""
        return max(self.logit_rows, self.max_sequences)
