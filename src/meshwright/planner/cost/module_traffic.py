"""Bytes that each rank sends in a training step of a foreign module, by call site, from its parameter table alone.
`comm/record.py` counts the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.data_calls import DataCalls, Work
from meshwright.spec.foreign import REST, ModulePartition
from meshwright.spec.parameters import ParameterTable


class BufferChanges(NamedTuple):
    """Changes of a module's buffers (such as running statistics) in a step, which ranks synchronise. averaged: elements
    of changed float buffers; copied: elements of changed integer buffers; reported: number of buffers for which ranks
    report if they changed."""

    averaged: int = 0
    copied: int = 0
    reported: int = 0


def module_calls(
    table: ParameterTable,
    layout: Layout,
    work: Work,
    rank: int = 0,
    *,
    held: Collection[str] = (),
    buffers: BufferChanges | None = None,
) -> Counter[tuple[str, str]]:
    """Return the bytes that `rank` sends in one training step of a user's own module, by (call site, axis).

    table: the module's parameters; work: sizes of the step; held: FSDP units that stay gathered for a whole
    micro-batch, as they are used outside their modules; buffers: what changes in the module's buffers in a step.
    """
    step = _ModuleTraffic(table, ModulePartition.whole(table), layout, work, rank)
    return step.count_step({REST, *held}, buffers or BufferChanges())


class _ModuleTraffic(DataCalls):
    """Counter of the bytes that one rank sends in a training step of a user's own module."""

    def count_step(self, held: Collection[str], buffers: BufferChanges) -> Counter[tuple[str, str]]:
        """Count all calls of the step; return bytes sent by (call site, axis). held: FSDP units that stay gathered for
        a whole micro-batch; buffers: what changes in the module's buffers."""
        passes = self.layout.micro_batches
        self.count_data_all_reduce("data.targets", "data", 1, 8)
        for unit in self.table.units:
            self.count_gradients(unit, passes)
        self.count_gathers(held, passes)
        self.count_data_all_reduce("module.buffers.changed", "data", buffers.reported, 8)
        for numel in (buffers.averaged, buffers.copied):
            self.count_data_all_reduce("module.buffers", "data", numel, 8)
        self.count_outcome()
        return self.sent

    def count_gathers(self, held: Collection[str], passes: int) -> None:
        """Count the bytes sent by ZeRO-3's parameter all-gathers: one a micro-batch for the FSDP units in `held` and
        for the last unit, two (forward, backward) for others. passes: micro-batches of the step."""
        if self.zero_stage("dense") < 3:
            return
        others = [unit for unit in self.table.units if unit not in held]
        for unit in self.table.units:
            times = 1 if unit in held or unit == others[-1] else 2
            numel = self.buffer_numel(unit, "dense")
            self.count_zero_collective(
                "data.parameters", "all_gather", "dense", numel, self.work.parameter_bytes, times * passes
            )
