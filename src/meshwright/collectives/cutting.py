"""Division of a vector of any length into chunks and segments, and the bytes that a rank then sends."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from meshwright.errors import UserError
from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import CollectiveProgram

SEGMENT_BYTES = 2**23  # approximate size of a segment of the vector, on CPU tensors
CHUNK_BYTES = 2**19  # minimum size of a chunk within a segment

OWNED = ("scatter", "gather", "all-gather", "reduce-scatter", "all-to-all")
"""Operations in which every rank owns a share of the vector."""


def split_segments(program: CollectiveProgram, numel: int, itemsize: int, whole: bool) -> list[tuple[int, int]]:
    """Split a long vector into segments of about 8 MiB or more; a collective program runs once on each segment, one
    after the other. Return for each segment (index of its first element, elements per chunk). Do not use this for
    operations in which each rank owns a share of the vector, such as all-gather.

    program: the program, whose number of chunks each segment is divided into. numel: elements of the vector. itemsize:
    bytes of an element. whole: True: return a single segment, the whole vector.
    """
    chunks = program.chunks
    wanted = max(SEGMENT_BYTES, chunks * CHUNK_BYTES) // itemsize
    count = 1 if whole else max(1, round(numel / wanted))
    n = -(-numel // (count * chunks))
    starts = range(0, numel, n * chunks)
    return [(start, min(n, -(-(numel - start) // chunks))) for start in starts]


def find_first_chunks(program: CollectiveProgram) -> list[int]:
    """Return the index of the first chunk that each rank owns, as a list `first` of length ranks + 1: rank r owns the
    chunks first[r] to first[r + 1] - 1 of the vector. program: collective program, which has `chunks` chunks in all."""
    owner = program.find_owner(np.arange(program.chunks))
    first: list[int] = np.searchsorted(owner, np.arange(program.ranks + 1)).tolist()
    return first


def compute_chunk_length(program: CollectiveProgram, numel: int) -> int:
    """Return the number of elements per chunk when a program runs on a vector of `numel` elements, of which every rank
    owns an equal share. The number is rounded up, because shares are padded to a whole number of chunks.

    Raises UserError if `numel` is not a multiple of the ranks, or if the program has fewer chunks than ranks.
    """
    name, ranks = f"{program.operation} {program.algorithm}", program.ranks
    if numel % ranks:
        raise UserError(f"{name}: {numel} elements are not divisible into equal shares for {ranks} ranks")
    fewest = min(stop - start for start, stop in pairwise(find_first_chunks(program)))
    if fewest == 0:
        raise UserError(f"{name}: {program.chunks} chunks are fewer than {ranks} ranks, so some ranks have no share")
    return -(-numel // (ranks * fewest))


def compute_sent_bytes(checked: CheckedCollective, rank: int, numel: int, itemsize: int, whole: bool = False) -> int:
    """Return the bytes that one rank sends when a collective program runs on a vector of `numel` elements, padding
    included.

    checked: the verified program. rank: rank of the program, from 0. itemsize: bytes of an element. whole: False: a
    long vector is cut into segments, on each of which the program runs; True: the program runs once on the whole
    vector.
    """
    program = checked.program
    slots = int(checked.bytes_sent(program.chunks)[rank])
    if program.operation in OWNED:
        return slots * compute_chunk_length(program, numel) * itemsize
    return slots * sum(n for _, n in split_segments(program, numel, itemsize, whole)) * itemsize
