"""The operators of a transformer in order, read from the table `operators.toml`: of a layer, the embedding, and the
head with its loss; and the kernels of a pipeline stage, with those that recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from meshwright.planner.cost.adapters import adapt_operators
from meshwright.planner.cost.dimensions import Flags, layer_dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_kind
from meshwright.planner.cost.operators import Operation, Operator
from meshwright.planner.cost.tables import list_rows
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.stages import Stage


def layer_operators(batch: MicroBatch, layer: int, input_gradient: bool = False) -> tuple[Operator, ...]:
    """Return the operators of the transformer layer with index `layer` in forward order. Names of saved tensors are
    relative to the layer.

    input_gradient: True if the gradient of the layer's input is computed even if all earlier parameters are frozen, as
    in every pipeline stage but the first.
    """
    kind = layer_kind(batch.config, layer)
    key = "layer", layer if layer in batch.routed else kind, input_gradient
    return _cached(batch, key, layer=layer, kind=kind, arrives=input_gradient or not kind.begins)


def embedding_operators(batch: MicroBatch) -> tuple[Operator, ...]:
    """Return the operators of the embedding: lookups in the tables of tokens, positions and token types, then the norm,
    as far as the model has them."""
    return _cached(batch, ("embedding",), arrives=False)


def head_operators(batch: MicroBatch, keeps_gradient: bool) -> tuple[Operator, ...]:
    """Return the operators after the last layer: final norm, language-model head (product with the vocabulary matrix)
    and loss. For an encoder, return the operators of its head.

    keeps_gradient: True if the forward already computes and saves the gradients of the head's input and weight; False
    if the backward computes the logits a second time."""
    key = "encoder_head" if batch.config.encoder else "head", keeps_gradient
    return _cached(batch, key, {"keeps_gradient": keeps_gradient})


def stage_operators(batch: MicroBatch, stage: Stage) -> list[Operator]:
    """Return the operators of a pipeline stage in forward order: embedding, layers and head, as far as it has them."""
    first = embedding_operators(batch) if stage.first else ()
    last = head_operators(batch, True) if stage.last else ()
    layers = (operator for layer in stage.layers for operator in layer_operators(batch, layer, not stage.first))
    return [*first, *layers, *last]


def _cached(
    batch: MicroBatch, key: tuple[Any, ...], flags: Flags = None, layer: int = 0, **adapted: Any
) -> tuple[Operator, ...]:
    """Return the operators of one section of `operators.toml`, such as "layer", including an adapter's operators if the
    model has an adapter. Results are cached in `batch.operators`.

    key: key of the cache entry; its first item is the section's name. flags: further properties, such as
    "keeps_gradient". layer: index of the layer. adapted: further arguments of `adapt_operators`."""
    if key not in batch.operators:
        found = read_operators(batch, key[0], flags, layer)
        batch.operators[key] = tuple(
            found if batch.config.adapter is None else adapt_operators(batch, found, **adapted)
        )
    operators: tuple[Operator, ...] = batch.operators[key]
    return operators


def read_operators(batch: MicroBatch, section: str, flags: Flags = None, layer: int = 0) -> Iterator[Operator]:
    """Yield the operators of one section (list of operators, such as "layer") of `operators.toml`, without adapters.

    flags: {property: True if it holds} of yes-or-no facts that are not the layer's, which conditions in the table
    test. layer: index of the layer, which decides the sizes."""
    dimensions = layer_dimensions(batch, layer, flags=flags)
    for row in list_rows(section, dimensions.true, "", ()):
        yield Operator(row, batch, dimensions)


ATTENTION_CORE = ("attention.core", "attention.scores", "attention.softmax", "attention.values", "attention.gradients")
"""Beginnings of the names of the kernels of softmax(q kᵀ) v."""


def list_operations(batch: MicroBatch, stage: Stage, *, at_once: bool = True) -> list[Operation]:
    """Return the kernels of one micro-batch on one rank of a pipeline stage: of the forward, of recomputation, and of
    the backward.

    at_once: True if the last stage runs each backward directly after its forward; if False, the engine `meshwright` may
    compute the logits a second time."""
    found = list_kernels(embedding_operators(batch)) if stage.first else []
    kinds = Counter(layer_kind(batch.config, layer) for layer in stage.layers)
    examples = {layer_kind(batch.config, layer): layer for layer in reversed(stage.layers)}
    for kind, layers in kinds.items():
        found += [one._replace(count=one.count * layers) for one in layer_operations(batch, examples[kind])]
    if stage.last:
        keeps = keeps_gradient(batch, len(stage.layers), at_once) or batch.engine.name != "meshwright"
        found += [*list_kernels(head_operators(batch, keeps)), *prediction_operations(batch, keeps)]
    return found


def prediction_operators(batch: MicroBatch) -> list[Operator]:
    """Return the operators of multi-token prediction, with the collectives of its embedding, head and loss; an empty
    list for models without it."""
    layers = range(batch.config.layers, batch.config.layers + batch.config.prediction_layers)
    return [one for layer in layers for one in (*read_operators(batch, "prediction"), *layer_operators(batch, layer))]


def prediction_operations(batch: MicroBatch, keeps_gradient: bool) -> list[Operation]:
    """Return the kernels of the multi-token-prediction layer; an empty list for models without one. keeps_gradient:
    True if the forward already computes and saves the gradients of the head's input and weight."""
    if not batch.config.prediction_layers:
        return []
    ends = [*read_operators(batch, "prediction"), *head_operators(batch, keeps_gradient)]
    return [*list_kernels(ends), *layer_operations(batch, batch.config.layers)]


def keeps_gradient(batch: MicroBatch, layers: int, at_once: bool) -> bool:
    """Return True if the forward of the last stage already computes the gradients of the head and saves them; False if
    the backward computes the logits again. layers: number of layers in the last stage; at_once: True if its backward
    directly follows its forward."""
    return bool(keeps_head_gradient(batch.all_tokens, batch.vocabulary, layers, batch.layout.recompute, at_once))


def layer_operations(batch: MicroBatch, layer: int) -> list[Operation]:
    """Return the kernels of the layer with index `layer`: of the forward, of recomputation, and of the backward."""
    found = list_kernels(layer_operators(batch, layer))
    return [*found, *_recomputed_operations(batch, found, batch.config.has_experts(layer))]


def list_kernels(operators: Iterable[Operator]) -> list[Operation]:
    """Return the kernels of all `operators` in order, forward and backward, without recomputation."""
    return [one for operator in operators for one in operator.operations]


def _recomputed_operations(batch: MicroBatch, layer: list[Operation], mixed: bool) -> Iterator[Operation]:
    """Yield the forward kernels of a layer that activation checkpointing runs again in the backward; for many layouts
    `count` is 0 where it does not. layer: all kernels of the layer; mixed: True if its MLP is a mixture of experts."""
    recompute, engine = batch.recompute, batch.engine
    last = _last_product(batch, mixed) if engine.stops_early else None
    # torchtitan's list of saved operations has no grouped product, so that of experts' up is repeated as a whole.
    every_second = {"attention.qkv": batch.kv_heads / (batch.heads + 2 * batch.kv_heads), "mlp.experts.up": 1.0}
    every_second |= {"attention.output": 1.0} | ({"mlp.up": 0.5, "mlp.shared.up": 0.5} if batch.config.gated else {})
    if any(one.name == f"{last}.adapter.b" for one in layer):  # one autograd function multiplies by all its matrices
        last = None
    for one in (each for each in layer if each.phase == "forward"):
        core, elementwise = one.name.startswith(ATTENTION_CORE), one.kind == "elementwise"
        shares: dict[str, Number] = {  # fraction of the kernel that is repeated
            "full": one.name != last,
            "core": core or one.name == "attention.dropout",
            # The result of ring attention came over the wire: it is kept.
            "elementwise": elementwise or (core and not batch.ring),
            "up-projections": one.name.endswith(("norm", ".rotary", ".activation", "_up", "_up.cast")),
            "every second product": elementwise or (one.kind == "product" and every_second.get(one.name, 0.0)),
        }
        share = (recompute == "full") * 1.0 * shares["full"] + (recompute == "selective") * shares[engine.selective]
        if np.any(share):
            count = one.count * (share > 0)
            yield one._replace(phase="recompute", flops=share * one.flops, bytes=share * one.bytes, count=count)


def _last_product(batch: MicroBatch, mixed: bool) -> str | None:
    """Return the name of a layer's last matrix product if recomputation can omit it; else None. It can be omitted if
    its result is only added to the residual stream, because the backward does not read it. mixed: True if the layer's
    MLP is a mixture of experts."""
    config = batch.config
    if config.encoder or config.post_norms:  # a norm reads it, or the sum with it
        return None
    if not mixed:
        return "mlp.down"
    # Under expert parallelism the shared expert is computed while tokens are dispatched, before other saved results.
    last = config.shared_intermediate and not config.shared_gate and not batch.layout.expert_parallel
    return "mlp.shared.down" if last else None
