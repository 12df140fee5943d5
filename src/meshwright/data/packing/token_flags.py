"""Token flags of records: one byte per token, which marks targets of the loss and stores the role of the token's turn.

Bit 0 is 1 for a target of the loss; bits 1 to 6 hold the index in `AUTHORS` of the turn's role; bit 7 is 1 for the
tokens of an undesirable response (KTO).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.names import ROLES

TRAINED_BIT = 1
UNDESIRABLE_BIT = 128
_ROLE_BITS = 126
AUTHORS = ("template", *ROLES)  # "template": text between turns, such as a default system prompt


def encode_role(role: str) -> int:
    """Return the bits of a token flag that store the role of the token's turn: the index of `role`, such as "user", in
    `AUTHORS`, shifted left by one bit. (The lowest bit marks targets of the loss.)"""
    return AUTHORS.index(role) << 1


def extract_role_index(flags: Any) -> Any:
    """Return the index in `AUTHORS` of the role that token flags store. flags: the flags of one token, or an array of
    any shape."""
    return (flags & _ROLE_BITS) >> 1


def iterate_runs(flags: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield the range [begin, end) of each run of equal values in `flags` [tokens], in order."""
    changes = np.flatnonzero(np.diff(flags)) + 1
    return pairwise([0, *changes.tolist(), len(flags)]) if len(flags) else iter(())


def count_by_role(flags: NDArray[np.uint8], begins: NDArray[np.int64]) -> dict[str, Any]:
    """Count turns, trained spans and tokens by role. Return {"spans": number of runs of consecutive trained tokens,
    "turns": {role: number of turns}, "tokens": {role: number of tokens}, "trained_tokens": {role: number of trained
    tokens}}. The role "template" stands for text between turns; only roles that occur are listed.

    flags: uint8 [tokens], flags of documents one after another. begins: index at which each document begins, ascending.
    """
    trained, authors = flags & TRAINED_BIT != 0, extract_role_index(flags)
    starts = np.zeros(len(flags), bool)
    starts[begins[begins < len(flags)]] = True
    changes = starts[1:] | (authors[1:] != authors[:-1])
    first_of_turn = np.append(starts[:1], changes) & (authors != 0)
    first_of_span = np.append(starts[:1], starts[1:] | ~trained[:-1]) & trained

    def count_tokens(which: NDArray[np.bool_]) -> dict[str, int]:
        """Count the tokens selected by the mask `which` [tokens] by role."""
        counts = np.bincount(authors[which], minlength=len(AUTHORS)).tolist()
        return {author: count for author, count in zip(AUTHORS, counts, strict=True) if count}

    return {
        "spans": int(first_of_span.sum()),
        "turns": count_tokens(first_of_turn),
        "tokens": count_tokens(np.ones(len(flags), bool)),
        "trained_tokens": count_tokens(trained),
    }
