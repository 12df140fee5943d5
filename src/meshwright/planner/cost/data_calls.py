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
from meshwright.spec.parameter_entries import AXES_OF, TRAINED_BUFFERS, BufferKind, padded_numel
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes and settings of a training step, from which the bytes that ranks send are counted.

    Attributes:
        batch: Sequences of a step over all ranks.
        sequence: Tokens of a sequence.
        parameter_bytes: Bytes of an element of parameters and activations.
        master_bytes: Bytes of an element of master weights and gradients.
        device: "cpu" or "cuda".
        collectives: Collective programs that replace the backend's collectives, by (axis, operation) such as ("data",
            "all_reduce").
        responses: Most responses with preferences (DPO, KTO) in a sequence; 0 for next-token training.
        estimates_kl: True if a step runs an additional forward pass for KTO's estimate of the KL divergence.
        teacher: Teacher model of distillation; None without.
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
    """Counter of the bytes that one rank sends in a step's data-parallel collectives; each `count_...` method adds to
    `sent`.

    table: the model's parameters; partition: assignment of parameters to pipeline stages; work: sizes of the step;
    rank: global rank. Attribute `sent`: bytes by (call site, axis), such as ("data.gradients", "data"); a call site is
    the label of a collective call in the source, as in traces.
    """

    def __init__(self, table: ParameterTable, partition: Partition, layout: Layout, work: Work, rank: int) -> None:
        self.table, self.partition, self.layout, self.work, self.rank = table, partition, layout, work, rank
        self.sent: Counter[tuple[str, str]] = Counter()

    def count_outcome(self, figures: int = 0) -> None:
        """Count the bytes sent by the all-reduce of a step's outcome: loss, squared gradient norm, flags to stop and of
        a failed save, working seconds of each rank. figures: number of the objective's metrics that it carries in
        addition."""
        ranks = self.layout.world_size
        self.count_all_reduce("step.verdict", "world", ranks, 8 * (4 + figures + ranks))

    # --- bytes of an operation

    def count_all_reduce(self, site: str, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """Count the bytes that this rank sends in `times` all-reduces of `size` bytes over the `ranks` ranks of an
        axis. site: call site, such as "data.gradients"."""
        self.sent[site, axis] += times * (2 * size * (ranks - 1) // ranks)

    def count_half(self, site: str, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """Count the bytes that this rank sends in `times` reduce-scatters or all-gathers, each of which sends half as
        much as an all-reduce.

        site: call site, such as "data.parameters"; axis, ranks: axis and number of its ranks; size: bytes of the full
        vector.
        """
        self.sent[site, axis] += times * (size * (ranks - 1) // ranks)

    def count_data_all_reduce(self, site: str, axis: str, numel: int, itemsize: int) -> None:
        """Count the bytes that this rank sends in an all-reduce of `numel` elements of `itemsize` bytes over a
        data-parallel axis, in the backend's or in the collective program that replaces it. site: call site, such as
        "data.gradients"."""
        ranks, place = self.group_position(axis)
        if not self.count_by_program(site, axis, "all_reduce", numel, itemsize, place, 1):
            self.count_all_reduce(site, axis, ranks, numel * itemsize)

    def count_zero_collective(
        self, site: str, operation: str, part: BufferKind, numel: int, itemsize: int, times: int = 1
    ) -> None:
        """Count the bytes that this rank sends in `times` reduce-scatters or all-gathers over its ZeRO sharding group,
        in the backend's or in the collective program that replaces them.

        site: call site; operation: "reduce_scatter" or "all_gather"; part: kind of the flat parameter buffer, such as
        "dense", which decides the sharding group; numel, itemsize: elements of the full vector, bytes of each.
        """
        axis = AXES_OF[part][1]
        ranks, place = self.group_position(axis)
        if not self.count_by_program(site, axis, operation, numel, itemsize, place, times):
            self.count_half(site, axis, ranks, numel * itemsize, times)

    def count_by_program(
        self, site: str, axis: str, operation: str, numel: int, itemsize: int, place: int, times: int
    ) -> bool:
        """Count the bytes that this rank sends in `times` runs of the collective program that replaces the backend's
        collective; return False, and count nothing, if there is no such program.

        site: call site; axis, operation: such as "data" and "all_reduce"; numel, itemsize: elements of the full vector,
        bytes of each; place: index of this rank in the axis's group.
        """
        named = self.work.collectives.get((axis, operation))
        if named is None:
            return False
        checked, whole = named.choose_program(numel * itemsize), self.work.device == "cuda"
        self.sent[site, axis] += times * compute_sent_bytes(checked, place, numel, itemsize, whole)
        return True

    def group_position(self, axis: str) -> tuple[int, int]:
        """Return (size, index): number of ranks in this rank's process group of an axis such as "data", and this rank's
        index in the group."""
        group = next(group for group in self.layout.groups(axis) if self.rank in group)
        return len(group), group.index(self.rank)

    # --- parameters and their gradients

    def zero_stage(self, part: BufferKind) -> int:
        """Return the ZeRO stage that takes effect for a kind of flat parameter buffer (`part`, such as "dense"): 0 if
        the sharding group has a single rank, and for frozen parameters unless the stage is 3."""
        sharded = self.group_position(AXES_OF[part][1])[0] > 1 and (part in TRAINED_BUFFERS or self.layout.zero == 3)
        return self.layout.zero if sharded else 0

    def buffer_numel(self, unit: str, part: BufferKind) -> int:
        """Return the number of elements, padding included, of an FSDP unit's flat parameter buffer. unit: such as
        "layers.3"; part: kind of the buffer, such as "dense"."""
        shards = (self.group_position(AXES_OF[part][1])[0] if self.zero_stage(part) else 1) * (1 + (part == "packed"))
        return padded_numel(self.table.unit_numel(unit, self.layout, part), shards)

    def count_gradients(self, unit: str, passes: int) -> None:
        """Count the bytes that this rank sends to reduce the gradients of an FSDP unit such as "layers.3", and under
        ZeRO-1 and 2 to all-gather its updated parameters. passes: backward passes in a step that add to the
        gradients."""
        holders = self.partition.holders(unit)
        for part in self.table.unit_buffers(unit, self.layout):
            if part not in TRAINED_BUFFERS:
                continue
            data, shard, replica = AXES_OF[part]
            numel, size, zero = self.buffer_numel(unit, part), self.work.master_bytes, self.zero_stage(part)
            if zero == 0:
                self.count_data_all_reduce("data.gradients", data, numel, size)
                held = self.table.unit_numel(unit, self.layout, part)
            else:
                self.count_zero_collective(
                    "data.gradients", "reduce_scatter", part, numel, size, passes if zero >= 2 else 1
                )
                held = numel // self.group_position(shard)[0]
                self.count_data_all_reduce("data.gradients.replicas", replica, held, size)
            self.count_all_reduce("pipeline.gradients.shared", "pp", len(holders), held * size)
            if zero in (1, 2):
                self.count_zero_collective("data.parameters", "all_gather", part, numel, self.work.parameter_bytes)


def sum_by_site(calls: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return {call site: bytes sent}, summed over axes, without sites that send nothing. calls: bytes by (site,
    axis)."""
    found = Counter[str]()
    for (site, _), sent in calls.items():
        found[site] += sent
    return {site: sent for site, sent in found.items() if sent}


def sum_by_axis(calls: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return {mesh axis: bytes sent}, summed over call sites, without axes that send nothing. calls: bytes by (site,
    axis)."""
    return sum_by_site({(axis, site): sent for (site, axis), sent in calls.items()})
