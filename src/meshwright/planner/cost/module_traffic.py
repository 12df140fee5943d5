"""What each rank puts on the wire in a training step of a foreign module, by call site: from its table alone.
`comm/record.py` counts the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from meshwright.layout import Layout
from meshwright.planner.cost.data_calls import DataCalls, Work
from meshwright.spec.foreign import REST, ModulePartition
from meshwright.spec.parameters import ParameterTable


def module_calls(
    table: ParameterTable,
    layout: Layout,
    work: Work,
    rank: int = 0,
    *,
    held: Collection[str] = (),
    averaged: int = 0,
    copied: int = 0,
    looked_at: int = 0,
) -> Counter[tuple[str, str]]:
    """Return the bytes that `rank` sends in one training step of a user's own module, by (call site, axis).

    table: the module's parameters; work: sizes of the step; held: FSDP units that stay gathered for a whole
    micro-batch, as they are used outside their modules; averaged, copied: elements of float and of integer buffers that
    change in a step; looked_at: number of buffers for which ranks report if they changed.
    """
    step = _ModuleStep(table, ModulePartition.whole(table), layout, work, rank)
    return step.step({REST, *held}, averaged, copied, looked_at)


class _ModuleStep(DataCalls):
    """Counter of the bytes that one rank sends in a training step of a user's own module."""

    def step(self, held: Collection[str], averaged: int, copied: int, looked_at: int) -> Counter[tuple[str, str]]:
        """Count all calls of the step; return bytes sent by (call site, axis).

        held: FSDP units that stay gathered for a whole micro-batch; averaged, copied: elements of float and of integer
        buffers that change in a step; looked_at: number of buffers for which ranks report if they changed.
        """
        passes = self.layout.micro_batches
        self.reduce("data.targets", "data", 1, 8)
        for unit in self.table.units:
            self.gradients(unit, passes)
        self.gathers(held, passes)
        self.reduce("module.buffers.changed", "data", looked_at, 8)
        for numel in (averaged, copied):
            self.reduce("module.buffers", "data", numel, 8)
        self.verdict()
        return self.sent

    def gathers(self, held: Collection[str], passes: int) -> None:
        """Count the bytes sent by ZeRO-3's parameter all-gathers: one a micro-batch for the FSDP units in `held` and
        for the last unit, two (forward, backward) for others. passes: micro-batches of the step."""
        if self.zero("dense") < 3:
            return
        others = [unit for unit in self.table.units if unit not in held]
        for unit in self.table.units:
            times = 1 if unit in held or unit == others[-1] else 2
            numel = self.padded(unit, "dense")
            self.shard("data.parameters", "all_gather", "dense", numel, self.work.parameter_bytes, times * passes)
