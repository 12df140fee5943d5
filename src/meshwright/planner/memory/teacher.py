"""Tensors of a distillation teacher on a rank: parameters, hidden states, logits."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.teacher import TeacherWork
from meshwright.planner.memory.states import flats_of
from meshwright.spec.chunks import loss_chunks
from meshwright.spec.distillation import make_teacher_layout
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for


def list_teacher_tensors(
    teacher: TeacherWork | None, batch: MicroBatch, pp_rank: int
) -> Iterator[tuple[str, str, int]]:
    """Yield (category, name, bytes) of the teacher's tensors on the pipeline rank `pp_rank` in distillation:
    parameters, final hidden states of all micro-batches, outputs of compared layers, logits of a chunk; nothing without
    a teacher. batch: micro-batch of the student."""
    if teacher is None:
        return
    layout, config = batch.layout, teacher.config
    micro_batches, tokens = layout.micro_batches, batch.rows * batch.tokens
    if teacher.top_k:
        yield "workspace", "teacher.top_k", micro_batches * tokens * (8 * teacher.top_k + 4 * (teacher.top_k + 1))
        return
    size = teacher.item_bytes or batch.itemsize
    held = make_teacher_layout(layout, teacher.held, config)
    table = parameter_table(config).frozen
    partition = Partition.of(program_for(held, config, batch.sequence), config, table, batch.sequence)
    head = {"head", "embedding"} if table.tied else {"head"}
    for flat in flats_of(table, held, partition.units_on(pp_rank)):
        gathered = flat.padded if flat.zero == 3 and flat.unit in head else 0
        yield "parameters", f"teacher.{flat.unit}", size * (flat.padded // flat.shards + gathered)
    if not any(stage.last for stage in partition.stages_on(pp_rank)):
        return
    yield "activations", "teacher.states", size * micro_batches * tokens * config.hidden
    if teacher.projected:
        here = tokens // (held.tp if held.tensor_sequence_parallel else 1)
        yield "activations", "teacher.layers", size * micro_batches * here * config.hidden * teacher.projected
    vocabulary = -(-config.vocabulary // layout.tp)
    yield (
        "workspace",
        "teacher.logits",
        size * vocabulary * max(loss_chunks(tokens, vocabulary, batch.device), default=0),
    )
