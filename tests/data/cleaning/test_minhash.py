"""MinHash is as accurate as rensa, and documents match as often as the banding probability predicts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.words import Words

VOCABULARY = [f"word{number}" for number in range(20_000)]


def pair(draw: random.Random, similarity: float, size: int = 200) -> tuple[list[str], list[str]]:
    """Return two texts of about this Jaccard similarity."""
    shared = round(2 * size * similarity / (1 + similarity))
    words = draw.sample(VOCABULARY, 2 * size - shared)
    return words[:size], words[size - shared :]


def test_minhash_estimates_are_as_accurate_as_rensa():
    rensa = pytest.importorskip("rensa")
    draw, minhash = random.Random(0), MinHash(16, 8, 1)
    errors: list[tuple[float, float]] = []
    for _ in range(300):
        one, other = pair(draw, draw.random())
        truth = len({*one} & {*other}) / len({*one} | {*other})
        mine = [minhash.compute_signature(minhash.hash_shingles(" ".join(words))) for words in (one, other)]
        theirs = []
        for words in (one, other):
            theirs.append(rensa.RMinHash(128, 42))
            theirs[-1].update(words)
        errors.append((float((mine[0] == mine[1]).mean()) - truth, theirs[0].jaccard(theirs[1]) - truth))
    ours, rensas = np.sqrt(np.mean(np.square(errors), axis=0))
    assert ours < 1.1 * (1 / 6 / 128) ** 0.5  # the mean of J (1 - J) / 128 over all J, for independent functions
    assert ours < 1.5 * rensas
    assert abs(np.mean(errors, axis=0)[0]) < 0.008


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_band_match_rate_follows_probability(similarity: float):
    draw, minhash, met, expected = random.Random(7), MinHash(14, 8, 1), 0, 0.0
    for _ in range(250):
        one, other = pair(draw, similarity)
        truth = len({*one} & {*other}) / len({*one} | {*other})
        keys = [
            minhash.hash_bands(minhash.compute_signature(minhash.hash_shingles(" ".join(words))))
            for words in (one, other)
        ]
        met += bool((keys[0] == keys[1]).any())
        expected += minhash.match_probability(truth)
    assert abs(met - expected) < 4 * (250 * 0.25) ** 0.5 * 0.75


def test_match_probability_follows_bands_and_rows():
    minhash = MinHash(14, 8, 5)
    assert minhash.match_probability(0.8) == pytest.approx(1 - (1 - 0.8**8) ** 14)
    assert (minhash.match_probability(0), minhash.match_probability(1)) == (0, 1)
    assert minhash.threshold == pytest.approx(0.719, abs=0.001)


def test_hashes_ignore_case_and_punctuation():
    minhash = MinHash(4, 2, 2)
    one, same, other = (minhash.hash_shingles(text) for text in ("One, two: three!", "one two\n three", "one two four"))
    assert one.tolist() == same.tolist() != other.tolist()
    assert len(minhash.hash_shingles("lonely")) == 1 and len(minhash.hash_shingles(" .,! ")) == 0


def test_words_of_every_script_are_distinguished():
    assert len(Words("größer, ÄRGER – “quoted”")) == 3
    assert Words("ÄRGER").hashes.tolist() == Words("ärger").hashes.tolist()
    assert len(Words("我们去公园。")) == 5
    assert len(Words("привет, мир")) == 2
    assert len(Words("")) == len(Words(" \n")) == 0


def test_ngram_hashes_are_independent_of_position():
    whole, part = Words("a few words that stand here and a few words that stand there"), Words("few words that stand")
    hashes = whole.hash_ngrams(4).tolist()
    assert hashes[1] == hashes[8] == part.hash_ngrams(4)[0]
    assert len({*hashes}) == len(hashes) - 2  # "a few words that", "few words that stand" stand twice
    assert len(part.hash_ngrams(5)) == 0
