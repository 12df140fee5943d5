"""Initial values are normal quantiles of Philox bits, each a function of (seed, name, index)."""

from __future__ import annotations

import hashlib
from statistics import NormalDist

import numpy as np
import pytest

from meshwright.spec.initial_values import draw_normal_values

NAME = "model.layers.0.mlp.down_proj.weight"


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 of Salmon et al. (SC 2011), figure 2 and table 2, in Python's integers."""
    words, keys = [counter, 0, 0, 0], list(key)
    for _ in range(10):
        high0, low0 = divmod(words[0] * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(words[2] * 0xCA5A826395121157, 2**64)
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) % 2**64, (keys[1] + 0xBB67AE8584CAA73B) % 2**64]
    return words


def test_philox_of_this_test_gives_published_vectors():
    assert philox((0, 0), 0)[0] == 0x16554D9ECA36314C  # Random123's kat_vectors, philox4x64 10, all zero


def expected_value(seed: int, index: int) -> float:
    digest = hashlib.sha256(f"{seed}:{NAME}".encode()).digest()
    key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
    word = philox(key, index // 8 + 1)[index % 8 // 2]  # NumPy counts before it draws
    bits = word >> 32 * (index % 2) & 0xFFFFFFFF
    value = NormalDist().inv_cdf(((bits >> 1) + 0.5) / 2**32)
    return -value if bits & 1 else value


def test_values_are_normal_quantiles_of_philox_bits():
    for start in (0, 5, 65_530, 2**40 + 3):
        found = draw_normal_values(7, NAME, start, start + 40)
        expected = [expected_value(7, start + index) for index in range(40)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_are_those_of_the_whole_tensor(threads: int):
    whole = draw_normal_values(1, NAME, 0, 700 * 301)
    generator = np.random.default_rng(0)
    for _ in range(20):
        start, stop = np.sort(generator.integers(0, whole.size, 2)).tolist()
        assert np.array_equal(draw_normal_values(1, NAME, start, stop, threads=threads), whole[start:stop])
        first, end = np.sort(generator.choice(302, 2, replace=False)).tolist()
        part = whole.reshape(700, 301)[:, first:end].reshape(-1)
        start, stop = np.sort(generator.integers(0, part.size + 1, 2)).tolist()
        found = draw_normal_values(1, NAME, start, stop, (first, end, 301), threads)
        assert np.array_equal(found, part[start:stop]), (start, stop, first, end)


def test_values_are_normally_distributed_and_independent():
    values = np.sort(draw_normal_values(3, NAME, 0, 1_000_000).astype(float))
    exact = np.array([NormalDist().cdf(value) for value in values[::100]])
    distance = np.abs(exact - np.arange(0, values.size, 100) / values.size).max()
    assert distance < 1.95 / values.size**0.5  # Kolmogorov-Smirnov at 0.1%
    assert abs(values.mean()) < 4e-3 and abs(values.var() - 1) < 6e-3
    assert abs((values**4).mean() - 3) < 0.05 and values[-1] > 4 and values[0] < -4
    one, other = (draw_normal_values(3, name, 0, 100_000) for name in (NAME, NAME + "2"))
    for a, b in ((one, other), (one[1:], one[:-1]), (one, draw_normal_values(4, NAME, 0, 100_000))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.013


def test_bits_are_the_same_on_every_processor():
    digest = hashlib.sha256(draw_normal_values(0, NAME, 0, 200_000).astype("<f4").tobytes()).hexdigest()
    assert digest.startswith("297a00b2aaffccee")
