"""Exercise 4, ZeRO: every rank has the whole model, but gradients and optimizer state of only a part of it.

    meshwright run --emulate 4 --check examples/exercises/zero.py     # against one device
    meshwright run --emulate 4 --show examples/exercises/zero.py      # each communication call

ZeRO stage 2 (Rajbhandari et al., arXiv 1910.02054): gradients are reduce-scattered, each rank clips and updates its
shard of the parameters with its shard of the momentum, and the parameters are all-gathered. There is one mistake in
`distributed()`.

Task: find it, and make the ranks compute what one device computes. The weights end up equal on all ranks: that alone
does not make them right.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH, STEPS, LEARNING_RATE, MOMENTUM, CLIP = 8, 8, 2, 0.5, 0.9, 0.1


def build() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return the model, the batch and the targets, equal on every rank."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 4))  # 160 parameters
    return model, torch.randn(ROWS, WIDTH), torch.randn(ROWS, 4)


def flatten(tensors: Any) -> torch.Tensor:
    """Return all elements of the tensors as one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def write_parameters(model: nn.Sequential, flat: torch.Tensor) -> None:
    """Copy a vector into the parameters."""
    nn.utils.vector_to_parameters(flat, model.parameters())


def one_device() -> dict[str, torch.Tensor]:
    """Train on one device; names in the order of computation."""
    model, x, y = build()
    weights = flatten(model.parameters())
    momentum, results = torch.zeros_like(weights), {}
    for step in range(1, STEPS + 1):
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        gradient = flatten(p.grad for p in model.parameters())
        results[f"step {step}: gradient"] = gradient
        momentum = MOMENTUM * momentum + gradient * min(1.0, CLIP / gradient.norm().item())
        results[f"step {step}: momentum"] = momentum
        weights = weights - LEARNING_RATE * momentum
        write_parameters(model, weights)
        results[f"step {step}: weights"] = weights
    return results


def distributed() -> dict[str, Any]:
    """Train on every rank; a shard goes with its index in the whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ROWS % ranks:
        sys.exit(f"this exercise takes a number of ranks that divides its batch of {ROWS}: 2, 4 or 8")
    model, x, y = build()
    x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    weights = flatten(model.parameters())
    size = weights.numel() // ranks
    mine = slice(rank * size, (rank + 1) * size)
    momentum, results = torch.zeros(size), {}

    for step in range(1, STEPS + 1):
        model.zero_grad()
        ((model(x) - y).square().mean() / ranks).backward()
        shard = torch.empty(size)
        dist.reduce_scatter_single(shard, flatten(p.grad for p in model.parameters()))
        results[f"step {step}: gradient"] = (shard, mine)

        momentum = MOMENTUM * momentum + shard * min(1.0, CLIP / shard.norm().item())
        results[f"step {step}: momentum"] = (momentum, mine)

        updated = weights[mine] - LEARNING_RATE * momentum
        weights = torch.empty_like(weights)
        dist.all_gather_single(weights, updated)
        write_parameters(model, weights)
        results[f"step {step}: weights"] = weights
    return results


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found, right = distributed()[f"step {STEPS}: weights"], one_device()[f"step {STEPS}: weights"]
    print(f"distance of the weights to one device's: {(found - right).norm().item():.2e}")
    dist.destroy_process_group()
