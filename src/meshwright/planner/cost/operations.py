"""Kernels of one micro-batch on one rank of a pipeline stage: forward, recomputed and backward, with FLOPs and bytes.

Sizes are a rank's own. FLOPs are those that torch's `FlopCounterMode` counts in the engine, and with one rank they add
up to those of `planner/cost/flops.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from meshwright.planner.cost.blocks import embedding_operators, head_operators, layer_operators, read_operators
from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_kind
from meshwright.planner.cost.operators import Operation, Operator
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.stages import Stage

_CORE = ("attention.scores", "attention.values", "attention.softmax", "attention.gradients")


def list_operations(batch: MicroBatch, stage: Stage, *, at_once: bool = True) -> list[Operation]:
    """Return the kernels of one micro-batch on one rank of a pipeline stage: of the forward, of recomputation, and of
    the backward.

    at_once: True if the last stage runs each backward directly after its forward; if False, the engine `meshwright` may
    compute the logits a second time."""
    found: list[Operation] = []
    if stage.first:
        found += list_kernels(embedding_operators(batch))
    kinds = Counter(layer_kind(batch.config, layer) for layer in stage.layers)
    examples = {layer_kind(batch.config, layer): layer for layer in reversed(stage.layers)}
    for kind, layers in kinds.items():
        found += [one._replace(count=one.count * layers) for one in layer_operations(batch, examples[kind])]
    if stage.last:
        keeps = keeps_gradient(batch, len(stage.layers), at_once) or batch.engine.name != "meshwright"
        found += [*list_kernels(head_operators(batch, keeps)), *prediction_operations(batch, keeps)]
    return found


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
    found: bool = keeps_head_gradient(batch.all_tokens, batch.vocabulary, layers, batch.layout.recompute, at_once)
    return found


def layer_operations(batch: MicroBatch, layer: int) -> list[Operation]:
    """Return the kernels of the layer with index `layer`: of the forward, of recomputation, and of the backward."""
    found = list_kernels(layer_operators(batch, layer))
    return [*found, *_recomputed_operations(batch, found, batch.config.has_experts(layer))]


def list_kernels(operators: Iterable[Operator]) -> list[Operation]:
    """Return the kernels of all `operators` in order, forward and backward, without recomputation."""
    return [one for operator in operators for one in operator.operations]


def _recomputed_operations(batch: MicroBatch, layer: list[Operation], mixed: bool) -> Iterator[Operation]:
    """Yield the forward kernels of a layer that activation checkpointing runs again in the backward. layer: all kernels
    of the layer; mixed: True if the layer's MLP is a mixture of experts."""
    kind, engine = batch.layout.recompute, batch.engine
    if kind == "none":
        return
    last = _last_product(batch, mixed) if engine.stops_early else None
    if any(one.name == f"{last}.adapter.b" for one in layer):  # it comes after the base's product
        last = None if batch.config.adapter and batch.config.adapter.kind == "dora" else f"{last}.adapter.b"
    for one in layer:
        if one.phase != "forward":
            continue
        core = one.kind == "attention" or one.name in _CORE
        share: Number = 1.0
        if kind == "full":
            wanted = one.name != last
        elif engine.selective == "core":
            wanted = core or one.name == "attention.dropout"
        elif engine.selective == "elementwise":
            # The result of ring attention came over the wire: it is kept.
            wanted = (core and not batch.ring) or one.kind == "elementwise"
            if batch.config.adapter and batch.config.adapter.kind != "dora":
                wanted = wanted or one.name.endswith(".adapter.b")
        elif engine.selective == "up-projections":
            wanted = one.name.endswith(("norm", ".rotary", ".activation", "_up", "_up.cast"))
        else:
            wanted = one.kind in ("product", "elementwise")
            if one.kind == "product":
                share = _every_second_product(batch).get(one.name)
                wanted = share is not None
        if wanted:
            yield one._replace(phase="recompute", flops=share * one.flops, bytes=share * one.bytes)


def _every_second_product(batch: MicroBatch) -> dict[str, Number]:
    """Return {name of a matrix product: fraction of it that is recomputed} under torchtitan's selective activation
    checkpointing "op", which saves every second matrix product of a layer."""
    found = {"attention.qkv": batch.kv_heads / (batch.heads + 2 * batch.kv_heads), "attention.output": 1.0}
    return found | ({"mlp.up": 0.5} if batch.config.gated else {})


def _last_product(batch: MicroBatch, mixed: bool) -> str | None:
    """Return the name of a layer's last matrix product if recomputation can omit it; else None. It can be omitted if
    its result is only added to the residual stream, because the backward does not read it. mixed: True if the layer's
    MLP is a mixture of experts."""
    config = batch.config
    if config.encoder or config.post_norms:  # a norm reads it, or the sum with it
        return None
    if not mixed:
        return "mlp.down"
    return "mlp.shared.down" if config.shared_intermediate and not config.shared_gate else None
