"""Published quality filters for web pages in prose: Gopher, C4 and FineWeb, one named rule per criterion."""

from __future__ import annotations

import re

from meshwright.data.cleaning.repetition import GOPHER_LIMITS, check_gopher_repetition, count_duplicates

Finding = tuple[str, str]  # the rule that drops a document, and what it measured

# Gopher (arXiv:2112.11446), appendix A1.1, "Quality filtering".
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))  # at least two of them
_WORDS = (50, 100_000)
_MEAN_WORD = (3, 10)  # characters
_SYMBOLS_PER_WORD = 0.1  # of "#", and of the ellipsis
_BULLET_LINES = 0.9
_ELLIPSIS_LINES = 0.3
_WORDS_WITH_LETTER = 0.8

# FineWeb (arXiv:2406.17557), section 3.6.
_PUNCTUATED_LINES = 0.12
_DUPLICATED_CHARACTERS = 0.1
_SHORT_LINES, _SHORT_LINE = 0.67, 30  # share, characters

# C4 (arXiv:1910.10683), section 2.2. The policy phrases and the longest word are those of its published code.
_SENTENCES = 3
_WORDS_OF_LINE = 5
_MAX_WORD_CHARACTERS = 1000
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")

_LETTER = re.compile(r"[^\W\d_]")
_ENDS = tuple(".!?｡。．！？‼⁇⁈⁉।॥؟۔።։")  # of sentences, in the scripts that have such marks
_C4_ENDS = (".", "!", "?", '"')
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
# The look-behind and possessive quantifiers keep the time linear in a run of marks.
_SENTENCE = re.compile(r"(?<![.!?。！？])[.!?。！？]++[\"'”’)\]]*+(?=\s|$)")

RULES = {
    "gopher-quality": (
        "gopher_words",
        "gopher_word_length",
        "gopher_symbols",
        "gopher_bullets",
        "gopher_ellipses",
        "gopher_letters",
        "gopher_stop_words",
    ),
    "gopher-repetition": tuple(GOPHER_LIMITS),
    "c4": ("c4_curly_bracket", "c4_lorem_ipsum", "c4_sentences"),
    "fineweb": ("fineweb_punctuation", "fineweb_duplicate_lines", "fineweb_short_lines", "fineweb_newlines"),
}
"""Rules of each family, in the order in which they run; the last is datatrove's alone."""


def check_gopher_quality(text: str) -> Finding | None:
    """Apply Gopher's quality rules to a text; returns (name of the first rule that it violates, measured value as
    text), or None if it passes. Words are separated by white space.
    """
    words = text.split()
    # The paper's words are tokens of prose: marks that stand alone are not counted as words.
    spoken = [word for word in words if word.isalnum() or any(map(str.isalnum, word))]
    if not _WORDS[0] <= len(spoken) <= _WORDS[1]:
        return "gopher_words", f"{len(spoken):,} words"
    mean = sum(map(len, spoken)) / len(spoken)
    if not _MEAN_WORD[0] <= mean <= _MEAN_WORD[1]:
        return "gopher_word_length", f"{mean:.1f} characters per word"
    for symbols in (text.count("#"), text.count("...") + text.count("…")):
        if symbols / len(words) > _SYMBOLS_PER_WORD:
            return "gopher_symbols", f"{symbols / len(words):.2f} per word"
    lines = [line for line in text.split("\n") if line.strip()]
    bullets = sum(line.lstrip().startswith(("•", "-", "*")) for line in lines) / len(lines)
    if bullets > _BULLET_LINES:
        return "gopher_bullets", f"{bullets:.2f} of the lines"
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
    if ellipses > _ELLIPSIS_LINES:
        return "gopher_ellipses", f"{ellipses:.2f} of the lines"
    with_letter = sum(word.isalpha() or _LETTER.search(word) is not None for word in words) / len(words)
    if with_letter < _WORDS_WITH_LETTER:
        return "gopher_letters", f"{with_letter:.2f} of the words"
    found = len(STOP_WORDS.intersection(words))
    if found < 2:
        return "gopher_stop_words", f"{found} stop words"
    return None


def check_c4(text: str) -> Finding | None:
    """Apply C4's page rules to a text whose lines `filter_c4_lines` filtered; returns (name of the first rule that it
    violates, measured value as text), or None if it passes.
    """
    if "{" in text:
        return "c4_curly_bracket", "contains {"
    if "lorem ipsum" in text.lower():
        return "c4_lorem_ipsum", "contains lorem ipsum"
    sentences = sum(1 for _ in _SENTENCE.finditer(text))
    if sentences < _SENTENCES:
        return "c4_sentences", f"{sentences} sentences"
    return None


def filter_c4_lines(text: str) -> tuple[str, int]:
    """Apply C4's line filters to `text`; return (kept lines without citation marks such as "[3]", number of non-blank
    lines removed).

    A kept line ends with ".", "!", "?" or a quotation mark but not with an ellipsis. It has at least 5 words, none of
    more than 1000 characters, and mentions neither JavaScript nor a privacy or cookie policy.
    """
    kept, dropped = [], 0
    for line in text.split("\n"):
        line = line.strip()
        if not line:
            continue
        if "[" in line:
            line = CITATION.sub("", line)
        words, lower = line.split(), line.lower()
        if (
            line.endswith(_C4_ENDS)
            and not line.endswith("...")
            and len(words) >= _WORDS_OF_LINE
            and "javascript" not in lower
            and not any(phrase in lower for phrase in POLICY)
            and (len(line) <= _MAX_WORD_CHARACTERS or max(map(len, words)) <= _MAX_WORD_CHARACTERS)
        ):
            kept.append(line)
        else:
            dropped += 1
    return "\n".join(kept), dropped


def check_fineweb(text: str) -> Finding | None:
    """Apply the rules that FineWeb added (punctuated line ends, repeated lines, short lines) to a text; returns (name
    of the first rule that it violates, measured value as text), or None if it passes.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "fineweb_punctuation", "no lines"
    punctuated = sum(line.rstrip().endswith(_ENDS) for line in lines) / len(lines)
    if punctuated <= _PUNCTUATED_LINES:
        return "fineweb_punctuation", f"{punctuated:.2f} of the lines"
    duplicated = count_duplicates(lines)[1] / sum(map(len, lines))
    if duplicated >= _DUPLICATED_CHARACTERS:
        return "fineweb_duplicate_lines", f"{duplicated:.2f} of the characters"
    short = sum(len(line) < _SHORT_LINE for line in lines) / len(lines)
    if short >= _SHORT_LINES:
        return "fineweb_short_lines", f"{short:.2f} of the lines"
    return None


CHECKS = {
    "gopher-quality": check_gopher_quality,
    "gopher-repetition": check_gopher_repetition,
    "c4": check_c4,
    "fineweb": check_fineweb,
}
