"""Detection of slow ranks and nodes."""

from __future__ import annotations

import random
import statistics

import pytest

from meshwright.probe.compare import THRESHOLD, SlowRank, compute_ratios, find_slow


def seconds(ranks: int, points: int, slow: dict[int, float], noise: float = 0.08) -> list[list[float]]:
    """Return times of points of different sizes, with noise and outliers, [ranks][points]. slow: rank -> factor."""
    chance = random.Random(3)
    sizes = [10 ** chance.uniform(-6, 0) for _ in range(points)]
    return [
        [size * slow.get(rank, 1.0) * chance.gauss(1, noise) * (8 if chance.random() < 0.1 else 1) for size in sizes]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_slow_rank_is_named_with_its_slowdown(ranks: int):
    hosts = ["one"] * ranks
    [found] = find_slow("products", seconds(ranks, 60, {1: 1.5}), hosts)
    assert (found.rank, found.host) == (1, "one")
    assert found.ratio == pytest.approx(1.5, rel=0.1)
    assert "rank 1 (on one) is slow: its matrix products take 1." in found.line
    assert f"(limit {THRESHOLD:g})" in found.line


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_transient_slowdown_is_not_reported(ranks: int):
    assert find_slow("memory", seconds(ranks, 60, {0: 1.1}), ["one"] * ranks) == []


def test_slow_node_is_named_instead_of_its_ranks():
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    found = find_slow("memory", seconds(12, 60, dict.fromkeys(range(4, 8), 1.4)), hosts)
    assert [(each.host, each.rank) for each in found] == [("b", None)]
    assert "node b is slow: its memory passes take 1." in found[0].line


def test_slow_rank_is_found_inside_slow_node():
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    slow = {**dict.fromkeys(range(4, 8), 1.5), 5: 3.0, 11: 2.0}
    found = find_slow("products", seconds(12, 60, slow), hosts)
    assert {(each.host, each.rank) for each in found} == {("b", None), ("b", 5), ("c", 11)}


def test_slow_single_rank_node_is_named():
    assert find_slow("products", seconds(3, 60, {2: 2.0}), ["a", "b", "c"]) == [
        SlowRank("products", "c", None, pytest.approx(2.0, rel=0.1))
    ]


def test_ratio_is_median_over_points_relative_to_other_ranks():
    times = [[1.0, 4.0, 9.0], [2.0, 2.0, 3.0], [4.0, 2.0, 6.0]]
    by_hand = [
        statistics.median([1 / 3, 4 / 2, 9 / 4.5]),
        statistics.median([2 / 2.5, 2 / 3, 3 / 7.5]),
        statistics.median([4 / 1.5, 2 / 3, 6 / 6]),
    ]
    assert compute_ratios(times) == pytest.approx(by_hand)
