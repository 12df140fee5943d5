"""Token marks of records, one byte per token: whether the token is a target of the loss, and the role of the turn that
it is part of.

Bit 0 is 1 for a target of the loss; bits 1 to 6 hold the index in `AUTHORS` of the turn's role; bit 7 is 1 for the
tokens of an undesirable response (KTO)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.names import ROLES

TRAINED_BIT = 1
UNDESIRABLE_BIT = 128
_AUTHOR_BITS = 126
AUTHORS = ("template", *ROLES)  # "template": text between turns, such as a default system prompt


def author_bits(role: str) -> int:
    """Return the bits of a token mark that store `role`, the role of the token's turn, such as "user": its index in
    `AUTHORS`, shifted left by one bit."""
    return AUTHORS.index(role) << 1


def author_of(marks: Any) -> Any:
    """Extract from a token mark, or an array of marks, the index in `AUTHORS` of the turn's role."""
    return (marks & _AUTHOR_BITS) >> 1


def iterate_runs(marks: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Split `marks` [tokens] into ranges of equal marks, as long as possible, and yield them as [begin,
    end) in order.
    """
    changes = np.flatnonzero(np.diff(marks)) + 1
    return pairwise([0, *changes.tolist(), len(marks)]) if len(marks) else iter(())


def count_marks(marks: NDArray[np.uint8], begins: NDArray[np.int64]) -> dict[str, Any]:
    """Count turns, trained spans and tokens by role. Returns {"spans": number of ranges of consecutive trained tokens,
    "turns": {role: number of turns}, "tokens": {author: number of tokens}, "trained_tokens": {author: number of trained
    tokens}}. An author is a role, or "template" for text between turns; only those that occur are listed.

    marks: [tokens] of documents one after another. begins: index at which each document begins, ascending.
    """
    trained, authors = marks & TRAINED_BIT != 0, author_of(marks)
    starts = np.zeros(len(marks), bool)
    starts[begins[begins < len(marks)]] = True
    changes = starts[1:] | (authors[1:] != authors[:-1])
    first_of_turn = np.append(starts[:1], changes) & (authors != 0)
    first_of_span = np.append(starts[:1], starts[1:] | ~trained[:-1]) & trained

    def count_by_author(which: NDArray[np.bool_]) -> dict[str, int]:
        """Count the tokens selected by the mask `which` [tokens] by role."""
        counts = np.bincount(authors[which], minlength=len(AUTHORS)).tolist()
        return {author: count for author, count in zip(AUTHORS, counts, strict=True) if count}

    return {
        "spans": int(first_of_span.sum()),
        "turns": count_by_author(first_of_turn),
        "tokens": count_by_author(np.ones(len(marks), bool)),
        "trained_tokens": count_by_author(trained),
    }
