"""Repetition inside a text by lines, paragraphs and n-grams (Gopher, arXiv:2112.11446, appendix A1.1)."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter

_PARAGRAPHS = re.compile("\n{2,}")
_LINES = re.compile("\n+")

# Gopher (arXiv:2112.11446), appendix A1.1, table A1: a document is dropped if more than this fraction repeats.
GOPHER_LIMITS = {
    "gopher_duplicate_lines": 0.30,
    "gopher_duplicate_paragraphs": 0.30,
    "gopher_duplicate_line_characters": 0.20,
    "gopher_duplicate_paragraph_characters": 0.20,
    "gopher_top_2_gram": 0.20,
    "gopher_top_3_gram": 0.18,
    "gopher_top_4_gram": 0.16,
    "gopher_duplicate_5_grams": 0.15,
    "gopher_duplicate_6_grams": 0.14,
    "gopher_duplicate_7_grams": 0.13,
    "gopher_duplicate_8_grams": 0.12,
    "gopher_duplicate_9_grams": 0.11,
    "gopher_duplicate_10_grams": 0.10,
}


def measure_repeated_lines(text: str) -> float:
    """Return the fraction, in [0, 1], of non-blank lines of `text` that repeat an earlier line; white space at either
    end of a line is ignored.
    """
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def count_duplicates(items: Sequence[str]) -> tuple[int, int]:
    """Count the items of `items` (lines or paragraphs) that repeat an earlier item; return (number of these items,
    number of their characters)."""
    seen = set(items)
    if len(seen) == len(items):
        return 0, 0
    return len(items) - len(seen), sum(map(len, items)) - sum(map(len, seen))


def check_gopher_repetition(text: str) -> tuple[str, str] | None:
    """Apply the repetition rules of Gopher's table A1 to a text; returns (name of the first rule that it violates,
    measured value as text), or None if it passes.
    """
    for rule, share in _measure_repetition(text):
        if share > GOPHER_LIMITS[rule]:
            return rule, f"{share:.2f} > {GOPHER_LIMITS[rule]:.2f}"
    return None


def _measure_repetition(text: str) -> Iterator[tuple[str, float]]:
    """Yield (rule name, repeated fraction in [0, 1]) for each rule of Gopher's table A1: the fraction of the text's
    paragraphs, lines or characters that are repetitions.
    """
    if not text.strip():
        return
    for kind, parts in (("paragraph", _PARAGRAPHS.split(text.strip())), ("line", _LINES.split(text))):
        count, characters = count_duplicates(parts)
        yield f"gopher_duplicate_{kind}s", count / len(parts)
        yield f"gopher_duplicate_{kind}_characters", characters / len(text)
    yield from ((rule, characters / len(text)) for rule, characters in count_repeated_ngrams(text.split()))


def count_repeated_ngrams(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield (rule name, number of repeated characters) for the word n-grams of each n from 2 to 10, as Gopher's rules
    count them. words: the text's words in order.

    For n <= 4: characters in all occurrences of the most frequent n-gram, 0 if no n-gram occurs twice. For n >= 5:
    characters in n-grams that occurred earlier in the text; a character in several such n-grams counts once.
    """
    # A repeated n-gram begins with a repeated (n - 1)-gram: few positions remain after the first count.
    places: Sequence[int] = range(len(words))
    for n in range(2, 11):
        places = places[: bisect.bisect_right(places, len(words) - n)]
        if n == 2:
            runs: list[tuple[str, ...]] = list(itertools.pairwise(words))
        else:
            runs = [tuple(words[place : place + n]) for place in places]
        counts = Counter(runs)
        if len(counts) < len(runs):
            repeated = [(place, run) for place, run in zip(places, runs, strict=True) if counts[run] > 1]
        else:
            repeated = []
        if n <= 4:
            run, most = max(((run, counts[run]) for _, run in repeated), key=itemgetter(1), default=((), 0))
            yield f"gopher_top_{n}_gram", most * (sum(map(len, run)) + n - 1)
        else:
            yield f"gopher_duplicate_{n}_grams", _count_repeated_characters(words, repeated, n)
        places = [place for place, _ in repeated]


def _count_repeated_characters(words: Sequence[str], runs: list[tuple[int, tuple[str, ...]]], n: int) -> int:
    """Count the characters of the words that are part of an n-gram which occurred earlier in the text; each word counts
    once.

    words: the text's words in order. runs: (index of its first word, n-gram) of each n-gram that occurs more than once,
    in order.
    """
    seen: set[tuple[str, ...]] = set()
    characters = end = 0  # end: of the words counted so far
    for place, run in runs:
        if run in seen:
            characters += sum(map(len, words[max(place, end) : place + n]))
            end = place + n
        else:
            seen.add(run)
    return characters
