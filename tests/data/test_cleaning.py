"""The cleaning rules drop what they are meant to drop, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.data.cleaning import RULES, Cleaner, repetition
from meshwright.recipe import CleanRecipe


def dropped(text: str | None, **clean: Any) -> str | None:
    return Cleaner(CleanRecipe(**clean)).check(text)[0]


ORDINARY = "def answer():\n\treturn 42  # größer als 41, 世界\n\x0c\n"


def test_ordinary_text_is_kept():
    assert dropped(ORDINARY) is None


@pytest.mark.parametrize(
    ("rule", "text", "clean"),
    [
        ("encoding", None, {}),
        ("encoding", "a byte that did not decode: \udcff", {}),
        ("encoding", "half of a pair from a JSON escape: \ud83d", {}),
        ("control_characters", "\x1b[31mred\x1b[0m" * 3, {}),
        ("control_characters", "a\x00", {}),
        ("length", "", {}),
        ("length", " \n\t ", {}),
        ("length", "short", {"minimum_characters": 6}),
        ("length", "", {"minimum_characters": 0}),  # nothing is no document, whatever the recipe says
        ("length", "longer", {"maximum_characters": 5}),
        ("repetition", "the same line\n" * 10, {}),
    ],
)
def test_a_rule_drops_what_it_is_for(rule: str, text: str | None, clean: dict[str, Any]):
    assert rule in RULES
    assert dropped(text, **clean) == rule


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("x" * 99 + "\x07", {"maximum_control_fraction": 0.01}),
        ("sixsix", {"minimum_characters": 6, "maximum_characters": 6}),
        ("same\n" * 4 + "other\n" * 4, {"maximum_repetition": 0.75}),
        ("the same line\n" * 10, {"maximum_repetition": 1.0}),
    ],
)
def test_a_rule_keeps_what_is_just_within_it(text: str, clean: dict[str, Any]):
    assert dropped(text, **clean) is None


def test_exact_duplicates_are_dropped_after_the_first_whatever_white_space_surrounds_them():
    cleaner = Cleaner(CleanRecipe())
    assert [cleaner.check(text)[0] for text in ("one", "two", "\none \n", "One")] == [
        None,
        None,
        "exact_duplicates",
        None,
    ]
    keeping = Cleaner(CleanRecipe(exact_duplicates=False))
    assert [keeping.check("one")[0] for _ in range(3)] == [None] * 3


def test_a_document_that_was_dropped_makes_no_later_one_a_duplicate():
    cleaner = Cleaner(CleanRecipe(minimum_characters=5))
    assert cleaner.check("abc")[0] == "length"
    assert cleaner.check("  abc  ")[0] is None


def test_repetition_is_the_share_of_lines_that_stood_before():
    assert repetition("a\nb\n\n  a\nc\na") == pytest.approx(2 / 5)
    assert repetition("") == repetition("a\nb") == 0
