"""Blocked words: documents that contain a listed word are dropped, unless it is only a part of other words."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.cleaning.blocked_words import BlockedWords
from meshwright.data.cleaning.rules import Cleaner
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe


@pytest.fixture
def listed(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text("\ufeffDrat\n\n two  words \nc.r.u.d\n馬鹿\nstraße\n")
    return str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("oh DRAT!", "drat"),
        ("drats and hydrate", None),
        ("these two  words, here", "two  words"),
        ("two words", None),
        ("two  wordsmiths", None),
        ("what c.r.u.d is this", "c.r.u.d"),
        ("xc.r.u.d", None),
        ("あの馬鹿が", "馬鹿"),
        ("STRASSE", "strasse"),
        ("これはdratです", "drat"),
        ("这是c.r.u.d吗", "c.r.u.d"),
        ("", None),
    ],
)
def test_blocked_words_match_whole_words_in_any_case(listed: str, text: str, found: str | None):
    assert BlockedWords(listed).find_blocked(text) == found


def test_blocked_word_drops_document_but_not_code(listed: str):
    cleaner = Cleaner(CleanRecipe(blocked_words=listed))
    verdict = cleaner.judge_document("one drat more", "a.txt")
    assert (verdict.rule, verdict.why) == ("blocked_words", 'contains "drat"')
    assert cleaner.judge_document("one drat more", "a.py").rule is None
    assert "blocked_words" in cleaner.rules and "blocked_words" not in Cleaner(CleanRecipe()).rules


@pytest.mark.parametrize(
    ("contents", "message"), [(None, "cannot be read: No such file"), (b"\n \n", "no word"), (b"\xff", "not UTF-8")]
)
def test_unusable_word_list_is_refused(tmp_path: Path, contents: bytes | None, message: str):
    path = tmp_path / "words.txt"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(UserError, match=rf"^data.clean.blocked_words: .*{message}"):
        BlockedWords(str(path))
