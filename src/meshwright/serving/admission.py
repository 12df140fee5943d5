"""Admission of sequences to the block pool by the banker's algorithm, oldest first: memory cannot run out.

Each running sequence may grow to a known most number of blocks. A state is safe if the sequences can end one after the
other, the oldest first, each growing to its most with the blocks that are available and those that older ones gave back
(Dijkstra, EWD 623; the order of ends is fixed here, so that the oldest sequence never waits). A step that would leave
the safe states is refused.

A sequence grows by one block in each of its block tables at once, and in a table with a sliding window it gives blocks
back while it runs. In table t it may still allocate `remaining` blocks, and of those it owns and those it allocates it
never holds more than `most_t`. So at any moment it has taken at most min(remaining, most_t - owned_t) blocks more than
it gave back, and what it needs from the pool is at most the sum of these over its tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Row = Sequence[int]
"""Numbers of blocks, one for each block table [W]."""


class AdmissionState:
    """State of the banker's algorithm (deadlock avoidance) for KV blocks: how many blocks are available, and how many
    each of N running sequences, ordered from the oldest to the youngest, owns and may still need in its W block tables.

    For sequence i, slack_i = available + (sum of owned_j over older j) - need_i, where owned_j: blocks that sequence j
    gives back when it ends, need_i: most blocks that sequence i may still need. The state is safe if no slack is
    negative: each sequence can then run to its end once all older ones have ended.
    """

    def __init__(
        self, available: int, tables: int, remaining: Sequence[int], most: Sequence[Row], owned: Sequence[Row]
    ) -> None:
        """`available`: blocks free or evictable; `tables`: W; for each sequence [N], `remaining`: blocks that it may
        still allocate in each table until its end; for each table of it, [N, W], `most`: blocks that it may hold at
        once (less than all with a sliding window), `owned`: held blocks that no younger sequence holds."""
        self.available, self._tables = available, tables
        self._remaining = np.array(remaining, np.int64)
        self._most, self._owned = (np.array(each, np.int64).reshape(-1, tables) for each in (most, owned))
        # Of the blocks that it holds, a sequence gets back for itself those that no younger one holds.
        needs = np.minimum(self._remaining[:, None], self._most - self._owned).sum(1)
        owned_N = self._owned.sum(1)
        self._slack: Counts = available + np.cumsum(owned_N) - owned_N - needs

    @property
    def safe(self) -> bool:
        """True if all sequences can run to their ends, one after the other from the oldest on, even if each allocates
        its maximum of KV blocks."""
        return not len(self._slack) or int(self._slack.min()) >= 0

    def allowance(self, index: int) -> int:
        """Return how many KV blocks the sequence at `index` (0: the oldest) may allocate in each of its tables now
        without making the state unsafe. For the oldest these are all available blocks, divided by the number of
        tables."""
        older = self._slack[:index]
        return (min(self.available, int(older.min())) if index else self.available) // self._tables

    def take(self, index: int, count: int) -> None:
        """Record that the sequence at `index` (0: the oldest) allocates `count` KV blocks in each of its tables, at
        most its allowance."""
        self.available -= count * self._tables
        self._remaining[index] -= count
        self._owned[index] += count
        self._slack[:index] -= count * self._tables

    def admit(self, most: Row, remaining: int, cached: Row, shared: Mapping[tuple[int, int], int]) -> AdmissionState:
        """Return a new admission state, perhaps an unsafe one, with one more sequence, the youngest; this state is
        unchanged.

        `most`: KV blocks that the new sequence may hold at once, per block table. `remaining`: blocks that it may still
        allocate in each table, those of its cached prefix excluded. `cached`: blocks of that prefix that no running
        sequence holds, per table. `shared`: {(index of a running sequence, table): number of blocks of that prefix
        whose youngest holder is the running sequence}.
        """
        owned, prefix = self._owned.copy(), list(cached)
        for (index, table), count in shared.items():
            owned[index, table] -= count
            prefix[table] += count
        all_remaining, all_most = [*self._remaining.tolist(), remaining], [*self._most.tolist(), most]
        return AdmissionState(
            self.available - sum(cached), self._tables, all_remaining, all_most, [*owned.tolist(), prefix]
        )


class AnswerShare:
    """Moving average of answer length / `max_tokens` over finished answers, which predicts the length of running ones.

    Attributes:
        share: The average, 0 to 1; 0.5 before the first answer.
    """

    def __init__(self) -> None:
        """The share before the first answer."""
        self.share = 0.5

    def observe(self, tokens: int, max_tokens: int) -> None:
        """Update the moving average of answer length / `max_tokens` by a finished answer of `tokens` tokens.
        max_tokens: at least 1."""
        self.share += 0.1 * (tokens / max_tokens - self.share)

    def expect(self, tokens: int, max_tokens: int) -> int:
        """Return the expected final length in tokens of an answer that has `tokens` tokens so far: at least one more,
        at most `max_tokens`."""
        return min(max_tokens, max(int(self.share * max_tokens), tokens + 1))
