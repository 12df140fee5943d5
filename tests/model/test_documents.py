"""Where documents begin, and what follows from it."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.model.documents import Documents

CPU = torch.device("cpu")


def test_positions_restart_with_each_document():
    documents = Documents.from_ids(np.array([[5, 5, 5, 9, 9], [1, 2, 3, 3, 3]], dtype=np.int32))
    assert documents.starts_BS.tolist() == [[0, 0, 0, 3, 3], [0, 1, 2, 2, 2]]
    assert documents.positions_BS().tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]


def test_a_number_that_comes_back_is_another_document():
    assert Documents.from_ids(torch.tensor([[1, 2, 1]])).starts_BS.tolist() == [[0, 1, 2]]


def test_rows_of_one_document_each_take_the_fast_path():
    documents = Documents.from_ids(torch.tensor([[3, 3, 3], [4, 4, 4]]))
    assert documents.starts_BS is None
    assert documents.positions_BS() is None
    assert documents.first_visible_BS(3, None, CPU) is None
    assert documents.to("meta") is documents


def test_starts_and_ids_say_the_same():
    by_start = Documents.from_starts([[0, 3], [1, 2]], sequence=5)
    by_id = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]))
    assert torch.equal(by_start.starts_BS, by_id.starts_BS)
    assert Documents.from_starts([[0], []], sequence=5).starts_BS is None


def test_a_window_hides_what_a_document_would_show():
    documents = Documents.from_ids(torch.tensor([[0, 0, 0, 0, 1, 1]]))
    assert documents.first_visible_BS(6, 2, CPU).tolist() == [[0, 0, 1, 2, 4, 4]]
    assert Documents().first_visible_BS(6, 2, CPU).tolist() == [[0, 0, 1, 2, 3, 4]]
    assert Documents().first_visible_BS(6, 6, CPU) is None  # as wide as the row
