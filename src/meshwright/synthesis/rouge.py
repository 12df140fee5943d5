"""ROUGE-L between short texts (Lin, ROUGE, 2004, section 3): the longest common subsequence of their words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

# Han, kana and Hangul syllables, Thai, Lao, Khmer: written without spaces, or nearly; every character is a word.
_OWN_WORD = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_OWN_WORD}]|[^\W_{_OWN_WORD}]+")


def words(text: str) -> list[str]:
    """The lower-case words of a text, without punctuation."""
    return _WORD.findall(text.lower())


def rouge_l(first: Sequence[str], second: Sequence[str]) -> float:
    """The F measure of ROUGE-L, precision and recall alike: 2 × common / (words of both); 0 where one is empty."""
    total = len(first) + len(second)
    return 2 * _common(first, second) / total if first and second else 0.0


class Pool:
    """Texts that a new one is compared with."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[tuple[list[str], Counter[str]]] = []
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        split = words(text)
        self._texts.append((split, Counter(split)))

    def is_like(self, text: str, threshold: float) -> bool:
        """Whether the ROUGE-L of `text` and one of the texts is `threshold` or more."""
        split = words(text)
        counts = Counter(split)
        for other, other_counts in self._texts:
            # A common subsequence has no more words than both hold in any order: most texts are told apart by that.
            most = sum(min(count, other_counts[word]) for word, count in counts.items() if word in other_counts)
            if 2 * most >= threshold * (len(split) + len(other)) and rouge_l(split, other) >= threshold:
                return True
        return False


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0  # what stood one row up, one to the left
        for place, other in enumerate(second, 1):
            here = row[place]
            row[place] = before + 1 if word == other else max(here, row[place - 1])
            before = here
    return row[-1]
