"""Composition of collective algorithms from rounds: in sequence, side by side, or pipelined.

The rounds of an algorithm are a Python generator that adds the steps of one round before each `yield`. Most take the
cooperating ranks as the last axis of an array; the rows of the array are groups that work independently at the same
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshwright.program.collective import Builder, CollectiveProgram

Rounds: TypeAlias = Iterator[None]


def build_from_rounds(program: Builder, *parts: Rounds) -> CollectiveProgram:
    """Run round generators one after the other and return the finished program.

    program: builder of the collective program. parts: generators; each adds the sends of one round to `program` before
    each yield.
    """
    for part in parts:
        while True:
            with program.round():
                if _write_next_round(part):
                    break
    return program.build()


def run_together(parts: Iterable[Rounds]) -> Rounds:
    """Run several round generators in parallel: round i of the result has the sends of round i of every generator.
    parts: generators; each adds the sends of one round to the program before each yield."""
    active = list(parts)
    while active := [part for part in active if not _write_next_round(part)]:
        yield


def run_staggered(parts: Iterable[Rounds]) -> Rounds:
    """Run several round generators as a pipeline: in round i of the result, generator `parts[i]` starts, and each
    earlier generator adds its next round. A generator adds the sends of one round to the program before each yield."""
    active: list[Rounds] = []
    for part in parts:
        active = [part for part in [*active, part] if not _write_next_round(part)]
        yield
    yield from run_together(active)


def run_in_sequence(*parts: Rounds) -> Rounds:
    """Run several round generators one after the other. parts: generators; each adds the sends of one round to the
    program before each yield."""
    for part in parts:
        yield from part


def _write_next_round(part: Rounds) -> bool:
    """Advance the round generator `part` by one iteration, which adds the sends of one round to the program. Return
    True if the generator had already ended and nothing was added, else False."""
    return next(part, part) is part


def transfer_cyclic_range(
    program: Builder, source: ArrayLike, target: ArrayLike, chunk: ArrayLike, count: ArrayLike, size: int
) -> None:
    """Add sends of `count` consecutive chunks from rank `source` to rank `target`. Chunks are numbered 0 to `size` - 1,
    and a range that passes the last chunk continues at chunk 0; such a range is sent as two messages.

    program: builder of the collective program. chunk: number of the first chunk, taken modulo `size`. The arguments
    source, target, chunk and count are integers or arrays that broadcast against each other; each entry adds one send.
    """
    chunk = np.asarray(chunk) % size
    count = np.asarray(count)
    before_the_end = np.minimum(count, size - chunk)
    program.transfer(source, target, chunk, before_the_end)
    program.transfer(source, target, 0, count - before_the_end)
