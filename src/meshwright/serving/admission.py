"""Admission of sequences to the block pool by the banker's algorithm, oldest first: memory cannot run out.

Each running sequence may grow to a known maximum number of blocks. A state is safe if the sequences can end one after
the other, the oldest first, each growing to its maximum with the blocks that are available and those that older ones
gave back (Dijkstra, EWD 623; the order of ends is fixed here, so that the oldest sequence never waits). A step that
would leave the safe states is refused.

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
    """State of the banker's algorithm (deadlock avoidance) for a pool of KV blocks that N running sequences share. It
    limits how many blocks a sequence may allocate now, so that all sequences can finish one after the other, from the
    oldest to the youngest.

    available: KV blocks that can be allocated now. tables: number W of block tables of each sequence. remaining [N]:
    blocks that each sequence may still allocate in each of its tables. most [N, W]: maximum number of blocks that each
    sequence holds at a time in each table (bounded by the sliding window, if there is one). owned [N, W]: blocks in
    each table that the sequence holds and no younger sequence shares; these blocks become available when the sequence
    and all older sequences have finished.

    Sequence i needs at most need_i = (sum over its tables t of min(remaining[i], most[i][t] - owned[i][t])) more
    blocks. The state is safe if, for each sequence i, need_i is at most `available` plus the sum of `owned` over older
    sequences."""

    def __init__(
        self, available: int, tables: int, remaining: Sequence[int], most: Sequence[Row], owned: Sequence[Row]
    ) -> None:
        """Copy the counts into arrays and compute the slack of every sequence; arguments: see the class."""
        self.available, self._tables = available, tables
        self._remaining = np.array(remaining, np.int64)
        self._most, self._owned = (np.array(each, np.int64).reshape(-1, tables) for each in (most, owned))
        # Of the blocks that it holds, a sequence gets back for itself those that no younger one holds.
        needs = np.minimum(self._remaining[:, None], self._most - self._owned).sum(1)
        owned_N = self._owned.sum(1)
        self._slack: Counts = available + np.cumsum(owned_N) - owned_N - needs

    @property
    def safe(self) -> bool:
        """True if all sequences can finish, one after the other from the oldest on, even if each sequence allocates the
        maximum number of KV blocks that it may need."""
        return not len(self._slack) or int(self._slack.min()) >= 0

    def compute_allowance(self, index: int) -> int:
        """Return the maximum number of KV blocks that the sequence at `index` (0: the oldest) may allocate now in each
        of its tables such that the state stays safe."""
        return min(self.available, int(self._slack[:index].min()) if index else self.available) // self._tables

    def take(self, index: int, count: int) -> None:
        """Record that the sequence at `index` (0: the oldest) allocates `count` KV blocks in each of its tables. count:
        at most the sequence's `compute_allowance`."""
        self.available -= count * self._tables
        self._remaining[index] -= count
        self._owned[index] += count
        self._slack[:index] -= count * self._tables

    def admit(self, most: Row, remaining: int, cached: Row, shared: Mapping[tuple[int, int], int]) -> AdmissionState:
        """Return a copy of the state with one more running sequence, the youngest. The copy may be unsafe; this state
        is unchanged.

        most [W]: maximum number of KV blocks that the new sequence holds at a time in each of W block tables.
        remaining: KV blocks that it may still allocate in each table. cached [W]: number of blocks of its cached prefix
        in each table that no running sequence holds. shared: {(index of a running sequence, table): number of blocks of
        the cached prefix that this sequence has owned so far}; these blocks become owned by the new sequence."""
        owned, prefix = self._owned.copy(), list(cached)
        for (index, table), count in shared.items():
            owned[index, table] -= count
            prefix[table] += count
        available, all_owned = self.available - sum(cached), [*owned.tolist(), prefix]
        all_remaining, all_most = [*self._remaining.tolist(), remaining], [*self._most.tolist(), most]
        return AdmissionState(available, self._tables, all_remaining, all_most, all_owned)


class AnswerLengthRatio:
    """Moving average, over finished answers, of the ratio of an answer's length to its limit `max_tokens`. It predicts
    the final length of unfinished answers.

    Attributes:
        ratio: The average, 0 to 1; 0.5 before the first answer.
    """

    def __init__(self) -> None:
        """Start at a ratio of 0.5."""
        self.ratio = 0.5

    def observe(self, tokens: int, max_tokens: int) -> None:
        """Include a finished answer of `tokens` tokens in the moving average. max_tokens: the answer's limit on tokens,
        at least 1."""
        self.ratio += 0.1 * (tokens / max_tokens - self.ratio)

    def predict_length(self, tokens: int, max_tokens: int) -> int:
        """Return the predicted final length in tokens of an unfinished answer that has `tokens` tokens so far: at least
        `tokens` + 1, at most `max_tokens`."""
        return min(max_tokens, max(round(self.ratio * max_tokens), tokens + 1))
