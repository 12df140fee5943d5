"""Tensors that the engine's eager forward of one micro-batch through one stage saves for its backward on one rank.

They follow from the operators' lists (`cost/blocks`), each storage once. Left out are parameters (and what ZeRO gathers
of them), the micro-batch itself (tokens, targets, where documents begin), which is allocated for the whole step, and
the tables of positions, which stay from step to step (`position_tables`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

import numpy as np

from meshwright.planner.cost import blocks
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.dimensions import Dimensions, element_types, layer_dimensions
from meshwright.planner.cost.micro_batch import ITEM_BYTES, MicroBatch, Number, at_least, at_most, layer_kind
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.cost.tables import parse_tensor, select_items
from meshwright.planner.memory import compiled_blocks
from meshwright.planner.memory.snapshot import Allocation, count_bytes
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage
from meshwright.toml import read_packaged_toml

PREDICTION, PREDICTION_LOSS = "prediction.block", "prediction.loss"
"""Names of the layer of multi-token prediction, and of its loss."""


def saved_activations(
    batch: MicroBatch, stage: Stage, *, at_once: bool = True, tp_rank: int = 0, compiled: bool = False
) -> list[Allocation]:
    """Return the activations of one micro-batch that a rank saves for the backward in a pipeline stage.

    at_once: True if the stage's backward directly follows its forward; tp_rank: rank along tp; compiled: True if layers
    and final norm are compiled by torch.compile (predicted as eager where this cannot be predicted)."""
    types = element_types(batch.dtype)
    found = []
    for each in _tensors(batch, stage, at_once, tp_rank, compiled):
        dtype = types[each.kind]
        size = math.prod(each.shape) * ITEM_BYTES[dtype]
        found.append(Allocation("activations", each.name, each.shape, dtype, size, None, "forward", "backward"))
    return found


@lru_cache(maxsize=64)
def position_tables(config: ModelConfig, sequence: int, parameter_dtype: str = "float32") -> list[Allocation]:
    """Return the cosine and sine tables of rotary positions for `sequence` tokens, rounded up to a power of two. The
    list is empty for models without rotary positions. parameter_dtype: torch's type name."""
    dtype, found = element_types(parameter_dtype)["wide"], list[Allocation]()
    for rotation in config.rotations(range(config.layers)):
        shape = 1 << (sequence - 1).bit_length(), rotation.pairs
        size = math.prod(shape) * ITEM_BYTES[dtype]
        found += [Allocation("workspace", f"rotation.table.{part}", shape, dtype, size) for part in ("cosine", "sine")]
    return found


def _tensors(batch: MicroBatch, stage: Stage, at_once: bool, tp_rank: int, compiled: bool) -> Iterator[SavedTensor]:
    """Yield the activations of one micro-batch that a rank saves, with symbolic element types such as "x". at_once:
    True if the stage's backward directly follows its forward; tp_rank: rank along tp; compiled: True if layers and
    final norm are compiled."""
    config = batch.config
    if stage.first:
        for operator in blocks.embedding_operators(batch):
            yield from operator.saved
    else:
        yield SavedTensor("input", (batch.rows, batch.slice, config.hidden), "x")
    yield from _shared_by_layers(batch, stage.layers)
    layers: dict[object, list[SavedTensor]] = {}
    # A norm's input in the type of activations is the stage's input, saved already; without norms products read it.
    copied, projected = config.norm == "rmsnorm" and batch.narrow, not config.pre_norms and batch.layout.tp == 1
    shared = {"input": True, "attention_norm.input": not (config.encoder or copied), "attention.qkv.input": projected}
    for layer in stage.layers:
        key = layer if layer in batch.routed else layer_kind(config, layer)
        if key not in layers:
            layers[key] = list(_layer(batch, layer, compiled, not stage.first))
        begins = layer == stage.layers[0] and not stage.first  # its input is the stage's
        for each in layers[key]:
            if not (begins and shared.get(each.name)):
                yield each._replace(name=f"layers.{layer}.{each.name}")
    if stage.last:
        yield from _head(batch, stage, at_once, tp_rank, compiled)
        yield from _prediction(batch, stage, at_once, tp_rank, compiled) if config.prediction_layers else ()
    elif any(map(config.has_experts, stage.layers)):
        yield SavedTensor("balance", (), "wide")


def queued_bytes(batch: MicroBatch, unrecomputed: Sequence[Allocation], layer: int, attention: bool = True) -> Number:
    """Return the bytes that a layer's queued weight gradients keep allocated: the inputs and the output gradients of
    its linear layers. unrecomputed: activations of the layer without recompute; attention: False to leave out
    attention's linear layers."""
    sizes = layer_dimensions(batch, layer)
    names = ("qkv.input", "output.input", "up.input", "down.input") if attention else ("up.input", "down.input")
    gradients = sizes["mlp_outputs x"] + (sizes["attention_outputs x"] if attention else 0)
    return gradients + count_bytes(each for each in unrecomputed if each.name.endswith(names))


def layer_tensors(batch: MicroBatch, layer: int, input_gradient: bool = True) -> Iterator[SavedTensor]:
    """Yield the tensors that an uncompiled layer saves in addition to its input, under the layout's recompute. Names
    are relative to the layer. input_gradient: True if the gradient of the layer's input is computed even if all earlier
    parameters are frozen."""
    recompute = batch.layout.recompute
    for operator in blocks.layer_operators(batch, layer, input_gradient) if recompute != "full" else ():
        yield from operator.saved if recompute == "none" else operator.kept
    # The recomputed forward uses the routes of the first.
    if recompute != "none" and batch.layout.expert_parallel and batch.config.has_experts(layer):
        yield SavedTensor("mlp.experts.counts", (batch.etp, batch.config.experts), "index")


def _layer(batch: MicroBatch, layer: int, compiled: bool, input_gradient: bool = True) -> Iterator[SavedTensor]:
    """Yield the tensors that a layer saves, compiled or not, with its input. An expert-parallel mixture of experts is
    not compiled: its tensors are those of an eager layer. input_gradient: as for `layer_tensors`."""
    recompute, of_input = batch.layout.recompute, ((batch.rows, batch.slice, batch.config.hidden), "x")
    whole = compiled and compiled_blocks.can_predict_compiled(batch)
    if whole or recompute != "none":
        yield SavedTensor("input", *of_input)
    if not whole:
        yield from layer_tensors(batch, layer, input_gradient)
        return
    yield from compiled_blocks.CompiledBlock(batch, layer_kind(batch.config, layer)).saved_tensors
    if batch.layout.expert_parallel and batch.config.has_experts(layer):
        if recompute == "selective":
            yield SavedTensor("mlp.input", *of_input)
        yield from (each for each in layer_tensors(batch, layer) if each.name.startswith("mlp."))


@cache
def _select(section: str, properties: frozenset[str]) -> tuple[SavedTensor, ...]:
    """Return the tensors of a list of `tensors.toml` that exist; their shapes are not computed yet. section: name of
    the list; properties: names of the properties that hold."""
    items = select_items(read_packaged_toml("planner/memory/tensors.toml")["saved"][section], properties, {})
    return tuple(map(parse_tensor, items))


def _listed(section: str, dimensions: Dimensions) -> Iterator[SavedTensor]:
    """Yield the saved tensors of a list of `tensors.toml`. section: name of the list; dimensions: values of sizes, with
    the properties that hold."""
    return (tensor.compute(dimensions) for tensor in _select(section, dimensions.true))


@cached_method
def _shared_by_layers(batch: MicroBatch, layers: range) -> Iterator[SavedTensor]:
    """Yield the tensors that all layers of a stage share, saved once a micro-batch: cosines and sines of rotary
    positions, masks, targets."""
    config = batch.config
    example = layer_kind(config, 0)._replace(tempered=False)
    for number, rotation in enumerate(config.rotations(layers)):
        for each in _listed("rotation", Dimensions(batch, example, {"pairs": rotation.pairs})):
            yield each._replace(name=f"{each.name}{number or ''}")
    kinds = [layer_kind(config, layer) for layer in layers]
    windows = {kind.window or 0: kind for kind in kinds}
    bounds = {
        "bounds": 1 + batch.varlen_documents if batch.masked else 0,
        "ring_bounds": 1 + batch.ring_documents if batch.masked and batch.ring else 0,
    }
    own_tiles = "capped" in layer_dimensions(batch, 0).true
    # The host reads the bounds of attention in tiles; an encoder's mask is one for all layers.
    for window in sorted(windows) if not (own_tiles or config.encoder) else ():
        kind = windows[window]
        for each in _listed("window", Dimensions(batch, kind, bounds)):
            yield each._replace(name=f"{each.name}.{window or 'all'}")
    flags = {"tempered": any(kind.tempered for kind in kinds), "mixtures": any(kind.mixed for kind in kinds)}
    yield from _listed("shared", Dimensions(batch, example, flags=flags))


def _head(batch: MicroBatch, stage: Stage, at_once: bool, tp_rank: int, compiled: bool) -> Iterator[SavedTensor]:
    """Yield the tensors that the final norm and the loss save; for an encoder, those of the transform, or of pooler and
    classifier, and of the loss. at_once: True if the stage's backward directly follows its forward; tp_rank: rank along
    tp; compiled: True if the final norm is compiled."""
    config = batch.config
    for each in blocks.head_operators(batch, True)[0].saved if not config.encoder else ():
        if not ((compiled or config.adapter) and each.name == "final_norm.scaled"):
            plain = compiled and config.norm == "rmsnorm" and each.name == "final_norm.input"
            yield each._replace(kind="x") if plain else each
    several = not isinstance(batch.predictions, np.ndarray) and len(batch.loss_chunks) > 1
    keeps = not batch.responses and not config.encoder and blocks.keeps_gradient(batch, len(stage.layers), at_once)
    # The last ranks along tp may have fewer rows of the head.
    rows = at_least(at_most(config.vocabulary - tp_rank * batch.vocabulary, batch.vocabulary), 0)
    sizes = layer_dimensions(batch, 0, {"head_rows": rows}, {"several_chunks": several, "keeps_gradient": keeps})
    yield from _listed("encoder_head" if config.encoder else "loss", sizes)


def _prediction(batch: MicroBatch, stage: Stage, at_once: bool, tp_rank: int, compiled: bool) -> Iterator[SavedTensor]:
    """Yield the tensors that the module of multi-token prediction saves, with its loss. Arguments: see `_head`."""
    inputs = [each for operator in blocks.read_operators(batch, "prediction") for each in operator.saved]
    for each in (*inputs, *_layer(batch, batch.config.layers, compiled)):
        yield each._replace(name=f"{PREDICTION}.{each.name}")
    for each in _head(batch, stage, at_once, tp_rank, compiled):
        yield each._replace(name=f"{PREDICTION_LOSS}.{each.name}")
