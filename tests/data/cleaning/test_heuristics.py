"""Published quality rules: each drops a text made for it, and n-gram counts match an exhaustive count."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from meshwright.data.cleaning import heuristics
from meshwright.data.cleaning.repetition import GOPHER_LIMITS, check_gopher_repetition, count_repeated_ngrams

PROSE = (
    "The settlers came to the valley in spring, and they built a mill beside the river. It was slow work with few "
    "tools. Nobody had told them that the winter would be long, but they stored grain and dried fish, and most of "
    "the children lived. When the snow melted, the oldest woman of the village said that they should stay."
)


def words(count: int) -> list[str]:
    return [f"word{number}" for number in range(count)]


def test_prose_passes_every_family():
    for family, ask in heuristics.CHECKS.items():
        assert ask(PROSE) is None, family


@pytest.mark.parametrize(
    ("family", "rule", "text"),
    [
        ("gopher-quality", "gopher_words", "the words and that " * 12),
        ("gopher-quality", "gopher_word_length", "the and " + " ".join("a" for _ in range(60))),
        ("gopher-quality", "gopher_word_length", "the and " + " ".join("elevenchars" for _ in range(60))),
        ("gopher-quality", "gopher_symbols", PROSE + " #tag" * 10),
        ("gopher-quality", "gopher_symbols", PROSE + " so..." * 10),
        ("gopher-quality", "gopher_bullets", "\n".join(f"- {line}" for line in PROSE.split(". "))),
        ("gopher-quality", "gopher_ellipses", PROSE + "\nmore...\nmore…"),
        ("gopher-quality", "gopher_letters", PROSE + " 12345" * 30),
        ("gopher-quality", "gopher_stop_words", " ".join(words(60))),
        ("gopher-repetition", "gopher_duplicate_lines", "one line\n" * 4 + "another line\n" * 4 + "a third"),
        ("gopher-repetition", "gopher_duplicate_paragraphs", "one\n\none\n\none\n\ntwo"),
        ("gopher-repetition", "gopher_top_2_gram", " ".join(f"ever same {word}" for word in words(60))),
        ("gopher-repetition", "gopher_duplicate_10_grams", " ".join(words(100) + words(100)[50:64])),
        ("c4", "c4_curly_bracket", PROSE + " {"),
        ("c4", "c4_lorem_ipsum", PROSE + " Lorem Ipsum."),
        ("c4", "c4_sentences", "One sentence. Two sentences."),
        ("fineweb", "fineweb_punctuation", "no end\n" * 3 + "none\nat all\nsix\nseven\neight\nan end."),
        ("fineweb", "fineweb_duplicate_lines", PROSE + "\n" + PROSE[:50] + ".\n" + PROSE[:50] + "."),
        ("fineweb", "fineweb_short_lines", PROSE + "\nshort.\nshorter.\nshortest."),
    ],
)
def test_rule_drops_its_target(family: str, rule: str, text: str):
    found = heuristics.CHECKS[family](text)
    assert found and found[0] == rule, found


def test_the_thresholds_of_repetition_are_those_of_table_a1():
    assert [*GOPHER_LIMITS.values()] == [*(0.3, 0.3, 0.2, 0.2, 0.2, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.1)]
    assert [*GOPHER_LIMITS] == [*heuristics.RULES["gopher-repetition"]]


def test_repeated_ngrams_match_exhaustive_count():
    draw = random.Random(5)
    for length in (0, 1, 2, 9, 10, 11, 300):
        text = [draw.choice(["a", "bb", "ccc"]) if draw.random() < 0.6 else f"w{draw.random()}" for _ in range(length)]
        found = dict(count_repeated_ngrams(text))
        for n in range(2, 11):
            runs = [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]
            counts = Counter(runs)
            if n <= 4:
                most = max((count for count in counts.values() if count > 1), default=0)
                sizes = {len(" ".join(run)) * most for run in runs if counts[run] == most} or {0}
                assert found[f"gopher_top_{n}_gram"] in sizes
            else:
                covered = {at + inner for at, run in enumerate(runs) if run in runs[:at] for inner in range(n)}
                assert found[f"gopher_duplicate_{n}_grams"] == sum(len(text[at]) for at in covered)


def test_violated_share_is_reported():
    found = check_gopher_repetition("one line\n" * 4 + "a second line\n" * 4 + "a third")
    assert found == ("gopher_duplicate_lines", "0.67 > 0.30")


def test_c4_keeps_the_lines_that_are_sentences():
    text = (
        "This line ends as a sentence should.\nMenu\nThis one does not end\n"
        "Please enable javascript to see this page.\n"
        "Too short.\nRead our privacy policy before you go on.\nA cited fact stands right here.[12]\n"
        "It goes on and on...\n" + "x" * 1001 + " is a very long word here."
    )
    assert heuristics.filter_c4_lines(text) == (
        "This line ends as a sentence should.\nA cited fact stands right here.",
        7,
    )


@pytest.mark.timeout(60)  # half a minute for 20,000 marks if the expression backtracks
def test_counting_sentences_takes_linear_time():
    assert heuristics.check_c4("x" + "!" * 1_000_000 + "x") == ("c4_sentences", "0 sentences")
    assert heuristics.check_c4('One!! Two?" Three.) x') is None
