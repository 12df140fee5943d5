"""Bytes of the data-parallel calls in one rank's step, for any parameter table: gradient reductions, ZeRO's
collectives. `traffic.py` adds those of a transformer, `ModuleCalls` those of a foreign module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from meshwright.collectives.cutting import compute_sent_bytes
from meshwright.collectives.named import NamedProgram
from meshwright.layout import Layout
from meshwright.planner.cost.communication import ZERO_CALLS
from meshwright.planner.cost.engines import ENGINES, Engine
from meshwright.planner.memory.states import Flat, flats_of
from meshwright.spec.foreign import REST, ModulePartition
from meshwright.spec.parameter_entries import AXES_OF
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition
from meshwright.spec.teacher import TeacherWork


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
        engine: Training engine, whose overlap of products decides which collectives are repeated.
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
    engine: Engine = ENGINES["meshwright"]


class DataCalls:
    """Counter of the bytes that one rank sends in a step's data-parallel collectives. Each `count_...` method adds to
    the attribute `sent`: {(call site, axis), such as ("data.gradients", "data"): bytes}. A call site is the label of a
    collective call in the source, as in traces.

    table: the model's parameters; partition: assignment of parameters to pipeline stages; work: sizes of the step;
    rank: global rank."""

    def __init__(self, table: ParameterTable, partition: Partition, layout: Layout, work: Work, rank: int) -> None:
        self.table, self.partition, self.layout, self.work, self.rank = table, partition, layout, work, rank
        self.sent: Counter[tuple[str, str]] = Counter()

    def count_outcome(self, figures: int = 0) -> None:
        """Count the bytes sent by the all-reduce at the end of a step. It carries the loss, the squared gradient norm,
        the flags "stop" and "a save has failed", and the working seconds of each rank. figures: number of further
        metrics in it."""
        ranks = self.layout.world_size
        self.count_call("step.verdict", "world", "all-reduce", ranks, 8 * (4 + figures + ranks))

    # --- bytes of an operation

    def count_call(self, site: str, axis: str, operation: str, ranks: int, size: int, times: int = 1) -> None:
        """Count the bytes that this rank sends in `times` collectives of the backend: an all-reduce sends twice as much
        as a reduce-scatter, an all-gather or an all-to-all.

        site: call site, such as "data.gradients"; axis, ranks: axis and number of its ranks; operation: such as
        "all-reduce"; size: bytes of the full vector.
        """
        self.sent[site, axis] += times * ((2 if operation == "all-reduce" else 1) * size * (ranks - 1) // ranks)

    def count_data_call(self, site: str, axis: str, operation: str, numel: int, itemsize: int, times: int = 1) -> None:
        """Count the bytes that this rank sends in `times` collectives over a data-parallel axis. If a collective
        program replaces the backend's collective, the program's bytes are counted.

        site: call site, such as "data.gradients"; axis: such as "data"; operation: such as "all-reduce"; numel,
        itemsize: elements of the full vector, and bytes of each."""
        ranks, place = self.group_position(axis)
        named = self.work.collectives.get((axis, operation.replace("-", "_")))
        if named is None:
            self.count_call(site, axis, operation, ranks, numel * itemsize, times)
            return
        checked, whole = named.choose_program(numel * itemsize), self.work.device == "cuda"
        self.sent[site, axis] += times * compute_sent_bytes(checked, place, numel, itemsize, whole)

    def group_position(self, axis: str) -> tuple[int, int]:
        """Return (number of ranks, index of this rank) of this rank's process group on an axis such as "data"."""
        group = next(group for group in self.layout.groups(axis) if self.rank in group)
        return len(group), group.index(self.rank)

    # --- parameters and their gradients

    @cached_property
    def flats(self) -> dict[str, list[Flat]]:
        """Flat parameter buffers of each FSDP unit."""
        return {unit: flats_of(self.table, self.layout, [unit]) for unit in self.table.units}

    def count_gradients(self, unit: str, passes: int) -> None:
        """Count the bytes that this rank sends to reduce the gradients of an FSDP unit such as "layers.3", and under
        ZeRO-1 and 2 to all-gather its updated parameters. passes: backward passes in a step that add to the
        gradients."""
        holders, work = self.partition.holders(unit), self.work
        for flat in (each for each in self.flats[unit] if each.trainable):
            self.count_call(
                "pipeline.gradients.shared", "pp", "all-reduce", len(holders), flat.held * work.master_bytes
            )
            for call in ZERO_CALLS:
                by_unit = call.of_parameters and call.repeats  # counted by `count_unit_gathers`
                if flat.zero in call.stages and not by_unit:
                    self.count_data_call(
                        call.site, AXES_OF[flat.part][call.group], call.operation,
                        flat.held if call.of_shard else flat.padded,
                        work.parameter_bytes if call.of_parameters else work.master_bytes,
                        passes if call.repeats else 1,
                    )  # fmt: skip

    def count_unit_gathers(self, unit: str, times: int) -> None:
        """Count the bytes that this rank sends in `times` ZeRO-3 all-gathers of the parameters of an FSDP unit."""
        for flat in (each for each in self.flats[unit] if each.zero == 3):
            numel, size = flat.padded, self.work.parameter_bytes
            if flat.packed is not None:
                numel, size = flat.held_bytes(numel, size), 1
            self.count_data_call("data.parameters", AXES_OF[flat.part][1], "all-gather", numel, size, times)


class BufferChanges(NamedTuple):
    """Sizes of a module's buffers (such as running statistics) that change in a step and are synchronised between
    ranks.

    averaged: elements of float buffers, which are averaged; copied: elements of integer buffers, which are copied;
    reported: number of buffers for which ranks exchange a flag that says if they changed."""

    averaged: int = 0
    copied: int = 0
    reported: int = 0


class ModuleCalls(DataCalls):
    """Counter of the bytes that one rank sends in a training step of a user's own module. table: the module's
    parameters; work: sizes of the step; rank: global rank."""

    def __init__(self, table: ParameterTable, layout: Layout, work: Work, rank: int) -> None:
        super().__init__(table, ModulePartition.whole(table), layout, work, rank)

    def count_step(self, held: Collection[str] = (), buffers: BufferChanges | None = None) -> Counter[tuple[str, str]]:
        """Count all calls of the step; return {(call site, axis): bytes sent}.

        held: FSDP units that stay gathered for a whole micro-batch, because they are used outside their modules. Under
        ZeRO-3 these units and the last unit are gathered once in a micro-batch, and the remaining units in forward and
        backward. buffers: changes of the module's buffers in a step; None: no changes."""
        passes, buffers = self.layout.micro_batches, buffers or BufferChanges()
        others = [unit for unit in self.table.units if unit not in (REST, *held)]
        self.count_data_call("data.targets", "data", "all-reduce", 1, 8)
        for unit in self.table.units:
            self.count_gradients(unit, passes)
            self.count_unit_gathers(unit, passes * (2 if unit in others[:-1] else 1))
        self.count_data_call("module.buffers.changed", "data", "all-reduce", buffers.reported, 8)
        for numel in (buffers.averaged, buffers.copied):
            self.count_data_call("module.buffers", "data", "all-reduce", numel, 8)
        self.count_outcome()
        return self.sent


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
