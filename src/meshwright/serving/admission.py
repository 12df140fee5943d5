"""Admission of sequences to the block pool by the banker's algorithm, oldest first: memory cannot run out.

Each running sequence may grow to a known most number of blocks. A state is safe if the sequences can end one after the
other, the oldest first, each growing to its most with the blocks that are available and those that older ones gave back
(Dijkstra, EWD 623; the order of ends is fixed here, so that the oldest sequence never waits). A step that would leave
the safe states is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class AdmissionState:
    """Claims of N sequences on the available blocks, in order of age, the oldest first.

    For sequence i, slack_i = available + sum over j < i of owned_j - need_i: the blocks that are left when i has grown
    to its most, all older ones have ended and no younger one has grown. The state is safe if no slack is negative.
    """

    def __init__(self, available: int, remaining: Sequence[int], most: Sequence[int], owned: Sequence[int]) -> None:
        """`available`: blocks free or evictable; for each sequence [N], `remaining`: blocks that it may still allocate
        until its end, `most`: blocks that it may hold at once (less than all with a sliding window), `owned`: held
        blocks that no younger sequence holds."""
        self.available = available
        self._remaining = np.array(remaining, np.int64)
        self._most = np.array(most, np.int64)
        self._owned = np.array(owned, np.int64)
        # Of the blocks that it holds, a sequence gets back for itself those that no younger one holds.
        needs = np.minimum(self._remaining, self._most - self._owned)
        self._slack: Counts = available + np.cumsum(self._owned) - self._owned - needs

    @property
    def safe(self) -> bool:
        """True if all sequences can end, whatever they allocate."""
        return not len(self._slack) or int(self._slack.min()) >= 0

    def allowance(self, index: int) -> int:
        """Return the most blocks that sequence `index` may allocate now; at least what it needs if it is the oldest."""
        older = self._slack[:index]
        return min(self.available, int(older.min())) if index else self.available

    def take(self, index: int, count: int) -> None:
        """Record that sequence `index` allocates `count` blocks, at most its allowance."""
        self.available -= count
        self._remaining[index] -= count
        self._owned[index] += count
        self._slack[:index] -= count

    def admit(self, most: int, remaining: int, cached: int, shared: Mapping[int, int]) -> AdmissionState:
        """Return the state after a new, youngest sequence has joined, which need not be safe.

        `most` and `remaining`: as in the constructor, without the blocks of its prefix in `remaining`; `cached`: blocks
        of its prefix that nobody held; `shared`: for each sequence, the blocks of the prefix that it owned.
        """
        owned = self._owned.copy()
        for index, count in shared.items():
            owned[index] -= count
        prefix = cached + sum(shared.values())
        return AdmissionState(
            self.available - cached,
            [*self._remaining.tolist(), remaining],
            [*self._most.tolist(), most],
            [*owned.tolist(), prefix],
        )


class AnswerShare:
    """Moving average of the share of `max_tokens` that answers use.

    Attributes:
        share: 0 to 1; 0.5 before the first answer.
    """

    def __init__(self) -> None:
        """The share before the first answer."""
        self.share = 0.5

    def observe(self, tokens: int, max_tokens: int) -> None:
        """Learn from an answer that ended with `tokens` of at most `max_tokens` tokens, more than 0."""
        self.share += 0.1 * (tokens / max_tokens - self.share)

    def expect(self, tokens: int, max_tokens: int) -> int:
        """Return the expected length of an answer that has `tokens` tokens: one more than now at least."""
        return min(max_tokens, max(int(self.share * max_tokens), tokens + 1))
