"""Text of an answer: it ends before a stop string, and offsets point to the characters of its tokens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from meshwright.data.tokenizers.detokenizer import IncrementalDetokenizer
from meshwright.serving.choices import AnswerText
from tests.data.fallback_tokenizer import fallback_tokenizer


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


@settings(max_examples=150)
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
