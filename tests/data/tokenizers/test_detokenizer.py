"""Streamed text is the text, in whole characters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from meshwright.data.tokenizers.detokenizer import IncrementalDetokenizer
from meshwright.data.tokenizers.tokenizer import load_tokenizer, write_tokenizer
from tests.data.fallback_tokenizer import fallback_tokenizer

SAMPLE = "naïve façade — 日本語のテキスト, emoji 👩🏽‍🚀🏳️‍🌈 and plain words\n\tdef f(x): return x  # ok\n"


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, request.param, 300, None, iter([SAMPLE, "plain words " * 50]))
    return load_tokenizer(tmp_path).tokenizer


def stream(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    text = IncrementalDetokenizer(tokenizer, before)
    pieces = [text.push(token) for token in tokens]
    return [*pieces, text.flush()]


def test_streamed_text_has_whole_characters_and_concatenates(tokenizer: Tokenizer):
    tokens = tokenizer.encode(SAMPLE, add_special_tokens=False).ids
    pieces = stream(tokenizer, [], tokens)
    assert "".join(pieces) == SAMPLE
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > len(SAMPLE) / 4  # it does come piece by piece
    assert pieces[-1] == ""


@pytest.mark.parametrize("seed", range(20))
def test_invalid_utf8_streams_as_decoded_at_once(tokenizer: Tokenizer, seed: int):
    tokens = random.Random(seed).choices(range(256), k=60)
    assert "".join(stream(tokenizer, [], tokens)) == tokenizer.decode(tokens)


def test_text_ending_inside_character_flushes_it(tokenizer: Tokenizer):
    tokens = list(tokenizer.encode("ok 🏳", add_special_tokens=False).ids)[:-1]
    pieces = stream(tokenizer, [], tokens)
    assert "".join(pieces[:-1]) == "ok "
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"


def test_the_space_between_prompt_and_text_is_kept():
    tokenizer = fallback_tokenizer()
    prompt = [0, *tokenizer.encode("once upon", add_special_tokens=False).ids]
    more = tokenizer.encode("a time, señor", add_special_tokens=False).ids
    assert tokenizer.decode(more) == "a time, señor"
    assert "".join(stream(tokenizer, prompt, more)) == " a time, señor"
    assert "".join(stream(tokenizer, [0], more)) == "a time, señor"


def test_special_tokens_are_not_shown():
    tokenizer = fallback_tokenizer()
    tokens = [*tokenizer.encode("one", add_special_tokens=False).ids, 0, 0]
    assert "".join(stream(tokenizer, [0], [*tokens, *tokens])) == "one one"


def test_text_cost_per_token_is_independent_of_length():
    tokenizer = fallback_tokenizer()
    text = IncrementalDetokenizer(tokenizer)
    longest = 0
    for token in tokenizer.encode("words without end " * 200, add_special_tokens=False).ids:
        text.push(token)
        longest = max(longest, len(text._window))
    assert longest < 10
