"""Dropout of adapters: PEFT's mathematics, for a mask of seed, sample, position, layer and feature alone."""

from __future__ import annotations

import pytest
import torch

from meshwright.adapters.dropout import Dropout, TokenKeys, sample_keys
from meshwright.adapters.low_rank import LowRank, Rows
from meshwright.model.documents import Documents
from meshwright.model.layers import Linear

TOKENS, INPUTS = 256, 96


def make_dropout(probability: float, name: str = "layers.0.mlp.up", seed: int = 1) -> Dropout:
    keys = TokenKeys()
    keys.set(Documents(samples_B=sample_keys(seed, torch.arange(4))), TOKENS)
    return Dropout(probability, name, torch.arange(INPUTS), keys)


def mask(dropout: Dropout) -> torch.Tensor:
    assert dropout.tokens.keys_BC is not None
    return dropout.mask(dropout.tokens.keys_BC)


def test_gradients_are_those_of_peft_for_the_mask():
    """PEFT computes lora_B(lora_A(dropout(x))) * scaling, and torch's dropout divides by the kept share."""
    torch.manual_seed(0)
    adapter, layer = LowRank([Rows(0, 5)], INPUTS, 3, 2.0, dtype=torch.float64), Linear(INPUTS, 5, bias=False)
    adapter.dropout = make_dropout(0.25)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, TOKENS, 5, dtype=torch.float64)
    found = torch.autograd.grad(adapter(x, y, layer).square().sum(), [x, *adapter.parameters()])
    dropped = x * mask(adapter.dropout) / (1 - 0.25)
    expected = y + dropped @ adapter.a.T @ adapter.b.T * 2.0
    for mine, theirs in zip(
        found, torch.autograd.grad(expected.square().sum(), [x, adapter.a, adapter.b]), strict=True
    ):
        assert (mine - theirs).norm() <= 1e-12 * theirs.norm()
    with torch.no_grad():
        torch.testing.assert_close(adapter(x, y, layer), y + x @ adapter.a.T @ adapter.b.T * 2.0)


def test_fused_product_of_a_frozen_layer_has_the_same_gradients():
    torch.manual_seed(0)
    adapter = LowRank([Rows(0, 5)], INPUTS, 3, 2.0, dtype=torch.float64)
    layer = Linear(INPUTS, 5, bias=False, dtype=torch.float64).requires_grad_(False)
    adapter.dropout = make_dropout(0.25)
    for parameter in (layer.weight, *adapter.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    found, expected = adapter.adapted_product(x, layer), adapter(x, layer.base_product(x), layer)
    assert "_AdaptedProduct" in type(found.grad_fn).__name__
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(each.square().sum(), [x, *adapter.parameters()]) for each in (found, expected)]
    for mine, theirs in zip(*both, strict=True):
        assert (mine - theirs).norm() <= 1e-12 * theirs.norm()


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_masks_are_independent(probability: float):
    """Kept shares lie within five standard deviations, and neighbouring elements, layers and seeds do not correlate."""
    first = make_dropout(probability)
    kept = mask(first).double()
    assert kept.mean().item() == pytest.approx(1 - probability, abs=5 * (probability / kept.numel()) ** 0.5)
    pairs = [(kept[:, 1:], kept[:, :-1]), (kept[..., 1:], kept[..., :-1]), (kept[1:], kept[:-1])]
    pairs += [(kept, mask(make_dropout(probability, *other)).double()) for other in (("layers.1.mlp.up",), ("x", 2))]
    for one, other in pairs:
        correlation = ((one - one.mean()) * (other - other.mean())).mean() / (one.std() * other.std())
        assert abs(correlation.item()) < 5 / one.numel() ** 0.5
    assert len({tuple(row.tolist()) for row in mask(first).flatten(0, 1)[:, :64]}) > 4 * TOKENS * 0.4


def test_mask_of_context_parallel_rank_is_a_part_of_the_whole():
    dropout = make_dropout(0.5)
    whole, places = mask(dropout), torch.tensor([0, 1, 250, 255])
    dropout.tokens.set(Documents(samples_B=sample_keys(1, torch.arange(2, 4)), indices_C=places), len(places))
    assert torch.equal(mask(dropout), whole[2:, places])
    dropout.tokens.set(Documents(), TOKENS)
    assert not dropout.active
