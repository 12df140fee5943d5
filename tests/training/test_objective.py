"""Objectives: the shares that ranks count add up to the terms of the batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from meshwright.model.documents import Documents, MicroBatch
from meshwright.training.objective import NextToken


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 5), (3, 7)])
def test_shares_of_ranks_with_equal_tokens_sum_to_their_number_in_float64(tp, pp):
    targets = torch.arange(1000).remainder(7).where(torch.arange(1000) % 10 != 0, -100)[None]
    mesh = SimpleNamespace(tp=SimpleNamespace(size=tp), pp=SimpleNamespace(size=pp))
    share = NextToken().terms_share([MicroBatch(targets, targets, Documents())] * 3, mesh)
    assert float(share) * tp * pp == pytest.approx(2700, rel=1e-15)
