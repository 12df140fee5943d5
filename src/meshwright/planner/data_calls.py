"""The calls of data parallelism in one rank's step, for any parameter table: sums of gradients, and the bytes of each
operation. `traffic.py` adds those of a transformer, `module_traffic.py` those of a foreign module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.collectives.cutting import compute_sent_bytes
from meshwright.collectives.named import NamedProgram
from meshwright.layout import Layout
from meshwright.spec.parameter_entries import BufferKind, padded_numel
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition

AXES_OF: dict[BufferKind, tuple[str, str, str]] = {
    "dense": ("data", "shard", "replica"),
    "experts": ("expert_data", "expert_shard", "expert_replica"),
}
"""The axes over which gradients of a part are summed, ZeRO shards it, and others hold the same shard."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes and settings of a training step, for counting its bytes on the wire.

    Attributes:
        batch: Sequences over all ranks.
        sequence: Tokens of each.
        parameter_bytes: Of an element of parameters and activations.
        master_bytes: Of an element of master weights and gradients.
        device: "cpu" or "cuda".
        collectives: Collective programs in place of the backend's calls, by (axis, operation).
        pairs: Most response pairs in a row; 0 for next-token training.
    """

    batch: int
    sequence: int
    parameter_bytes: int = 4
    master_bytes: int = 4
    device: str = "cpu"
    collectives: Mapping[tuple[str, str], NamedProgram] = field(default_factory=dict)
    pairs: int = 0


class DataCalls:
    """Counter of the bytes that one rank sends in a step's data-parallel calls.

    table, partition: parameters, and the units of each pipeline stage; work: sizes of the step; rank: global. Attribute
    `sent`: bytes by (call site, axis).
    """

    def __init__(self, table: ParameterTable, partition: Partition, layout: Layout, work: Work, rank: int) -> None:
        self.table, self.partition, self.layout, self.work, self.rank = table, partition, layout, work, rank
        self.sent: Counter[tuple[str, str]] = Counter()

    def verdict(self, figures: int = 0) -> None:
        """Add the all-reduce by which all ranks agree on a step's outcome. figures: numbers of the loss in it, beside
        its own."""
        ranks = self.layout.world_size
        self.all_reduce("step.verdict", "world", ranks, 8 * (4 + figures + ranks))

    # --- bytes of an operation

    def all_reduce(self, site: str, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """Add `times` all-reduces of `size` bytes over the `ranks` ranks of an axis. site: label of the call in traces,
        such as "data.gradients"."""
        self.sent[site, axis] += times * (2 * size * (ranks - 1) // ranks)

    def half(self, site: str, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """Add `times` reduce-scatters or all-gathers (half an all-reduce each) over the `ranks` ranks of an axis. site:
        label of the call; size: bytes of the full vector."""
        self.sent[site, axis] += times * (size * (ranks - 1) // ranks)

    def reduce(self, site: str, axis: str, numel: int, itemsize: int) -> None:
        """Add an all-reduce of `numel` gradient elements of `itemsize` bytes on a data-parallel axis, by its collective
        program if it has one. site: label of the call, such as "data.gradients"."""
        ranks, place = self.on(axis)
        if not self.by_program(site, axis, "all_reduce", numel, itemsize, place, 1):
            self.all_reduce(site, axis, ranks, numel * itemsize)

    def shard(self, site: str, operation: str, part: BufferKind, numel: int, itemsize: int, times: int = 1) -> None:
        """Add `times` reduce-scatters or all-gathers over the ranks that ZeRO shards a part over, by collective program
        if any.

        site: label of the call; operation: "reduce_scatter" or "all_gather"; part: "dense" or "experts"; numel,
        itemsize: elements of the full vector, bytes of each.
        """
        axis = AXES_OF[part][1]
        ranks, place = self.on(axis)
        if not self.by_program(site, axis, operation, numel, itemsize, place, times):
            self.half(site, axis, ranks, numel * itemsize, times)

    def by_program(
        self, site: str, axis: str, operation: str, numel: int, itemsize: int, place: int, times: int
    ) -> bool:
        """Add `times` calls of the collective program of an axis and operation; return False if there is none.

        site: label of the call; numel, itemsize: elements of the full vector, bytes of each; place: this rank's index
        in the axis's group.
        """
        named = self.work.collectives.get((axis, operation))
        if named is None:
            return False
        checked, whole = named.choose_program(numel * itemsize), self.work.device == "cuda"
        self.sent[site, axis] += times * compute_sent_bytes(checked, place, numel, itemsize, whole)
        return True

    def on(self, axis: str) -> tuple[int, int]:
        """Return the number of ranks in this rank's group of an axis such as "data", and this rank's index in it."""
        group = next(group for group in self.layout.groups(axis) if self.rank in group)
        return len(group), group.index(self.rank)

    # --- parameters and their gradients

    def zero(self, part: BufferKind) -> int:
        """Return the effective ZeRO level of a part of the parameters, "dense" or "experts": 0 where it has a single
        rank."""
        return self.layout.zero if self.on(AXES_OF[part][1])[0] > 1 else 0

    def padded(self, unit: str, part: BufferKind) -> int:
        """Return the elements, padding included, of the flat buffer of a unit such as "layers.3"; part: "dense" or
        "experts"."""
        shards = self.on(AXES_OF[part][1])[0] if self.zero(part) else 1
        return padded_numel(self.table.unit_numel(unit, self.layout, part), shards)

    def gradients(self, unit: str, passes: int) -> None:
        """Add the gradient reductions of a unit such as "layers.3". passes: backward passes of a step that contribute
        to it."""
        holders = self.partition.holders(unit)
        for part in self.table.unit_buffers(unit, self.layout):
            data, shard, replica = AXES_OF[part]
            numel, size, zero = self.padded(unit, part), self.work.master_bytes, self.zero(part)
            if zero == 0:
                self.reduce("data.gradients", data, numel, size)
                held = self.table.unit_numel(unit, self.layout, part)
            else:
                self.shard("data.gradients", "reduce_scatter", part, numel, size, passes if zero >= 2 else 1)
                held = numel // self.on(shard)[0]
                self.reduce("data.gradients.replicas", replica, held, size)
            self.all_reduce("pipeline.gradients.shared", "pp", len(holders), held * size)
            if zero in (1, 2):
                self.shard("data.parameters", "all_gather", part, numel, self.work.parameter_bytes)


def by_site(calls: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return the bytes sent by call site, without sites that send nothing. calls: bytes by (site, axis)."""
    found = Counter[str]()
    for (site, _), sent in calls.items():
        found[site] += sent
    return {site: sent for site, sent in found.items() if sent}


def by_axis(calls: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return the bytes sent by mesh axis, without axes that send nothing. calls: bytes by (site, axis)."""
    return by_site({(axis, site): sent for (site, axis), sent in calls.items()})
