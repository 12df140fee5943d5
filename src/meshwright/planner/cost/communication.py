"""What one rank tells others in a step, as calls to be timed: which operation, among whom, how large, how often.

The sites are those of `planner/cost/traffic.py`, which counts their bytes exactly for our engine; here they are closed
forms that hold for every engine of `planner/cost/engines.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.engines import Engine
from meshwright.planner.cost.operations import Phase
from meshwright.planner.cost.rates import Collective, Collectives, Group
from meshwright.planner.hardware.cluster import Cluster
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage


class Call(NamedTuple):
    """Equal collective calls of one micro-batch on one rank.

    Attributes:
        axis: "tensor", "context" or "expert".
        phase: "forward", "again" (recomputed), "input" or "weight" (gradients).
        operation: Collective, such as "all-reduce", or "send".
        group: Number of ranks, and how many of them share a node.
        size: Bytes of one call's full vector (`Collectives.seconds`).
        count: Number of calls.
        beside: Computation that overlaps them: "attention" of the same layer, "weight" gradients, or the matrix
            "product" that they feed or follow, in slices; None if exposed.
    """

    axis: str
    phase: Phase
    operation: Collective
    group: Group
    size: float
    count: float  # type: ignore[assignment]  # not what tuples call so
    beside: Literal["attention", "weight", "product"] | None = None

    def seconds(self, collectives: Collectives) -> float:
        """Return the seconds of all these calls together. collectives: cost model of collectives."""
        return self.count * collectives.seconds(self.operation, self.group, self.size)


def group_of(layout: Layout, axis: str, cluster: Cluster) -> Group:
    """Return the number of ranks in a group of an axis, and how many of them share a node. axis: "tp", "cp", "data",
    "shard", "replica", "ep", "etp", "expert_data", "expert_shard" or "expert_replica" (see `Layout.groups`).

    Ranks are numbered with tp innermost, then cp, dp, pp; for experts, within a stage: etp, ep, expert_data.
    """
    experts, ranks = layout.ep * layout.etp, layout.group_size(axis)
    stride = {
        "tp": 1, "cp": layout.tp, "data": layout.tp, "shard": layout.tp,
        "replica": layout.tp * layout.group_size("shard"), "etp": 1, "ep": layout.etp, "expert_data": experts,
        "expert_shard": experts, "expert_replica": experts * layout.group_size("expert_shard"),
    }[axis]  # fmt: skip
    if cluster.nodes == 1:
        return Group(ranks, ranks)
    node = cluster.devices_per_node
    # Groups begin at multiples of their span: those that a node's border cuts through are the slowest.
    return Group(ranks, max(part for part in _parts(ranks) if part == 1 or node % (stride * part) == 0))


@cache
def _parts(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def neighbours(layout: Layout, cluster: Cluster) -> Group:
    """Return the group of two adjacent pipeline ranks: on one node if the layout fits into one, else on two (the
    slowest link)."""
    return Group(2, 2 if layout.world_size <= cluster.devices_per_node else 1)


def calls(
    config: ModelConfig,
    layout: Layout,
    rows: int,
    sequence: int,
    stage: Stage,
    engine: Engine,
    cluster: Cluster,
    itemsize: int = 2,
) -> list[Call]:
    """Return the tensor-, context- and expert-parallel collective calls of one rank, for a micro-batch's forward and
    backward on a pipeline stage.

    rows, sequence: sequences of the micro-batch on a data-parallel rank, and tokens of each; itemsize: bytes of an
    activation's element.
    """
    work = _Calls(config, layout, rows, sequence, engine, cluster, itemsize)
    return [*work.tensor(stage), *work.context(stage), *work.experts(stage)]


class _Calls:
    """Generator of the collective calls of one micro-batch on one rank, for each kind of parallelism.

    rows, sequence: sequences of the micro-batch, and tokens of each; engine: training engine, which decides what is
    overlapped and recomputed; itemsize: bytes of an activation's element.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        rows: int,
        sequence: int,
        engine: Engine,
        cluster: Cluster,
        itemsize: int,
    ) -> None:
        self.config, self.layout, self.engine, self.itemsize = config, layout, engine, itemsize
        self.cluster = cluster
        self.tokens = rows * sequence / layout.cp
        self.hidden = self.tokens * config.hidden * itemsize

    def tensor(self, stage: Stage) -> Iterator[Call]:
        """Yield the tensor-parallel collective calls around attention and each MLP of a pipeline stage (Shoeybi et al.
        2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)."""
        config, layout = self.config, self.layout
        if layout.tp == 1:
            return
        group = group_of(layout, "tp", self.cluster)
        layers = len(stage.layers)
        spread = sum(self.spread(layer) and not config.shared_intermediate for layer in stage.layers)
        around = 2 * layers - spread
        recompute = layout.recompute
        # What was gathered is gathered again by ours in every mode, and by all where whole blocks are repeated.
        gathered = around if recompute == "full" or (recompute != "none" and self.engine.selective != "core") else 0
        # The last sum of a block that is computed again is for nobody.
        summed = 0 if recompute != "full" else layers if self.engine.stops_early else around
        entries, exits = around + stage.last, around + stage.first
        beside: Literal["weight"] | None = "weight" if self.engine.overlaps_tensor else None
        if layout.tensor_sequence_parallel:
            inner: Literal["product"] | None = "product" if self.engine.overlaps_tensor == "products" else None
            yield Call("tensor", "forward", "all-gather", group, self.hidden, around, inner)
            yield Call("tensor", "forward", "reduce-scatter", group, self.hidden, around, inner)
            # The embedding's scatter and the head's gather have no product of a block at their side.
            yield Call("tensor", "forward", "all-gather", group, self.hidden, int(stage.last))
            yield Call("tensor", "forward", "reduce-scatter", group, self.hidden, int(stage.first))
            yield Call("tensor", "again", "all-gather", group, self.hidden, gathered, inner)
            yield Call("tensor", "again", "reduce-scatter", group, self.hidden, summed, inner)
            yield Call("tensor", "input", "all-gather", group, self.hidden, around, inner)
            yield Call("tensor", "input", "all-gather", group, self.hidden, int(stage.first))
            yield Call("tensor", "input", "reduce-scatter", group, self.hidden, entries, beside)
        else:
            yield Call("tensor", "forward", "all-reduce", group, self.hidden, exits)
            yield Call("tensor", "again", "all-reduce", group, self.hidden, summed)
            yield Call("tensor", "input", "all-reduce", group, self.hidden, entries, beside)
        if stage.last:  # highest logit, sum of exponentials, the target's logit
            yield Call("tensor", "forward", "all-reduce", group, 4 * self.tokens, 3)

    def context(self, stage: Stage) -> Iterator[Call]:
        """Yield the context-parallel calls of a stage: ring steps that send keys and values to the next rank, or
        all-to-alls of heads and tokens (Ulysses)."""
        config, layout, ranks = self.config, self.layout, self.layout.cp
        if ranks == 1:
            return
        heads, kv_heads = config.heads // layout.tp, max(1, config.kv_heads // layout.tp)
        one = self.tokens * config.head_dim * self.itemsize
        group, layers = group_of(layout, "cp", self.cluster), len(stage.layers)
        if layout.cp_method == "ring":
            link = Group(2, min(2, group.in_node)) if group.nodes == 1 else Group(2, 1)
            sent, wide = 2 * kv_heads * one, 4 / self.itemsize
            yield Call("context", "forward", "send", link, sent, layers * (ranks - 1), beside="attention")
            if layout.recompute == "full":
                yield Call("context", "again", "send", link, sent, layers * (ranks - 1), beside="attention")
            yield Call("context", "input", "send", link, sent * (1 + wide), layers * (ranks - 1), beside="attention")
            yield Call("context", "input", "send", link, sent * wide, layers)  # the last one goes home
            return
        traded = (heads + 2 * kv_heads * max(1, ranks // kv_heads), heads)
        for width in traded:
            yield Call("context", "forward", "all-to-all", group, width * one, layers)
            yield Call("context", "input", "all-to-all", group, width * one, layers)
            if layout.recompute != "none":
                yield Call("context", "again", "all-to-all", group, width * one, layers)

    def spread(self, layer: int) -> bool:
        """Return True if the layer with index `layer` in the model has experts and they are expert-parallel."""
        return self.layout.expert_parallel and self.config.has_experts(layer)

    def experts(self, stage: Stage) -> Iterator[Call]:
        """Yield the all-to-alls that dispatch a stage's tokens to experts and combine the results, and the etp
        collectives, with equal load on all ranks."""
        config, layout = self.config, self.layout
        mixtures = sum(self.spread(layer) for layer in stage.layers)
        if not mixtures:
            return
        rows = self.tokens / layout.tp * config.experts_per_token * config.hidden * self.itemsize
        ep, etp = group_of(layout, "ep", self.cluster), group_of(layout, "etp", self.cluster)
        passes: list[tuple[Phase, int]] = [("forward", 1), ("input", 1)]
        if layout.recompute == "full":
            passes.append(("again", 1))
        for phase, times in passes:
            yield Call("expert", phase, "all-to-all", ep, rows, 2 * mixtures * times)
            yield Call("expert", phase, "all-gather", etp, rows * layout.etp, mixtures * times)
            yield Call("expert", phase, "reduce-scatter", etp, rows * layout.etp, mixtures * times)
        if not layout.tensor_sequence_parallel and layout.tp > 1:
            tp = group_of(layout, "tp", self.cluster)
            yield Call("expert", "forward", "all-gather", tp, self.hidden, mixtures)
            yield Call("expert", "input", "all-gather", tp, self.hidden, mixtures)


@dataclass(frozen=True, slots=True)
class Held:
    """Number of parameters on one rank, before ZeRO's sharding. In a pair, the first counts dense, the second
    expert-parallel parameters.

    Expert parameters are separate where ep or etp shards them, as their gradients are reduced over other ranks.

    Attributes:
        layer: Of a dense layer.
        mixture: Of a mixture-of-experts layer.
        first: Of the first stage outside its layers: embeddings.
        last: Of the last stage outside its layers: final norm and head.
    """

    layer: tuple[float, float]
    mixture: tuple[float, float]
    first: float
    last: float

    def of_stage(self, config: ModelConfig, stage: Stage) -> tuple[float, float]:
        """Return the number of (dense, expert-parallel) parameters that a rank of this pipeline stage holds."""
        mixtures = sum(config.has_experts(layer) for layer in stage.layers)
        plain = len(stage.layers) - mixtures
        ends = self.first * stage.first + self.last * stage.last
        if config.tied_head and not config.encoder and stage.first and stage.last:  # one matrix
            ends -= self.last - config.hidden * (1 + config.norm_bias)
        return ends + plain * self.layer[0] + mixtures * self.mixture[0], mixtures * self.mixture[1]


def held(config: ModelConfig, layout: Layout) -> Held:
    """Return the number of parameters on each rank of a dense layer, a mixture-of-experts layer, the embedding and the
    head, in closed form, without ZeRO's sharding."""
    hidden, tp = config.hidden, layout.tp
    heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
    qkv, query = (heads + 2 * kv_heads) * config.head_dim, heads * config.head_dim
    norm = hidden * (1 + config.norm_bias)
    attention = qkv * (hidden + config.qkv_bias) + hidden * (query + config.output_bias)
    attention += 2 * config.head_dim * config.query_key_norm + norm * (4 if config.post_norms else 2)

    def mlp(width: float) -> float:
        """Return the number of parameters of an MLP with `width` hidden columns on this rank."""
        up = width * (2 if config.gated else 1)
        return up * (hidden + config.mlp_bias) + hidden * (width + config.mlp_bias)

    plain = attention + mlp(config.intermediate / tp)
    dense = spread = 0.0
    if config.experts:
        router = config.experts * (hidden + config.router_bias) + hidden * config.shared_gate
        dense = attention + router + 3.0 * hidden * config.shared_intermediate / tp
        matrices = 3.0 * hidden * config.expert_intermediate
        if layout.expert_parallel:
            spread = matrices * config.experts / layout.ep / layout.etp
        else:
            dense += matrices * config.experts / tp
    vocabulary = -(-config.vocabulary // tp) * hidden
    first = vocabulary + (config.max_positions * hidden if config.positions == "learned" else 0)
    first += norm if config.embedding_norm else 0
    first += config.token_types * hidden
    last = norm + vocabulary
    if config.encoder:  # never cut into stages: what it shares with the embedding is counted there
        last = hidden * (hidden + 1)
        last += norm + config.vocabulary if config.head == "masked" else len(config.labels) * (hidden + 1)
    return Held((plain, 0.0), (dense, spread), first, last)
