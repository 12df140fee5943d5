"""Memory peaks inside compiled blocks, in forward and backward, beside their saved activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_examples, layer_kind
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, INPUT_GRADIENT, CompiledBlock
from meshwright.planner.memory.inductor import KernelMemory, find_peak
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, activation, workspace
from meshwright.planner.memory.temporaries import Pass

COLLECTED = ".weight gradients"
"""Snapshot at the end of a compiled backward, which returns all weight gradients of the block together."""

PRODUCTS = "mlp.down", "mlp.up", "attention.output", "attention.qkv"
"""Linear layers in the order in which their queued weight gradients are computed."""


class Backward(NamedTuple):
    """State in which a compiled layer's backward runs.

    arrived: names of gradients that another pipeline stage sent, which stay allocated until the backward ends; queues:
    True if weight gradients are queued, so that the backward returns their operands (`model/weight_gradients.py`);
    at_once: True if the queued weight gradients are computed right after the backward."""

    arrived: frozenset[str] = frozenset()
    queues: bool = False
    at_once: bool = False


def saved_tensors(batch: MicroBatch, layer: int) -> Iterator[SavedTensor]:
    """Yield the activations that a compiled layer's forward saves in addition to its input; none under full recompute.
    Their names are relative to the layer."""
    if batch.layout.recompute != "full":
        block = CompiledBlock(batch, layer)
        yield from map(block.entry, block.saved)


def forward_extras(batch: MicroBatch, layer: int) -> Iterator[Allocation]:
    """Yield the tensors that are allocated at the memory peak of a compiled layer's forward, without its input; tensors
    that it saves for the backward are included."""
    yield from _extras(_forward(batch, _first_equal(batch, layer)), f"layers.{layer}")


def backward_extras(batch: MicroBatch, layer: int, state: Backward) -> Iterator[NamedSnapshot]:
    """Yield (snapshot name, tensors other than saved activations) for the memory snapshots of a compiled layer's
    backward. state: how the backward runs."""
    for name, held in _backward(batch, _first_equal(batch, layer), state):
        yield name, list(_extras(held, f"layers.{layer}"))


def peak_temporaries(batch: MicroBatch, layer: int) -> Number:
    """Return the peak bytes of a compiled layer's temporaries over forward and backward, without weight gradients,
    whose size does not depend on the batch."""
    layer = _first_equal(batch, layer)
    every = (_forward(batch, layer), *(held for _, held in _backward(batch, layer, Backward())))
    return max(
        held.bytes - sum(each.bytes for each in held.buffers.values() if each.category == "gradients") for held in every
    )


def mixture_backward_extras(
    batch: MicroBatch, layer: int, saved: tuple[Sequence[Allocation], Sequence[Allocation]], state: Backward
) -> Iterator[NamedSnapshot]:
    """Yield (snapshot name, temporaries) for the backward of a layer that is compiled except for its expert-parallel
    mixture.

    saved: the layer's saved activations, as a pair (without recompute, with the layout's recompute); state: how the
    backward runs.
    """
    mlp = f"layers.{layer}.mlp"
    whole, here = (sum(each.bytes for each in of if each.name.startswith(f"{mlp}.")) for of in saved)
    again = whole - here
    front = list(backward_extras(batch, layer, state))
    if batch.layout.recompute == "full":
        yield front.pop(0)
        block = CompiledBlock(batch, layer)
        again += sum(map(block.bytes, block.saved))
    for name, extras in Pass.of_layer(batch, layer, saved[0]).snapshots("mixture"):
        yield name, [activation("recomputed", again), *extras]
    for name, extras in front:
        yield name, [*extras, activation(f"{mlp}: freed", -here)]


def queued_bytes(batch: MicroBatch, layer: int) -> int:
    """Return the bytes that a compiled layer's queued weight gradients keep allocated: inputs and output gradients of
    its linear layers."""
    block = CompiledBlock(batch, layer)
    return sum(block.bytes(name) for pair in _operands(block).values() for name in pair)


def _first_equal(batch: MicroBatch, layer: int) -> int:
    """Return the index of the first layer of the same kind as `layer`. Results are cached under this index, once for
    all layers of a kind."""
    return layer_examples(batch.config)[layer_kind(batch.config, layer)]


def _extras(memory: KernelMemory, unit: str) -> Iterator[Allocation]:
    """Yield the tensors that are allocated while a kernel runs, as entries of a memory snapshot. memory: memory during
    the kernel; unit: prefix of the entries' names, such as "layers.3"."""
    for name, each in memory.buffers.items():
        yield Allocation(each.category, f"{unit}.{name}", bytes=each.bytes)
    yield from memory.inside
    if memory.gone:
        yield activation(f"{unit}: freed", -memory.gone)


@lru_cache(maxsize=64)
def _forward(batch: MicroBatch, layer: int) -> KernelMemory:
    """Find the memory peak of a compiled layer's forward; return the memory during the kernel at the peak."""
    block = CompiledBlock(batch, layer)
    return find_peak(block.forward(), {}, {*block.saved, *block.results})


@lru_cache(maxsize=64)
def _backward(batch: MicroBatch, layer: int, state: Backward) -> list[tuple[str, KernelMemory]]:
    """Return (snapshot name, memory) at the peak and at the end of a compiled layer's backward; under full recompute,
    these are preceded by the peak of the recomputed forward. state: how the backward runs."""
    block, found = CompiledBlock(batch, layer), []
    again, kernels = block.recompute == "full", block.backward
    returned = {INPUT_GRADIENT}
    if state.queues:
        kernels = [each for each in kernels if not each.name.startswith("weight gradient")]
        returned |= {name for pair in _operands(block).values() for name in pair}
    else:
        returned |= {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
    saved = {name: block.bytes(name) for name in block.saved}
    given = {name: block.bytes(name) for name in (INPUT, *block.gradients) if name not in state.arrived}
    gradients = tuple(activation(name, block.bytes(name)) for name in block.gradients)
    recomputed = tuple(activation(name, size) for name, size in saved.items()) if again else ()
    if again:
        held = _forward(batch, layer)
        found.append((".forward again", KernelMemory(held.name, held.buffers, 0, (*held.inside, *gradients))))
    held = find_peak(kernels, given | saved, returned)
    inside = (*held.inside, *gradients, *recomputed)
    found.append((f".{held.name}", KernelMemory(held.name, held.buffers, held.gone, inside)))
    made = {each.name: each for kernel in kernels for each in kernel.makes if each.name in returned}
    gone = 0 if again else sum(size for name, size in saved.items() if name not in returned)
    left = [each for each in recomputed if each.name in returned]
    if GRADIENT in state.arrived or GRADIENT in returned:
        left += gradients[:1]
    if state.at_once and batch.narrow and batch.device != "cuda":  # else products add to the sums themselves
        left.append(workspace("weight gradient", _weight_gradients(block)))
    found.append((COLLECTED, KernelMemory(COLLECTED, made, gone + given.get(INPUT, 0), tuple(left))))
    return found


def _operands(block: CompiledBlock) -> dict[str, tuple[str, str]]:
    """Return {linear layer, such as "mlp.up": (name of its input, name of the gradient of its output)}. These two
    buffers are the operands of the layer's queued weight gradient."""
    down, output = GRADIENT, "gradient between"
    if "gathers" in block.true:
        down, output = "mlp.down.product.gradient", "attention.output.product.gradient"
    gradients = down, "mlp.up.output.gradient", output, "attention.qkv.output.gradient"
    return {name: (f"{name}.input", made) for name, made in zip(PRODUCTS, gradients, strict=True)}


def _weight_gradients(block: CompiledBlock) -> int:
    """Return the peak bytes while a layer's queued weight gradients are computed one after another. Each frees its
    operands when it is done."""
    most = used = 0
    for name, pair in _operands(block).items():
        most = max(most, block.bytes(f"weight gradient of {name.rpartition('.')[2]}") - used)
        used += sum(block.bytes(each) for each in pair if each != GRADIENT)
    return most
