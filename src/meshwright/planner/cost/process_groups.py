"""Process groups of many layouts, and the seconds of collectives in them, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.communication import group_of
from meshwright.planner.cost.measured_rates import CostByLayout
from meshwright.planner.cost.operators import Collective
from meshwright.planner.cost.rates import Collectives, Cost, Group
from meshwright.program.durations import Floats

Array = np.ndarray[Any, np.dtype[Any]]


class ProcessGroups:
    """Process groups of candidate layouts by axis, and the seconds of collectives in them as arrays [..., candidates].

    collectives: predictor of a collective's seconds; layouts: distinct layouts; which: index into `layouts` of each
    candidate, [candidates].
    """

    def __init__(self, collectives: Collectives, layouts: Sequence[Layout], which: Array | None = None) -> None:
        self.collectives, self.layouts = collectives, layouts
        self.which = np.arange(len(layouts)) if which is None else which

    @cached_method
    def groups(self, axis: str) -> tuple[list[Group], Array]:
        """Return (distinct process groups of an axis such as "data", index of each candidate's [candidates])."""
        numbers: dict[Group, int] = {}
        of = [group_of(layout, axis, self.collectives.cluster) for layout in self.layouts]
        index = np.array([numbers.setdefault(group, len(numbers)) for group in of], dtype=np.int64)
        return list(numbers), index[self.which]

    def _by_group(self, axis: str, get: Callable[[Group], float]) -> Floats:
        """Return get(process group of an axis) for each candidate: [candidates]."""
        groups, which = self.groups(axis)
        return np.array([get(group) for group in groups], dtype=np.float64)[which]

    def ranks(self, axis: str) -> Floats:
        """Return the number of ranks in a process group of an axis such as "data": [candidates]."""
        return self._by_group(axis, lambda group: group.ranks)

    def seconds(self, operation: Collective, axis: str, size: Floats) -> Floats:
        """Return the seconds of a collective over an axis: [..., candidates]. operation: such as "all-reduce"; axis:
        such as "data"; size: bytes of the full vector."""
        return self._cost(operation, axis).seconds_at(size)

    @cached_method
    def _cost(self, operation: Collective, axis: str) -> Cost | CostByLayout:
        """Return the cost function of a collective over an axis for all candidates."""
        groups, which = self.groups(axis)
        costs = [self.collectives.cost(operation, group) for group in groups]
        if not all(isinstance(each, Cost) for each in costs):
            return CostByLayout(costs, which)
        parts = (np.array([getattr(each, name) for each in costs]) for name in ("start", "byte", "root"))
        return Cost(*(part[which] for part in parts))

    def distinct_places(self, axis: str, chosen: int, groups: tuple[int, int] = (1, 1)) -> Floats:
        """Return the expected number of distinct nodes (or, if the group is within a node, ranks) to which a token is
        sent, divided by `chosen`, the number of its experts, if the experts' load is equal: [candidates].

        axis: axis of the process group; groups: (groups chosen per token, number of groups) for group-limited routing,
        which restricts a token's experts to a few groups; a group is a whole number of nodes if there are enough.
        """
        places = self._by_group(axis, lambda group: group.nodes if group.nodes > 1 else group.ranks)
        places = np.where(places % groups[1] == 0, places * groups[0] / groups[1], places)
        return np.asarray(places / chosen * (1 - (1 - 1 / places) ** chosen))

    def overlap_slowdown(self, axis: str) -> Floats:
        """Return the seconds by which computation slows for each second of communication over an axis that overlaps it:
        [candidates]."""
        return self._by_group(axis, self.collectives.overlap_slowdown)

    @cached_property
    def shards(self) -> tuple[Floats, Floats]:
        """Number of ranks over which ZeRO shards (dense, expert-parallel) parameters."""
        return self.ranks("shard"), self.ranks("expert_shard")

    @cached_method
    def gradient_slowdown(self, sharded: bool) -> Floats:
        """Return the seconds by which computation slows for each second of gradient communication that overlaps it:
        [candidates]. sharded: True if ZeRO shards gradients, so that communication stays within a sharding group."""
        dense, experts = ("shard", "expert_shard") if sharded else ("data", "expert_data")
        mixed = np.array([layout.expert_parallel for layout in self.layouts])[self.which]
        of_experts = np.where(mixed, self.overlap_slowdown(experts), 0.0)
        return np.maximum(self.overlap_slowdown(dense), of_experts)
