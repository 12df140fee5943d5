"""Pairwise exchange: one partner in each round; all-pairs: messages to all other ranks in one round.

Pairwise: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA
19(1), 2005. All-pairs: M. Cowan et al., MSCCLang, ASPLOS 2023.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, build_from_rounds
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def add_reduce_scatter_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Add a pairwise reduce-scatter to the builder `program`. In each round, each rank sends to one other rank the
    block that the receiver will own. Each iteration of this generator adds the sends of one round, so that several
    algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent groups. own: [..., n], first slot (buffer for one chunk) of
    the block that each rank ends with. count: number of consecutive slots in a block.
    """
    for partner in list_partners(ranks.shape[-1]):
        program.transfer(ranks, ranks[..., partner], own[..., partner], count, reduce=True)
        yield


def add_all_gather_rounds(program: Builder, ranks: Integers, own: Integers, count: int = 1) -> Rounds:
    """Add a pairwise all-gather to the builder `program`. In each round, each rank sends its block to one other rank.
    Each iteration of this generator adds the sends of one round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent groups. own: [..., n], first slot (buffer for one chunk) of
    the block that each rank starts with. count: number of consecutive slots in a block.
    """
    for partner in list_partners(ranks.shape[-1]):
        program.transfer(ranks, ranks[..., partner], own, count)
        yield


def add_all_to_all_rounds(program: Builder, ranks: Integers, blocks: Integers, into: Integers, count: int) -> Rounds:
    """Add a pairwise all-to-all to the builder `program`. In each round, each rank sends one block to one other rank of
    its group. Each iteration of this generator adds the sends of one round, so that several algorithms can be
    interleaved.

    A slot is a buffer for one chunk; a block is `count` consecutive slots. ranks: [..., n], the members of each of
    several independent groups of n ranks. blocks: [n], blocks[j] is the first slot of the block that every sender sends
    to member j of its group. into: [..., n], into[..., i] is the first slot in which a receiver stores the block from
    member i of its group.
    """
    for partner in list_partners(ranks.shape[-1]):
        program.transfer(ranks, ranks[..., partner], blocks[partner], count, into)
        yield


def list_partners(n: int) -> list[Integers]:
    """Return the destination of every rank in each of the n - 1 rounds of a pairwise all-to-all among ranks 0 to n - 1:
    n - 1 arrays [n]. If n is a power of two, ranks exchange in pairs."""
    position = np.arange(n)
    in_pairs = n & (n - 1) == 0
    return [position ^ step if in_pairs else (position + step) % n for step in range(1, n)]


def merge_rounds(rounds: Rounds) -> Rounds:
    """Run a round generator to its end, so that all of its sends form a single round, and yield once at the end of this
    round. No send may depend on another.

    rounds: generator that adds one round's sends to a collective program before each yield.
    """
    for _ in rounds:
        pass
    yield


def all_pairs_all_reduce(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the all-pairs all-reduce: every rank reduces one block (1/n of the
    vector) and sends the result to all other ranks.

    Best for small vectors inside a machine, where all pairs have good links.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 2 rounds;
    2(n-1)/n S bytes sent per rank in 2(n-1) messages; time 2 alpha + 2(n-1)/n S beta.
    """
    program = Builder("all-reduce", "all-pairs", ranks, chunks=ranks)
    everyone = own = np.arange(ranks)
    return build_from_rounds(
        program,
        merge_rounds(add_reduce_scatter_rounds(program, everyone, own)),
        merge_rounds(add_all_gather_rounds(program, everyone, own)),
    )


def all_pairs_reduce_scatter(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the all-pairs reduce-scatter: every rank sends to all other ranks
    at once; each receiver gets the block that it will own. Best for small vectors inside a machine.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 1 round of n-1
    messages; (n-1)/n S bytes sent per rank; time alpha + (n-1)/n S beta.
    """
    program = Builder("reduce-scatter", "all-pairs", ranks, chunks=ranks)
    return build_from_rounds(
        program, merge_rounds(add_reduce_scatter_rounds(program, np.arange(ranks), np.arange(ranks)))
    )


def all_pairs_all_gather(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the all-pairs all-gather: every rank sends its block to all other
    ranks at once. Best for small vectors inside a machine.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 1 round of n-1
    messages; (n-1)/n S bytes sent per rank; time alpha + (n-1)/n S beta.
    """
    program = Builder("all-gather", "all-pairs", ranks, chunks=ranks)
    return build_from_rounds(program, merge_rounds(add_all_gather_rounds(program, np.arange(ranks), np.arange(ranks))))


def reduce_scatter(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the pairwise reduce-scatter: blocks (1/n of the vector each) go
    directly to their owners.

    Best for large vectors if all pairs of ranks are near (as within a node).

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank; time (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("reduce-scatter", "pairwise", ranks, chunks=ranks)
    return build_from_rounds(program, add_reduce_scatter_rounds(program, np.arange(ranks), np.arange(ranks)))


def all_gather(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the pairwise all-gather: blocks (1/n of the vector each) go
    directly from their owners to all ranks.

    Best for large vectors if all pairs of ranks are near (as within a node).

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank; time (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("all-gather", "pairwise", ranks, chunks=ranks)
    return build_from_rounds(program, add_all_gather_rounds(program, np.arange(ranks), np.arange(ranks)))


def all_to_all(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the pairwise all-to-all: one partner in each round. Best for large
    vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: n-1 rounds;
    (n-1)/n S bytes sent per rank, each sent once; time (n-1) alpha + (n-1)/n S beta.
    """
    program = Builder("all-to-all", "pairwise", ranks, chunks=ranks)
    return build_from_rounds(program, _add_own_copy_round(program), _add_exchange_rounds(program))


def all_pairs_all_to_all(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the all-pairs all-to-all: every rank sends its messages to all
    other ranks at once.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: 1 round of n-1
    messages; (n-1)/n S bytes sent per rank; time alpha + (n-1)/n S beta.
    """
    program = Builder("all-to-all", "all-pairs", ranks, chunks=ranks)
    return build_from_rounds(program, _add_own_copy_round(program), merge_rounds(_add_exchange_rounds(program)))


def _add_own_copy_round(program: Builder) -> Rounds:
    """Add to the builder `program` the first round of an all-to-all, in which each rank copies its block for itself
    from its input to its output. This generator yields once, after the round."""
    everyone = np.arange(program.ranks)
    program.copy(everyone, source=everyone, into=program.chunks + everyone)
    yield


def _add_exchange_rounds(program: Builder) -> Rounds:
    """Add a pairwise all-to-all of one chunk per pair of ranks, over all ranks of the builder `program`. Each iteration
    of the returned generator adds the sends of one round."""
    everyone = np.arange(program.ranks)
    return add_all_to_all_rounds(program, everyone, everyone, program.chunks + everyone, 1)
