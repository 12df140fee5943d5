"""The order of samples: a permutation each epoch, and a function of (seed, number) alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import SampleOrder

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, sequences=sizes, epoch=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_every_epoch_is_a_permutation(seed: int, sequences: int, epoch: int):
    numbers = epoch * sequences + np.arange(sequences)
    samples = SampleOrder(seed, sequences).sample(numbers)
    assert np.array_equal(np.sort(samples), np.arange(sequences))


@given(seed=seeds, sequences=sizes, data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_sample_depends_on_its_number_alone(seed: int, sequences: int, data: st.DataObject):
    numbers = np.array(data.draw(st.lists(st.integers(0, 5 * sequences), min_size=1, max_size=50)))
    order = SampleOrder(seed, sequences)
    together = order.sample(numbers)
    assert together.tolist() == [int(SampleOrder(seed, sequences).sample(number)) for number in numbers]
    assert np.array_equal(order.sample(numbers.reshape(-1, 1)), together.reshape(-1, 1))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6])
def test_any_number_of_replicas_reads_the_same_batches_in_the_same_order(replicas: int):
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
    epochs = 2400
    samples = SampleOrder(3, 4).sample(np.arange(4 * epochs)).reshape(epochs, 4)
    counts = Counter(map(tuple, samples.tolist()))
    expected = epochs / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 24
    assert chi_squared < 49.7  # 23 degrees of freedom: exceeded by chance once in 1,000


def test_neighbours_do_not_stay_neighbours():
    samples = SampleOrder(0, 10_000).sample(np.arange(10_000))
    # Lag-1 correlation of a random permutation is below 4 / sqrt(n) with near certainty.
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(samples, np.arange(10_000))[0, 1]) < 0.04


def test_a_published_order_never_changes():
    # Checkpoints of old versions resume in the middle of these.
    published = [7, 0, 9, 6, 2, 8, 3, 1, 5, 4, 4, 3, 2, 1, 0, 6, 7, 9, 5, 8]
    assert SampleOrder(7, 10).sample(np.arange(20)).tolist() == published
