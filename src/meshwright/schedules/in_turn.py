"""Writes the steps of a rank that holds two chunks in phrases, as papers print them: `F0 F1`, `F0&B1 F1&B0`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.program.order import Integers
from meshwright.program.pipeline import Kind, RankBuilder

_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRADIENT, "W": Kind.WEIGHT_GRADIENT}


@dataclass(frozen=True)
class Chunk:
    """One stage of one replica on a rank, and the micro-batches that it takes in turn."""

    stage: int
    micro_batches: range
    replica: int = 0


class InTurn:
    """Writes phrases for one rank; every chunk takes its micro-batches in turn, forwards and backwards alike.

    F: forward, B: whole backward, I: input gradient, W: weight gradient, each followed by the number of the chunk. `W`
    without a number is the oldest weight gradient that has been put off, of whichever chunk. `&` joins a forward and a
    backward that overlap. A step for which no micro-batch is left is left out. `done` comes last.
    """

    def __init__(self, rank: RankBuilder, chunks: Sequence[Chunk]) -> None:
        self.rank, self.chunks = rank, chunks
        self._written: list[Integers] = []

    def write(self, phrase: str, times: int = 1) -> None:
        """The phrase, so many times in a row; none for a number below 1."""
        self._written += [_parsed(phrase)] * times

    def done(self) -> None:
        """Hand all that was written to the rank. Of weight gradients either all or none must have a number."""
        kind, chunk, joined = np.concatenate(self._written).T
        micro_batch = np.full(len(kind), -1)
        split = kind == Kind.INPUT_GRADIENT
        forward, back = kind == Kind.FORWARD, split | (kind == Kind.BACKWARD)
        for number, held in enumerate(self.chunks):
            for steps in (forward & (chunk == number), back & (chunk == number)):
                at = np.flatnonzero(steps)[: len(held.micro_batches)]
                micro_batch[at] = np.arange(len(at)) + held.micro_batches.start
        weights = kind == Kind.WEIGHT_GRADIENT
        split &= micro_batch >= 0
        assert (chunk[weights] < 0).all() or (chunk[weights] >= 0).all(), "weight gradients with and without a number"
        for number in np.unique(chunk[weights]):
            puts = np.flatnonzero(split & ((chunk == number) | (number < 0)))
            takes = np.flatnonzero(weights & (chunk == number))
            # Taken after each: one more than before it, but no more than were put off by then.
            turn = np.arange(1, len(takes) + 1)
            taken = turn + np.minimum(0, np.minimum.accumulate(np.searchsorted(puts, takes) - turn))
            there = np.diff(taken, prepend=0) > 0
            taker, put = takes[there], puts[taken[there] - 1]
            micro_batch[taker], chunk[taker] = micro_batch[put], chunk[put]
        kept = micro_batch >= 0
        stage, replica = np.array([(held.stage, held.replica) for held in self.chunks]).T
        of = chunk[kept]
        self.rank.take(np.cumsum(1 - joined)[kept], kind[kept], stage[of], replica[of], micro_batch[kept])


@lru_cache(maxsize=128)
def _parsed(phrase: str) -> Integers:
    """Of each step [steps, 3] its kind, its chunk (-1: of whichever), and whether it is joined to the one before."""
    steps = [
        (_KINDS[step[0]], int(step[1:]) if step[1:] else -1, place > 0)
        for word in phrase.split()
        for place, step in enumerate(word.split("&"))
    ]
    return np.array(steps, np.int64)
