"""Collective calls of one micro-batch on one rank, and the parameters that a rank holds, read from the operators; the
process groups of layouts on a cluster, and the seconds of collectives in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.blocks import head_operators, stage_operators
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.measured_rates import CostByLayout
from meshwright.planner.cost.micro_batch import MicroBatch, Number
from meshwright.planner.cost.operators import Collective, CollectiveCall, Operator, sum_parameters
from meshwright.planner.cost.rates import Collectives, Cost, Group
from meshwright.planner.hardware.cluster import Cluster
from meshwright.program.durations import Floats
from meshwright.spec.stages import Stage

Array = np.ndarray[Any, np.dtype[Any]]


Value = TypeVar("Value", bound=Hashable)


def find_distinct(values: Iterable[Value]) -> tuple[list[Value], Array]:
    """Return (the distinct values in order, index among them for each value)."""
    numbers: dict[Value, int] = {}
    index = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(index, dtype=np.int64)


def timed_calls(operators: Iterable[Operator]) -> Iterator[CollectiveCall]:
    """Yield the collective calls of operators that the time model includes. A call that activation checkpointing
    repeats is yielded twice, the second time with phase "recompute"."""
    for one in (call for operator in operators for call in operator.collectives if call.timed):
        yield one
        if np.any(one.again):
            yield one._replace(phase="recompute", count=one.count * one.again)


class ZeroCall(NamedTuple):
    """A collective of data parallelism (ZeRO), made for dense parameters and, separately, for expert-parallel ones.

    Attributes:
        site: Call site in `parallel/`.
        operation: Such as "reduce-scatter".
        group: Process group: 0 for all data-parallel ranks, 1 for a sharding group, 2 for the ranks that hold the same
            shard in different sharding groups (index into a value of `AXES_OF`).
        stages: ZeRO stages under which the collective is called.
        repeats: True if it is called once a micro-batch, False if once a step.
        of_parameters: True if parameters are sent, False if gradients are.
        of_shard: True if the vector is the rank's shard, False if it is the full vector.
    """

    site: str
    operation: Collective
    group: int
    stages: tuple[int, ...]
    repeats: bool = False
    of_parameters: bool = False
    of_shard: bool = False


ZERO_CALLS = (
    ZeroCall("data.gradients", "all-reduce", 0, (0,)),
    ZeroCall("data.gradients", "reduce-scatter", 1, (1,)),
    ZeroCall("data.gradients", "reduce-scatter", 1, (2, 3), repeats=True),
    ZeroCall("data.gradients.replicas", "all-reduce", 2, (1, 2, 3), of_shard=True),
    ZeroCall("data.parameters", "all-gather", 1, (1, 2), of_parameters=True),
    ZeroCall("data.parameters", "all-gather", 1, (3,), repeats=True, of_parameters=True),
)
"""Collectives of data parallelism under each ZeRO stage; under stage 3 a micro-batch gathers parameters for its forward
and for its backward."""


def group_of(layout: Layout, axis: str, cluster: Cluster) -> Group:
    """Return the process group of an axis on a cluster: its number of ranks, and how many of these are on each node.

    axis: "tp", "cp", "data", "shard", "replica", "ep", "etp", "expert_data", "expert_shard" or "expert_replica" (see
    `Layout.groups`); "ring": two neighbours in cp; "pp": two adjacent pipeline ranks. Ranks are numbered with tp
    innermost, then cp, dp, pp; for experts, within a stage: etp, ep, expert_data."""
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
    return Group(ranks, max(part for part in divisors(ranks) if part == 1 or node % (stride * part) == 0))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number in ascending order; cached."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def count_parameters(batch: MicroBatch, stage: Stage) -> tuple[Number, Number]:
    """Return the numbers of (dense, expert-parallel) parameters that a rank of a pipeline stage holds, before ZeRO's
    sharding. Experts sharded by ep or etp are counted apart, as their gradients are reduced over other ranks."""
    shared = list_shared_operators(batch) if stage.first and stage.last else ()
    return sum_parameters(one for one in stage_operators(batch, stage) if one not in shared)


def list_shared_operators(batch: MicroBatch) -> tuple[Operator, ...]:
    """Return the head's operators whose parameters are shared with the embedding (tied weights). A rank that has both
    embedding and head holds these parameters once."""
    tied = batch.config.tied_head and not batch.config.encoder
    return tuple(one for one in head_operators(batch, True) if tied and one.name == "head")


class ProcessGroups:
    """Process groups of candidate layouts by axis, and the seconds of collectives in them as arrays [..., candidates].

    collectives: predictor of a collective's seconds; layouts: distinct layouts; which: index into `layouts` for each
    candidate, [candidates]."""

    def __init__(self, collectives: Collectives, layouts: Sequence[Layout], which: Array | None = None) -> None:
        self.collectives, self.layouts = collectives, layouts
        self.which = np.arange(len(layouts)) if which is None else which

    @cached_method
    def groups(self, axis: str) -> tuple[list[Group], Array]:
        """Return (distinct process groups of an axis such as "data", for each candidate the index of its group
        [candidates])."""
        groups, index = find_distinct(group_of(layout, axis, self.collectives.cluster) for layout in self.layouts)
        return groups, index[self.which]

    def _by_group(self, axis: str, get: Callable[[Group], float]) -> Floats:
        """Apply `get` to the process group that each candidate has on an axis such as "data"; return the results
        [candidates]."""
        groups, which = self.groups(axis)
        return np.array([get(group) for group in groups], dtype=np.float64)[which]

    def ranks(self, axis: str) -> Floats:
        """Return the number of ranks in a process group of an axis such as "data": [candidates]."""
        return self._by_group(axis, lambda group: group.ranks)

    def seconds(self, operation: Collective, axis: str, size: Floats) -> Floats:
        """Return the seconds of a collective over an axis: [..., candidates]. operation: such as "all-reduce"; axis:
        such as "data"; size: bytes of the full vector."""
        return np.asarray(self._cost(operation, axis).seconds_at(size))

    @cached_method
    def _cost(self, operation: Collective, axis: str) -> Cost | CostByLayout:
        """Return the cost function of a collective over an axis for all candidates."""
        groups, which = self.groups(axis)
        costs = [self.collectives.cost(operation, group) for group in groups]
        published = [each for each in costs if isinstance(each, Cost)]
        return Cost.stack(published, which) if len(published) == len(costs) else CostByLayout(costs, which)

    def distinct_places(self, axis: str, chosen: int, groups: tuple[int, int] = (1, 1)) -> Floats:
        """Return, for each candidate layout, the expected number of nodes to which one token is sent, divided by the
        number of experts that it chooses (`chosen`): [candidates]. All experts have equal load. For a process group
        within one node, ranks are counted instead of nodes.

        axis: axis of the process group. groups: (expert groups chosen per token, number of expert groups) of
        group-limited routing, which restricts a token's experts to a few groups; (1, 1): no restriction."""
        places = self._by_group(axis, lambda group: group.nodes if group.nodes > 1 else group.ranks)
        places = np.where(places % groups[1] == 0, places * groups[0] / groups[1], places)
        return np.asarray(places / chosen * (1 - (1 - 1 / places) ** chosen))

    def overlap_slowdown(self, axis: str) -> Floats:
        """Return the seconds that computation loses for each second in which communication over `axis` overlaps it:
        [candidates]."""
        return self._by_group(axis, self.collectives.overlap_slowdown)

    @cached_property
    def shards(self) -> tuple[Floats, Floats]:
        """(Number of ranks over which ZeRO shards dense parameters [candidates], number of ranks over which it shards
        expert-parallel parameters [candidates])."""
        return self.ranks("shard"), self.ranks("expert_shard")

    @cached_method
    def gradient_slowdown(self, sharded: bool) -> Floats:
        """Return the seconds that computation loses for each second in which communication of gradients overlaps it:
        [candidates]. sharded: True if ZeRO shards gradients, so that communication stays within a sharding group."""
        dense, experts = ("shard", "expert_shard") if sharded else ("data", "expert_data")
        mixed = np.array([layout.expert_parallel for layout in self.layouts])[self.which]
        of_experts = np.where(mixed, self.overlap_slowdown(experts), 0.0)
        return np.maximum(self.overlap_slowdown(dense), of_experts)
