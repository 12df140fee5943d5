"""Batches of a synthetic problem, and the micro-batches of each rank."""

from __future__ import annotations

from meshwright.verification.problem import Problem
from meshwright.verification.samples import Batch, make_sequences


def make_batch(problem: Problem, step: int) -> Batch:
    """Return the sequences of a step; every step gets the next ones."""
    return make_sequences(problem, range(step * problem.batch, (step + 1) * problem.batch))


def share_of(batch: Batch, data_rank: int, data_size: int, micro_batches: int) -> list[Batch]:
    """Return the micro-batches of one rank: consecutive rows, ordered by rank, then by micro-batch."""
    rows = batch.tokens.shape[0] // (data_size * micro_batches)
    first = data_rank * rows * micro_batches
    return [batch.slice_sequences(first + index * rows, first + (index + 1) * rows) for index in range(micro_batches)]
