"""Selective activation checkpointing of functions that are not compiled: saved, modified and discarded results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.parallel.recompute import SAVED, ActivationCheckpointing, discard

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
W = torch.linspace(0, 2, 20, dtype=torch.float64).view(5, 4).requires_grad_()


def checkpoint_by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    make_contexts = partial(create_selective_checkpoint_contexts, list(SAVED))
    return partial(checkpoint, function, use_reentrant=False, context_fn=make_contexts)


CHECKPOINTS = pytest.mark.parametrize(
    "wrap", [ActivationCheckpointing("selective").wrap, checkpoint_by_torch], ids=["ours", "torch"]
)


@CHECKPOINTS
@pytest.mark.parametrize("modified", [False, True])
def test_modified_saved_result_is_an_error_in_backward(wrap: Callable[..., Any], modified: bool):
    y, z = wrap(lambda x: ((y := F.linear(x, W)), y.tanh().square()))(X)
    if modified:
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified in place|mutated"):
            z.sum().backward()
        return
    (gradient,) = torch.autograd.grad(z.sum(), W)
    assert torch.equal(gradient, torch.autograd.grad(F.linear(X, W).tanh().square().sum(), W)[0])


@CHECKPOINTS
def test_result_modified_in_the_checkpointed_function_is_an_error_in_backward(wrap: Callable[..., Any]):
    z = wrap(lambda x: F.linear(x, W).mul_(2).tanh())(X)
    with pytest.raises(RuntimeError, match="modified in place|mutated"):
        z.sum().backward()


def test_earlier_result_can_be_discarded(monkeypatch: pytest.MonkeyPatch):
    """Backward then reads a tensor without values, which deterministic mode fills with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)

    def run(x: torch.Tensor, wasted: bool) -> torch.Tensor:
        first = F.linear(x, W)
        second = F.linear(first.relu(), W.T)
        if wasted:
            discard(first[:, 1:])  # a view
        return second.tanh() * first.square().sum()

    wrapped = ActivationCheckpointing("selective").wrap(run)
    torch.use_deterministic_algorithms(True)
    try:
        right, wrong = (torch.autograd.grad(wrapped(X, wasted).sum(), W)[0] for wasted in (False, True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(right, torch.autograd.grad(run(X, False).sum(), W)[0])
    assert wrong.isnan().all()
