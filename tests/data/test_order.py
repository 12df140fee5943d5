"""The sample order: a permutation in each epoch, and a function of (seed, number) alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import MixtureOrder, SampleOrder
from meshwright.data.order import MAX_PERIOD, interleave_evenly, reduce_weights

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, sequences=sizes, epoch=st.integers(0, 10**6))
@settings(max_examples=60)
def test_epoch_is_a_permutation(seed: int, sequences: int, epoch: int):
    numbers = epoch * sequences + np.arange(sequences)
    samples = SampleOrder(seed, sequences).sample(numbers)
    assert np.array_equal(np.sort(samples), np.arange(sequences))


@given(seed=seeds, sequences=sizes, data=st.data())
@settings(max_examples=60)
def test_sample_depends_on_number_alone(seed: int, sequences: int, data: st.DataObject):
    numbers = np.array(data.draw(st.lists(st.integers(0, 5 * sequences), min_size=1, max_size=50)))
    order = SampleOrder(seed, sequences)
    together = order.sample(numbers)
    assert together.tolist() == [int(SampleOrder(seed, sequences).sample(number)) for number in numbers]
    assert np.array_equal(order.sample(numbers.reshape(-1, 1)), together.reshape(-1, 1))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6])
def test_replicas_read_same_batches_in_same_order(replicas: int):
    order, batch, steps = SampleOrder(5, 101), 12, 30
    share = batch // replicas
    read = [
        order.sample(step * batch + rank * share + np.arange(share))
        for step in range(steps)
        for rank in range(replicas)
    ]
    assert np.array_equal(np.concatenate(read), order.sample(np.arange(steps * batch)))


def test_epochs_and_seeds_differ():
    orders = [SampleOrder(seed, 500).sample(epoch * 500 + np.arange(500)) for seed in (0, 1) for epoch in range(4)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    # Two random permutations agree in about one place; so does each pair of these.
    agreements = [int((a == b).sum()) for index, a in enumerate(orders) for b in orders[:index]]
    assert max(agreements) < 8


def test_every_permutation_of_a_small_set_is_equally_likely():
    epochs = 960
    samples = SampleOrder(3, 4).sample(np.arange(4 * epochs)).reshape(epochs, 4)
    counts = Counter(map(tuple, samples.tolist()))
    expected = epochs / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 24
    assert chi_squared < 49.7  # 23 degrees of freedom: exceeded by chance once in 1,000


def test_permutation_separates_neighbours():
    samples = SampleOrder(0, 10_000).sample(np.arange(10_000))
    # Lag-1 correlation of a random permutation is below 4 / sqrt(n) with near certainty.
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(samples, np.arange(10_000))[0, 1]) < 0.04


def test_sample_order_never_changes():
    # Checkpoints of old versions resume in the middle of these.
    published = [7, 0, 9, 6, 2, 8, 3, 1, 5, 4, 4, 3, 2, 1, 0, 6, 7, 9, 5, 8]
    assert SampleOrder(7, 10).sample(np.arange(20)).tolist() == published


# --- mixtures


shares = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(parts=shares)
@settings(max_examples=200)
def test_mixture_share_deviates_by_less_than_one_sample(parts: list[int]):
    period = np.array(interleave_evenly(parts))
    times = np.arange(1, len(period) + 1)
    bound = 1 - 1 / (2 * len(parts) - 2) if len(parts) > 1 else 0
    for source, part in enumerate(parts):
        taken = np.cumsum(period == source)
        assert np.abs(taken - times * part / sum(parts)).max() <= bound + 1e-9
        assert taken[-1] == part


@given(parts=shares, data=st.data())
@settings(max_examples=60)
def test_mixture_window_share_deviates_by_less_than_two_samples(parts: list[int], data: st.DataObject):
    sequences = [data.draw(st.integers(1, 50)) for _ in parts]
    begin, length = data.draw(st.integers(0, 10**7)), data.draw(st.integers(1, 400))
    samples = MixtureOrder(3, sequences, parts).sample(begin + np.arange(length))
    borders = np.cumsum([0, *sequences])
    counts = np.histogram(samples, borders)[0] if len(parts) > 1 else np.array([length])
    for count, part in zip(counts.tolist(), parts, strict=True):
        assert abs(count - length * part / sum(parts)) < 2


@given(data=st.data())
@settings(max_examples=25)
def test_mixture_sample_depends_on_number_alone(data: st.DataObject):
    sequences = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    weights = [data.draw(st.sampled_from([0.1, 0.25, 1.0, 3.0, 1e-3, 0.3333])) for _ in sequences]
    numbers = np.array(data.draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8)))
    together = MixtureOrder(5, sequences, weights).sample(numbers)
    assert together.tolist() == [int(MixtureOrder(5, sequences, weights).sample(number)) for number in numbers]


def test_mixture_sources_have_separate_epochs():
    sequences = [5, 1000, 30]
    order = MixtureOrder(1, sequences, [1, 2, 1])
    samples = order.sample(np.arange(400))
    small = samples[samples < 5]
    assert len(small) == 100
    epochs = small.reshape(20, 5)
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs.tolist())
    assert len(set(map(tuple, epochs.tolist()))) > 10  # and in another order each time
    large = samples[(samples >= 5) & (samples < 1005)]
    assert len(large) == 200 == len(set(large.tolist()))
    assert order.count_by_source(400) == [100, 200, 100]
    assert order.count_by_source(3) == np.histogram(samples[:3], [0, 5, 1005, 1035])[0].tolist()


def test_mixture_sources_have_different_permutations():
    samples = MixtureOrder(0, [500, 500], [1, 1]).sample(np.arange(1000))
    first, second = samples[samples < 500], samples[samples >= 500] - 500
    assert int((first == second).sum()) < 8


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([3, 1], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([0.5, 0.25], [2, 1]),
        ([100.0], [1]),
        ([1e-05, 1.0], [1, 65535]),
    ],
)
def test_weights_reduce_to_smallest_integers(weights: list[float], whole: list[int]):
    assert reduce_weights(weights) == whole


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_long_weights_are_rounded_within_one_sixty_thousandth(weights: list[float]):
    whole = reduce_weights(weights)
    assert sum(whole) <= MAX_PERIOD + len(whole) and min(whole) >= 1
    for weight, part in zip(weights, whole, strict=True):
        assert abs(weight / sum(weights) - part / sum(whole)) < len(weights) / 60_000


def test_mixture_order_never_changes():
    published = [7, 1, 13, 6, 0, 4, 5, 2, 10, 12, 3, 8]
    assert MixtureOrder(7, [4, 10], [1, 2]).sample(np.arange(12)).tolist() == published
