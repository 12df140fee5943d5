"""Bytes of the data-parallel calls in one rank's step, for any parameter table: gradient reductions, ZeRO's
collectives. `traffic.py` adds those of a transformer, `module_traffic.py` those of a foreign module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.collectives.cutting import compute_sent_bytes
from meshwright.collectives.named import NamedProgram
from meshwright.layout import Layout
from meshwright.planner.cost.teacher import TeacherWork
from meshwright.spec.parameter_entries import TRAINED_BUFFERS, BufferKind, padded_numel
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition

AXES_OF: dict[BufferKind, tuple[str, str, str]] = {
    "dense": ("data", "shard", "replica"),
    "experts": ("expert_data", "expert_shard", "expert_replica"),
    "frozen": ("data", "shard", "replica"),
    "frozen_experts": ("expert_data", "expert_shard", "expert_replica"),
    "packed": ("data", "shard", "replica"),
}
"""The axes over which gradients of a part are summed, ZeRO shards it, and others hold the same shard."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes and settings of a training step, from which the bytes that ranks send are counted.

    Attributes:
        batch: Sequences over all ranks.
        sequence: Tokens of each.
        parameter_bytes: Bytes of an element of parameters and activations.
        master_bytes: Bytes of an element of master weights and gradients.
        device: "cpu" or "cuda".
        collectives: Collective programs that replace the backend's calls, by (axis, operation) such as
            ("data", "all_reduce").
        responses: Most responses with preferences in a sequence; 0 for next-token training.
        estimates_kl: A step runs its micro-batches forward once more, for KTO's estimate of the KL divergence.
        teacher: The teacher of distillation; None: none.
    """

    batch: int
    sequence: int
    parameter_bytes: int = 4
    master_bytes: int = 4
    device: str = "cpu"
    collectives: Mapping[tuple[str, str], NamedProgram] = field(default_factory=dict)
    responses: int = 0
    estimates_kl: bool = False
    teacher: TeacherWork | None = None


class DataCalls:
    """Counter of the bytes that one rank sends in a step's data-parallel calls.

    table: the model's parameters; partition: parameters by pipeline stage; work: sizes of the step; rank: global.
    Attribute `sent`: bytes by (call site, axis), such as ("data.gradients", "data").
    """

    def __init__(self, table: ParameterTable, partition: Partition, layout: Layout, work: Work, rank: int) -> None:
        self.table, self.partition, self.layout, self.work, self.rank = table, partition, layout, work, rank
        self.sent: Counter[tuple[str, str]] = Counter()

    def verdict(self, figures: int = 0) -> None:
        """Count the bytes sent by the all-reduce in which all ranks agree on a step's outcome. figures: number of
        values of the loss that it carries in addition to four of its own."""
        ranks = self.layout.world_size
        self.all_reduce("step.verdict", "world", ranks, 8 * (4 + figures + ranks))

    # --- bytes of an operation

    def all_reduce(self, site: str, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """Count the bytes sent by `times` all-reduces of `size` bytes over the `ranks` ranks of an axis. site: label of
        the call in traces, such as "data.gradients"."""
        self.sent[site, axis] += times * (2 * size * (ranks - 1) // ranks)

    def half(self, site: str, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """Count the bytes sent by `times` reduce-scatters or all-gathers (half of an all-reduce's) over the `ranks`
        ranks of an axis. site: label of the call in traces, such as "data.parameters"; size: bytes of the full
        vector."""
        self.sent[site, axis] += times * (size * (ranks - 1) // ranks)

    def reduce(self, site: str, axis: str, numel: int, itemsize: int) -> None:
        """Count the bytes sent by an all-reduce of `numel` gradient elements of `itemsize` bytes on a data-parallel
        axis, by the axis's collective program if there is one. site: label of the call in traces, such as
        "data.gradients"."""
        ranks, place = self.on(axis)
        if not self.by_program(site, axis, "all_reduce", numel, itemsize, place, 1):
            self.all_reduce(site, axis, ranks, numel * itemsize)

    def shard(self, site: str, operation: str, part: BufferKind, numel: int, itemsize: int, times: int = 1) -> None:
        """Count the bytes sent by `times` reduce-scatters or all-gathers over the ranks of a ZeRO sharding group, by
        its collective program if there is one.

        site: label of the call in traces; operation: "reduce_scatter" or "all_gather"; part: parameters whose group it
        is, by the kind of their flat buffer; numel, itemsize: elements of the full vector, bytes of each.
        """
        axis = AXES_OF[part][1]
        ranks, place = self.on(axis)
        if not self.by_program(site, axis, operation, numel, itemsize, place, times):
            self.half(site, axis, ranks, numel * itemsize, times)

    def by_program(
        self, site: str, axis: str, operation: str, numel: int, itemsize: int, place: int, times: int
    ) -> bool:
        """Count the bytes sent by `times` calls of the collective program for an axis and operation; return False if
        there is none.

        site: label of the call in traces; operation: such as "all_reduce"; numel, itemsize: elements of the full
        vector, bytes of each; place: this rank's index in the axis's group.
        """
        named = self.work.collectives.get((axis, operation))
        if named is None:
            return False
        checked, whole = named.choose_program(numel * itemsize), self.work.device == "cuda"
        self.sent[site, axis] += times * compute_sent_bytes(checked, place, numel, itemsize, whole)
        return True

    def on(self, axis: str) -> tuple[int, int]:
        """Return (number of ranks in this rank's group of an axis such as "data", this rank's index in the group)."""
        group = next(group for group in self.layout.groups(axis) if self.rank in group)
        return len(group), group.index(self.rank)

    # --- parameters and their gradients

    def zero(self, part: BufferKind) -> int:
        """Return the effective ZeRO stage for some of the parameters. part: kind of their flat buffer. It is 0 if their
        sharding group has a single rank, and for frozen parameters below ZeRO-3."""
        sharded = self.on(AXES_OF[part][1])[0] > 1 and (part in TRAINED_BUFFERS or self.layout.zero == 3)
        return self.layout.zero if sharded else 0

    def padded(self, unit: str, part: BufferKind) -> int:
        """Return the number of elements, padding included, of the flat buffer of an FSDP unit such as "layers.3". part:
        kind of the buffer."""
        shards = (self.on(AXES_OF[part][1])[0] if self.zero(part) else 1) * (1 + (part == "packed"))
        return padded_numel(self.table.unit_numel(unit, self.layout, part), shards)

    def gradients(self, unit: str, passes: int) -> None:
        """Count the bytes sent by the gradient reductions of an FSDP unit such as "layers.3", and by the all-gather
        of its updated parameters under ZeRO-1 and 2. passes: backward passes of a step that contribute to the
        gradients."""
        holders = self.partition.holders(unit)
        for part in self.table.unit_buffers(unit, self.layout):
            if part not in TRAINED_BUFFERS:
                continue
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
