"""Memory peaks inside compiled blocks, in forward and backward, beside their saved activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, INPUT_GRADIENT
from meshwright.planner.memory.compiled_layers import block_of
from meshwright.planner.memory.inductor import KernelMemory, highest
from meshwright.planner.memory.temporaries import mixture_backward
from meshwright.planner.memory.tensors import Temporary

if TYPE_CHECKING:
    from meshwright.planner.memory.tensors import Saved

COLLECTED = ".weight gradients"
"""When the compiled backward is over: it gives all weight gradients of the block at once."""


def forward_extras(at: MicroBatch, layer: int, x: int) -> Iterator[Temporary]:
    """Yield the tensors allocated at the memory peak of a compiled layer's forward, including those that it saves.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element.
    """
    held = forward_held(at, alike(at, layer), x)
    yield from extras_of(held, f"layers.{layer}")


def backward_extras(
    at: MicroBatch, layer: int, x: int, arrived: frozenset[str] = frozenset()
) -> Iterator[tuple[str, list[Temporary]]]:
    """Yield (snapshot name, tensors other than saved activations) for the memory snapshots of a compiled layer's
    backward.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element; arrived: names of the input or output gradient that another pipeline stage sent, which stays allocated
    until the backward ends.
    """
    unit = f"layers.{layer}"
    held = _backward(at, alike(at, layer), x, arrived)
    for name, each in held:
        yield name, list(extras_of(each, unit))


def passing_bytes(at: MicroBatch, layer: int, x: int) -> int:
    """Return the peak bytes of a compiled layer's temporaries in forward and backward, without weight gradients, as
    these do not grow with the batch. at: sizes and settings of one micro-batch on one rank; layer: the layer's index;
    x: bytes of an activation's element."""
    layer, found = alike(at, layer), []
    for held in (forward_held(at, layer, x), *(each for _, each in _backward(at, layer, x))):
        found.append(held.bytes - sum(each.bytes for each in held.buffers.values() if each.category == "gradients"))
    return max(found)


def spread_backward(
    at: MicroBatch,
    layer: int,
    x: int,
    kept: tuple[Sequence[Saved], Sequence[Saved]],
    stream: int,
    arrived: frozenset[str] = frozenset(),
) -> Iterator[tuple[str, list[Temporary]]]:
    """Yield (snapshot name, temporary tensors) for the backward of a layer whose expert-parallel mixture is not
    compiled, while the rest of the layer is.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element; kept: saved activations of the stage, (without recompute, with the layout's recompute); stream: bytes of
    the layer's output; arrived: names of gradients that another pipeline stage sent.
    """
    mlp = f"layers.{layer}.mlp"
    whole, here = (sum(each.bytes for each in of if each.name.startswith(f"{mlp}.")) for of in kept)
    again = whole - here
    front = list(backward_extras(at, layer, x, arrived))
    if at.layout.recompute == "full":
        yield front.pop(0)
        block = block_of(at, layer, x)
        again += sum(block.bytes(name) for name in block.kept())
    gradient = Temporary("activations", "gradient of the layer's output", stream * (2 if at.layout.tp > 1 else 1))
    more = [gradient, Temporary("activations", "recomputed", again)]
    for name, extras in mixture_backward(at, mlp, kept[0], x, False):
        yield f".mlp{name}", [*more, *extras]
    for name, extras in front:
        yield name, [*extras, Temporary("activations", f"{mlp}: freed", -here)]


def alike(at: MicroBatch, layer: int) -> int:
    """Return the index of the first layer that has the same kernels and sizes as `layer` (same attention window,
    experts or none), so that results are cached once for equal layers. at: sizes and settings of one micro-batch on one
    rank."""
    config = at.config
    kinds = [(config.layer_window(each), config.has_experts(each)) for each in range(layer + 1)]
    return kinds.index(kinds[-1])


def extras_of(held: KernelMemory, unit: str) -> Iterator[Temporary]:
    """Yield the tensors that are allocated during a kernel, as entries of a memory snapshot. held: memory during the
    kernel; unit: prefix of the entries' names, such as "layers.3"."""
    for name, each in held.buffers.items():
        yield Temporary(each.category, f"{unit}.{name}", each.bytes)
    yield from held.inside
    if held.gone:
        yield Temporary("activations", f"{unit}: freed", -held.gone)


@lru_cache(maxsize=64)
def forward_held(at: MicroBatch, layer: int, x: int) -> KernelMemory:
    """Return the memory during the kernel with the highest peak of a compiled layer's forward. at: sizes and settings
    of one micro-batch on one rank; layer: index of the first of all equal layers, as the result is cached; x: bytes of
    an activation's element."""
    block = block_of(at, layer, x)
    return highest(list(block.forward()), {}, {*block.kept(), *block.results()})


@lru_cache(maxsize=64)
def _backward(
    at: MicroBatch, layer: int, x: int, arrived: frozenset[str] = frozenset()
) -> list[tuple[str, KernelMemory]]:
    """Return (snapshot name, memory) at the peak and at the end of a compiled layer's backward; under full recompute,
    these are preceded by the peak of the recomputed forward.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element; arrived: names of gradients that another pipeline stage sent.
    """
    block = block_of(at, layer, x)
    found = []
    kernels = list(block.backward())
    kept = {name: block.bytes(name) for name in block.kept()}
    given = {name: block.bytes(name) for name in (INPUT, *block.gradients())}
    weights = {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
    gradients = tuple(Temporary("activations", name, given[name]) for name in block.gradients())
    for name in arrived:
        del given[name]
    if block.again == "full":
        again = forward_held(at, layer, x)
        found.append((".forward again", KernelMemory(again.name, again.buffers, 0, (*again.inside, *gradients))))
        made_again = tuple(Temporary("activations", name, size) for name, size in kept.items())
    else:
        made_again = ()
    held = highest(kernels, given | kept, {*weights, INPUT_GRADIENT})
    name = f".{held.name}"
    found.append((name, KernelMemory(held.name, held.buffers, held.gone, (*held.inside, *gradients, *made_again))))
    last = {made.name: made for kernel in kernels for made in kernel.makes if made.name in {*weights, INPUT_GRADIENT}}
    gone = 0 if block.again == "full" else sum(kept.values())
    stays = gradients[:1] if GRADIENT in arrived else ()
    found.append((COLLECTED, KernelMemory(COLLECTED, last, gone + given.get(INPUT, 0), stays)))
    return found
