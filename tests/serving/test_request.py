"""Requests and outputs: checks, and lossless JSON forms."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshwright.errors import UserError
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
RESULTS = st.builds(
    TokenResult,
    st.integers(0, 2**31),
    st.none() | FLOATS,
    st.lists(st.tuples(st.integers(0, 2**31), FLOATS), max_size=3).map(tuple),
)


def through_json(document: dict) -> dict:
    return json.loads(json.dumps(document))


@settings(max_examples=50, deadline=None)
@given(
    results=st.lists(RESULTS, max_size=3),
    reason=st.sampled_from([None, "stop", "length", "cancelled"]),
    prompt=st.none() | st.lists(st.none() | RESULTS, max_size=3),
)
def test_output_round_trips_through_json(results: list, reason: str | None, prompt: list | None):
    output = Output("a", results, reason, 32, prompt)  # type: ignore[arg-type]
    assert Output.from_json(through_json(output.to_json())) == output


def test_request_round_trips_through_json():
    sampling = Sampling(
        temperature=0.1 + 0.2, top_k=5, logit_bias={7: -1.5, 3: 2.0}, stop_tokens=frozenset([9, 2]), seed=-(2**63),
        logprobs=0, prompt_logprobs=2,
    )  # fmt: skip
    request = Request("chatcmpl-ü", (1, 2), sampling, 3, -1, 1e9 + 0.125, (4, 5), "salt")
    assert Request.from_json(through_json(request.to_json())) == request


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": ()}, "the prompt is empty"),
        ({"tokens": (3, -1)}, "token ID -1"),
        ({"tokens": (3,), "replayed": (1,) * 256}, "replayed: 256 tokens should be fewer than max_tokens 256"),
    ],
)
def test_invalid_request_is_refused(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        Request("a", **fields)


def test_request_beyond_model_limits_is_refused():
    request = Request("a", (1, 49), Sampling(max_tokens=8))
    request.check(50, 10)
    with pytest.raises(UserError, match="token ID 49 should be less than 49"):
        request.check(49, 10)
    with pytest.raises(UserError, match=r"prompt of 2 tokens \+ max_tokens 8: should be at most 9 tokens"):
        request.check(50, 9)
