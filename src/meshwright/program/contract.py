"""What every collective operation starts from and has to end with: which chunk a slot holds, with whose parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.names import OPERATIONS, REDUCTIONS, unknown
from meshwright.program.collective import CollectiveProgram
from meshwright.program.order import Integers

ALL = -1  # in place of one rank: the reduction over all ranks

_LARGEST_MEMORY = 4 << 30  # bytes that a check may take for the sets of ranks


def refuse(operation: str, ranks: int, chunks: int, root: int, scratch: int, reduction: str, where: str) -> None:
    """`UserError` where a program could not be checked whatever its steps are. where: what the message starts with."""
    if operation not in OPERATIONS:
        raise UserError(f"{where}: {unknown('operation', operation, OPERATIONS)}")
    if reduction not in REDUCTIONS:
        raise UserError(f"{where}: {unknown('reduction', reduction, REDUCTIONS)}")
    for name, value, least in (("ranks", ranks, 1), ("chunks", chunks, 1), ("scratch", scratch, 0)):
        if value < least:
            raise UserError(f"{where}: {name} is {value}; it has to be at least {least}")
    if not 0 <= root < ranks:
        raise UserError(f"{where}: root is {root}; ranks are 0 to {ranks - 1}")
    if operation == "all-to-all" and chunks % ranks:
        raise UserError(
            f"{where}: all-to-all gives every rank an equal share of the chunks, and {ranks} ranks do not divide "
            f"{chunks} chunks; write a multiple of {ranks}"
        )
    slots = chunks * (2 if operation == "all-to-all" else 1) + scratch
    if ranks * slots * (-(-ranks // 64) * 8 + 4) > _LARGEST_MEMORY:
        raise UserError(f"{where}: {ranks} ranks of {slots} slots are too many to check in {_LARGEST_MEMORY >> 30} GiB")


@dataclass
class Memory:
    """What the slots of all ranks hold.

    chunk: (ranks, slots), the chunk of the vector; -1 while a slot holds nothing.
    origins: (ranks, slots, words of 64 ranks), the ranks whose parts have been reduced into it, one bit a rank.
    """

    chunk: NDArray[np.int32]
    origins: NDArray[np.uint64]

    def ranks_in(self, rank: int, slot: int) -> list[int]:
        """The ranks whose parts a slot holds."""
        return members(self.origins[rank, slot])


def members(words: NDArray[np.uint64]) -> list[int]:
    """The numbers in a set of ranks."""
    return [64 * word + bit for word, bits in enumerate(words.tolist()) for bit in range(64) if bits >> bit & 1]


def only(rank: Integers, ranks: int) -> NDArray[np.uint64]:
    """Sets of one rank each: (..., words)."""
    sets = np.zeros((*rank.shape, -(-ranks // 64)), np.uint64)
    bit = np.left_shift(np.uint64(1), (rank % 64).astype(np.uint64))
    np.put_along_axis(sets, (rank // 64)[..., None], bit[..., None], axis=-1)
    return sets


def everyone(ranks: int) -> NDArray[np.uint64]:
    """The set of all ranks: (words,)."""
    return np.asarray(np.bitwise_or.reduce(only(np.arange(ranks), ranks), axis=0))


def receiver(program: CollectiveProgram) -> int:
    """Who gets the vector of a send-receive."""
    return program.ranks - 1 if program.root != program.ranks - 1 else 0


def initial(program: CollectiveProgram) -> Memory:
    """What the slots hold before the first step. A barrier has one slot: the ranks that a rank has heard from
    (from signals alone: that a blocking send was taken tells its sender something too, but no buffered one)."""
    ranks, chunks = program.ranks, program.chunks
    rank, chunk = np.arange(ranks)[:, None], np.arange(chunks)
    match program.operation:
        case "all-gather" | "gather":
            holds = program.find_owner(chunk) == rank
        case "broadcast" | "scatter" | "send-receive":
            holds = np.broadcast_to(rank == program.root, (ranks, chunks))
        case _:
            holds = np.ones((ranks, chunks), np.bool_)
    memory = Memory(
        np.full((ranks, program.slots), -1, np.int32),
        np.zeros((ranks, program.slots, -(-ranks // 64)), np.uint64),
    )
    memory.chunk[:, :chunks] = np.where(holds, chunk, -1)
    memory.origins[:, :chunks] = only(np.arange(ranks), ranks)[:, None] * holds[..., None]
    return memory


@dataclass(frozen=True)
class Required:
    """The slots that matter in the end, by rank: the chunk that each must hold, and whose part of it (or `ALL`)."""

    rank: Integers
    slot: Integers
    chunk: Integers
    origin: Integers


def required(program: CollectiveProgram) -> Required:
    """What the operation promises."""
    ranks, chunks, root = program.ranks, program.chunks, program.root
    rank, chunk = (a.ravel() for a in np.meshgrid(np.arange(ranks), np.arange(chunks), indexing="ij"))
    slot, owner = chunk, program.find_owner(chunk)
    match program.operation:
        case "all-reduce" | "barrier":
            kept, origin = np.ones(len(rank), np.bool_), np.full(len(rank), ALL)
        case "reduce-scatter":
            kept, origin = owner == rank, np.full(len(rank), ALL)
        case "reduce":
            kept, origin = rank == root, np.full(len(rank), ALL)
        case "all-gather":
            kept, origin = np.ones(len(rank), np.bool_), owner
        case "gather":
            kept, origin = rank == root, owner
        case "broadcast":
            kept, origin = np.ones(len(rank), np.bool_), np.full(len(rank), root)
        case "scatter":
            kept, origin = owner == rank, np.full(len(rank), root)
        case "send-receive":
            kept, origin = rank == receiver(program), np.full(len(rank), root)
        case "all-to-all":
            # The output is laid out by sender: share s of it is what rank s held for this rank.
            share = chunks // ranks
            kept, slot, origin = np.ones(len(rank), np.bool_), program.output + chunk, owner
            chunk = rank * share + chunk % share
        case _:
            raise AssertionError(program.operation)
    return Required(rank[kept], slot[kept], chunk[kept], origin[kept])
