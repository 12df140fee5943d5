"""Exercise 3, tensor parallelism: every rank has a part of the columns of one matrix and of the rows of the next.

    meshwright run --emulate 4 --check examples/exercises/tensor_parallel.py     # against one device
    meshwright run --emulate 4 --show examples/exercises/tensor_parallel.py      # each communication call

An embedding (equal on all ranks), then a feed-forward block: `up` is split by columns, so each rank computes a part of
the hidden units without communication; `down` is split by rows, so the ranks' products are partial sums, which one
all-reduce adds up. (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.) There is one mistake: the output is
right, and training is not.

Task: find it, and make the ranks compute what one device computes. Ask of every tensor in backward: is it whole on
this rank, or one rank's share of a sum?
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH, HIDDEN = 6, 8, 16


class ReduceFromRanks(torch.autograd.Function):
    """Sum of the ranks' partial results: forward all-reduces, backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, which is equal on all ranks."""
        return gradient


def build() -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return embedding, `up` and `down` weights, batch and targets, equal on every rank."""
    torch.manual_seed(3)
    embedding = nn.Linear(WIDTH, WIDTH)
    up = torch.randn(WIDTH, HIDDEN) / WIDTH**0.5
    down = torch.randn(HIDDEN, WIDTH) / HIDDEN**0.5
    return embedding, up, down, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def one_device() -> dict[str, torch.Tensor]:
    """Compute output and gradients on one device; names in the order of computation."""
    embedding, up, down, x, y = build()
    up.requires_grad_()
    down.requires_grad_()
    output = torch.relu(embedding(x) @ up) @ down
    (output - y).square().mean().backward()
    return {
        "output": output.detach(), "gradient of down": down.grad, "gradient of up": up.grad,
        "gradient of embedding.weight": embedding.weight.grad,
    }  # fmt: skip


def distributed() -> dict[str, Any]:
    """Compute output and gradients; a rank's part of a split tensor goes with its index in the whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    embedding, up, down, x, y = build()
    mine = slice(rank * HIDDEN // ranks, (rank + 1) * HIDDEN // ranks)
    up, down = up[:, mine].clone().requires_grad_(), down[mine].clone().requires_grad_()

    hidden = torch.relu(embedding(x) @ up)
    output = ReduceFromRanks.apply(hidden @ down)
    (output - y).square().mean().backward()

    return {
        "output": output.detach(), "gradient of down": (down.grad, mine), "gradient of up": (up.grad, (..., mine)),
        "gradient of embedding.weight": embedding.weight.grad,
    }  # fmt: skip


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found, right = distributed()["gradient of embedding.weight"], one_device()["gradient of embedding.weight"]
    print(f"norm of the embedding's gradient {found.norm().item():.6f}, on one device {right.norm().item():.6f}")
    dist.destroy_process_group()
