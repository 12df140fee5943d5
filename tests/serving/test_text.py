"""Streamed text is the text, in whole characters."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.data.tokenizers.detokenizer import IncrementalDetokenizer
from meshwright.data.tokenizers.tokenizer import load_tokenizer, write_tokenizer
from meshwright.serving.text import AnswerText

SAMPLE = "naïve façade — 日本語のテキスト, emoji 👩🏽‍🚀🏳️‍🌈 and plain words\n\tdef f(x): return x  # ok\n"


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, request.param, 300, None, iter([SAMPLE, "plain words " * 50]))
    return load_tokenizer(tmp_path).tokenizer


def fallback_tokenizer() -> Tokenizer:
    """In the manner of SentencePiece: spaces in words, dropped before the first; unknown characters as bytes."""
    vocabulary = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


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


class Letters:
    """Detokenizer whose tokens are the letters of a string."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def show(text: str, stop: list[str], min_tokens: int = 0) -> tuple[str, str | None, list[str]]:
    answer = AnswerText(Letters(), stop, min_tokens)  # type: ignore[arg-type]
    pieces = []
    for letter in text:
        pieces.append(answer.push(ord(letter)))
        if answer.stopped_by:
            break
    return "".join(pieces) + answer.finish(), answer.stopped_by, pieces


@settings(max_examples=150, deadline=None)
@given(text=st.text("ab", max_size=30), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_visible_text_ends_before_first_completed_stop_string(text: str, stop: list[str]):
    shown, stopped_by, pieces = show(text, stop)
    ends = [text.find(each) + len(each) for each in stop if each in text]
    if not ends:
        assert (shown, stopped_by) == (text, None)
        return
    read = text[: min(ends)]  # the token that ends it is the first to complete any of them
    assert len(pieces) == len(read)
    assert shown == read[: min(read.find(each) for each in stop if each in read)]
    assert stopped_by in stop
    assert not any(each in shown for each in stop)


def test_possible_stop_string_is_held_back_until_decided():
    assert show("a<ende", ["<end>"])[2] == ["a", "", "", "", "", "<ende"]
    assert show("a<en", ["<end>"])[0] == "a<en"  # shown at the end
    assert show("a<<end>", ["<end>"])[0] == "a<"


def test_the_text_of_min_tokens_tokens_is_not_searched():
    assert show("ab ab", ["ab"], min_tokens=1)[:2] == ("ab ", "ab")
    assert show("ab ab", ["ab"], min_tokens=9)[:2] == ("ab ab", None)


def test_text_offsets_point_to_first_character_of_token():
    tokenizer = fallback_tokenizer()
    tokens = tokenizer.encode("a señor x", add_special_tokens=False).ids
    answer = AnswerText(IncrementalDetokenizer(tokenizer), ["or x"])
    shown = "".join(map(answer.push, tokens))
    assert (shown, answer.stopped_by) == ("a señ", "or x")
    whole = tokenizer.decode(tokens)
    beginnings = [len(tokenizer.decode(tokens[:n]).rstrip("\N{REPLACEMENT CHARACTER}")) for n in range(len(tokens))]
    assert answer.offsets == beginnings
    assert whole[answer.offsets[-1] :] == "x"
