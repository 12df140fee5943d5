"""Tensors of a distillation teacher on a rank: parameters, hidden states, logits, temporaries of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from meshwright.layout import Layout
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.teacher import TeacherWork
from meshwright.planner.memory.saved import position_tables
from meshwright.planner.memory.snapshot import Allocation, Snapshot, activation, workspace
from meshwright.planner.memory.states import flats_of
from meshwright.spec.distillation import make_teacher_layout
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for

DIVERGENCE_TENSORS = {"forward_kl": 5, "reverse_kl": 5, "jsd": 8}
"""Number of tensors of the size of a slice's logits, in float32 (or float64), at the peak of computing a divergence."""
CROSS_ENTROPY_TENSORS = 2
"""Number of these tensors that the cross-entropy without teacher needs, too."""


@dataclass(frozen=True)
class TeacherMemory:
    """Memory of a distillation teacher on a rank. teacher: sizes of the teacher; batch: micro-batch of the student;
    compiled: True if the loss is compiled."""

    teacher: TeacherWork
    batch: MicroBatch
    compiled: bool = False

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
                yield workspace(f"teacher.{one.name}", int(one.bytes))
            compares = any(stage.last for stage in partition.stages_on(pp_rank))
        for each in self.list_states() if several and compares else ():
            yield each._replace(bytes=each.bytes * batch.layout.micro_batches)

    def list_states(self) -> Iterator[Allocation]:
        """Yield the tensors with the teacher's results for one micro-batch: final hidden states and outputs of compared
        layers, or the cached most probable tokens. Without pipeline parallelism they are allocated only during the
        student's forward."""
        tokens, config, top_k = self.batch.all_tokens, self.teacher.config, self.teacher.top_k
        if top_k:
            yield workspace("teacher.top_k", tokens * (8 * top_k + 4 * (top_k + 1)))
            return
        yield activation("teacher.states", self.item * tokens * config.hidden)
        if self.teacher.projected:
            here = tokens // (self.layout.tp if self.layout.tensor_sequence_parallel else 1)
            yield activation("teacher.hidden", self.item * here * config.hidden * self.teacher.projected)

    def list_loss_temporaries(self, differentiated: bool) -> Iterator[Allocation]:
        """Yield the temporaries that distillation adds to those of the cross-entropy, for one chunk of tokens: the
        teacher's logits and, before the chunk's gradients are computed, the divergence's gradients and the temporaries
        of one slice of the chunk. differentiated: True after the chunk's gradients are computed."""
        batch, width, longest = self.batch, self.batch.vocabulary, max(self.batch.loss_chunks, default=0)
        at_once = longest if self.compiled else batch.loss_slice(longest)
        wide = DIVERGENCE_TENSORS[self.teacher.divergence] - (0 if self.compiled else CROSS_ENTROPY_TENSORS)
        if self.teacher.top_k:
            wide = 0
        else:
            yield workspace("teacher.logits", self.item * width * longest)
        if not differentiated:
            yield workspace("gradients of the divergence", batch.itemsize * width * (longest - at_once))
            yield workspace("divergence of a slice", batch.wide * width * at_once * wide)

    def make_forward_snapshot(self) -> Snapshot:
        """Return the memory snapshot of the teacher's forward, which runs before the student's. It is taken in a
        feed-forward layer of the teacher, with these temporaries: gate and up, the activation, their product, and three
        tensors of hidden states."""
        config = self.teacher.config
        experts = config.experts_per_token * config.expert_intermediate if config.experts else 0
        columns = max(config.intermediate, experts)
        numbers = (4 if config.gated else 2) * columns // self.layout.tp + 3 * config.hidden
        size = self.item * self.batch.all_tokens * numbers
        return Snapshot("teacher: forward", 0, (activation("teacher's layer being computed", size),))

    def add_to(self, student: Iterable[Snapshot], forward: bool) -> Iterator[Snapshot]:
        """Yield the memory snapshots of a pass of the student through its last stage, with the tensors of the
        distillation loss added. Without pipeline parallelism, the teacher's results are added too in a forward pass,
        which runs after the teacher's.

        student: snapshots without teacher; forward: True for a forward pass."""
        alone = forward and self.batch.layout.pp == 1
        held = list(self.list_states()) if alone else []
        if alone and not self.teacher.top_k:
            yield self.make_forward_snapshot()
        for snapshot in student:
            of_loss: list[Allocation] = []
            if snapshot.name.startswith(("head.statistics", "head.gradient")):
                of_loss = list(self.list_loss_temporaries(snapshot.name.startswith("head.gradient")))
            yield snapshot.with_more([*held, *of_loss])
