"""Sampling against float64 references of the definitions, written out over the whole vocabulary."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.serving.logit_rows import LogitRow
from meshwright.serving.sampling import InvalidLogits, Sampling, TokenCounts, draw_uniform, sample, score_token

LOGITS = (3 * np.random.default_rng(0).standard_normal(500)).astype(np.float32)


def distribution(logits: np.ndarray, sampling: Sampling, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Probabilities [V] as vLLM defines them: minimum length, bias, penalties, temperature, min-p, top-k, top-p."""
    scores = logits.astype(np.float64)
    if len(answer) < sampling.min_tokens:
        scores[list(sampling.stop_tokens)] = -np.inf
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in set(prompt) | set(answer):
        scores[token] *= 1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
    for token in set(answer):
        scores[token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    kept = weights >= sampling.min_p * weights.max()
    for token in order[sampling.top_k or len(order) :]:
        kept[token] = False
    weights *= kept
    weights /= weights.sum()
    if sampling.top_p < 1:
        before = 0.0
        for token in order:
            share, weights[token] = weights[token], weights[token] * (before < sampling.top_p)
            before += share
    return weights / weights.sum()


def count_draws(logits: np.ndarray, sampling: Sampling, prompt: list[int], answer: list[int], draws: int) -> np.ndarray:
    found = np.zeros(len(logits))
    for choice in range(draws):
        counts = TokenCounts(prompt, answer)
        found[sample(LogitRow(logits), sampling, choice=choice, position=len(answer), counts=counts).token] += 1
    return found


OPTIONS = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.5, "top_k": 7},
    {"top_k": 1000, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.8},
    {"min_tokens": 9, "stop_tokens": frozenset(np.argsort(-LOGITS)[:3].tolist())},
    {"repetition_penalty": 1.8, "top_k": 12},
    {"frequency_penalty": 1.5, "presence_penalty": -1.0, "logit_bias": {3: 8.0, 7: -100.0, 11: 7.0}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_follow_the_probabilities(options: dict):
    sampling = Sampling(**{"temperature": 1.0, **options, "seed": 1})
    best = np.argsort(-LOGITS)[:20].tolist()
    prompt, answer = [*best[::2], 3], [*best[::3], best[3], 7, 11, 11]
    draws = 1000
    expected = distribution(LOGITS, sampling, prompt, answer) * draws
    found = count_draws(LOGITS, sampling, prompt, answer, draws)
    assert not found[expected == 0].any()
    often = expected >= 5  # Pearson's chi-squared; the rare tokens as one class
    classes = [(found[often], expected[often])]
    if (rare := expected[~often].sum()) >= 5:
        classes.append((np.array([found[~often].sum()]), np.array([rare])))
    statistic = sum(float(((f - e) ** 2 / e).sum()) for f, e in classes)
    freedom = max(1, sum(len(e) for _, e in classes) - 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.parametrize("size", [1, 2, 300, 5000])
def test_each_draw_is_the_quantile_of_the_distribution(size: int):
    logits = (2 * np.random.default_rng(size).standard_normal(size)).astype(np.float32)
    sampling, nucleus = Sampling(temperature=0.7, seed=5), Sampling(temperature=0.7, top_p=0.95, seed=5)
    order = np.lexsort((np.arange(size), -logits))
    for position in range(20):
        uniform = draw_uniform(5, 2, position)
        for options, tokens in ((sampling, np.arange(size)), (nucleus, order)):
            sums = np.cumsum(distribution(logits, options, [], [])[tokens])
            rank = int(
                np.flatnonzero(tokens == sample(LogitRow(logits), options, choice=2, position=position).token)[0]
            )
            below = sums[rank - 1] if rank else 0.0
            assert below - 1e-6 <= uniform <= sums[rank] + 1e-6


def test_draws_are_uniform_functions_of_seed_and_position():
    draws = {(s, c, p): draw_uniform(s, c, p) for s in (-(2**63), 0, 1) for c in range(20) for p in range(50)}
    assert len(set(draws.values())) == len(draws)
    assert all(0 <= value < 1 for value in draws.values())
    shares = np.histogram(list(draws.values()), bins=10, range=(0, 1))[0] / len(draws)
    assert abs(shares - 0.1).max() < 0.025
    assert draw_uniform(0, 1, 2) == draws[0, 1, 2]


def test_equal_logits_choose_lower_token_id():
    logits = np.array([1, 5, 5, 0, 5], np.float32)
    assert sample(LogitRow(logits), Sampling(logprobs=3)).token == 1
    assert [token for token, _ in sample(LogitRow(logits), Sampling(logprobs=4)).top] == [1, 2, 4, 0]
    assert {sample(LogitRow(logits), Sampling(temperature=1, top_k=2), position=p).token for p in range(99)} == {1, 2}
    assert sample(LogitRow(logits), Sampling(logit_bias={2: 0.5, 4: 0.5})).token == 2


def test_tiny_temperature_is_greedy():
    assert sample(LogitRow(LOGITS), Sampling(temperature=1e-300)).token == int(LOGITS.argmax())
    found = {sample(LogitRow(LOGITS), Sampling(temperature=2e-5), position=p).token for p in range(50)}
    assert found == {int(LOGITS.argmax())}


def test_log_probabilities_use_unmodified_logits():
    sampling = Sampling(temperature=0.5, top_k=3, logit_bias={9: 50.0}, logprobs=5, seed=3)
    result = sample(LogitRow(LOGITS), sampling)
    wide = LOGITS.astype(np.longdouble)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert result.token == 9
    assert result.logprob == pytest.approx(float(expected[9]), abs=5e-7)
    best = np.argsort(-LOGITS, kind="stable")[:5]
    assert [token for token, _ in result.top] == best.tolist()
    assert [value for _, value in result.top] == pytest.approx([float(expected[token]) for token in best], abs=5e-7)
    assert json.loads(json.dumps(result.logprob)) == result.logprob
    assert score_token(LogitRow(LOGITS), 9, 0).top == ()
    assert len(score_token(LogitRow(LOGITS), 9, 10_000).top) == 500
    assert sample(LogitRow(LOGITS), Sampling()).logprob is None


def test_sampled_row_is_independent_of_batch_and_alignment():
    rows = np.random.default_rng(2).standard_normal((7, 4097)).astype(np.float32)
    for options in OPTIONS:
        sampling = Sampling(**{"temperature": 1.0, **options, "logprobs": 2, "stop_tokens": frozenset([1])})
        elsewhere = np.concatenate([rows[0, :5], rows[3]])[5:]  # another alignment
        results = [
            sample(LogitRow(row), sampling, position=4, counts=TokenCounts([1, 2], [3]))
            for row in (rows[3].copy(), rows[3], elsewhere)
        ]
        assert results[0] == results[1] == results[2]
    assert rows.flags.writeable and not np.isinf(rows).any()  # and the logits stay as they were


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"logprobs": 1}])
def test_non_finite_logits_raise_error(value: float, options: dict):
    logits = LOGITS.copy()
    logits[77] = value
    with pytest.raises(InvalidLogits, match=f"the model computed {value} as a logit"):
        sample(LogitRow(logits), Sampling(**options))


def test_impossible_tokens_are_never_drawn():
    logits = np.full(300, -np.inf, np.float32)
    logits[[5, 250]] = 1.0
    for options in ({}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 9}):
        found = {sample(LogitRow(logits), Sampling(temperature=1.0, **options), position=p).token for p in range(60)}
        assert found == {5, 250}
    everything = Sampling(temperature=1.0, min_tokens=1, stop_tokens=frozenset(range(300)))
    assert sample(LogitRow(logits), everything).token == 0


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.integers(0, 9), max_size=30))
def test_incremental_token_counts_equal_recounted_ones(prompt: list[int], answer: list[int]):
    sampling = Sampling(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2, max_tokens=9)
    grown = TokenCounts(prompt)
    for token in answer:
        grown.add(token)
    logits = LOGITS[:10].copy()
    grown.penalize(logits, sampling)
    expected = distribution(LOGITS[:10], Sampling(**{**_fields(sampling), "temperature": 1.0}), prompt, answer)
    assert np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() == pytest.approx(expected, rel=1e-5)


def _fields(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0: should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -2}, "top_k -2"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty inf"),
        ({"frequency_penalty": -3.0}, "frequency_penalty -3.0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias.-1 -1: should be"),
        ({"logit_bias": {4: 101.0}}, "logit_bias.4 101.0: should be less than or equal to 100"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
        ({"max_tokens": -1}, "max_tokens -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5: should be 0 to max_tokens"),
        ({"stop_tokens": frozenset([-4])}, "stop_tokens.0 -4"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1"),
    ],
)
def test_invalid_option_is_named(options: dict, message: str):
    with pytest.raises(UserError, match=message):
        Sampling(**options)


def test_numpy_integers_are_stored_as_python_ones():
    tokens = np.array([3, 4])
    options = {"seed": np.int64(5), "top_k": np.int32(3), "max_tokens": np.uint8(9), "logprobs": np.int16(2)}
    sampling = Sampling(**options, stop_tokens=frozenset(tokens), logit_bias=dict.fromkeys(tokens, 1.0))
    plain = Sampling(seed=5, top_k=3, max_tokens=9, logprobs=2, stop_tokens=frozenset({3, 4}), logit_bias={3: 1, 4: 1})
    assert sampling == plain
    numbers = [getattr(sampling, name) for name in options]
    assert {type(each) for each in (*numbers, *sampling.stop_tokens, *sampling.logit_bias)} == {int}


def test_token_outside_vocabulary_is_named():
    with pytest.raises(UserError, match="logit_bias: token ID 500 should be less than 500"):
        Sampling(logit_bias={3: 1.0, 500: 1.0}).check_vocabulary(500)
    with pytest.raises(UserError, match="stop_token_ids: token ID 501"):
        Sampling(stop_tokens=frozenset([501])).check_vocabulary(500)
    Sampling(logit_bias={499: 1.0}).check_vocabulary(500)
