"""Closed forms against the simulator, and lower bounds against every program of the library on every network."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from meshwright.collectives.bounds import compute_lower_bound_seconds
from meshwright.collectives.cost import CLOSED_FORMS, compute_closed_form_seconds
from meshwright.collectives.grid import find_nearly_cubic, resolve_ranks_per_node
from meshwright.collectives.library import ALGORITHMS, ROOTED, generate, list_options
from meshwright.collectives.topologies import parse_topology
from meshwright.errors import UserError
from meshwright.names import OPERATIONS
from meshwright.program.check_collective import check_collective
from meshwright.program.network import Network
from meshwright.program.simulate_collective import CollectiveSimulator
from tests.conftest import exhaustive

SIZES = (1e3, 1e7)
RANKS = (1, 2, 3, 4, 6, 7, 8)
each_algorithm = pytest.mark.parametrize(
    ("operation", "algorithm"), [(operation, name) for operation in ALGORITHMS for name in ALGORITHMS[operation]]
)


@functools.cache
def checked(operation: str, algorithm: str, ranks: int, **options: Any) -> Any:
    """Return a checked program, or None if the algorithm does not accept the number of ranks."""
    try:
        program = generate(operation, algorithm, ranks, **options)
    except UserError:
        return None
    return check_collective(program)


def meant_for(algorithm: str, ranks: int, dims: tuple[int, ...] | None = None) -> Network:
    """Return the network for which an algorithm was designed."""
    if "torus" in algorithm or "mesh" in algorithm:
        kind = "torus" if "torus" in algorithm else "mesh"
        dims = dims or (find_nearly_cubic(ranks, int(algorithm[0])) if algorithm[0].isdigit() else (ranks,))
        return parse_topology(f"{kind}:{'x'.join(map(str, dims))}", ranks)
    if algorithm.startswith("hierarchical"):
        return parse_topology(f"nodes:{resolve_ranks_per_node('', ranks)},inner=100GB/s,2us,outer=10GB/s,7us", ranks)
    return parse_topology("ring" if algorithm == "bidirectional-ring" else "switch", ranks)


def seconds(program: Any, network: Network, size: float) -> float:
    return CollectiveSimulator(program, network).run(size).seconds


def is_power_of_two(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


def bounds_of_the_form(algorithm: str, ranks: int) -> tuple[float, float]:
    """Return the lowest and highest ratio of simulated time to closed form; both 1 where the form is exact."""
    if algorithm == "double-binary-tree":
        return 0.4, 1.1  # links are partly idle while the pipeline fills and drains; rounds are not in lockstep
    if algorithm == "reduce-scatter-gather" and not is_power_of_two(ranks):
        return 0.8, 1.0  # the two phases overlap
    return 1.0, 1.0


def test_every_algorithm_has_a_closed_form():
    assert {operation: set(forms) for operation, forms in CLOSED_FORMS.items()} == {
        operation: set(algorithms) for operation, algorithms in ALGORITHMS.items()
    }


@pytest.mark.parametrize("numbers", [RANKS, *exhaustive([12])], ids=["some", "more"])
@each_algorithm
def test_simulated_time_matches_closed_form(operation: str, algorithm: str, numbers: Iterable[int]):
    for ranks in numbers:
        program = checked(operation, algorithm, ranks)
        if program is None:
            continue
        network = meant_for(algorithm, ranks)
        least, most = bounds_of_the_form(algorithm, ranks)
        for size in SIZES:
            form = compute_closed_form_seconds(operation, algorithm, network, size)
            assert form is not None
            simulated = seconds(program, network, size)
            assert least * form * (1 - 1e-9) <= simulated <= most * form * (1 + 1e-9), (ranks, size)


@each_algorithm
def test_closed_forms_hold_for_any_root(operation: str, algorithm: str):
    if operation not in ROOTED or algorithm in ("reduce-scatter-gather",):
        return
    for ranks, root in ((5, 3), (8, 7), (12, 5)):
        program = checked(operation, algorithm, ranks, root=root)
        network = meant_for(algorithm, ranks)
        form = compute_closed_form_seconds(operation, algorithm, network, 1e6)
        least, most = bounds_of_the_form(algorithm, ranks)
        assert form is not None
        assert least * form <= seconds(program, network, 1e6) * (1 + 1e-9) <= most * form * (1 + 2e-9)


@pytest.mark.parametrize("name", ["torus", "mesh"])
@pytest.mark.parametrize("dims", [(2, 3), (3, 5), (4, 4), (2, 2, 2), (3, 3, 3), (2, 3, 4), (1, 6), (2, 2, 2, 2)])
@pytest.mark.parametrize("operation", ["all-reduce", "reduce-scatter", "all-gather"])
def test_simulated_grids_of_any_sides_match_closed_form(operation: str, name: str, dims: tuple[int, ...]):
    ranks = math.prod(dims)
    program = checked(operation, name, ranks, dims=dims)
    network = meant_for(name, ranks, dims)
    for size in SIZES:
        form = compute_closed_form_seconds(operation, name, network, size, dims=dims)
        assert seconds(program, network, size) == pytest.approx(form)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [(operation, name) for operation in ALGORITHMS for name in ALGORITHMS[operation] if "hierarchical" in name],
)
def test_simulated_nodes_of_any_size_match_closed_form(operation: str, algorithm: str, groups: int):
    program = checked(operation, algorithm, 12, groups=groups)
    network = parse_topology(f"nodes:{groups},inner=100GB/s,2us,outer=10GB/s,7us", 12)
    form = compute_closed_form_seconds(operation, algorithm, network, 1e6, groups=groups)
    assert seconds(program, network, 1e6) == pytest.approx(form)


@pytest.mark.parametrize("segments", [1, 2, 5, 32])
@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_simulated_pipelines_of_any_depth_match_closed_form(operation: str, segments: int):
    for algorithm, near in (("ring", 1e-9), ("double-binary-tree", 0.1)):
        for ranks in (4, 7, 16):
            program = checked(operation, algorithm, ranks, segments=segments)
            network = parse_topology("switch", ranks)
            form = compute_closed_form_seconds(operation, algorithm, network, 1e7, segments=segments)
            assert seconds(program, network, 1e7) == pytest.approx(form, rel=near), (algorithm, ranks)


def test_two_trees_approach_closed_form_for_long_pipelines():
    network = parse_topology("switch", 16)
    program = checked("all-reduce", "double-binary-tree", 16, segments=64)
    form = compute_closed_form_seconds("all-reduce", "double-binary-tree", network, 1e9, segments=64)
    assert form is not None
    assert seconds(program, network, 1e9) == pytest.approx(form, rel=0.02)
    assert form == pytest.approx((2 * 4 + 63) * (5e-6 + 2e9 / 64 / 25e9))


@pytest.mark.parametrize("operation", ["broadcast", "reduce", "all-reduce"])
def test_segmented_binomial_tree_is_no_slower_than_closed_form(operation: str):
    for ranks in (4, 6, 16):
        for segments in (2, 8):
            program = checked(operation, "binomial-tree", ranks, segments=segments)
            network = parse_topology("switch", ranks)
            form = compute_closed_form_seconds(operation, "binomial-tree", network, 1e7, segments=segments)
            assert form is not None and 0.4 * form < seconds(program, network, 1e7) <= 1.02 * form


def test_all_pairs_messages_serialise_on_one_port():
    small, large = 1.0, 1e9
    for name, waits in (("switch,10GB/s,10us", 6), ("full-mesh,10GB/s,10us", 0)):
        network = parse_topology(name, 8)
        form = compute_closed_form_seconds("all-gather", "all-pairs", network, small)
        assert form == pytest.approx(10e-6 + waits * 2e-6, rel=1e-3)
        assert seconds(checked("all-gather", "all-pairs", 8), network, small) == pytest.approx(form)
    full, port = (
        compute_closed_form_seconds("scatter", "linear", parse_topology(name, 8), large)
        for name in ("full-mesh", "switch")
    )
    assert full is not None and port is not None
    assert port / full == pytest.approx(7, rel=1e-2)
    assert seconds(checked("scatter", "linear", 8), parse_topology("full-mesh", 8), large) == pytest.approx(full)


def test_closed_forms_match_literature():
    """Formulas as written in the literature, independent of the code."""
    network = parse_topology("switch,10GB/s,4us", 8)
    alpha, beta, size = 4e-6, 1e-10, 3e6

    def form(operation: str, algorithm: str) -> Any:
        return pytest.approx(compute_closed_form_seconds(operation, algorithm, network, size))

    assert 14 * alpha + 2 * 7 / 8 * size * beta == form("all-reduce", "ring")
    assert 6 * alpha + 2 * 7 / 8 * size * beta == form("all-reduce", "rabenseifner")
    assert 3 * (alpha + size * beta) == form("all-reduce", "butterfly")
    assert 6 * (alpha + size * beta) == form("all-reduce", "halving-doubling") == form("all-reduce", "binomial-tree")
    assert 7 * alpha + 7 / 8 * size * beta == form("all-gather", "ring") == form("all-to-all", "pairwise")
    assert 3 * alpha + 7 / 8 * size * beta == form("all-gather", "bruck") == form("reduce-scatter", "recursive-halving")
    assert 3 * alpha + 3 * size / 2 * beta == form("all-to-all", "bruck")
    assert 3 * (alpha + size * beta) == form("broadcast", "binomial-tree")
    torus = parse_topology("torus:3x3,10GB/s,4us", 9)  # both axes and both directions together
    assert 8 * alpha + 2 / 4 * size * (2 / 3 + 2 / 9) * beta == pytest.approx(
        compute_closed_form_seconds("all-reduce", "2d-torus", torus, size)
    )
    ring = parse_topology("ring,10GB/s,4us", 8)
    assert 14 * alpha + 7 / 8 * size * beta == pytest.approx(
        compute_closed_form_seconds("all-reduce", "bidirectional-ring", ring, size)
    )


def test_unknown_algorithm_has_no_closed_form():
    assert compute_closed_form_seconds("all-reduce", "by-hand", parse_topology("switch", 4), 1.0) is None


# --- lower bounds

NETWORKS = {
    1: ["switch"],
    2: ["switch", "nodes:2x1"],
    5: ["ring", "mesh:5"],
    6: ["torus:2x3", "mesh:2x3", "nodes:2x3,adapters=1"],
    8: ["full-mesh", "torus:2x2x2", "nodes:2x4,adapters=2", "nodes:2x4,rails",
        "spine-leaf:2x4,oversubscription=8,spines=2"],
}  # fmt: skip
"""Every kind of network with every option."""
MORE_NETWORKS = {
    2: ["ring"],
    5: ["switch"],
    6: ["spine-leaf:3x2,oversubscription=4"],
    8: ["torus:2x4", "nodes:2x4"],
    12: ["mesh:3x4", "nodes:3x4,adapters=2", "spine-leaf:3x4,oversubscription=8,spines=2"],
}


@pytest.mark.parametrize("networks", [NETWORKS, *exhaustive(MORE_NETWORKS)], ids=["some", "more"])
@each_algorithm
def test_no_program_is_faster_than_the_lower_bound(operation: str, algorithm: str, networks: dict[int, list[str]]):
    for ranks, names in networks.items():
        program = checked(operation, algorithm, ranks)
        if program is None:
            continue
        for name in names:
            network = parse_topology(name, ranks)
            simulator = CollectiveSimulator(program, network)
            for size in (1e4, 1e9):
                assert simulator.run(size).seconds >= compute_lower_bound_seconds(operation, network, size) * (
                    1 - 1e-9
                ), (
                    name,
                    size,
                )


@each_algorithm
def test_lower_bound_holds_for_other_roots_and_settings(operation: str, algorithm: str):
    generator = np.random.default_rng(zlib.crc32(f"{operation} {algorithm}".encode()))
    for _ in range(2):
        ranks = int(generator.choice([4, 6, 8]))
        has = list_options(operation, algorithm)
        options: dict[str, Any] = {}
        if "root" in has:
            options["root"] = int(generator.integers(ranks))
        if "segments" in has:
            options["segments"] = int(generator.integers(1, 6))
        if "groups" in has:
            options["groups"] = 2
        program = checked(operation, algorithm, ranks, **options)
        if program is None:
            continue
        for name in ("switch", "ring", "full-mesh", "nodes:2,rails", "spine-leaf:2,oversubscription=3"):
            network = parse_topology(name, ranks, latency=float(generator.choice([0.0, 1e-6, 1e-3])))
            for size in (1e2, 1e7):
                bound = compute_lower_bound_seconds(operation, network, size, options.get("root", 0))
                assert seconds(program, network, size) >= bound * (1 - 1e-9), (name, size, options)


@pytest.mark.parametrize(
    ("operation", "algorithm", "name"),
    [
        ("all-reduce", "ring", "switch"),
        ("all-reduce", "bidirectional-ring", "ring"),
        ("all-reduce", "rabenseifner", "switch"),
        ("all-reduce", "torus", "torus:8"),
        ("reduce-scatter", "ring", "switch"),
        ("reduce-scatter", "bidirectional-ring", "ring"),
        ("all-gather", "all-pairs", "full-mesh"),
        ("all-to-all", "all-pairs", "full-mesh"),
        ("all-to-all", "pairwise", "switch"),
        ("scatter", "linear", "switch"),
        ("gather", "linear", "switch"),
        ("all-reduce", "hierarchical-scatter", "nodes:4x2,adapters=1,inner=1000000GB/s"),
        ("send-receive", "direct", "switch"),
    ],
)
def test_optimal_algorithms_reach_lower_bound_for_large_vectors(operation: str, algorithm: str, name: str):
    network = parse_topology(name, 8)
    bound = compute_lower_bound_seconds(operation, network, 1e11)
    assert seconds(checked(operation, algorithm, 8), network, 1e11) == pytest.approx(bound, rel=1e-3)


def test_lower_bound_counts_slowest_cut():
    leaves = parse_topology("spine-leaf:2x4,10GB/s,0s,oversubscription=4", 8)  # 10 GB/s between the leaves
    assert compute_lower_bound_seconds("all-reduce", leaves, 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 10e9)
    assert compute_lower_bound_seconds("all-to-all", leaves, 1e9) == pytest.approx(4 * 4 / 8 * 1e9 / 10e9)
    line = parse_topology("mesh:8,10GB/s,0s", 8)  # one link in the middle
    assert compute_lower_bound_seconds("all-to-all", line, 1e9) == pytest.approx(4 * 4 / 8 * 1e9 / 10e9)
    assert compute_lower_bound_seconds("broadcast", line, 1e9, root=3) == pytest.approx(1e9 / 10e9)


def test_lower_bound_counts_bytes_by_direction():
    """With one slow direction: a rank must send its own share in an all-gather, and the others' in a reduce-scatter."""
    for operation, out, into in (("all-gather", 1, 3), ("reduce-scatter", 3, 1), ("scatter", 3, 0), ("gather", 0, 3)):
        for link, shares in ((0, out), (4, into)):  # rank 0's links to and from the switch
            network = parse_topology("switch,10GB/s,0s", 4)
            network.bandwidth[link] = 1e8
            bound = compute_lower_bound_seconds(operation, network, 4e9)
            assert bound == pytest.approx(max(shares * 1e9 / 1e8, 3e9 / 10e9))


def test_lower_bound_counts_latency_of_longest_route():
    assert compute_lower_bound_seconds("barrier", parse_topology("ring,1us", 9), 0) == pytest.approx(4e-6)
    assert compute_lower_bound_seconds("broadcast", parse_topology("mesh:3x3,1us", 9), 0, root=4) == pytest.approx(2e-6)
    assert compute_lower_bound_seconds("gather", parse_topology("mesh:3x3,1us", 9), 0, root=8) == pytest.approx(4e-6)
    assert compute_lower_bound_seconds("send-receive", parse_topology("ring,1us", 8), 0, root=0) == pytest.approx(1e-6)
    assert all(
        compute_lower_bound_seconds(operation, parse_topology("switch", 1), 1e9) == 0 for operation in OPERATIONS
    )
