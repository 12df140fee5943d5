"""Tensors of a distillation teacher on a rank: parameters, hidden states, logits, temporaries of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshwright.layout import Layout
from meshwright.planner.cost.dimensions import layer_dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, Number
from meshwright.planner.memory.saved import position_tables
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot
from meshwright.planner.memory.states import flats_of
from meshwright.planner.memory.temporaries import Pass
from meshwright.spec.distillation import make_teacher_layout
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for
from meshwright.spec.teacher import TeacherWork

DIVERGENCE_TENSORS = {"forward_kl": 5, "reverse_kl": 5, "jsd": 8}
"""Number of tensors of the size of a slice's logits, in float32 (or float64), at the peak of computing a divergence."""


@dataclass(frozen=True)
class TeacherMemory:
    """Memory of a distillation teacher on a rank. teacher: sizes of the teacher; batch: micro-batch of the student."""

    teacher: TeacherWork
    batch: MicroBatch

    @cached_property
    def layout(self) -> Layout:
        """Layout of the teacher."""
        return make_teacher_layout(self.batch.layout, self.teacher.held, self.teacher.config)

    @property
    def item(self) -> int:
        """Bytes of an element of the teacher's parameters."""
        return self.teacher.item_bytes or self.batch.itemsize

    def list_tensors(self, pp_rank: int) -> Iterator[Allocation]:
        """Yield the tensors that are allocated during the whole step on the pipeline rank `pp_rank`: parameters and,
        under pipeline parallelism, the hidden states or cached logits of all micro-batches."""
        config, batch, several = self.teacher.config, self.batch, self.batch.layout.pp > 1
        compares = self.teacher.top_k > 0  # whether the rank holds what the student is compared with
        if not self.teacher.top_k:
            table = parameter_table(config).frozen
            partition = Partition.of(program_for(self.layout, config, batch.sequence), config, table, batch.sequence)
            head = {"head", "embedding"} if table.tied else {"head"}
            for flat in flats_of(table, self.layout, partition.units_on(pp_rank)):
                gathered = flat.padded if flat.zero == 3 and flat.unit in head else 0
                size = self.item * (flat.padded // flat.shards + gathered)
                yield Allocation("parameters", f"teacher.{flat.unit}", bytes=size)
            for one in position_tables(config, batch.sequence, batch.dtype):
                yield Allocation("workspace", f"teacher.{one.name}", bytes=int(one.bytes))
            compares = any(stage.last for stage in partition.stages_on(pp_rank))
        for each in self.list_states() if several and compares else ():
            yield each._replace(bytes=each.bytes * batch.layout.micro_batches)

    def list_states(self) -> list[Allocation]:
        """Return the tensors with the teacher's results for one micro-batch: final hidden states and outputs of
        compared layers, or the cached most probable tokens. Without pipeline parallelism they are allocated only during
        the student's forward."""
        return [each for _, tensors in self.list_snapshots("teacher_states") for each in tensors]

    def list_snapshots(self, section: str) -> Iterator[NamedSnapshot]:
        """Yield the snapshots of a section of `tensors.toml`, computed with the teacher's sizes. section: such as
        "teacher_forward", the teacher's forward, which runs before the student's."""
        config, top_k = self.teacher.config, self.teacher.top_k
        dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[self.item]
        forward = MicroBatch.of(config, self.layout, self.batch.rows, self.batch.sequence, dtype=dtype)
        experts = config.experts_per_token * config.expert_intermediate if config.experts else 0
        sizes = {"top_k": top_k, "projected": self.teacher.projected, "columns": max(config.intermediate, experts)}
        flags = {"cached": top_k, "projects": self.teacher.projected}
        return Pass(layer_dimensions(forward, 0, sizes, flags)).snapshots(section)

    @property
    def loss_sizes(self) -> dict[str, Number]:
        """Sizes that distillation adds to those of the loss: bytes of an element of the teacher's logits, and number of
        tensors of a divergence."""
        return {"teacher_x": self.item, "divergence_tensors": DIVERGENCE_TENSORS[self.teacher.divergence]}
