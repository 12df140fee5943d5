"""Requests and outputs: checks, and lossless messages."""

from __future__ import annotations

import json
import math
from types import GenericAlias
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError

from meshwright.errors import UserError
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.messages import encode
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult

T = TypeVar("T")
FLOATS = st.floats(max_value=0, allow_nan=False)
RESULTS = st.builds(
    TokenResult,
    st.integers(0, 2**31),
    st.none() | FLOATS,
    st.lists(st.tuples(st.integers(0, 2**31), FLOATS), max_size=3).map(tuple),
)


def through_message(value: T) -> T:
    """The value after its message was sent: encoded, parsed and decoded as on the other side."""
    return TypeAdapter(GenericAlias(dict, (str, type(value)))).validate_json(encode({"add": value})[4:])["add"]


@settings(max_examples=50)
@given(
    results=st.lists(RESULTS, max_size=3),
    reason=st.sampled_from([None, "stop", "length", "cancelled"]),
    prompt=st.none() | st.lists(st.none() | RESULTS, max_size=3),
)
def test_output_round_trips_through_a_message(results: list, reason: str | None, prompt: list | None):
    output = Output("a", results, reason, 32, prompt)  # type: ignore[arg-type]
    assert through_message(output) == output


def test_request_round_trips_through_a_message():
    sampling = Sampling(
        temperature=0.1 + 0.2, top_k=5, logit_bias={7: -1.5, 3: 2.0}, stop_tokens=frozenset([9, 2]), seed=-(2**63),
        logprobs=0, prompt_logprobs=2,
    )  # fmt: skip
    request = Request("chatcmpl-ü", (1, 2), sampling, 3, -1, 1e9 + 0.125, (4, 5), "salt")
    assert through_message(request) == request


def test_plan_of_ranks_round_trips_through_a_message():
    plan = RankPlan("a/ü", "tp2 dp2", ServingSizes(64, 4, 100, "bfloat16", 3, 9, resident=False), step_seconds=math.inf)
    assert through_message(plan) == plan


def test_options_outside_their_range_are_refused_by_the_receiver():
    document = json.loads(encode({"add": Request("a", (1,), Sampling())})[4:])["add"]
    with pytest.raises(ValidationError, match="sampling.top_p"):
        TypeAdapter(Request).validate_python(document | {"sampling": document["sampling"] | {"top_p": 2}})


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
    request.check_vocabulary(50)
    request.check_length(10)
    with pytest.raises(UserError, match="token ID 49 should be less than 49"):
        request.check_vocabulary(49)
    with pytest.raises(UserError, match=r"prompt of 2 tokens \+ max_tokens 8: should be at most 9 tokens"):
        request.check_length(9)
