"""Tensors that the engine's eager forward of one micro-batch through one stage saves for its backward on one rank.

They follow from the operators' lists (`cost/blocks`), each storage once. Left out are parameters (and what ZeRO gathers
of them), the micro-batch itself (tokens, targets, where documents begin), which is allocated for the whole step, and
the tables of positions, which stay from step to step (`position_tables`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from meshwright.planner.cost.blocks import embedding_operators, layer_operators, norm_operator
from meshwright.planner.cost.micro_batch import ITEM_BYTES, MicroBatch, at_least, at_most, layer_kind
from meshwright.planner.cost.operations import keeps_gradient
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.memory import compiled_blocks, compiled_peaks
from meshwright.planner.memory.snapshot import Saved
from meshwright.spec.chunks import split_loss_chunks
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage


def saved_activations(
    batch: MicroBatch, stage: Stage, *, at_once: bool = True, tp_rank: int = 0, compiled: bool = False
) -> list[Saved]:
    """Return the activations of one micro-batch that a rank saves for the backward in a pipeline stage.

    at_once: the stage's backward directly follows its forward; tp_rank: rank along tp; compiled: layers and final norm
    are compiled, as far as that can be predicted.
    """
    types = _types(batch.dtype)
    found = []
    for each in _tensors(batch, stage, at_once, tp_rank, compiled):
        dtype = types[each.kind]
        found.append(Saved(each.name, each.shape, dtype, math.prod(each.shape) * ITEM_BYTES[dtype]))
    return found


def position_tables(config: ModelConfig, sequence: int, parameter_dtype: str = "float32") -> list[Saved]:
    """Return the cosine and sine tables of rotary positions for `sequence` tokens, rounded up to a power of two; none
    for other positions. parameter_dtype: torch's type name."""
    dtype, found = _types(parameter_dtype)["wide"], list[Saved]()
    for rotation in config.rotations(range(config.layers)):
        shape = 1 << (sequence - 1).bit_length(), rotation.size // 2
        size = math.prod(shape) * ITEM_BYTES[dtype]
        found += [Saved(f"rotation.table.{part}", shape, dtype, size) for part in ("cosine", "sine")]
    return found


@lru_cache(maxsize=8)
def _types(dtype: str) -> dict[str, str]:
    """Return {element type of `SavedTensor`, such as "wide": torch's type name}. dtype: torch's type name of
    activations and parameters."""
    wide = dtype if dtype == "float64" else "float32"
    return {"x": dtype, "wide": wide, "index": "int64", "int32": "int32", "bool": "bool"}


def _tensors(batch: MicroBatch, stage: Stage, at_once: bool, tp_rank: int, compiled: bool) -> Iterator[SavedTensor]:
    """Yield the tensors of `saved_activations` (same arguments), before element types are resolved."""
    config, recompute = batch.config, batch.layout.recompute
    stream = batch.rows, batch.slice, config.hidden
    if stage.first:
        for operator in embedding_operators(batch):
            yield from operator.saved
    else:
        yield SavedTensor("input", stream, "x")
    yield from _shared_by_layers(batch, stage)
    layers: dict[object, list[SavedTensor]] = {}
    for layer in stage.layers:
        begins = layer == stage.layers[0] and not stage.first  # its input is the stage's
        whole = compiled and compiled_blocks.can_predict_compiled(batch)
        if not begins and (whole or recompute != "none"):
            yield SavedTensor(f"layers.{layer}.input", stream, "x")
        key = layer if layer in batch.routed else layer_kind(config, layer)
        if key not in layers:
            layers[key] = list(_compiled_layer(batch, layer) if whole else layer_tensors(batch, layer, not stage.first))
        # A norm's input in the type of activations is the stage's input, saved already.
        shared = "attention_norm.input" if begins and not config.encoder and not _copies_input(batch) else None
        if begins and not config.pre_norms and batch.layout.tp == 1:  # the projections read it
            shared = "attention.qkv.input"
        for each in layers[key]:
            if each.name != shared:
                yield SavedTensor(f"layers.{layer}.{each.name}", each.shape, each.kind)
    if stage.last and config.encoder:
        yield from _encoder_head(batch)
    elif stage.last:
        for each in norm_operator(batch, "final_norm").saved:
            if not ((compiled or config.adapter) and each.name == "final_norm.scaled"):
                plain = compiled and config.norm == "rmsnorm" and each.name == "final_norm.input"
                yield each._replace(kind="x") if plain else each
        yield from _loss(batch, stage, at_once, tp_rank)
    elif _mixtures(batch, stage):
        yield SavedTensor("balance", (), "wide")


def layer_tensors(batch: MicroBatch, layer: int, input_gradient: bool = True) -> Iterator[SavedTensor]:
    """Yield the tensors that an uncompiled layer saves in addition to its input, under the layout's recompute. Names
    are relative to the layer. input_gradient: True if the gradient of the layer's input is computed even if all earlier
    parameters are frozen."""
    recompute = batch.layout.recompute
    for operator in layer_operators(batch, layer, input_gradient) if recompute != "full" else ():
        yield from operator.saved if recompute == "none" else operator.kept
    # The recomputed forward uses the routes of the first.
    if recompute != "none" and batch.expert_parallel and batch.config.has_experts(layer):
        yield SavedTensor("mlp.experts.counts", (batch.etp, batch.config.experts), "index")


def _compiled_layer(batch: MicroBatch, layer: int) -> Iterator[SavedTensor]:
    """Yield the tensors that a compiled layer saves in addition to its input. An expert-parallel mixture is not
    compiled: it saves what eager ones save."""
    yield from compiled_peaks.saved_tensors(batch, layer)
    if not (batch.expert_parallel and batch.config.has_experts(layer)):
        return
    if batch.layout.recompute == "selective":
        yield SavedTensor("mlp.input", (batch.rows, batch.slice, batch.config.hidden), "x")
    for each in layer_tensors(batch, layer):
        if each.name.startswith("mlp."):
            yield each


def _copies_input(batch: MicroBatch) -> bool:
    """Return True if a norm saves a copy of its input in float32."""
    return batch.config.norm == "rmsnorm" and batch.narrow


def _mixtures(batch: MicroBatch, stage: Stage) -> bool:
    """Return True if a layer of the stage is a mixture of experts."""
    return any(batch.config.has_experts(layer) for layer in stage.layers)


def _shared_by_layers(batch: MicroBatch, stage: Stage) -> Iterator[SavedTensor]:
    """Yield the tensors that all layers share, saved once a micro-batch: cosines and sines of rotary positions, masks,
    targets."""
    config, layout = batch.config, batch.layout
    rows = batch.rows if batch.masked else 1
    if batch.masked or layout.cp > 1:
        for number, rotation in enumerate(config.rotations(stage.layers)):
            for part in ("cosine", "sine"):
                name = f"rotation.{part}{number or ''}"
                yield SavedTensor(name, (rows, 1, batch.tokens, rotation.size // 2), "wide")
    if any(layer_kind(config, layer).tempered for layer in stage.layers):
        yield SavedTensor("temperatures", (rows, 1, batch.tokens, 1), "wide")
    if config.encoder:
        if batch.masked:
            yield SavedTensor("attention.added", (batch.rows, 1, batch.tokens, batch.tokens), "x")
        return
    length = batch.tokens if batch.ring else batch.sequence
    for window in sorted({config.layer_window(layer) or 0 for layer in stage.layers}):
        if batch.capped:  # the host reads the bounds
            continue
        limited = 0 < window < batch.sequence
        name = f"attention.cu_seqlens.{window or 'all'}"
        if batch.device == "cuda" and batch.ring:  # other bounds are on the host
            if batch.masked and batch.flash:
                yield SavedTensor(name, (2, batch.ring_documents + 1), "int32")
            continue
        if batch.varlen(window or None):
            if batch.masked:
                yield SavedTensor(name, (1, batch.varlen_documents + 1), "int32")
            continue
        if batch.device == "cuda" and batch.limited(window or None):
            if layout.recompute != "none":  # else layers keep what they make of it
                yield SavedTensor(f"attention.visible.{window or 'all'}", (rows, 1, length, length), "bool")
        elif limited or (batch.masked and batch.ring):
            cut = rows if not (limited and config.window_chunks) else batch.rows
            yield SavedTensor(f"attention.first_visible.{window or 'all'}", (cut, length), "index")
    if _mixtures(batch, stage) and (config.router_loss or layout.recompute != "none"):
        yield SavedTensor("router.targets", (batch.rows,), "index")


def _encoder_head(batch: MicroBatch) -> Iterator[SavedTensor]:
    """Yield the activations that an encoder saves after its last layer: transform, norm and loss of masked tokens, or
    pooler and classifier."""
    config = batch.config
    places = batch.predictions
    inside = places, config.hidden
    if config.head != "masked":
        yield SavedTensor("pooler.input", inside, "x")
        yield SavedTensor("pooler.output", inside, "x")
        if config.labels:
            yield SavedTensor("classifier.logarithms", (places, len(config.labels)), "wide")
            yield SavedTensor("loss", (), "wide")
            yield SavedTensor("loss.weight", (), "wide")
        return
    yield SavedTensor("transform.places", (places,), "index")
    yield SavedTensor("transform.input", inside, "x")
    yield SavedTensor("transform.output", inside, "x")
    yield SavedTensor("transform_norm.input", inside, "x")
    for what in ("mean", "deviation"):  # PyTorch keeps them in the input's type on a CPU
        yield SavedTensor(f"transform_norm.{what}", (places, 1), "x" if batch.device == "cpu" else "wide")
    several = len(split_loss_chunks(places, config.vocabulary, batch.device)) > 1
    yield SavedTensor("head.hidden.gradient", inside, "x")
    yield SavedTensor("head.weight.gradient", (config.vocabulary, config.hidden), "wide" if several else "x")
    yield SavedTensor("head.bias.gradient", (config.vocabulary,), "wide")
    yield SavedTensor("loss", (), "wide")


def _loss(batch: MicroBatch, stage: Stage, at_once: bool, tp_rank: int) -> Iterator[SavedTensor]:
    """Yield the tensors that the loss saves: the head's gradients if its forward computes them, else the head's input
    and two softmax statistics of each token, from which the backward computes them.

    at_once: the stage's backward directly follows its forward; tp_rank: rank along tp.
    """
    config, tokens = batch.config, batch.all_tokens
    if not batch.responses and keeps_gradient(batch, len(stage.layers), at_once):
        yield SavedTensor("head.hidden.gradient", (tokens, config.hidden), "x")
        several = (
            not isinstance(tokens, np.ndarray)
            and len(split_loss_chunks(tokens, min(batch.vocabulary, config.vocabulary), batch.device)) > 1
        )
        if config.adapter is not None:  # the head is frozen
            yield SavedTensor("loss", (), "wide")
            return
        rows = at_most(
            config.vocabulary - tp_rank * batch.vocabulary, batch.vocabulary
        )  # the last ranks may have fewer
        yield SavedTensor("head.weight.gradient", (at_least(rows, 0), config.hidden), "wide" if several else "x")
    else:
        yield SavedTensor("head.input", (tokens, config.hidden), "x")
        yield SavedTensor("head.known", (2, tokens), "wide")
    yield SavedTensor("loss", (), "wide")
