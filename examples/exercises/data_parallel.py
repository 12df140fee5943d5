"""Exercise 1, data parallelism: every rank has the whole model and a part of the batch.

    meshwright run --emulate 4 --check examples/exercises/data_parallel.py     # against one device
    meshwright run --emulate 4 examples/exercises/data_parallel.py             # or: torchrun --nproc-per-node 4 ...

One step of training: each rank computes the loss of its part of the batch, the gradients are all-reduced, every rank
makes the same update. The loss is the mean over all rows of the batch. There is one mistake in `distributed()`.

Task: find it, and make the ranks compute what one device computes. The batch has 10 rows: look at who has how many.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH, LEARNING_RATE = 10, 8, 0.1


def build() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return the model, the batch and the targets, equal on every rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(ROWS, WIDTH)
    return model, x, x.square().sum(dim=1, keepdim=True) / WIDTH


def update(model: nn.Sequential) -> None:
    """Make one step of SGD."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LEARNING_RATE * parameter.grad


def name_results(model: nn.Sequential, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is compared, in the order of computation: backward computes the last layer's gradient first."""
    gradients = {f"gradient of {name}": p.grad for name, p in reversed(list(model.named_parameters()))}
    return {"loss": loss.detach(), **gradients, **{name: p.detach() for name, p in model.named_parameters()}}


def one_device() -> dict[str, torch.Tensor]:
    """Train one step on one device."""
    model, x, y = build()
    loss = (model(x) - y).square().mean()
    loss.backward()
    update(model)
    return name_results(model, loss)


def distributed() -> dict[str, torch.Tensor]:
    """Train one step on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, x, y = build()
    x, y = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]

    loss = (model(x) - y).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    total = loss.detach().clone()
    dist.all_reduce(total)
    total /= ranks

    update(model)
    return name_results(model, total)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"loss {distributed()['loss'].item():.6f}, on one device {one_device()['loss'].item():.6f}")
    dist.destroy_process_group()
