"""Collective algorithms by operation and name, and the function that generates any of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from meshwright.collectives import (
    binomial_tree,
    bruck,
    chain,
    direct,
    dissemination,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    mesh,
    pairwise,
    recursive,
    ring,
    ring_all_to_all,
    scatter_first,
    torus,
)
from meshwright.errors import UserError
from meshwright.names import ALGORITHM_ALIASES, OPERATIONS, unknown
from meshwright.program.collective import CollectiveProgram

Generator: TypeAlias = Callable[..., CollectiveProgram]

ALGORITHMS: dict[str, dict[str, Generator]] = {
    "send-receive": {"direct": direct.send_receive},
    "barrier": {"dissemination": dissemination.barrier, "binomial-tree": binomial_tree.barrier},
    "broadcast": {
        "binomial-tree": binomial_tree.broadcast,
        "ring": chain.broadcast,
        "scatter-all-gather": scatter_first.broadcast,
        "double-binary-tree": double_binary_tree.broadcast,
        "hierarchical": hierarchical.broadcast,
    },
    "scatter": {"binomial-tree": binomial_tree.scatter, "linear": direct.scatter},
    "gather": {"binomial-tree": binomial_tree.gather, "linear": direct.gather},
    "reduce": {
        "binomial-tree": binomial_tree.reduce,
        "ring": chain.reduce,
        "reduce-scatter-gather": scatter_first.reduce,
        "double-binary-tree": double_binary_tree.reduce,
        "hierarchical": hierarchical.reduce,
    },
    "all-gather": {
        "ring": ring.all_gather,
        "bidirectional-ring": ring.bidirectional_all_gather,
        "recursive-doubling": recursive.all_gather,
        "bruck": bruck.all_gather,
        "pairwise": pairwise.all_gather,
        "all-pairs": pairwise.all_pairs_all_gather,
        "hierarchical": hierarchical.all_gather,
        "2d-torus": partial(torus.all_gather, dimensions=2),
        "3d-torus": partial(torus.all_gather, dimensions=3),
        "torus": torus.all_gather,
        "2d-mesh": partial(mesh.all_gather, dimensions=2),
        "mesh": mesh.all_gather,
    },
    "reduce-scatter": {
        "ring": ring.reduce_scatter,
        "bidirectional-ring": ring.bidirectional_reduce_scatter,
        "recursive-halving": recursive.reduce_scatter,
        "pairwise": pairwise.reduce_scatter,
        "all-pairs": pairwise.all_pairs_reduce_scatter,
        "hierarchical": hierarchical.reduce_scatter,
        "2d-torus": partial(torus.reduce_scatter, dimensions=2),
        "3d-torus": partial(torus.reduce_scatter, dimensions=3),
        "torus": torus.reduce_scatter,
        "2d-mesh": partial(mesh.reduce_scatter, dimensions=2),
        "mesh": mesh.reduce_scatter,
    },
    "all-reduce": {
        "ring": ring.all_reduce,
        "halving-doubling": halving_doubling.all_reduce,
        "rabenseifner": recursive.rabenseifner,
        "butterfly": recursive.butterfly,
        "binomial-tree": binomial_tree.all_reduce,
        "double-binary-tree": double_binary_tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "hierarchical-scatter": hierarchical.all_reduce_scattered,
        "2d-torus": partial(torus.all_reduce, dimensions=2),
        "2d-mesh": partial(mesh.all_reduce, dimensions=2),
        "3d-torus": partial(torus.all_reduce, dimensions=3),
        "torus": torus.all_reduce,
        "mesh": mesh.all_reduce,
        "all-pairs": pairwise.all_pairs_all_reduce,
        "bidirectional-ring": ring.bidirectional_all_reduce,
    },
    "all-to-all": {
        "pairwise": pairwise.all_to_all,
        "ring": ring_all_to_all.all_to_all,
        "bruck": bruck.all_to_all,
        "all-pairs": pairwise.all_pairs_all_to_all,
        "hierarchical": hierarchical.all_to_all,
    },
}
OPTIONS = ("root", "segments", "groups", "dims")
_PARAMETERS = {"groups": "ranks_per_node"}  # option -> parameter of the generators, if the names differ
ROOTED = ("send-receive", "broadcast", "scatter", "gather", "reduce")


def list_options(operation: str, algorithm: str) -> tuple[str, ...]:
    """Return which of the options "root", "segments", "groups" and "dims" the program generator of an algorithm
    accepts. operation: such as "all-reduce"."""
    parameters = inspect.signature(find_generator(operation, algorithm)).parameters
    return tuple(option for option in OPTIONS if _PARAMETERS.get(option, option) in parameters)


def find_generator(operation: str, algorithm: str) -> Generator:
    """Return the function that generates the program of an algorithm. operation: such as "all-reduce". algorithm: name
    or alias. Raises UserError for unknown names and for "auto"."""
    if operation not in OPERATIONS:
        raise UserError(unknown("operation", operation, OPERATIONS))
    known = ALGORITHMS[operation]
    if algorithm == "auto":
        raise UserError(f"{operation} auto: auto needs a size and a topology; valid are {', '.join(known)}")
    name = ALGORITHM_ALIASES.get(operation, {}).get(algorithm, algorithm)
    if name not in known:
        raise UserError(unknown(f"{operation} algorithm", algorithm, known))
    return known[name]


def generate(
    operation: str,
    algorithm: str,
    ranks: int,
    *,
    root: int = 0,
    segments: int | None = None,
    groups: int | None = None,
    dims: Sequence[int] | None = None,
) -> CollectiveProgram:
    """Generate the collective program (steps of every rank) of an algorithm for `ranks` ranks.

    operation: such as "all-reduce". root: source or destination rank. segments: number of segments of a pipelined
    algorithm. groups: number of ranks per node, for hierarchical algorithms. dims: sides of the grid, for tori and
    meshes, with ranks in row-major order. None: the generator's default. Raises UserError for unknown names, options
    that the algorithm does not have, and invalid numbers.
    """
    generator, has = find_generator(operation, algorithm), list_options(operation, algorithm)
    name = f"{algorithm} {operation}"
    if ranks < 1:
        raise UserError(f"{name}: {ranks} ranks; there must be at least 1")
    if not 0 <= root < ranks:
        raise UserError(f"{name}: root {root} is not one of ranks 0 to {ranks - 1}")
    given: dict[str, object] = {"segments": segments, "groups": groups, "dims": dims}
    given = {option: value for option, value in given.items() if value is not None}
    if root or operation in ROOTED:
        given["root"] = root
    for option in given:
        if option not in has:
            others = [other for other in ALGORITHMS[operation] if option in list_options(operation, other)]
            right = f"; {option} is for {', '.join(others)}" if others else ""
            raise UserError(f"{name} takes no {option}{right}")
    if segments is not None and segments < 1:
        raise UserError(f"{name}: {segments} segments; there must be at least 1")
    return generator(ranks, **{_PARAMETERS.get(option, option): value for option, value in given.items()})
