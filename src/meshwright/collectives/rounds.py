"""How collective algorithms are put together: out of rounds, one after the other, side by side, or staggered.

The rounds of an algorithm are a Python generator that writes the steps of one round before each `yield`. Most take the
ranks that work together as the last axis of an array: all rows of the array work at the same time, each for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshwright.program.collective import Builder, CollectiveProgram

Rounds: TypeAlias = Iterator[None]


def write(program: Builder, *parts: Rounds) -> CollectiveProgram:
    """The program of these parts, one after the other."""
    for part in parts:
        while True:
            with program.round():
                if _is_over(part):
                    break
    return program.build()


def together(parts: Iterable[Rounds]) -> Rounds:
    """Side by side: the first rounds of all parts are one round, their second rounds the next, and so on."""
    under_way = list(parts)
    while under_way := [part for part in under_way if not _is_over(part)]:
        yield


def staggered(parts: Iterable[Rounds]) -> Rounds:
    """As a pipeline: each part begins one round after the part before it."""
    under_way: list[Rounds] = []
    for part in parts:
        under_way = [part for part in [*under_way, part] if not _is_over(part)]
        yield
    yield from together(under_way)


def in_turn(*parts: Rounds) -> Rounds:
    """One after the other."""
    for part in parts:
        yield from part


def _is_over(part: Rounds) -> bool:
    """Write the next round of a part, if there is one."""
    return next(part, part) is part


def transfer_around(
    program: Builder, source: ArrayLike, target: ArrayLike, chunk: ArrayLike, count: ArrayLike, size: int
) -> None:
    """Send slots chunk .. chunk + count, where slot 0 follows slot size - 1: at most two messages."""
    chunk = np.asarray(chunk) % size
    count = np.asarray(count)
    before_the_end = np.minimum(count, size - chunk)
    program.transfer(source, target, chunk, before_the_end)
    program.transfer(source, target, 0, count - before_the_end)
