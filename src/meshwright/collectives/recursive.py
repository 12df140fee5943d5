"""Recursive halving and doubling: partners at distance 1, 2, 4 ... exchange, in log2 n rounds.

R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005.
If n is not a power of two, each extra rank first reduces its vector into that of its neighbour, the stand-in, and at
the end receives the result from it.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, build_from_rounds, run_in_sequence
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def add_halving_rounds(program: Builder, ranks: Integers, edges: Integers) -> Rounds:
    """Add a recursive-halving reduce-scatter among 2^k ranks, farthest partner first, to the builder `program`. Each
    iteration of this generator adds the sends of one round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent groups. edges: [n + 1]; the rank at position p of a group ends
    with the slots (buffers for one chunk) edges[p] to edges[p + 1] - 1.
    """
    position = np.arange(ranks.shape[-1])
    for distance in reversed(list_powers_of_two(ranks.shape[-1])):
        partner = position ^ distance
        start = partner // distance * distance  # first position of the half that the partner keeps
        count = edges[start + distance] - edges[start]
        program.transfer(ranks, ranks[..., partner], edges[start], count, reduce=True)
        yield


def add_doubling_rounds(program: Builder, ranks: Integers, edges: Integers) -> Rounds:
    """Add a recursive-doubling all-gather among 2^k ranks, nearest partner first, to the builder `program`. Each
    iteration of this generator adds the sends of one round, so that several algorithms can be interleaved.

    ranks: [..., n], ranks of each of several independent groups. edges: [n + 1]; the rank at position p of a group
    starts with the slots (buffers for one chunk) edges[p] to edges[p + 1] - 1.
    """
    position = np.arange(ranks.shape[-1])
    for distance in list_powers_of_two(ranks.shape[-1]):
        start = position // distance * distance  # first position of the shares that a rank has so far
        count = edges[start + distance] - edges[start]
        program.transfer(ranks, ranks[..., position ^ distance], edges[start], count)
        yield


def list_powers_of_two(n: int) -> list[int]:
    """Return the powers of two smaller than n: 1, 2, 4 ..."""
    return [1 << bit for bit in range((n - 1).bit_length())]


def split_extra_ranks(ranks: Integers) -> tuple[Integers, Integers, Integers]:
    """Split n ranks into core ranks, whose number is the largest power of two up to n, and extra ranks. Return (extra
    ranks, substitutes, core ranks): the substitute of an extra rank is the core rank that runs the algorithm on its
    behalf.

    ranks: [..., n], ranks of each of several independent groups; the results have the same leading shape.
    """
    n = ranks.shape[-1]
    extra = n - (1 << n.bit_length() - 1)
    stand_in = ranks[..., 1 : 2 * extra : 2]
    return ranks[..., : 2 * extra : 2], stand_in, np.concatenate([stand_in, ranks[..., 2 * extra :]], axis=-1)


def add_fold_round(program: Builder, ranks: Integers) -> Rounds:
    """Add to the builder `program` the first round of an algorithm for a number of ranks that is not a power of two:
    each extra rank (beyond the largest power of two) sends its vector to a core rank, which adds the vector to its own.
    This generator yields once, after the round; for a power of two it adds nothing and never yields.

    ranks: all ranks of the algorithm, in order.
    """
    extra, stand_in, _ = split_extra_ranks(ranks)
    if extra.size:
        program.transfer(extra, stand_in, 0, program.chunks, reduce=True)
        yield


def add_unfold_round(program: Builder, ranks: Integers) -> Rounds:
    """Add to the builder `program` the last round of an algorithm for a number of ranks that is not a power of two:
    each extra rank (beyond the largest power of two) receives the full result from its core rank. This generator yields
    once, after the round; for a power of two it adds nothing and never yields.

    ranks: all ranks of the algorithm, in order.
    """
    extra, stand_in, _ = split_extra_ranks(ranks)
    if extra.size:
        program.transfer(stand_in, extra, 0, program.chunks)
        yield


def rabenseifner(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the Rabenseifner all-reduce: recursive-halving reduce-scatter,
    recursive-doubling all-gather.

    Best for medium and large vectors: as few bytes as a ring in far fewer rounds, but between distant ranks, whose
    links may be shared. R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: if n is a power
    of two, 2 log2 n rounds; 2(n-1)/n S bytes sent per rank; time 2 log2 n alpha + 2(n-1)/n S beta. Otherwise, let m be
    the largest power of two below n: 2 log2 m + 2 rounds; time 2 log2 m alpha + 2(m-1)/m S beta + 2 (alpha + S beta).
    Each of the n - m extra ranks sends its S bytes to a neighbour and later receives the result from this neighbour.
    Such a neighbour sends 2(m-1)/m S + S bytes; each other rank sends 2(m-1)/m S.
    """
    everyone = np.arange(ranks)
    _, _, core = split_extra_ranks(everyone)
    program = Builder("all-reduce", "rabenseifner", ranks, chunks=len(core))
    edges = np.arange(len(core) + 1)
    return build_from_rounds(
        program,
        add_fold_round(program, everyone),
        add_halving_rounds(program, core, edges),
        add_doubling_rounds(program, core, edges),
        add_unfold_round(program, everyone),
    )


def butterfly(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the butterfly all-reduce (recursive doubling): partners exchange
    and add whole vectors.

    Best for small vectors: fewest rounds.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: if n is a power
    of two, log2 n rounds; S log2 n bytes sent per rank; time log2 n (alpha + S beta). Otherwise, let m be the largest
    power of two below n: log2 m + 2 rounds. Each of the n - m extra ranks sends its S bytes to a neighbour and later
    receives the result from this neighbour. Such a neighbour sends S log2 m + S bytes.
    """
    program = Builder("all-reduce", "butterfly", ranks, chunks=1)
    everyone = np.arange(ranks)
    _, _, core = split_extra_ranks(everyone)

    def exchange() -> Rounds:
        """Add the rounds of the butterfly to the program: in round i, ranks at distance 2^i send each other their
        vectors, and each adds the received vector to its own. A generator that adds one round's sends per iteration."""
        position = np.arange(len(core))
        for distance in list_powers_of_two(len(core)):
            program.transfer(core, core[position ^ distance], 0, reduce=True)
            yield

    return build_from_rounds(
        program, add_fold_round(program, everyone), exchange(), add_unfold_round(program, everyone)
    )


def add_reduce_scatter_rounds(program: Builder, ranks: Integers) -> Rounds:
    """Add to the builder `program` a recursive-halving reduce-scatter for any number of ranks. Each iteration of this
    generator adds the sends of one round, so that several algorithms can be interleaved.

    ranks: [n], ranks of the algorithm, in order; the rank at position p ends with slot p (buffer for one chunk).
    """
    extra, stand_in, core = split_extra_ranks(ranks)
    return run_in_sequence(
        add_fold_round(program, ranks),
        add_halving_rounds(program, core, _compute_share_bounds(ranks)),
        _add_extra_share_round(program, stand_in, extra),
    )


def reduce_scatter(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the reduce-scatter by recursive halving. Best for small and medium
    vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: if n is a power
    of two, log2 n rounds; (n-1)/n S bytes sent per rank; time log2 n alpha + (n-1)/n S beta. Otherwise 2 more rounds:
    ranks beyond the largest power of two first send S bytes, and at the end receive their share of S/n.
    """
    program = Builder("reduce-scatter", "recursive-halving", ranks, chunks=ranks)
    return build_from_rounds(program, add_reduce_scatter_rounds(program, np.arange(ranks)))


def all_gather(ranks: int) -> CollectiveProgram:
    """Generate the program (steps of every rank) of the recursive-doubling all-gather. Best for small and medium
    vectors.

    Costs for n ranks and a vector of S bytes, where a message of b bytes takes alpha + b beta seconds: if n is a power
    of two, log2 n rounds; (n-1)/n S bytes sent per rank; time log2 n alpha + (n-1)/n S beta. Otherwise 2 more rounds:
    ranks beyond the largest power of two first send their share of S/n bytes, and at the end receive the missing
    (n-1)/n S. The algorithm `bruck` needs fewer rounds.
    """
    program = Builder("all-gather", "recursive-doubling", ranks, chunks=ranks)
    everyone = np.arange(ranks)
    extra, stand_in, core = split_extra_ranks(everyone)

    def fill_up() -> Rounds:
        """Add to the program the round in which each extra rank (beyond the largest power of two) receives the shares
        of all other ranks: a generator of this one round, which can be interleaved with others."""
        program.transfer(stand_in, extra, 0, count=extra)
        program.transfer(stand_in, extra, extra + 1, count=ranks - extra - 1)
        yield

    gather = add_doubling_rounds(program, core, _compute_share_bounds(everyone))
    return build_from_rounds(program, _add_extra_share_round(program, extra, stand_in), gather, fill_up())


def _compute_share_bounds(ranks: Integers) -> Integers:
    """Return the bounds of the ranges of slots (buffers for one chunk) that the core ranks own: [2^k + 1]; the i-th
    core rank owns the slots bounds[i] to bounds[i + 1] - 1.

    ranks: all ranks of the algorithm, in order. The 2^k core ranks (2^k: largest power of two up to the number of
    ranks) run the algorithm; a core rank that acts for another rank owns the slot of the other rank too.
    """
    n, extra = ranks.shape[-1], split_extra_ranks(ranks)[0].shape[-1]
    return np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, n + 1)])


def _add_extra_share_round(program: Builder, source: Integers, target: Integers) -> Rounds:
    """Add to the builder `program` one round that moves shares of the vector between extra ranks (beyond the largest
    power of two) and core ranks. An extra rank's core rank runs the algorithm on its behalf. This generator yields
    once, after the round.

    source, target: [pairs], sending and receiving ranks: the extra ranks and their core ranks, or the reverse. The
    share of pair i is slot 2 i (buffer for one chunk), because the i-th extra rank is rank 2 i.
    """
    program.transfer(source, target, 2 * np.arange(source.shape[-1]))
    yield
