"""Compiled block with split backward: weight gradients are queued, and the backward returns the products' inputs and
output gradients instead (`model/weight_gradients.py`); some of these are saved activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, INPUT_GRADIENT, CompiledBlock
from meshwright.planner.memory.compiled_layers import block_of
from meshwright.planner.memory.compiled_peaks import COLLECTED, alike, extras_of, forward_held
from meshwright.planner.memory.inductor import Kernel, KernelMemory, highest
from meshwright.planner.memory.tensors import Temporary

PRODUCTS = "mlp.down", "mlp.up", "attention.output", "attention.qkv"
"""In the order in which their weight gradients are asked for."""


def pairs(block: CompiledBlock) -> dict[str, tuple[str, str]]:
    """Return, for each linear layer such as "mlp.up", the names of its input and its output's gradient: the tensors
    that its queued (deferred) weight gradient needs.

    The gradient of the last product is the block's output gradient, unless a rank holds only a slice of that.
    """
    down, output = GRADIENT, "gradient between"
    if block.gathers:
        down, output = "mlp.down.product.gradient", "attention.output.product.gradient"
    gradients = down, "mlp.up.output.gradient", output, "attention.qkv.output.gradient"
    return {name: (f"{name}.input", made) for name, made in zip(PRODUCTS, gradients, strict=True)}


def queued_bytes(at: MicroBatch, layer: int, x: int) -> int:
    """Return the bytes that the queued (deferred) weight gradients of a compiled layer keep allocated. at: sizes and
    settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's element."""
    block = block_of(at, layer, x)
    return sum(block.bytes(name) for pair in pairs(block).values() for name in pair)


def split_backward_extras(
    at: MicroBatch, layer: int, x: int, arrived: frozenset[str], at_once: bool, fused: bool
) -> Iterator[tuple[str, list[Temporary]]]:
    """Yield (snapshot name, temporary tensors) for a compiled layer's backward that queues its weight gradients.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element; arrived: names of gradients that another pipeline stage sent; at_once: the weight gradients are computed
    right after it; fused: the matrix products accumulate them into the gradient sums themselves.
    """
    for name, held in _backward(at, alike(at, layer), x, arrived, at_once, fused):
        yield name, list(extras_of(held, f"layers.{layer}"))


@lru_cache(maxsize=64)
def _backward(
    at: MicroBatch, layer: int, x: int, arrived: frozenset[str], at_once: bool, fused: bool
) -> list[tuple[str, KernelMemory]]:
    """Return (snapshot name, memory) for the memory snapshots of a compiled backward that queues its weight gradients.

    arrived: names of gradients that another pipeline stage sent; at_once: the weight gradients are computed right after
    it; fused: the matrix products accumulate them into the gradient sums themselves.
    """
    block = block_of(at, layer, x)
    found = []
    kernels = list(split_backward(block))
    kept = {name: block.bytes(name) for name in block.kept()}
    stays = {INPUT_GRADIENT, *(name for pair in pairs(block).values() for name in pair)}
    given = {name: block.bytes(name) for name in (INPUT, GRADIENT) if name not in arrived}
    gradient = Temporary("activations", GRADIENT, block.bytes(GRADIENT))
    again = block.again == "full"
    made_again = {name: Temporary("activations", name, size) for name, size in kept.items()} if again else {}
    if again:
        held = forward_held(at, layer, x)
        found.append((".forward again", KernelMemory(held.name, held.buffers, 0, (*held.inside, gradient))))
    held = highest(kernels, given | kept, stays)
    inside = (*held.inside, gradient, *made_again.values())
    found.append((f".{held.name}", KernelMemory(held.name, held.buffers, held.gone, inside)))
    made = {each.name: each for kernel in kernels for each in kernel.makes if each.name in stays}
    gone = 0 if again else sum(size for name, size in kept.items() if name not in stays)
    left = [each for name, each in made_again.items() if name in stays]
    if GRADIENT in arrived or GRADIENT in stays:
        left.append(gradient)
    if at_once and not fused:
        left.append(Temporary("workspace", "weight gradient", _products(block)))
    found.append((COLLECTED, KernelMemory(COLLECTED, made, gone + given.get(INPUT, 0), tuple(left))))
    return found


def _products(block: CompiledBlock) -> int:
    """Return the peak bytes of computing the queued weight gradients one after another: each result less the inputs
    that the products before it freed."""
    most = used = 0
    for name, pair in pairs(block).items():
        most = max(most, block.bytes(f"weight gradient of {name.rpartition('.')[2]}") - used)
        used += sum(block.bytes(each) for each in pair if each != GRADIENT)
    return most


def split_backward(block: CompiledBlock) -> Iterator[Kernel]:
    """Yield the kernels of a compiled block's backward, in order, except those of weight gradients."""
    for kernel in block.backward():
        if not kernel.name.startswith("weight gradient"):
            yield kernel
