"""Kind of compiled block of a layer, and the activations that its forward saves."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import MicroBatch, layer_kind
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.memory.compiled_blocks import CompiledBlock
from meshwright.planner.memory.compiled_encoder import CompiledEncoderBlock
from meshwright.planner.memory.compiled_mixture import CompiledMixture
from meshwright.planner.memory.compiled_spread import CompiledFront


def block_of(at: MicroBatch, layer: int, x: int = 4) -> CompiledBlock:
    """Return the model of a layer's block compiled by torch.compile: an encoder, dense or mixture-of-experts block, or
    the compiled part before an expert-parallel mixture.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index; x: bytes of an activation's
    element.
    """
    kind = layer_kind(at.config, layer)
    if at.config.encoder:
        return CompiledEncoderBlock(at, kind, x)
    made = CompiledBlock
    if kind.mixed:
        made = CompiledFront if at.spread else CompiledMixture
    return made(at, kind, x)


def kept(at: MicroBatch, layer: int) -> Iterator[SavedTensor]:
    """Yield the activations that a compiled layer's forward saves in addition to its input; none under full recompute.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index. Names are relative to the layer.
    """
    block = block_of(at, layer)
    for title in [] if block.again == "full" else block.kept():
        yield block.entry(title)
