"""Everybody with everybody: all-pairs sends to all others at once, pairwise to one other in each round.

Pairwise: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH,
IJHPCA 19(1), 2005. All-pairs: M. Cowan et al., MSCCLang, ASPLOS 2023.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def reduce_scatter_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """In each round, each rank sends one other rank that rank's block.

    ranks: [..., n]. own: [..., n], first slot of the block that each rank is to end with. count: slots a block.
    """
    for partner in partners(ranks.shape[-1]):
        program.transfer(ranks, ranks[..., partner], own[..., partner], count, reduce=True)
        yield


def all_gather_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """In each round, each rank sends its block to one other rank. Arguments as in `reduce_scatter_rounds`."""
    for partner in partners(ranks.shape[-1]):
        program.transfer(ranks, ranks[..., partner], own, count)
        yield


def all_to_all_rounds(program: Builder, ranks: Integers, blocks: Integers, into: Integers, count: int) -> Rounds:
    """In each round, each rank sends one other rank the block that is for it.

    ranks: [..., n]. blocks: [n], first slots of the blocks for each of them. into: [..., n], first slot where a
    receiver keeps what comes from each of them. count: slots a block.
    """
    for partner in partners(ranks.shape[-1]):
        program.transfer(ranks, ranks[..., partner], blocks[partner], count, into)
        yield


def partners(n: int) -> list[Integers]:
    """To which position each position sends, in each of n-1 rounds; with 2^k positions, in pairs that exchange."""
    position = np.arange(n)
    in_pairs = n & (n - 1) == 0
    return [position ^ step if in_pairs else (position + step) % n for step in range(1, n)]


def at_once(rounds: Rounds) -> Rounds:
    """All rounds in one, where none needs what another brings."""
    for _ in rounds:
        pass
    yield


def all_pairs_all_reduce(ranks: int) -> CollectiveProgram:
    """Everybody reduces one block and hands it to everybody. Best for small vectors where all pairs have good links:
    inside one machine.

    2 rounds; 2(n-1)/n S bytes a rank in 2(n-1) messages; 2 alpha + 2(n-1)/n S beta.
    """
    program = Builder("all-reduce", "all-pairs", ranks, chunks=ranks)
    everyone = own = np.arange(ranks)
    return write(
        program,
        at_once(reduce_scatter_rounds(program, everyone, own)),
        at_once(all_gather_rounds(program, everyone, own)),
    )


def all_pairs_reduce_scatter(ranks: int) -> CollectiveProgram:
    """Best for small vectors inside one machine. 1 round of n-1 messages; (n-1)/n S bytes a rank;
    alpha + (n-1)/n S beta."""
    program = Builder("reduce-scatter", "all-pairs", ranks, chunks=ranks)
    return write(program, at_once(reduce_scatter_rounds(program, np.arange(ranks), np.arange(ranks))))


def all_pairs_all_gather(ranks: int) -> CollectiveProgram:
    """Best for small vectors inside one machine. 1 round of n-1 messages; (n-1)/n S bytes a rank;
    alpha + (n-1)/n S beta."""
    program = Builder("all-gather", "all-pairs", ranks, chunks=ranks)
    return write(program, at_once(all_gather_rounds(program, np.arange(ranks), np.arange(ranks))))


def reduce_scatter(ranks: int) -> CollectiveProgram:
    """Blocks go straight to their owners, never through others. Best for large vectors where all pairs are near.

    n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("reduce-scatter", "pairwise", ranks, chunks=ranks)
    return write(program, reduce_scatter_rounds(program, np.arange(ranks), np.arange(ranks)))


def all_gather(ranks: int) -> CollectiveProgram:
    """As `reduce_scatter`: n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S beta."""
    program = Builder("all-gather", "pairwise", ranks, chunks=ranks)
    return write(program, all_gather_rounds(program, np.arange(ranks), np.arange(ranks)))


def all_to_all(ranks: int) -> CollectiveProgram:
    """One other rank in each round. Best for large vectors: every byte travels once.

    n-1 rounds; (n-1)/n S bytes a rank; (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("all-to-all", "pairwise", ranks, chunks=ranks)
    return write(program, _keep_own(program), _exchange(program))


def all_pairs_all_to_all(ranks: int) -> CollectiveProgram:
    """All messages at once, as most networks like it best: 1 round of n-1 messages; (n-1)/n S bytes a rank;
    alpha + (n-1)/n S beta."""
    program = Builder("all-to-all", "all-pairs", ranks, chunks=ranks)
    return write(program, _keep_own(program), at_once(_exchange(program)))


def _keep_own(program: Builder) -> Rounds:
    everyone = np.arange(program.ranks)
    program.copy(everyone, source=everyone, into=program.chunks + everyone)
    yield


def _exchange(program: Builder) -> Rounds:
    everyone = np.arange(program.ranks)
    return all_to_all_rounds(program, everyone, everyone, program.chunks + everyone, 1)
