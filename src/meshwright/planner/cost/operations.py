"""What one rank computes for one micro-batch on one stage, kernel by kernel: matrix products with their sizes,
attention, elementwise work with the bytes it moves.

Sizes are a rank's own: tp cuts heads, the MLP's columns and the vocabulary, cp (and sequence parallelism outside the
products) the tokens, ep and etp the experts. FLOPs are 2 per multiply-add of matrix products; they are those that
torch's `FlopCounterMode` counts in the engine, and with one rank they add up to those of `planner/cost/flops.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost import elementwise
from meshwright.planner.cost.elementwise import WIDE, There
from meshwright.planner.cost.engines import AttentionKernel, Engine
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage
from meshwright.spec.work import count_predictions, keys_per_token

Phase = Literal["forward", "again", "input", "weight"]
"""When: on the way there; a second time, before the way back; for the gradients of inputs; for those of weights."""

FLASH_BACKWARD = 2.5
"""Products of a flash kernel's backward for each of its forward: five for two, because it forms the scores again (Dao
et al. 2022, arXiv:2205.14135, algorithm 4)."""


def in_eight_bits(name: str) -> bool:
    """Return True if fp8 training computes a matrix product in 8 bits: those of the linear layers of blocks. name: of
    an operation, such as "attention.qkv".

    Attention's products, routers and the head stay in 16 bits (as in Transformer Engine, and in torchao as torchtitan
    uses it).
    """
    return name in ("attention.qkv", "attention.output") or name.endswith((".up", ".down"))


class Operation(NamedTuple):
    """An operation (about one kernel) of one micro-batch on one rank, called `count` times; the numbers are of one
    call.

    name: such as "attention.qkv". kind: product (matrix product), attention (a flash kernel), elementwise, lookup or
    loss. phase: "forward", "again" (recomputed), "input" or "weight" (gradients). flops: of matrix products alone.
    bytes: read and written. shape: M, N, K of a product; of a flash kernel the queries, the keys that each sees on
    average and a head's size; None for others.
    """

    name: str
    kind: Literal["product", "attention", "elementwise", "lookup", "loss"]
    phase: Phase
    flops: float
    bytes: float
    shape: tuple[float, float, float] | None = None
    count: float = 1.0  # type: ignore[assignment]  # not what tuples call so


def operations(
    config: ModelConfig,
    layout: Layout,
    rows: int,
    sequence: int,
    stage: Stage,
    engine: Engine,
    *,
    itemsize: int = 2,
    attention: AttentionKernel | None = None,
    documents: float = 1.0,
    at_once: bool = True,
    eight_bit: bool = False,
) -> list[Operation]:
    """Return the operations of one micro-batch of `rows` sequences on one rank of a pipeline stage: forward, recomputed
    and backward.

    engine: training engine whose kernels are listed. itemsize: bytes of an activation or weight. attention: attention
    kernel (None: the engine's own). documents: number packed into a sequence of `sequence` tokens, on average, of equal
    length. at_once: the loss's backward directly follows its forward; if not, the engine `meshwright` may compute the
    logits twice. eight_bit: linear layers of blocks compute in fp8.
    """
    work = _Work(config, layout, rows, sequence, engine, itemsize, attention or engine.attention, documents, eight_bit)
    kinds = Counter((config.layer_window(layer), config.has_experts(layer)) for layer in stage.layers)
    found = []
    if stage.first:
        found += work.embedding()
    for (window, mixture), layers in kinds.items():
        forward = list(work.layer(window, mixture))
        again = list(work.repeated(forward, mixture))
        found += [_times(one, layers) for one in (*forward, *again)]
    if stage.last:
        widest = min(-(-config.vocabulary // layout.tp), config.vocabulary)
        kept = keeps_head_gradient(work.tokens, widest, len(stage.layers), layout.recompute, at_once)
        found += work.head(kept or engine.name != "meshwright")
    return found


def total_flops(found: list[Operation], *phases: Phase) -> float:
    """Return the total FLOPs of operations. phases: only those of "forward", "again" (recomputed), "input" and "weight"
    (gradients) that are given; all if none is."""
    return sum(one.flops * one.count for one in found if not phases or one.phase in phases)


def _times(one: Operation, count: float) -> Operation:
    """Return an operation with its call count multiplied by `count`."""
    if count == 1:
        return one
    return Operation(one.name, one.kind, one.phase, one.flops, one.bytes, one.shape, one.count * count)


class _Work:
    """Generator of the operations of one rank for one micro-batch, by part of the model.

    rows, sequence: sequences, and tokens of each; itemsize: bytes of an activation or weight; attention: attention
    kernel; documents: average number packed into a sequence; eight_bit: linear layers of blocks compute in fp8.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        rows: int,
        sequence: int,
        engine: Engine,
        itemsize: int,
        attention: AttentionKernel,
        documents: float,
        eight_bit: bool,
    ) -> None:
        self.config, self.layout, self.engine, self.itemsize = config, layout, engine, itemsize
        self.kernel, self.documents, self.rows, self.sequence = attention, documents, rows, sequence
        self.eight_bit = eight_bit
        self.tokens = rows * sequence // layout.cp
        # Outside of the products, where ranks of tp may share a micro-batch's tokens.
        self.own_tokens = self.tokens / layout.tp if layout.tensor_sequence_parallel else self.tokens
        self.heads, self.kv_heads = config.heads // layout.tp, max(1, config.kv_heads // layout.tp)
        self.qkv_width = (self.heads + 2 * self.kv_heads) * config.head_dim

    # --- kinds of operations

    def product(
        self, name: str, rows: float, out: int, inner: int, count: float = 1.0, bias: bool = False
    ) -> Iterator[Operation]:
        """Yield a linear layer's matrix products y = x Wᵀ, dx = dy W and dW = dyᵀ x, and the kernels that go with them
        (accumulation, bias gradient, fp8 casts).

        name: such as "mlp.up"; rows, out, inner: tokens, outputs and inputs; count: number of equal layers; bias: the
        layer has a bias, whose gradient reads dy once more.
        """
        flops = 2.0 * rows * out * inner
        moved = self.itemsize * (rows * out + rows * inner + out * inner)
        yield Operation(name, "product", "forward", flops, moved, (rows, out, inner), count)
        yield Operation(name, "product", "input", flops, moved, (rows, inner, out), count)
        sums = self.engine.gradient_bytes
        if self.engine.accumulates == "fused":
            moved += out * inner * (2 * sums - self.itemsize)
        yield Operation(name, "product", "weight", flops, moved, (out, inner, rows), count)
        if self.engine.accumulates != "fused":
            added = self.itemsize + (2 * sums if self.engine.accumulates == "added" else sums)
            yield Operation(f"{name}.sum", "elementwise", "weight", 0.0, added * out * inner, None, count)
        if bias:
            yield Operation(f"{name}.bias", "elementwise", "input", 0.0, self.itemsize * rows * out, None, count)
        if self.eight_bit and in_eight_bits(name):
            # Transformer Engine, whose kernels the fused ones are, casts weights once a step: not counted.
            weights = 0 if self.engine.fusion == "kernels" else out * inner
            for phase, elements in (("forward", rows * inner + weights), ("input", rows * out)):
                cast = elementwise.cast(self.engine.fusion)
                moved = cast.bytes(self.itemsize) * elements / cast.kernels
                yield Operation(f"{name}.cast", "elementwise", phase, 0.0, moved, None, count * cast.kernels)  # type: ignore[arg-type]

    def passes(self, name: str, elements: float, of: There) -> Iterator[Operation]:
        """Yield an elementwise operation on `elements` elements, forward and backward. name: such as "norm"; of: memory
        traffic per element."""
        phases: tuple[Phase, Phase] = ("forward", "input")
        for phase, each in zip(phases, of, strict=True):
            moved = each.bytes(self.itemsize) * elements
            if moved:
                kernels = max(each.kernels, 1.0)
                yield Operation(name, "elementwise", phase, 0.0, moved / kernels, None, kernels)

    # --- a layer

    def layer(self, window: int | None, mixture: bool) -> Iterator[Operation]:
        """Yield the operations of one layer, without recomputation. window: most tokens that a query attends to, None
        for all; mixture: its MLP is a mixture of experts."""
        config, fusion = self.config, self.engine.fusion
        inside = self.own_tokens * config.hidden
        norms = self.passes("norm", inside, elementwise.norm(config.norm, fusion))
        yield from (_times(one, 4 if config.post_norms else 2) for one in norms)
        yield from (_times(one, 2) for one in self.passes("residual", inside, elementwise.residual(fusion)))
        if self.engine.dropout:
            yield from (_times(one, 2) for one in self.passes("dropout", inside, elementwise.RESIDUAL_DROPOUT))
        yield from self.attention(window)
        yield from self.mixture() if mixture else self.feed_forward("mlp", config.intermediate)

    def attention(self, window: int | None) -> Iterator[Operation]:
        """Yield the operations of attention: projections, positions and softmax(q kᵀ) v. window: most tokens that a
        query attends to, None for all."""
        config, tokens, fusion = self.config, self.tokens, self.engine.fusion
        query = self.heads * config.head_dim
        yield from self.product("attention.qkv", tokens, self.qkv_width, config.hidden, bias=config.qkv_bias)
        yield from self.passes("attention.join", tokens * self.qkv_width, elementwise.JOINED)
        turned = tokens * (self.heads + self.kv_heads) * config.head_dim
        if config.query_key_norm:
            yield from self.passes("attention.norms", turned, elementwise.norm("rmsnorm", fusion))
        if config.positions == "rope":
            yield from self.passes("attention.rotary", turned, elementwise.rotary(fusion))
        yield from self.core(window)
        yield from self.product("attention.output", tokens, config.hidden, query, bias=config.output_bias)

    def core(self, window: int | None) -> Iterator[Operation]:
        """Yield softmax(q kᵀ) v for this rank's tokens and heads (under cp, its share; ring attention balances it).
        window: most tokens that a query attends to, None for all."""
        size = self.config.head_dim
        if self.kernel == "scores":
            heads, queries, keys = self.rows * self.heads, self.sequence // self.layout.cp, self.sequence
            flops = 2.0 * queries * keys * size
            moved = self.itemsize * (queries * keys + (queries + keys) * size)
            out, into = (queries, keys, size), (queries, size, keys)
            for phase, times in (("forward", 1), ("input", 2)):
                yield Operation("attention.scores", "product", phase, flops, moved, out, heads * times)  # type: ignore[arg-type]
                yield Operation("attention.values", "product", phase, flops, moved, into, heads * times)  # type: ignore[arg-type]
            scores = heads * queries * keys
            yield from self.passes("attention.softmax", scores, elementwise.softmax(self.engine.fusion))
            if self.engine.dropout:
                yield from self.passes("attention.dropout", scores, elementwise.SCORES_DROPOUT)
            return
        # A decoder's kernel skips what is hidden, an encoder's goes through all keys with a mask.
        seen = self.sequence if self.config.encoder else max(1, round(self.sequence / self.documents))
        keys_seen = keys_per_token(seen, window, causal=not self.config.encoder)
        flops = 4.0 * keys_seen * self.heads * size * self.tokens
        moved = self.itemsize * self.tokens * (self.qkv_width + self.heads * size)
        ring = self.layout.cp > 1 and self.layout.cp_method == "ring"  # of which every rank has pieces of each row
        name = "attention.core.ring" if ring else "attention.core"
        shape = (self.sequence / (2 * self.layout.cp) if ring else self.sequence, keys_seen, size)
        yield Operation(name, "attention", "forward", flops, moved, shape)
        yield Operation(name, "attention", "input", FLASH_BACKWARD * flops, 2 * moved, shape)

    def feed_forward(self, name: str, width: int) -> Iterator[Operation]:
        """Yield the operations of a dense MLP. name: prefix such as "mlp"; width: hidden columns over all tp ranks."""
        config, tokens = self.config, self.tokens
        width //= self.layout.tp
        up = width * (2 if config.gated else 1)
        yield from self.product(f"{name}.up", tokens, up, config.hidden, bias=config.mlp_bias)
        of = elementwise.activation(config.gated, self.engine.fusion)
        yield from self.passes(f"{name}.activation", tokens * width, of)
        yield from self.product(f"{name}.down", tokens, config.hidden, width, bias=config.mlp_bias)

    def mixture(self) -> Iterator[Operation]:
        """Yield the operations of a mixture of experts with equal load; expert-parallel ranks also compute tokens that
        other ranks dispatch to them."""
        config, layout = self.config, self.layout
        spread = layout.expert_parallel
        tokens = self.tokens / layout.tp if spread else self.tokens
        copies = tokens * config.experts_per_token
        held = config.experts // layout.ep
        width = config.expert_intermediate // (layout.etp if spread else layout.tp)
        arriving = copies * (layout.etp if spread else 1)
        yield from self.product("mlp.router", tokens, config.experts, config.hidden)
        yield from self.passes("mlp.routing", tokens * config.experts, elementwise.ROUTED)
        yield from self.passes("mlp.copies", copies * config.hidden, elementwise.COPIES)
        if spread:
            yield from self.passes("mlp.exchange", arriving * config.hidden, elementwise.EXCHANGED)
        yield from self.product("mlp.experts.up", arriving / held, 2 * width, config.hidden, held)
        of = elementwise.activation(True, self.engine.fusion)
        yield from self.passes("mlp.experts.activation", arriving * width, of)
        yield from self.product("mlp.experts.down", arriving / held, config.hidden, width, held)
        if config.shared_intermediate:
            yield from self.feed_forward("mlp.shared", config.shared_intermediate)
            if config.shared_gate:
                yield from self.product("mlp.shared.gate", self.tokens, 1, config.hidden)

    def repeated(self, forward: list[Operation], mixture: bool) -> Iterator[Operation]:
        """Yield the operations of a layer's forward that activation checkpointing recomputes. forward: all operations
        of the layer; mixture: its MLP is a mixture of experts."""
        kind = self.layout.recompute
        for one in forward:
            if one.phase != "forward" or kind == "none":
                continue
            core = one.kind == "attention" or one.name in ("attention.scores", "attention.values", "attention.softmax")
            if kind == "selective":
                if self.engine.selective == "core":
                    wanted = core or one.name == "attention.dropout"
                elif self.engine.selective == "every second product":
                    share = self.every_second(one.name) if one.kind == "product" else float(one.kind == "elementwise")
                    if share:
                        yield Operation(
                            one.name, one.kind, "again", share * one.flops, share * one.bytes, one.shape, one.count
                        )
                    continue
                else:
                    wanted = core or one.kind == "elementwise"
                    # A ring's result came over the wire: it is kept.
                    wanted = wanted and not (core and self.layout.cp > 1 and self.layout.cp_method == "ring")
            else:
                wanted = not (self.engine.stops_early and one.name == self.last_product(mixture))
            if wanted:
                yield Operation(one.name, one.kind, "again", one.flops, one.bytes, one.shape, one.count)

    def every_second(self, name: str) -> float:
        """Return the recomputed fraction of a product such as "mlp.up" if every second matrix product of a block is
        saved (torchtitan's selective activation checkpointing "op")."""
        keys, gates = self.kv_heads / (self.heads + 2 * self.kv_heads), 0.5 if self.config.gated else 0.0
        return {"attention.qkv": keys, "attention.output": 1.0, "mlp.up": gates}.get(name, 0.0)

    def last_product(self, mixture: bool) -> str | None:
        """Return the name of the product whose result the backward does not need, as it is only added to the residual
        stream; None if there is none. mixture: the layer's MLP is a mixture of experts."""
        if self.config.encoder:  # what it is added to is normed
            return None
        if not mixture:
            return "mlp.down"
        return "mlp.shared.down" if self.config.shared_intermediate and not self.config.shared_gate else None

    # --- both ends

    def embedding(self) -> list[Operation]:
        """Return the embedding's lookup, and the accumulation of its gradient into a zeroed table."""
        config, itemsize = self.config, self.itemsize
        looked_up = self.tokens * config.hidden
        table = -(-config.vocabulary // self.layout.tp) * config.hidden
        back = looked_up * (itemsize + 3 * WIDE) + table * (2 * WIDE + itemsize)
        found = [
            Operation("embedding", "lookup", "forward", 0.0, 2.0 * itemsize * looked_up),
            Operation("embedding", "lookup", "input", 0.0, float(back)),
        ]
        if config.positions == "learned":
            found += self.passes("positions", self.own_tokens * config.hidden, elementwise.residual("eager"))
        if config.token_types:
            found += self.passes("token types", self.own_tokens * config.hidden, elementwise.residual("eager"))
        if config.embedding_norm:
            norm = elementwise.norm(config.norm, self.engine.fusion)
            found += self.passes("norm", self.own_tokens * config.hidden, norm)
        return found

    def head(self, kept: bool) -> list[Operation]:
        """Return the operations of final norm, vocabulary product and loss. kept: False if the logits are recomputed in
        the backward."""
        if self.config.encoder:
            return list(self.encoder_head())
        config, tokens = self.config, self.tokens
        inside = self.own_tokens * config.hidden
        found = list(self.passes("norm", inside, elementwise.norm(config.norm, self.engine.fusion)))
        width = -(-config.vocabulary // self.layout.tp)
        products = list(self.product("head", tokens, width, config.hidden))
        found += products
        if not kept:
            found.append(Operation("head", "product", "again", *_sizes(products[0])))
        there = tokens * width * self.engine.loss_bytes / 2
        found += [Operation("loss", "loss", phase, 0.0, there) for phase in ("forward", "input")]
        return found

    def encoder_head(self) -> Iterator[Operation]:
        """Yield the operations of an encoder's head: transform, norm, vocabulary product and loss of masked tokens; or
        pooler and classifier."""
        config, fusion = self.config, self.engine.fusion
        places = count_predictions(config, self.rows, self.sequence)
        if config.head == "masked":
            dense, out, outputs = "transform", "head", config.vocabulary
        else:
            dense, out, outputs = "pooler", "classifier", len(config.labels)
        inside = places * config.hidden
        yield from self.product(dense, places, config.hidden, config.hidden, bias=True)
        yield from self.passes(f"{dense}.activation", inside, elementwise.activation(False, fusion))
        if config.head == "masked":
            yield from self.passes("norm", inside, elementwise.norm(config.norm, fusion))
        if outputs:
            yield from self.product(out, places, outputs, config.hidden, bias=True)
            there = places * outputs * self.engine.loss_bytes / 2
            for phase in ("forward", "input"):
                yield Operation("loss", "loss", phase, 0.0, there)


def _sizes(one: Operation) -> tuple[float, float, tuple[float, float, float] | None, float]:
    """Return (flops, bytes, shape, count) of an operation."""
    return one.flops, one.bytes, one.shape, one.count
