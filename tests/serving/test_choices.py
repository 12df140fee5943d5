"""Choices: text, token offsets and finish reasons do not depend on how tokens are divided into outputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shared.fake_engine import SAMPLE, make_prompts
from meshwright.serving.choices import Choice, Piece, StopRule
from meshwright.serving.prompts import Prompts
from meshwright.serving.request import FinishReason, Output, Request
from meshwright.serving.sampling import Sampling, TokenResult


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return make_prompts(tmp_path_factory.mktemp("tokenizer"))


def answer(
    prompts: Prompts, tokens: list[int], reason: FinishReason, stop: StopRule, cuts: set[int], echo: str | None = None
) -> tuple[Choice, Piece]:
    """The pieces of a choice for `tokens`, divided into outputs before the positions `cuts`."""
    choice = Choice(0, Request("r", (1, 2), Sampling()), prompts, stop, echo)
    results = [TokenResult(token) for token in tokens]
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(tokens)), len(tokens)]
    pieces = []
    for begin, end in pairwise(edges):
        pieces.append(choice.push(Output("r", results[begin:end], reason if end == len(tokens) else None)))
        if pieces[-1].finish_reason is not None:
            break
    return choice, Piece.join(pieces)


@given(st.data())
def test_answer_is_independent_of_output_chunking(prompts: Prompts, data: st.DataObject):
    text = data.draw(st.text(alphabet="abæ日 😀", max_size=12))
    stops = data.draw(st.lists(st.text(alphabet="abæ日 ", min_size=1, max_size=3), max_size=3))
    rule = StopRule(stops, data.draw(st.booleans()))
    (end,) = prompts.ends
    tokens = [*prompts.encode(text, add_start=False, empty=True), end]
    cuts = data.draw(st.sets(st.integers(1, 40)))
    choice, piece = answer(prompts, tokens, "stop", rule, cuts)
    whole, expected = answer(prompts, tokens, "stop", rule, set())
    assert (piece, choice.stop_reason) == (expected, whole.stop_reason)
    if not any(stop in text for stop in stops):
        assert piece.text == text and choice.stop_reason is None and choice.completion_tokens == len(tokens)
    else:
        assert choice.stop_reason in stops and piece.finish_reason == "stop"
        shown = piece.text if rule.include else piece.text + str(choice.stop_reason)
        assert text.startswith(shown) and shown.endswith(str(choice.stop_reason))


def test_offsets_are_the_characters_before_each_token(prompts: Prompts):
    tokens = prompts.encode(SAMPLE, add_start=False)
    for echo in (None, "prompt "):
        _, piece = answer(prompts, tokens, "length", StopRule(), set(range(100)), echo)
        begin = len(echo or "")
        assert piece.text[begin:] == SAMPLE
        for number, (result, offset) in enumerate(piece.tokens):
            whole = prompts.get_token_text(result.token)
            if not whole.startswith("bytes:"):
                assert piece.text[offset:].startswith(whole), number


def test_stop_token_is_counted_and_not_shown(prompts: Prompts):
    tokens = prompts.encode("so it ends", add_start=False)
    choice, piece = answer(prompts, tokens, "stop", StopRule(), {3})
    assert piece.text == prompts.decode(tokens[:-1])
    assert choice.completion_tokens == len(piece.tokens) == len(tokens)
    assert piece.tokens[-1].offset == len(piece.text)
    assert choice.stop_reason == tokens[-1]  # no end token of the model
    _, shown = answer(prompts, tokens, "stop", StopRule((), True), {3})
    assert shown.text == "so it ends"


def test_no_stop_string_ends_the_first_min_tokens(prompts: Prompts):
    tokens = prompts.encode("aXbXc", add_start=False)
    choice = Choice(0, Request("r", (1,), Sampling(min_tokens=3)), prompts, StopRule(["X"]))
    piece = choice.push(Output("r", [TokenResult(token) for token in tokens], "length"))
    assert (piece.text, piece.finish_reason) == ("aXb", "stop")


def test_echo_returns_positions_of_prompt_tokens(prompts: Prompts):
    tokens = prompts.encode("one two")
    results = [None, *(TokenResult(token, -0.5) for token in tokens[1:])]
    choice = Choice(0, Request("r", tuple(tokens), Sampling(max_tokens=0)), prompts, StopRule(), "one two")
    piece = choice.push(Output("r", [], "length", 0, results))
    assert piece.text == "one two" and choice.completion_tokens == 0
    assert [token.result.token for token in piece.tokens] == tokens
    assert piece.tokens[0].result.logprob is None
    for result, offset in piece.tokens[1:]:
        assert piece.text[offset:].startswith(prompts.get_token_text(result.token))
