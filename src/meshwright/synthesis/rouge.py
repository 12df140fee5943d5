"""ROUGE-L between short texts: longest common subsequence of words (Lin, ROUGE, 2004, section 3)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

# Han, kana and Hangul syllables, Thai, Lao, Khmer: written without spaces, or nearly; every character is a word.
_OWN_WORD = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_OWN_WORD}]|[^\W_{_OWN_WORD}]+")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; in scripts without spaces each character is a
    word.
    """
    return _WORD.findall(text.lower())


def compute_rouge_l(first: Sequence[str], second: Sequence[str]) -> float:
    """Return the ROUGE-L F1, in [0, 1], of the texts `first` and `second`, given as lists of words: 2 × length of the
    longest common subsequence / (sum of both lengths), in words; 0 if either is empty.
    """
    total = len(first) + len(second)
    return 2 * _compute_lcs_length(first, second) / total if first and second else 0.0


class SimilarityPool:
    """Pool of texts with which `has_similar` compares a new text by ROUGE-L (F1 of the longest common subsequence of
    words).
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Start with `texts`."""
        self._texts: list[tuple[list[str], Counter[str]]] = []
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Add a text to the pool, to be compared with later texts."""
        split = split_words(text)
        self._texts.append((split, Counter(split)))

    def has_similar(self, text: str, threshold: float) -> bool:
        """Return True if the ROUGE-L F1 of `text` and any text of the pool is at least `threshold`, in [0, 1]."""
        split = split_words(text)
        counts = Counter(split)
        for other, other_counts in self._texts:
            # A common subsequence has no more words than both hold in any order: this bound rules out most texts.
            most = sum(min(count, other_counts[word]) for word, count in counts.items() if word in other_counts)
            if 2 * most >= threshold * (len(split) + len(other)) and compute_rouge_l(split, other) >= threshold:
                return True
        return False


def _compute_lcs_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of words in the longest common subsequence of the texts `first` and `second`, given as lists of
    words.
    """
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0  # value one row up, one column to the left
        for place, other in enumerate(second, 1):
            here = row[place]
            row[place] = before + 1 if word == other else max(here, row[place - 1])
            before = here
    return row[-1]
