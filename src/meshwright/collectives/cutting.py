"""How a program takes a vector of any length: in chunks, a long one in segments; and what a rank sends of it then."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from meshwright.errors import UserError
from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import CollectiveProgram

SEGMENT_BYTES = 2**23  # of the vector, about; on CPU tensors
CHUNK_BYTES = 2**19  # of a chunk within a segment, at least

OWNED = ("scatter", "gather", "all-gather", "reduce-scatter", "all-to-all")
"""Operations in which every rank has its share of the vector."""


def segments(program: CollectiveProgram, numel: int, itemsize: int, whole: bool) -> list[tuple[int, int]]:
    """First element and chunk length of each segment of a vector that belongs to nobody; `whole`: of one segment."""
    chunks = program.chunks
    wanted = max(SEGMENT_BYTES, chunks * CHUNK_BYTES) // itemsize
    count = 1 if whole else max(1, round(numel / wanted))
    n = -(-numel // (count * chunks))
    starts = range(0, numel, n * chunks)
    return [(start, min(n, -(-(numel - start) // chunks))) for start in starts]


def first_chunks(program: CollectiveProgram) -> list[int]:
    """The chunks of rank r are first[r] .. first[r + 1]."""
    owner = program.find_owner(np.arange(program.chunks))
    first: list[int] = np.searchsorted(owner, np.arange(program.ranks + 1)).tolist()
    return first


def chunk_of_share(program: CollectiveProgram, numel: int) -> int:
    """Chunk length when every rank has an equal share of the vector. Raises UserError where none can have one."""
    name, ranks = f"{program.operation} {program.algorithm}", program.ranks
    if numel % ranks:
        raise UserError(f"{name}: {numel} elements are no equal shares for {ranks} ranks")
    fewest = min(stop - start for start, stop in pairwise(first_chunks(program)))
    if fewest == 0:
        raise UserError(f"{name}: {program.chunks} chunks are fewer than {ranks} ranks; not each has a share")
    return -(-numel // (ranks * fewest))


def sent_bytes(checked: CheckedCollective, rank: int, numel: int, itemsize: int, whole: bool = False) -> int:
    """Bytes that the rank at place `rank` puts on the wire for a vector of `numel` elements, padding included."""
    program = checked.program
    slots = int(checked.bytes_sent(program.chunks)[rank])
    if program.operation in OWNED:
        return slots * chunk_of_share(program, numel) * itemsize
    return slots * sum(n for _, n in segments(program, numel, itemsize, whole)) * itemsize
