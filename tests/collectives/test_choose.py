"""Choice of an algorithm, and its crossovers over size."""

from __future__ import annotations

import math

import pytest

from meshwright.collectives.choose import AlgorithmOptions, Choice, Chooser
from meshwright.collectives.crossover import Curves
from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.collectives.topologies import parse_topology
from meshwright.errors import UserError
from meshwright.names import OPERATIONS
from meshwright.program.check_collective import check_collective
from meshwright.program.network import Network
from meshwright.program.simulate_collective import simulate_collective
from tests.collectives.example_curves import simulate_example_curves


def choose_algorithm(operation: str, network: Network, total_bytes: float, root: int = 0) -> Choice:
    return Chooser(operation, network, root).choose(total_bytes)


def best(operation: str, name: str, ranks: int, size: float) -> str:
    return choose_algorithm(operation, parse_topology(name, ranks), size).best.algorithm


def test_small_vectors_prefer_few_rounds_large_ones_few_bytes():
    assert best("all-reduce", "switch", 8, 64) == "butterfly"
    assert best("all-reduce", "switch", 8, 1 << 30) in ("rabenseifner", "ring", "all-pairs")
    assert best("broadcast", "switch", 16, 64) == "binomial-tree"
    assert best("broadcast", "switch", 16, 1 << 30) in ("ring", "double-binary-tree")
    assert best("all-to-all", "switch", 32, 64) == "bruck"
    assert best("barrier", "switch", 16, 0) == "dissemination"


def test_network_prefers_algorithm_designed_for_it():
    large = 1 << 28
    assert best("all-reduce", "torus:3x3", 9, large) == "2d-torus"
    assert best("all-reduce", "torus:2x2x3", 12, large) in ("3d-torus", "torus")
    assert best("all-reduce", "mesh:3x3", 9, large) in ("2d-mesh", "mesh")
    assert best("all-reduce", "ring", 8, large) in ("bidirectional-ring", "torus")
    assert best("all-reduce", "nodes:2x4,outer=5GB/s,20us", 8, large) == "hierarchical-scatter"
    assert best("all-reduce", "nodes:2x4,outer=1GB/s,adapters=1", 8, large) in ("hierarchical-scatter", "mesh")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_algorithm_is_ranked_by_simulated_time(operation: str):
    network = parse_topology("switch", 6)
    choice = choose_algorithm(operation, network, 1e5, root=0)
    assert {one.algorithm for one in choice.ranking} | choice.refused.keys() == set(ALGORITHMS[operation])
    times = [one.seconds for one in choice.ranking]
    assert times == pytest.approx(sorted(times))
    for one in choice.ranking:
        settings = one.settings
        program = generate(
            operation, one.algorithm, 6, segments=settings.segments, groups=settings.groups, dims=settings.dims
        )
        assert simulate_collective(check_collective(program), network, 1e5).seconds == one.seconds
    assert choice.best.algorithm in choice.reason


def test_refused_algorithms_are_listed_with_reason():
    choice = choose_algorithm("all-reduce", parse_topology("switch", 7), 1e5)
    assert set(choice.refused) == {"2d-torus", "2d-mesh", "3d-torus"}
    assert "cannot take 7 ranks" in choice.refused["2d-torus"]


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_chosen_segment_count_beats_its_neighbours(size: float):
    network = parse_topology("switch", 8)
    chooser = Chooser("broadcast", network)
    chosen = chooser.find_candidate("ring", size, near=math.inf)
    assert chosen is not None and chosen.settings.segments is not None
    for segments in (chosen.settings.segments // 2, chosen.settings.segments * 2):
        if 1 <= segments <= 256:
            other = check_collective(generate("broadcast", "ring", 8, segments=segments))
            assert simulate_collective(other, network, size).seconds >= chosen.seconds


def test_segments_are_simulated_where_closed_form_is_inaccurate():
    network = parse_topology("torus:2x3", 6)
    ranking = {one.algorithm: one for one in choose_algorithm("broadcast", network, 3e6).ranking}
    by_form = Chooser("broadcast", network).find_candidate("double-binary-tree", 3e6)
    assert by_form is not None
    assert ranking["double-binary-tree"].seconds < 0.95 * by_form.seconds
    assert ranking["double-binary-tree"].settings.segments != by_form.settings.segments


def test_settings_come_from_network_unless_given():
    chooser = Chooser("all-reduce", parse_topology("nodes:2x6", 12))
    assert chooser.resolve_settings("hierarchical") == AlgorithmOptions(groups=6)
    assert (
        Chooser("all-reduce", parse_topology("nodes:2x6", 12), requested=AlgorithmOptions(groups=3))
        .resolve_settings("hierarchical")
        .groups
        == 3
    )
    torus = Chooser("all-reduce", parse_topology("torus:3x4", 12))
    assert torus.resolve_settings("2d-torus").dims == torus.resolve_settings("torus").dims == (3, 4)
    assert torus.resolve_settings("3d-torus").dims is None and torus.resolve_settings("ring") == AlgorithmOptions()


def test_ties_are_listed_and_first_in_library_wins():
    choice = choose_algorithm("all-gather", parse_topology("switch", 4), 1e9)
    ring, pairwise = (next(one for one in choice.ranking if one.algorithm == name) for name in ("ring", "pairwise"))
    assert ring.seconds == pytest.approx(pairwise.seconds)
    assert choice.ranking.index(ring) < choice.ranking.index(pairwise)


def test_choice_for_one_rank_takes_zero_time():
    assert choose_algorithm("all-reduce", parse_topology("switch", 1), 1e6).best.seconds == 0


@pytest.mark.parametrize(
    ("operation", "root", "message"), [("all-redcue", 0, "all-reduce"), ("broadcast", 4, "ranks 0 to 3")]
)
def test_invalid_choice_arguments_are_refused(operation: str, root: int, message: str):
    with pytest.raises(UserError, match=message):
        choose_algorithm(operation, parse_topology("switch", 4), 1e6, root)


# --- crossovers


@pytest.mark.parametrize("outer", ["outer=10GB/s,5us", "outer=40GB/s,5us"])
def test_algorithms_take_equal_time_at_crossover(outer: str):
    one = Chooser("all-reduce", parse_topology(f"nodes:2x3,{outer}", 6))
    found = Curves.simulate(one, 2**14, 2**22).find_crossovers()
    assert found
    for crossover in found:
        before, after = (one.find_candidate(name, crossover.size) for name in (crossover.before, crossover.after))
        assert before is not None and after is not None
        assert before.seconds == pytest.approx(after.seconds, rel=0.02)
        for name, size in ((crossover.before, crossover.size / 1.05), (crossover.after, crossover.size * 1.05)):
            assert one.choose(size).best.algorithm == name


def test_crossovers_lead_from_smallest_size_to_largest():
    curves = simulate_example_curves()
    found = curves.find_crossovers()
    assert [one.before for one in found] == [curves.find_fastest(0), *(one.after for one in found[:-1])]
    assert found[-1].after == curves.find_fastest(len(curves.sizes) - 1)
    assert [one.size for one in found] == sorted(one.size for one in found)


def test_quick_search_finds_same_crossovers_as_full_search():
    curves = simulate_example_curves()
    assert Curves.simulate_promising(curves.chooser, most=2**26).find_crossovers() == curves.find_crossovers()
    for name, ranks in (("torus:2x3", 6), ("switch", 4)):
        one = Chooser("all-reduce", parse_topology(name, ranks))
        assert (
            Curves.simulate_promising(one, most=2**24).find_crossovers()
            == Curves.simulate(one, most=2**24).find_crossovers()
        )


def test_algorithms_left_out_on_many_ranks_are_never_best():
    # Closed forms use one class of links: here the fastest algorithm is not the one that they rank first.
    one, size = Chooser("all-gather", parse_topology("nodes:10x8", 80)), 2**12
    choice = one.choose(size)
    assert choice.left_out and choice.best.algorithm != min(
        one.algorithms, key=lambda name: one.compute_closed_form(name, size)
    )
    for name in choice.left_out:
        candidate = one.find_candidate(name, size)
        assert candidate is not None and candidate.seconds > choice.best.seconds, name


def test_curves_lie_above_the_bound():
    curves = simulate_example_curves()
    for seconds in curves.seconds.values():
        assert all(value >= bound * (1 - 1e-9) for value, bound in zip(seconds, curves.bound, strict=True))
