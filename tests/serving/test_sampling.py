"""Sampling against the processors of transformers and against itself."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from meshwright.errors import UserError
from meshwright.serving.sampling import Sampler, Sampling, distribution

LOGITS = 3 * torch.randn(200, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.9), (7, 0.6), (1, 0.5), (500, 0.01)])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float):
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None].double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = distribution(LOGITS, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(ours, scores[0].softmax(0), rtol=1e-10, atol=0)


def test_temperature_zero_takes_the_most_likely_and_of_equals_the_first():
    assert Sampler(Sampling()).choose(LOGITS) == int(LOGITS.argmax())
    assert Sampler(Sampling()).choose(torch.tensor([1.0, 5.0, 5.0])) == 1


def test_a_tiny_temperature_is_greedy_and_finite():
    probabilities = distribution(LOGITS, Sampling(temperature=1e-9))
    assert probabilities.tolist() == torch.nn.functional.one_hot(LOGITS.argmax(), 200).tolist()


def test_draws_depend_on_the_seed_alone_and_follow_the_probabilities():
    def draws(seed: int, count: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, top_k=4, seed=seed))
        return [sampler.choose(LOGITS) for _ in range(count)]

    torch.manual_seed(1)
    first = draws(3, 4000)
    torch.manual_seed(2)
    assert draws(3, 50) == first[:50]
    assert draws(4, 50) != first[:50]
    shares = torch.bincount(torch.tensor(first), minlength=200) / 4000
    torch.testing.assert_close(shares.double(), distribution(LOGITS, Sampling(1.0, 4)), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temperature": -1.0}, "temperature -1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top-k -1"),
        ({"top_p": 0.0}, "top-p 0"),
        ({"top_p": 1.1}, "top-p 1.1"),
    ],
)
def test_an_impossible_setting_is_named(values: dict[str, float], word: str):
    with pytest.raises(UserError, match=word):
        Sampling(**values)  # type: ignore[arg-type]
