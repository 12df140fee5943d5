"""Writer of a rank's steps from texts in the notation of papers: `F0 F1`, `F0&B1 F1&B0`."""

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
    """One stage on a rank (a model chunk), with the micro-batches that run through it, in order.

    stage: number of the stage. micro_batches: numbers of the micro-batches. replica: index of the copy of the model to
    which the stage belongs, 0 or 1.
    """

    stage: int
    micro_batches: range
    replica: int = 0


class PhraseWriter:
    """Writer of one rank's pipeline steps from texts in the notation of papers, such as `F0 F1 F0&B1`.

    F: forward, B: full backward, I: input gradient, W: weight gradient, each followed by the number of a chunk (stage
    on this rank). `W` without a number is the oldest deferred weight gradient of any chunk. `&` joins an overlapped
    forward and backward. In each chunk the k-th forward and the k-th backward are on the chunk's k-th micro-batch;
    steps beyond the last micro-batch are dropped.
    rank: builder that receives the steps when `finish` is called. chunks: stages of the rank, by chunk number.
    """

    def __init__(self, rank: RankBuilder, chunks: Sequence[Chunk]) -> None:
        """Start without steps; arguments: see the class."""
        self.rank, self.chunks = rank, chunks
        self._written: list[Integers] = []

    def write(self, phrase: str, times: int = 1) -> None:
        """Append the steps that the text `phrase` describes, repeated `times` times (0 or less: none). Example: `F0
        F0&B1` is a forward of chunk 0 (stage 0 of this rank), then the next forward of chunk 0 overlapped with a
        backward of chunk 1."""
        self._written.append(np.tile(_parse_phrase(phrase), (max(0, times), 1)))

    def finish(self) -> None:
        """Assign micro-batches to all steps written so far, and pass the steps to the rank's builder. Call it once, at
        the end. In each chunk (stage on the rank), the k-th forward and the k-th backward get the k-th micro-batch.

        Asserts that weight gradients were written either all with a chunk number (`W0`) or all without (`W`)."""
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
            # Number of weight gradients run after each W: one more, but no more than are deferred by then.
            turn = np.arange(1, len(takes) + 1)
            taken = turn + np.minimum(0, np.minimum.accumulate(np.searchsorted(puts, takes) - turn))
            there = np.diff(taken, prepend=0) > 0
            taker, put = takes[there], puts[taken[there] - 1]
            micro_batch[taker], chunk[taker] = micro_batch[put], chunk[put]
        kept = micro_batch >= 0
        stage, replica = np.array([(held.stage, held.replica) for held in self.chunks]).T
        of = chunk[kept]
        self.rank.set_steps(np.cumsum(1 - joined)[kept], kind[kept], stage[of], replica[of], micro_batch[kept])


@lru_cache(maxsize=128)
def _parse_phrase(phrase: str) -> Integers:
    """Parse a text such as `F0 F0&B1` into a table of steps [steps, 3]. F is forward, B full backward, I input
    gradient, W weight gradient; the number after the letter is the number of a chunk (stage on this rank).

    Columns: (1) kind; (2) chunk number, -1 for a `W` without number; (3) 1 if `&` joins the step to the previous step,
    else 0."""
    steps = [
        (_KINDS[step[0]], int(step[1:]) if step[1:] else -1, place > 0)
        for word in phrase.split()
        for place, step in enumerate(word.split("&"))
    ]
    return np.array(steps, np.int64)
