"""Recursive halving and doubling: partners at distance 1, 2, 4 ... exchange, so that log2 n rounds reach everybody.

R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005.
Where n is not a power of two, each of the extra ranks first folds its vector into its neighbour's, which stands in for
both, and at the end gets from it what it lacks.
"""

from __future__ import annotations

import numpy as np

from meshwright.collectives.rounds import Rounds, in_turn, write
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.order import Integers


def halving_rounds(program: Builder, ranks: Integers, edges: Integers) -> Rounds:
    """Reduce-scatter among 2^k ranks: both partners keep half of what they had, the farthest partner first.

    ranks: [..., n]. edges: [n + 1]; position p ends with slots edges[p] .. edges[p + 1].
    """
    position = np.arange(ranks.shape[-1])
    for distance in reversed(powers_of_two(ranks.shape[-1])):
        partner = position ^ distance
        start = partner // distance * distance  # of the half that the partner keeps
        count = edges[start + distance] - edges[start]
        program.transfer(ranks, ranks[..., partner], edges[start], count, reduce=True)
        yield


def doubling_rounds(program: Builder, ranks: Integers, edges: Integers) -> Rounds:
    """All-gather among 2^k ranks: both partners have twice as much as before, the nearest partner first.

    ranks: [..., n]. edges: [n + 1]; position p begins with slots edges[p] .. edges[p + 1].
    """
    position = np.arange(ranks.shape[-1])
    for distance in powers_of_two(ranks.shape[-1]):
        start = position // distance * distance  # of what a rank has so far
        count = edges[start + distance] - edges[start]
        program.transfer(ranks, ranks[..., position ^ distance], edges[start], count)
        yield


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4 ... below n."""
    return [1 << bit for bit in range((n - 1).bit_length())]


def fold(ranks: Integers) -> tuple[Integers, Integers, Integers]:
    """Extra ranks, the neighbour that stands in for each, and the 2^k ranks that remain."""
    n = ranks.shape[-1]
    extra = n - (1 << n.bit_length() - 1)
    stand_in = ranks[..., 1 : 2 * extra : 2]
    return ranks[..., : 2 * extra : 2], stand_in, np.concatenate([stand_in, ranks[..., 2 * extra :]], axis=-1)


def fold_rounds(program: Builder, ranks: Integers) -> Rounds:
    """Extra ranks add their whole vector to that of the rank which stands in for them."""
    extra, stand_in, _ = fold(ranks)
    if extra.size:
        program.transfer(extra, stand_in, 0, program.chunks, reduce=True)
        yield


def unfold_rounds(program: Builder, ranks: Integers) -> Rounds:
    """Extra ranks get the whole result."""
    extra, stand_in, _ = fold(ranks)
    if extra.size:
        program.transfer(stand_in, extra, 0, program.chunks)
        yield


def rabenseifner(ranks: int) -> CollectiveProgram:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling. Best for medium and large vectors:
    as few bytes as a ring in far fewer rounds, but to distant ranks, where links may be shared.

    R. Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
    n = 2^k: 2 log2 n rounds; 2(n-1)/n S bytes a rank; 2 log2 n alpha + 2(n-1)/n S beta.
    Else, with m the power of two below: 2 more rounds and 2 (alpha + S beta) more; extra ranks send S, their stand-ins
    2(m-1)/m S + S, the others 2(m-1)/m S.
    """
    everyone = np.arange(ranks)
    _, _, core = fold(everyone)
    program = Builder("all-reduce", "rabenseifner", ranks, chunks=len(core))
    edges = np.arange(len(core) + 1)
    return write(
        program,
        fold_rounds(program, everyone),
        halving_rounds(program, core, edges),
        doubling_rounds(program, core, edges),
        unfold_rounds(program, everyone),
    )


def butterfly(ranks: int) -> CollectiveProgram:
    """Recursive doubling: partners add the whole vector of each other. Best for small vectors: fewest rounds.

    n = 2^k: log2 n rounds; S log2 n bytes a rank; log2 n (alpha + S beta).
    Else, with m the power of two below: log2 m + 2 rounds; extra ranks send S, their stand-ins S log2 m + S.
    """
    program = Builder("all-reduce", "butterfly", ranks, chunks=1)
    everyone = np.arange(ranks)
    _, _, core = fold(everyone)

    def exchange() -> Rounds:
        position = np.arange(len(core))
        for distance in powers_of_two(len(core)):
            program.transfer(core, core[position ^ distance], 0, reduce=True)
            yield

    return write(program, fold_rounds(program, everyone), exchange(), unfold_rounds(program, everyone))


def reduce_scatter_rounds(program: Builder, ranks: Integers) -> Rounds:
    """Recursive halving for any number of ranks; the rank at position p ends with slot p."""
    extra, stand_in, core = fold(ranks)
    return in_turn(
        fold_rounds(program, ranks),
        halving_rounds(program, core, _edges(ranks)),
        _hand_over(program, stand_in, extra),
    )


def reduce_scatter(ranks: int) -> CollectiveProgram:
    """Recursive halving. Best for small and medium vectors.

    n = 2^k: log2 n rounds; (n-1)/n S bytes a rank; log2 n alpha + (n-1)/n S beta.
    Else 2 more rounds: extra ranks first send S, and at the end get their share of S/n.
    """
    program = Builder("reduce-scatter", "recursive-halving", ranks, chunks=ranks)
    return write(program, reduce_scatter_rounds(program, np.arange(ranks)))


def all_gather(ranks: int) -> CollectiveProgram:
    """Recursive doubling. Best for small and medium vectors; `bruck` needs fewer rounds where n is not a power of two.

    n = 2^k: log2 n rounds; (n-1)/n S bytes a rank; log2 n alpha + (n-1)/n S beta.
    Else 2 more rounds: extra ranks first send their share of S/n, and at the end get the (n-1)/n S that they lack.
    """
    program = Builder("all-gather", "recursive-doubling", ranks, chunks=ranks)
    everyone = np.arange(ranks)
    extra, stand_in, core = fold(everyone)

    def fill_up() -> Rounds:
        program.transfer(stand_in, extra, 0, count=extra)
        program.transfer(stand_in, extra, extra + 1, count=ranks - extra - 1)
        yield

    gather = doubling_rounds(program, core, _edges(everyone))
    return write(program, _hand_over(program, extra, stand_in), gather, fill_up())


def _edges(ranks: Integers) -> Integers:
    """Where the shares of the core begin and end, one slot a rank: a stand-in keeps two shares."""
    n, extra = ranks.shape[-1], fold(ranks)[0].shape[-1]
    return np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, n + 1)])


def _hand_over(program: Builder, source: Integers, target: Integers) -> Rounds:
    """The share of each extra rank, which stands at positions 0, 2, 4 ..., from or to its stand-in."""
    program.transfer(source, target, 2 * np.arange(source.shape[-1]))
    yield
