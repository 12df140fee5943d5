"""Document boundaries in packed sequences: positions and masks."""

from __future__ import annotations

import numpy as np
import torch

from bench.shared.packed_documents import documents_from_starts
from meshwright.model.documents import Documents

CPU = torch.device("cpu")


def test_positions_restart_with_each_document():
    documents = Documents.from_ids(np.array([[5, 5, 5, 9, 9], [1, 2, 3, 3, 3]], dtype=np.int32))
    assert documents.starts_BS.tolist() == [[0, 0, 0, 3, 3], [0, 1, 2, 2, 2]]
    assert documents.positions_BS().tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]


def test_repeated_document_id_starts_another_document():
    assert Documents.from_ids(torch.tensor([[1, 2, 1]])).starts_BS.tolist() == [[0, 1, 2]]


def test_single_document_rows_use_fast_path():
    documents = Documents.from_ids(torch.tensor([[3, 3, 3], [4, 4, 4]]))
    assert documents.starts_BS is None
    assert documents.positions_BS() is None
    assert documents.first_visible_BS(3, None, CPU) is None
    assert documents.to("meta") == documents


def test_document_starts_and_ids_are_equivalent():
    by_start = documents_from_starts([[0, 3], [1, 2]], sequence=5)
    by_id = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]))
    assert torch.equal(by_start.starts_BS, by_id.starts_BS)
    assert documents_from_starts([[0], []], sequence=5).starts_BS is None


def test_window_masks_tokens_within_document():
    documents = Documents.from_ids(torch.tensor([[0, 0, 0, 0, 1, 1]]))
    assert documents.first_visible_BS(6, 2, CPU).tolist() == [[0, 0, 1, 2, 4, 4]]
    assert Documents().first_visible_BS(6, 2, CPU).tolist() == [[0, 0, 1, 2, 3, 4]]
    assert Documents().first_visible_BS(6, 6, CPU) is None  # as wide as the sequence
