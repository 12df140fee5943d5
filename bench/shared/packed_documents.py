"""Boundaries of packed documents, given by where they start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.model.documents import Documents


def documents_from_starts(starts: Sequence[Sequence[int]], sequence: int) -> Documents:
    """Boundaries of documents that start at these indices: one ascending list for each sequence of `sequence` tokens.
    Index 0 starts a document even if it is not listed."""
    ids = torch.zeros(len(starts), sequence, dtype=torch.int64)
    for row, places in enumerate(starts):
        assert all(0 <= place < sequence for place in places), (row, places, sequence)
        ids[row, [place for place in places if place]] = 1
    return Documents.from_ids(ids.cumsum(dim=1))
