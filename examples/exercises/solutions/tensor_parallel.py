"""Solution of exercise 3: the gradient of the block's input is all-reduced in backward.

Each rank's part of the hidden units passes its own share of the gradient to the block's input; the gradient is their
sum. So the identity that enters the block in forward is an all-reduce in backward: Megatron-LM's f, the conjugate of g,
which leaves it. Gradients inside the block are whole without it, so only what lies before the block goes wrong.
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


class CopyToRanks(torch.autograd.Function):
    """Entry of a tensor-parallel block: forward passes the input on, backward all-reduces the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients over ranks."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


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

    hidden = torch.relu(CopyToRanks.apply(embedding(x)) @ up)
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
