"""Splitting of a text into sentences, in time linear in its length."""

from __future__ import annotations

import itertools
import re

# After a mark that ends a sentence and closing quotation marks and parentheses: white space, except after CJK marks.
# Possessive quantifiers and the look-behind keep the time linear in the text.
_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’»)\]]*+\s++|(?<![。！？｡।॥۔።])[。！？｡।॥۔።]++[\"'”’」』)）\]]*+\s*+|\n\s*+")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; each sentence includes the white space after it, so that the joined sentences are
    the text. A line break also ends a sentence. White space at the beginning is part of the first sentence."""
    ends = [found.end() for found in _END.finditer(text)]
    if ends and not text[: ends[0]].strip():
        del ends[0]
    if not ends or ends[-1] < len(text):
        ends.append(len(text))
    return [text[begin:end] for begin, end in itertools.pairwise([0, *ends])] if text.strip() else []
