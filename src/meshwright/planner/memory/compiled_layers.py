"""Which kind of compiled block a layer is, and what its forward keeps."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.memory.compiled_blocks import CompiledBlock
from meshwright.planner.memory.compiled_encoder import CompiledEncoderBlock
from meshwright.planner.memory.compiled_mixture import CompiledMixture
from meshwright.planner.memory.compiled_spread import CompiledFront
from meshwright.planner.memory.saved_blocks import Entry, Local


def block_of(at: Local, layer: int, x: int = 4) -> CompiledBlock:
    """Return the model of a layer's block compiled by torch.compile: an encoder, dense or mixture-of-experts block, or
    the compiled part before an expert-parallel mixture.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element.
    """
    if at.config.encoder:
        return CompiledEncoderBlock(at, None, x)
    made = CompiledBlock
    if at.config.has_experts(layer):
        made = CompiledFront if at.spread else CompiledMixture
    return made(at, at.config.layer_window(layer), x)


def kept(at: Local, layer: int) -> Iterator[Entry]:
    """Yield the activations that a compiled layer's forward saves in addition to its input; none under full recompute.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index N. Names begin with `layers.N.`.
    """
    block = block_of(at, layer)
    for title in [] if block.again == "full" else block.kept():
        yield block.entry(title)._replace(name=f"layers.{layer}.{title}")
