"""Collective calls of one micro-batch on one rank, and the parameters that a rank holds, read from the operators; the
process groups of a layout on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.blocks import embedding_operators, head_operators, layer_operators
from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_examples
from meshwright.planner.cost.operators import CollectiveCall, Operator, Phase
from meshwright.planner.cost.rates import Group
from meshwright.planner.hardware.cluster import Cluster
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage


class PhaseCalls(NamedTuple):
    """Equal calls of one collective in one phase of a micro-batch. collective: the collective; phase: "forward",
    "recompute" or "input" (input gradients); count: number of calls."""

    collective: CollectiveCall
    phase: Phase
    count: Number


def timed_calls(operators: Iterable[Operator]) -> Iterator[PhaseCalls]:
    """Yield the collective calls of operators that the time model includes; calls repeated by activation checkpointing
    are yielded a second time, with phase "recompute"."""
    for operator in operators:
        for one in operator.collectives:
            if one.timed:
                yield PhaseCalls(one, one.phase, one.count)
                if one.again:
                    yield PhaseCalls(one, "recompute", one.count)


def group_of(layout: Layout, axis: str, cluster: Cluster) -> Group:
    """Return the number of ranks of an axis's process group on a cluster, and how many of them share a node.

    axis: "tp", "cp", "data", "shard", "replica", "ep", "etp", "expert_data", "expert_shard" or "expert_replica" (see
    `Layout.groups`); "ring": two neighbours in cp; "pp": two adjacent pipeline ranks. Ranks are numbered with tp
    innermost, then cp, dp, pp; for experts, within a stage: etp, ep, expert_data.
    """
    if axis == "pp":  # on one node if the layout fits into one, else on two: the slowest link
        return Group(2, 2 if layout.world_size <= cluster.devices_per_node else 1)
    if axis == "ring":
        whole = group_of(layout, "cp", cluster)
        return Group(2, min(2, whole.in_node)) if whole.nodes == 1 else Group(2, 1)
    ranks = layout.group_size(axis)
    if cluster.nodes == 1:
        return Group(ranks, ranks)
    stride = layout.ep * layout.etp if axis.startswith("expert") else layout.tp
    stride = {"tp": 1, "etp": 1, "ep": layout.etp}.get(axis, stride)
    if axis.endswith("replica"):
        stride *= layout.group_size(axis.replace("replica", "shard"))
    node = cluster.devices_per_node
    # Groups begin at multiples of their span: those that cross a node boundary are the slowest.
    return Group(ranks, max(part for part in _divisors(ranks) if part == 1 or node % (stride * part) == 0))


@cache
def _divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number in ascending order; cached."""
    return tuple(part for part in range(1, number + 1) if number % part == 0)


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Number of parameters that one rank holds, before ZeRO's sharding, by part of the model.

    Pairs are (dense, expert-parallel): experts sharded by ep or etp are counted apart, as their gradients are reduced
    over other ranks.

    Attributes:
        layer: Pair of numbers for a dense layer.
        mixture: Pair of numbers for a mixture-of-experts layer.
        first: Number of dense parameters that only the first stage has: the embeddings.
        last: Number of dense parameters that only the last stage has: final norm and head.
    """

    layer: tuple[Number, Number]
    mixture: tuple[Number, Number]
    first: Number
    last: Number

    def of_stage(self, config: ModelConfig, stage: Stage) -> tuple[Number, Number]:
        """Return the number of (dense, expert-parallel) parameters that a rank of this pipeline stage holds."""
        mixtures = sum(map(config.has_experts, stage.layers)) if config.experts else 0
        plain = len(stage.layers) - mixtures
        ends = self.first * stage.first + self.last * stage.last
        if config.tied_head and not config.encoder and stage.first and stage.last:  # one matrix
            ends = ends - (self.last - config.hidden * (1 + config.norm_bias))
        return ends + plain * self.layer[0] + mixtures * self.mixture[0], mixtures * self.mixture[1]


def count_parameters(batch: MicroBatch) -> ParameterCounts:
    """Return the number of parameters on this rank, before ZeRO's sharding, of a dense layer, a mixture-of-experts
    layer, the embedding and the head."""
    layers = {kind.mixed: layer for kind, layer in layer_examples(batch.config).items()}
    plain, mixed = (
        _sum_parameters(layer_operators(batch, layers[kind])) if kind in layers else (0.0, 0.0)
        for kind in (False, True)
    )
    return ParameterCounts(
        plain, mixed, _sum_parameters(embedding_operators(batch))[0], _sum_parameters(head_operators(batch, True))[0]
    )


def _sum_parameters(operators: Iterable[Operator]) -> tuple[Number, Number]:
    """Return the numbers of (dense, expert-parallel) parameters of operators on this rank."""
    of = [(one.parameters, one.expert_parameters) for one in operators]
    return sum(each for each, _ in of), sum(each for _, each in of)
