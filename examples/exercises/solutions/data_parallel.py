"""Solution of exercise 1: the sum of the rows' losses, divided by the rows of all ranks.

Ten rows on four ranks are 3, 3, 2 and 2: the mean of the ranks' means weighs a row of a short part more than one of a
long part. With equal parts the mistake does not show, which is why it is common; with tokens that are masked out of the
loss, parts are never equal.
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

    loss = (model(x) - y).square().sum() / ROWS
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    total = loss.detach().clone()
    dist.all_reduce(total)

    update(model)
    return name_results(model, total)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"loss {distributed()['loss'].item():.6f}, on one device {one_device()['loss'].item():.6f}")
    dist.destroy_process_group()
