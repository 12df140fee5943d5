"""Solution of exercise 2: all stages go backward in the same order of micro-batches.

Messages between two ranks carry no name: the n-th receive gets what the n-th send sent. The last stage went backward
from micro-batch 0, the others from the last one, so that they applied the gradients of one micro-batch to the
activations of another. All have the same shape, so nothing fails. A schedule is one program of all ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

LAYERS, ROWS, WIDTH, MICRO_BATCHES = 4, 8, 6, 4


def build() -> tuple[list[nn.Linear], torch.Tensor, torch.Tensor]:
    """Return the layers, the batch and the targets, equal on every rank."""
    torch.manual_seed(2)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's share of the loss, the mean over the whole batch."""
    return (outputs - targets).square().sum() / (ROWS * WIDTH)


def one_device() -> dict[str, torch.Tensor]:
    """Compute loss and gradients on one device; names in the order of computation, backward last layer first."""
    layers, x, y = build()
    for layer in layers:
        x = torch.tanh(layer(x))
    loss = loss_of(x, y)
    loss.backward()
    gradients = {f"gradient of layers.{n}.weight": layers[n].weight.grad for n in reversed(range(LAYERS))}
    return {"loss": loss.detach(), **gradients}


def distributed() -> dict[str, torch.Tensor]:
    """Compute loss and gradients, each rank those of its layer."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if last + 1 != LAYERS:
        sys.exit(f"this exercise takes {LAYERS} ranks, one for each layer: meshwright run --emulate {LAYERS}")
    layers, x, y = build()
    layer, xs, ys = layers[rank], x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)
    loss = torch.zeros(())
    inputs, outputs = [], []

    for m in range(MICRO_BATCHES):
        received = xs[m].clone()
        if rank > 0:
            dist.recv(received, src=rank - 1)
        inputs.append(received.requires_grad_(rank > 0))
        outputs.append(torch.tanh(layer(inputs[m])))
        if rank < last:
            dist.send(outputs[m].detach(), dst=rank + 1)

    for m in reversed(range(MICRO_BATCHES)):
        if rank == last:
            share = loss_of(outputs[m], ys[m])
            loss += share.detach()
            share.backward()
        else:
            gradient = torch.empty_like(outputs[m])
            dist.recv(gradient, src=rank + 1)
            outputs[m].backward(gradient)
        if rank > 0:
            dist.send(inputs[m].grad, dst=rank - 1)

    results = {f"gradient of layers.{rank}.weight": layer.weight.grad}
    return {"loss": loss, **results} if rank == last else results


if __name__ == "__main__":
    dist.init_process_group("gloo")
    right = one_device()
    for name, tensor in distributed().items():
        print(f"{name}: norm {tensor.norm().item():.6f}, on one device {right[name].norm().item():.6f}")
    dist.destroy_process_group()
