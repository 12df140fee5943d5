"""Correct collective programs, written by hand and generated, small enough to run often."""

from __future__ import annotations

from functools import cache

import numpy as np

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.errors import UserError
from meshwright.program.collective import Builder, CollectiveProgram


def ring(ranks: int) -> CollectiveProgram:
    program = Builder("all-reduce", "ring", ranks, chunks=ranks)
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=(rank - step) % ranks, reduce=True)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=(rank + 1 - step) % ranks)
    return program.build()


def star_barrier(ranks: int) -> CollectiveProgram:
    program = Builder("barrier", "star", ranks, chunks=1)
    others = np.arange(1, ranks)
    with program.round():
        program.signal(others, 0)
    with program.round():
        program.signal(0, others)
    return program.build()


def all_to_one_and_back(ranks: int) -> CollectiveProgram:
    """Many reductions into one slot in one group, then copies to and from scratch, and a broadcast."""
    program = Builder("all-reduce", "star", ranks, chunks=2, scratch=2)
    others = np.arange(1, ranks)
    with program.round():
        program.transfer(others, 0, chunk=0, count=2, reduce=True)
    with program.round():
        program.copy(0, source=0, into=2, count=2)
    with program.round():
        program.copy(0, source=2, into=0)
    with program.round():
        program.transfer(0, others, chunk=2, into=0)
        program.transfer(0, others, chunk=3, into=1)
    return program.build()


def through_scratch(ranks: int) -> CollectiveProgram:
    """Each rank's vector travels around the ring in scratch slots, and every rank adds it to its own."""
    program = Builder("all-reduce", "carousel", ranks, chunks=1, scratch=2)
    rank = np.arange(ranks)
    with program.round():
        program.copy(rank, source=0, into=1)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=1 + step % 2, into=2 - step % 2)
        with program.round():
            program.copy(rank, source=2 - step % 2, into=0, combine=True)
    return program.build()


def uneven_chain(ranks: int) -> CollectiveProgram:
    """A send-receive through every rank, one chunk after the other, so that matched groups differ in level."""
    program = Builder("send-receive", "chain", ranks, chunks=3)
    for chunk in range(3):
        for rank in range(ranks - 1):
            with program.round():
                program.transfer(rank, rank + 1, chunk=chunk)
    return program.build()


@cache
def programs() -> list[CollectiveProgram]:
    """Correct programs, small enough to run often."""
    found = []
    for ranks in (2, 3, 4, 6):
        found += [make(ranks) for make in (star_barrier, all_to_one_and_back, through_scratch, uneven_chain)]
        for operation, algorithms in ALGORITHMS.items():
            for name in algorithms:
                try:
                    program = generate(operation, name, ranks)
                except UserError:
                    continue
                if len(program.steps) <= 150:
                    found.append(program)
    return found
