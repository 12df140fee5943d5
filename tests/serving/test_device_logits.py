"""Sampling from figures that a device computes of each row, against sampling from the whole row in host memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from meshwright.serving.device_logits import DeviceLogits, DeviceRow
from meshwright.serving.logit_rows import Draw, LogitRow
from meshwright.serving.sampling import InvalidLogits, Sampling, TokenCounts, prepare_draw, sample, score_token
from tests.serving import device_reference

OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 99)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([1, 3, 31, 32, 40, 5000]),
        "top_p": st.sampled_from([1e-6, 0.3, 0.95, 0.9999]),
        "min_p": st.sampled_from([1e-8, 0.02, 0.5, 1.0]),
        "logprobs": st.sampled_from([0, 1, 5, 31, 32, 3000]),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.just({2: 3.0}),
        "min_tokens": st.just(9),
        "stop_tokens": st.just(frozenset({0, 1})),
    },
)


def on_device(logits: np.ndarray, draws: list[Draw]) -> DeviceLogits:
    buffers = [torch.zeros(3 * len(draws) + 2, dtype=torch.float64) for _ in range(2)]
    return DeviceLogits(torch.from_numpy(logits), draws, device_reference, buffers)


def device_rows(logits: np.ndarray, draws: list[Draw]) -> list[DeviceRow]:
    return list(on_device(logits, draws))


@settings(max_examples=150)
@given(st.lists(OPTIONS, min_size=1, max_size=4), st.sampled_from([5, 33, 2500]), st.sampled_from([None, 1.0, 8.0]))
def test_results_are_those_of_rows_in_host_memory(options: list[dict], size: int, steps: float | None):
    """steps: logits are multiples of 1 / steps, so that many are equal, at the end of the copied list, too."""
    logits = np.random.default_rng(size).standard_normal((len(options), size)).astype(np.float32) * 2
    if steps is not None:
        logits = np.round(logits * np.float32(steps)) / np.float32(steps)
    requests = [Sampling(max_tokens=20, **each) for each in options]
    draws = [prepare_draw(each, choice=1, position=number) for number, each in enumerate(requests)]
    for number, (sampling, row) in enumerate(zip(requests, device_rows(logits, draws), strict=True)):
        context = {"choice": 1, "position": number, "counts": TokenCounts([1, 2], [3])}
        found, expected = sample(row, sampling, **context), sample(LogitRow(logits[number]), sampling, **context)
        assert (found.token, [token for token, _ in found.top]) == (
            expected.token,
            [token for token, _ in expected.top],
        )
        assert (found.logprob is None) == (expected.logprob is None)
        if found.logprob is not None and expected.logprob is not None:
            assert math.isclose(found.logprob, expected.logprob, rel_tol=1e-6, abs_tol=1e-6)
            pairs = zip(found.top, expected.top, strict=True)
            assert all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("alternatives", [0, 3, 40])
def test_prompt_tokens_are_scored_as_in_host_memory(alternatives: int):
    logits = np.random.default_rng(1).standard_normal((3, 700)).astype(np.float32)
    rows = device_rows(logits, [Draw(target=token, ranked=alternatives) for token in (0, 5, 699)])
    for row, values, token in zip(rows, logits, (0, 5, 699), strict=True):
        found, expected = score_token(row, token, alternatives), score_token(LogitRow(values), token, alternatives)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-6)
        assert [each for each, _ in found.top] == [each for each, _ in expected.top]


@settings(max_examples=100)
@given(st.lists(OPTIONS, min_size=1, max_size=3), st.sampled_from([None, 1.0]))
def test_tokens_passed_to_the_next_step_are_the_sampled_ones(options: list[dict], steps: float | None):
    logits = np.random.default_rng(3).standard_normal((len(options), 90)).astype(np.float32)
    logits = logits if steps is None else np.round(logits)
    requests = [Sampling(max_tokens=20, **each) for each in options]
    found = on_device(logits, [prepare_draw(each, position=number) for number, each in enumerate(requests)])
    if found.decided:
        tokens = torch.zeros(len(options), dtype=torch.int32)
        found.copy_tokens_to(tokens)
        rows = list(found)
        expected = [
            sample(LogitRow(values), sampling, position=number).token
            for number, (values, sampling) in enumerate(zip(logits, requests, strict=True))
        ]
        assert tokens.tolist() == expected
        assert [
            sample(row, each, position=n).token for n, (row, each) in enumerate(zip(rows, requests, strict=True))
        ] == expected
        assert all(row._host_V is None for row in rows), "the logits were read after the next step"


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"logprobs": 0}])
def test_sampling_calls_no_tensor_operation_for_each_row(options: dict):
    class Calls(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            calls.append(function)
            return function(*arguments, **(options or {}))

    counts, sampling = [], Sampling(**options)
    for rows in (1, 6):
        calls, logits = [], np.random.default_rng(4).standard_normal((rows, 50)).astype(np.float32)
        draws = [prepare_draw(sampling, position=number) for number in range(rows)]
        with Calls():
            found = [sample(row, sampling, position=n) for n, row in enumerate(on_device(logits, draws))]
        assert len(found) == rows
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_plain_sampling_is_decided_by_the_device_and_narrowed_sampling_is_not():
    logits = np.zeros((1, 9), np.float32)
    decided = [{}, {"temperature": 0.7}, {"logprobs": 0}, {"stop_tokens": frozenset({3})}]
    not_decided = [
        {"temperature": 0.7, "top_k": 3}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.1},
        {"logprobs": 2}, {"logit_bias": {1: 2.0}}, {"presence_penalty": 1.0},
        {"min_tokens": 2, "stop_tokens": frozenset({3})},
    ]  # fmt: skip
    for expected, several in ((True, decided), (False, not_decided)):
        for each in several:
            assert on_device(logits, [prepare_draw(Sampling(max_tokens=5, **each))]).decided is expected, each
    assert not on_device(logits, [Draw(target=4)]).decided


def test_invalid_logits_pass_on_a_token_of_the_vocabulary():
    tokens = torch.full((2,), 77, dtype=torch.int32)
    logits = np.full((2, 9), np.nan, np.float32)
    on_device(logits, [prepare_draw(Sampling()), prepare_draw(Sampling(temperature=1.0))]).copy_tokens_to(tokens)
    assert all(0 <= token < 9 for token in tokens.tolist())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_damaged_row_is_reported_and_others_are_not(value: float):
    logits = np.random.default_rng(2).standard_normal((2, 60)).astype(np.float32)
    logits[0, 17] = value
    damaged, whole = device_rows(logits, [Draw(), Draw()])
    with pytest.raises(InvalidLogits, match=f"the model computed {value} as a logit"):
        sample(damaged, Sampling())
    assert sample(whole, Sampling()).token == int(logits[1].argmax())


@pytest.mark.parametrize(
    ("options", "copied"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7, "logprobs": 5}, False),
        ({"temperature": 0.7, "top_k": 50, "top_p": 0.9}, False),
        ({"temperature": 0.7, "top_p": 0.5, "min_p": 0.01}, False),
        ({"temperature": 1.5, "top_p": 0.4}, False),  # keeps between 256 and 1,023 tokens
        ({"repetition_penalty": 1.1}, True),
        ({"temperature": 5.0, "top_p": 0.9999}, True),  # of 20,000 tokens most are kept
    ],
)
def test_whole_row_is_copied_only_if_options_need_it(options: dict, copied: bool):
    logits = 4 * np.random.default_rng(3).standard_normal((1, 20_000)).astype(np.float32)
    sampling = Sampling(**options)
    (row,) = device_rows(logits, [prepare_draw(sampling)])
    sample(row, sampling, counts=TokenCounts([1], []))
    assert (row._host_V is not None) == copied
