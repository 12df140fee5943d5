"""Pre- and postconditions of collective operations: for each slot, its chunk and the ranks that contribute to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.names import OPERATIONS, REDUCTIONS, unknown
from meshwright.program.collective import CollectiveProgram
from meshwright.program.order import Integers

ALL = -1  # instead of a rank: contributions of all ranks

_MAX_MEMORY = 4 << 30  # bytes of all contribution sets during a check


def check_header(operation: str, ranks: int, chunks: int, root: int, scratch: int, reduction: str, where: str) -> None:
    """Raise `UserError` if a header field of a collective program is invalid, or the program is too large to check.

    operation, reduction: names such as `all-reduce`, `sum`. ranks: number of ranks. chunks: number of chunks of the
    vector. root: source or destination rank. scratch: number of temporary slots (buffers for one chunk) per rank.
    where: prefix of the message, such as the file's name.
    """
    if operation not in OPERATIONS:
        raise UserError(f"{where}: {unknown('operation', operation, OPERATIONS)}")
    if reduction not in REDUCTIONS:
        raise UserError(f"{where}: {unknown('reduction', reduction, REDUCTIONS)}")
    for name, value, least in (("ranks", ranks, 1), ("chunks", chunks, 1), ("scratch", scratch, 0)):
        if value < least:
            raise UserError(f"{where}: {name} is {value}; it must be at least {least}")
    if not 0 <= root < ranks:
        raise UserError(f"{where}: root is {root}; ranks are 0 to {ranks - 1}")
    if operation == "all-to-all" and chunks % ranks:
        raise UserError(
            f"{where}: all-to-all gives every rank an equal share of the chunks, but {ranks} ranks do not divide "
            f"{chunks} chunks; use a multiple of {ranks}"
        )
    slots = chunks * (2 if operation == "all-to-all" else 1) + scratch
    if ranks * slots * (-(-ranks // 64) * 8 + 4) > _MAX_MEMORY:
        raise UserError(f"{where}: {ranks} ranks of {slots} slots are too many to check in {_MAX_MEMORY >> 30} GiB")


@dataclass
class SymbolicMemory:
    """Contents of the slots (buffers of one chunk each) of all ranks in a symbolic execution: instead of numbers, the
    chunk that a slot holds and the ranks whose contributions it sums.

    Attributes:
        chunk: [ranks, slots], number of the vector's chunk in each slot; -1 for an empty slot.
        origins: [ranks, slots, ceil(ranks / 64)], set of ranks whose contributions are summed in the slot, one bit per
            rank.
    """

    chunk: NDArray[np.int32]
    origins: NDArray[np.uint64]

    def list_contributors(self, rank: int, slot: int) -> list[int]:
        """Return the ranks whose contributions are summed in slot `slot` (buffer for one chunk) of rank `rank`,
        ascending."""
        return list_ranks(self.origins[rank, slot])


def list_ranks(words: NDArray[np.uint64]) -> list[int]:
    """Return the ranks in a bit set, ascending. words: [ceil(ranks / 64)], where bit r % 64 of word r // 64 stands for
    rank r."""
    return [64 * word + bit for word, bits in enumerate(words.tolist()) for bit in range(64) if bits >> bit & 1]


def make_single_rank_sets(rank: Integers, ranks: int) -> NDArray[np.uint64]:
    """Return, for each rank in `rank` [...], the bit set that contains only that rank: [..., ceil(ranks / 64)] words of
    64 bits. ranks: total number of ranks."""
    sets = np.zeros((*rank.shape, -(-ranks // 64)), np.uint64)
    bit = np.left_shift(np.uint64(1), (rank % 64).astype(np.uint64))
    np.put_along_axis(sets, (rank // 64)[..., None], bit[..., None], axis=-1)
    return sets


def make_full_set(ranks: int) -> NDArray[np.uint64]:
    """Return the bit set of all `ranks` ranks: [ceil(ranks / 64)] 64-bit words."""
    return np.asarray(np.bitwise_or.reduce(make_single_rank_sets(np.arange(ranks), ranks), axis=0))


def find_receiver(ranks: int, root: int) -> int:
    """Return the destination rank of a send-receive: the last of `ranks` ranks, or rank 0 if the last is the root."""
    return ranks - 1 if root != ranks - 1 else 0


def build_initial_memory(program: CollectiveProgram) -> SymbolicMemory:
    """Return the symbolic contents (chunk number and contributing ranks) of all slots (buffers for one chunk) before
    the first step: the input that the program's operation assumes on each rank.

    For a barrier, slot 0 of each rank collects the set of ranks from which signals have come, directly or through other
    ranks.
    """
    ranks, chunks = program.ranks, program.chunks
    rank, chunk = np.arange(ranks)[:, None], np.arange(chunks)
    match program.operation:
        case "all-gather" | "gather":
            holds = program.find_owner(chunk) == rank
        case "broadcast" | "scatter" | "send-receive":
            holds = np.broadcast_to(rank == program.root, (ranks, chunks))
        case _:
            holds = np.ones((ranks, chunks), np.bool_)
    memory = SymbolicMemory(
        np.full((ranks, program.slots), -1, np.int32),
        np.zeros((ranks, program.slots, -(-ranks // 64)), np.uint64),
    )
    memory.chunk[:, :chunks] = np.where(holds, chunk, -1)
    memory.origins[:, :chunks] = make_single_rank_sets(np.arange(ranks), ranks)[:, None] * holds[..., None]
    return memory


@dataclass(frozen=True)
class RequiredSlots:
    """Slot contents that an operation requires at its end, as columns with one entry per slot (buffer for one chunk).

    Attributes:
        rank, slot: Rank, and number of the slot on it.
        chunk: Chunk of the vector that the slot must hold.
        origin: Rank whose data the slot must hold, or `ALL` (-1) for the sum over all ranks.
    """

    rank: Integers
    slot: Integers
    chunk: Integers
    origin: Integers


def build_required_slots(program: CollectiveProgram) -> RequiredSlots:
    """Return the slots (buffers for one chunk) that hold the result of the program's operation, with the contents that
    they must have at the end."""
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
            kept, origin = rank == find_receiver(ranks, root), np.full(len(rank), root)
        case "all-to-all":
            # The output is ordered by sender: share s holds the data of rank s for this rank.
            share = chunks // ranks
            kept, slot, origin = np.ones(len(rank), np.bool_), program.output + chunk, owner
            chunk = rank * share + chunk % share
        case _:
            raise AssertionError(program.operation)
    return RequiredSlots(rank[kept], slot[kept], chunk[kept], origin[kept])
