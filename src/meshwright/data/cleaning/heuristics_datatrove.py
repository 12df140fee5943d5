"""The heuristics with the defaults of datatrove 0.10, which differ from the papers': its thresholds, and spaCy's words.

https://github.com/huggingface/datatrove, src/datatrove/pipeline/filters, for English.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from meshwright.data.cleaning.heuristics import CITATION, POLICY, STOP_WORDS, Finding
from meshwright.data.cleaning.repetition import GOPHER_LIMITS, count_duplicates
from meshwright.errors import UserError

# Unicode's characters that end sentences (Sentence_Terminal).
_TERMINAL = (
    "!.?\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u104a"
    "\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u17d6\u17d9\u17da\u1803\u1809\u1944\u1945\u1aa8"
    "\u1aa9\u1aaa\u1aab\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d\u1b7e\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047\u2048"
    "\u2049\u2e2e\u2e3c\u2e53\u2e54\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8"
    "\ua9c9\uaa5d\uaa5e\uaa5f\uaaf0\uaaf1\uabeb\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61\U00010a56\U00010a57"
    "\U00010f55\U00010f56\U00010f57\U00010f58\U00010f59\U00010f86\U00010f87\U00010f88\U00010f89\U00011047"
    "\U00011048\U000110be\U000110bf\U000110c0\U000110c1\U00011141\U00011142\U00011143\U000111c5\U000111c6"
    "\U000111cd\U000111de\U000111df\U00011238\U00011239\U0001123b\U0001123c\U000112a9\U0001144b\U0001144c"
    "\U000115c2\U000115c3\U000115c9\U000115ca\U000115cb\U000115cc\U000115cd\U000115ce\U000115cf\U000115d0"
    "\U000115d1\U000115d2\U000115d3\U000115d4\U000115d5\U000115d6\U000115d7\U00011641\U00011642\U0001173c"
    "\U0001173d\U0001173e\U00011944\U00011946\U00011a42\U00011a43\U00011a9b\U00011a9c\U00011c41\U00011c42"
    "\U00011ef7\U00011ef8\U00011f43\U00011f44\U00016a6e\U00016a6f\U00016af5\U00016b37\U00016b38\U00016b44"
    "\U00016e98\U0001bc9f\U0001da88"
)
_PUNCTUATION = frozenset(
    "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»"
    + "".join(map(chr, (*range(9), 11, 12, *range(13, 32), *range(127, 160))))
    + _TERMINAL
)
_C4_ENDS = (".", "?", "!", '"', "'")
_SENTENCES, _WORDS_OF_LINE, _MAX_WORD_CHARACTERS = 5, 3, 1000
_PUNCTUATED_LINES, _DUPLICATED_CHARACTERS, _LINES_PER_WORD = 0.12, 0.01, 0.3
_SHORT_LINES, _SHORT_LINE = 0.67, 30  # share, characters
_PARAGRAPHS, _LINES = re.compile("\n{2,}"), re.compile("\n+")


@cache
def load_spacy() -> Any:
    """Load spaCy's English tokenizer with rules for sentence ends; it needs no model. Raises `UserError` if spaCy is
    not installed.
    """
    try:
        spacy = import_module("spacy")
    except ImportError:
        raise UserError(
            "data.clean.heuristics_like: datatrove's words need spaCy: run `pip install 'meshwright[spacy]'`, or set "
            'it to "papers"'
        ) from None
    tokenizer = spacy.blank("en")
    tokenizer.add_pipe("sentencizer")
    return tokenizer


def split_words(text: str) -> list[str]:
    """Split a text into words as datatrove does: spaCy's tokens without white space."""
    with _parse_with_spacy(text) as parsed:
        return [word for token in parsed if (word := token.text.strip())]


def count_sentences(text: str) -> int:
    """Count the sentences of a text by spaCy's rules."""
    with _parse_with_spacy(text) as parsed:
        return sum(1 for _ in parsed.sents)


@contextmanager
def _parse_with_spacy(text: str) -> Iterator[Any]:
    """Context manager that yields spaCy's `Doc` of a text; the strings that spaCy interned for it are freed at the
    end."""
    tokenizer = load_spacy()
    with tokenizer.memory_zone():
        tokenizer.max_length = len(text) + 10
        try:
            parsed = tokenizer(text)
        except Exception:  # spaCy fails on the name of its attribute, as datatrove's authors found
            parsed = tokenizer(text.replace("IS_ALPHA", ""))
        yield parsed


def check_gopher_quality(text: str) -> Finding | None:
    """Apply datatrove's `GopherQualityFilter` to a text; return (name of the first violated rule, measured value), or
    None if it passes."""
    words = split_words(text)
    spoken = [word for word in words if not _PUNCTUATION.issuperset(word)]
    if not 50 <= len(spoken) <= 100_000:
        return "gopher_words", f"{len(spoken):,} words"
    mean = sum(map(len, spoken)) / len(spoken)
    if not 3 <= mean <= 10:
        return "gopher_word_length", f"{mean:.1f} characters per word"
    for symbols in (text.count("#"), text.count("...") + text.count("…")):
        if symbols / len(words) > 0.1:
            return "gopher_symbols", f"{symbols / len(words):.2f} per word"
    lines = text.splitlines()  # blank ones, too
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
    if bullets > 0.9:
        return "gopher_bullets", f"{bullets:.2f} of the lines"
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
    if ellipses > 0.3:
        return "gopher_ellipses", f"{ellipses:.2f} of the lines"
    letters = sum(any(map(str.isalpha, word)) for word in words) / len(words)
    if letters < 0.8:
        return "gopher_letters", f"{letters:.2f} of the words"
    found = len(STOP_WORDS.intersection(words))
    return ("gopher_stop_words", f"{found} stop words") if found < 2 else None


def check_gopher_repetition(text: str) -> Finding | None:
    """Apply datatrove's `GopherRepetitionFilter` to a text; return (name of the first violated rule, measured value),
    or None if it passes."""
    shares: dict[str, float] = {}
    for kind, parts in (("paragraph", _PARAGRAPHS.split(text.strip())), ("line", _LINES.split(text))):
        count, characters = count_duplicates(parts)
        shares[f"gopher_duplicate_{kind}s"] = count / len(parts)
        shares[f"gopher_duplicate_{kind}_characters"] = characters / len(text)
    words = split_words(text)
    for n in (2, 3, 4):  # the most frequent n-gram counts even if it occurs once
        if ngrams := Counter(" ".join(words[at : at + n]) for at in range(len(words) - n + 1)):
            ((ngram, count),) = ngrams.most_common(1)
            shares[f"gopher_top_{n}_gram"] = len(ngram) * count / len(text)
    for n in range(5, 11):
        shares[f"gopher_duplicate_{n}_grams"] = _count_repeated_characters(words, n) / len(text)
    for rule, share in shares.items():
        if share > GOPHER_LIMITS[rule]:
            return rule, f"{share:.2f} > {GOPHER_LIMITS[rule]:.2f}"
    return None


def _count_repeated_characters(words: Sequence[str], n: int) -> int:
    """Count the characters of the word n-grams that occurred earlier in the text. As in datatrove, counted n-grams do
    not overlap: the search continues with the word after a counted n-gram. words: the text's words in order."""
    seen: set[str] = set()
    characters = at = 0
    while at < len(words) - n + 1:
        ngram = "".join(words[at : at + n])
        if ngram in seen:
            characters, at = characters + len(ngram), at + n
        else:
            seen.add(ngram)
            at += 1
    return characters


def filter_c4_lines(text: str) -> tuple[str, int]:
    """Apply the line filters of datatrove's `C4QualityFilter` to `text`; return (kept lines without citation marks,
    number of non-blank lines removed). Lines that make `check_c4` drop the whole page are kept, so that `check_c4`
    finds them.
    """
    kept, dropped = [], 0
    for line in map(str.strip, text.splitlines()):
        words, plain = line.split(), CITATION.sub("", line)
        lower = plain.lower()
        ends = plain.endswith(_C4_ENDS) and not plain.endswith("...") and len(words) >= _WORDS_OF_LINE
        javascript, policy = "javascript" in lower, any(phrase in lower for phrase in POLICY)
        allowed = "lorem ipsum" in lower or (not javascript and ("{" in plain or not policy))
        if ends and allowed and max(map(len, words)) <= _MAX_WORD_CHARACTERS:
            kept.append(plain)
        else:
            dropped += bool(line)
    return "\n".join(kept).strip(), dropped


def check_c4(text: str) -> Finding | None:
    """Apply the page rules of datatrove's `C4QualityFilter` to a text whose lines `filter_c4_lines` filtered; return
    (name of the first rule that it violates, measured value), or None if it passes."""
    for line in text.split("\n"):
        if "lorem ipsum" in line.lower():
            return "c4_lorem_ipsum", "contains lorem ipsum"
        if "{" in line:
            return "c4_curly_bracket", "contains {"
    sentences = sum(map(count_sentences, text.split("\n")))
    return ("c4_sentences", f"{sentences} sentences") if sentences < _SENTENCES else None


def check_fineweb(text: str) -> Finding | None:
    """Apply datatrove's `FineWebQualityFilter` to a text; return (name of the first violated rule, measured value), or
    None if it passes."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "fineweb_punctuation", "no lines"
    punctuated = sum(line.endswith(tuple(_TERMINAL)) for line in lines) / len(lines)
    if punctuated < _PUNCTUATED_LINES:
        return "fineweb_punctuation", f"{punctuated:.2f} of the lines"
    short = sum(len(line) <= _SHORT_LINE for line in lines) / len(lines)
    if short > _SHORT_LINES:
        return "fineweb_short_lines", f"{short:.2f} of the lines"
    duplicated = count_duplicates(lines)[1] / len(text.replace("\n", ""))
    if duplicated > _DUPLICATED_CHARACTERS:
        return "fineweb_duplicate_lines", f"{duplicated:.2f} of the characters"
    newlines = text.count("\n") / len(split_words(text))
    return ("fineweb_newlines", f"{newlines:.2f} per word") if newlines > _LINES_PER_WORD else None


CHECKS = {
    "gopher-quality": check_gopher_quality,
    "gopher-repetition": check_gopher_repetition,
    "c4": check_c4,
    "fineweb": check_fineweb,
}
