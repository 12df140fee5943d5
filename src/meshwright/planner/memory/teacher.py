"""Tensors of a distillation teacher on a rank: parameters, hidden states, logits, temporaries of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.teacher import TeacherWork
from meshwright.planner.memory.saved import position_tables
from meshwright.planner.memory.snapshot import Snapshot, Temporary, activation, workspace
from meshwright.planner.memory.states import flats_of
from meshwright.spec.chunks import split_loss_chunks
from meshwright.spec.distillation import make_teacher_layout
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.policy import SLICE_LOGITS
from meshwright.spec.stage_times import program_for

DIVERGENCE_TENSORS = {"forward_kl": 5, "reverse_kl": 5, "jsd": 8}
"""Number of tensors of the size of a slice's logits, in float32 (or float64), at the peak of computing a divergence."""
CROSS_ENTROPY_TENSORS = 2
"""Number of these tensors that the cross-entropy without teacher needs, too."""


def list_teacher_tensors(
    teacher: TeacherWork | None, batch: MicroBatch, pp_rank: int
) -> Iterator[tuple[str, str, int]]:
    """Yield (category, name, bytes) of the teacher's tensors on the pipeline rank `pp_rank` that are allocated during
    the whole step: parameters and, under pipeline parallelism, the hidden states or cached logits of all micro-batches;
    nothing without a teacher. batch: micro-batch of the student."""
    if teacher is None:
        return
    layout = batch.layout
    if teacher.top_k:
        if layout.pp > 1:
            for each in list_teacher_states(teacher, batch):
                yield each.category, each.name, each.bytes * layout.micro_batches
        return
    config, size = teacher.config, _item_bytes(teacher, batch)
    held = make_teacher_layout(layout, teacher.held, config)
    table = parameter_table(config).frozen
    partition = Partition.of(program_for(held, config, batch.sequence), config, table, batch.sequence)
    head = {"head", "embedding"} if table.tied else {"head"}
    for flat in flats_of(table, held, partition.units_on(pp_rank)):
        gathered = flat.padded if flat.zero == 3 and flat.unit in head else 0
        yield "parameters", f"teacher.{flat.unit}", size * (flat.padded // flat.shards + gathered)
    for one in position_tables(config, batch.sequence, batch.dtype):
        yield "workspace", f"teacher.{one.name}", one.bytes
    if layout.pp > 1 and any(stage.last for stage in partition.stages_on(pp_rank)):
        for each in list_teacher_states(teacher, batch):
            yield each.category, each.name, each.bytes * layout.micro_batches


def list_teacher_states(teacher: TeacherWork, batch: MicroBatch) -> Iterator[Temporary]:
    """Yield the teacher's final hidden states and outputs of compared layers for one micro-batch, or its cached most
    probable tokens; without pipeline parallelism they are allocated during the student's forward alone. batch:
    micro-batch of the student."""
    tokens, config = batch.rows * batch.tokens, teacher.config
    if teacher.top_k:
        yield workspace("teacher.top_k", tokens * (8 * teacher.top_k + 4 * (teacher.top_k + 1)))
        return
    held, size = make_teacher_layout(batch.layout, teacher.held, config), _item_bytes(teacher, batch)
    yield activation("teacher.states", size * tokens * config.hidden)
    if teacher.projected:
        here = tokens // (held.tp if held.tensor_sequence_parallel else 1)
        yield activation("teacher.hidden", size * here * config.hidden * teacher.projected)


def list_loss_temporaries(
    teacher: TeacherWork, batch: MicroBatch, compiled: bool, differentiated: bool
) -> Iterator[Temporary]:
    """Yield the tensors of a chunk of the loss that the cross-entropy alone does not need: the teacher's logits and,
    unless the chunk is `differentiated` already, gradients of the divergence and temporaries of a slice of tokens.
    batch: micro-batch of the student; compiled: the loss is compiled."""
    width = -(-batch.config.vocabulary // batch.layout.tp)
    longest = max(split_loss_chunks(batch.rows * batch.tokens, width, batch.device), default=0)
    whole = batch.device != "cpu" or compiled
    at_once = longest if whole else min(longest, max(1, SLICE_LOGITS // width))
    if not teacher.top_k:
        yield workspace("teacher.logits", _item_bytes(teacher, batch) * width * longest)
    if not differentiated:
        yield workspace("gradients of the divergence", batch.itemsize * width * (longest - at_once))
        wide = (
            0 if teacher.top_k else DIVERGENCE_TENSORS[teacher.divergence] - (0 if compiled else CROSS_ENTROPY_TENSORS)
        )
        yield workspace("divergence of a slice", batch.wide * width * at_once * wide)


def make_forward_snapshot(teacher: TeacherWork, batch: MicroBatch) -> Snapshot:
    """Return the memory snapshot of a teacher's forward, which runs before the student's, in one of its feed-forward
    layers: gate and up, the activation, their product, and four tensors of hidden states. batch: micro-batch of the
    student."""
    config, tokens = teacher.config, batch.rows * batch.tokens
    layout = make_teacher_layout(batch.layout, teacher.held, config)
    columns = max(config.intermediate, config.experts_per_token * config.expert_intermediate if config.experts else 0)
    numbers = (4 if config.gated else 2) * columns // layout.tp + 4 * config.hidden
    size = _item_bytes(teacher, batch) * tokens * numbers
    return Snapshot("teacher: forward", 0, (activation("teacher's layer being computed", size),))


def add_teacher(
    teacher: TeacherWork, batch: MicroBatch, student: Iterable[Snapshot], forward: bool, compiled: bool
) -> Iterator[Snapshot]:
    """Yield the snapshots of a pass of the student through its last stage with the tensors of the distillation loss.
    Without pipeline parallelism, a forward pass comes after that of the teacher and holds the teacher's states.

    batch: micro-batch of the student; student: snapshots without teacher; forward: True for a forward pass; compiled:
    the loss is compiled."""
    alone = forward and batch.layout.pp == 1
    held = list(list_teacher_states(teacher, batch)) if alone else []
    if alone and not teacher.top_k:
        yield make_forward_snapshot(teacher, batch)
    for snapshot in student:
        of_loss: list[Temporary] = []
        if snapshot.name.startswith(("head.statistics", "head.gradient")):
            differentiated = snapshot.name.startswith("head.gradient")
            of_loss = list(list_loss_temporaries(teacher, batch, compiled, differentiated))
        yield snapshot.with_more([*held, *of_loss])


def _item_bytes(teacher: TeacherWork, batch: MicroBatch) -> int:
    """Return the bytes of an element of the teacher's parameters. batch: micro-batch of the student."""
    return teacher.item_bytes or batch.itemsize
