"""Bytes that each rank sends in a training step, by call site: from the parameter table, the operators' collectives and
the pipeline's program. `comm/record.py` counts the same during a run; the two are equal.

Bytes of an operation over n ranks on a vector of b bytes, which are also the least that each rank can send: all-reduce
2 b (n - 1) / n, reduce-scatter and all-gather b (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from meshwright.layout import Layout
from meshwright.planner.cost.blocks import prediction_operators, stage_operators
from meshwright.planner.cost.data_calls import DataCalls, Work, sum_by_axis, sum_by_site
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.operators import CollectiveCall
from meshwright.program import consumed_sends
from meshwright.program.pipeline import Kind
from meshwright.schedules.transfers import with_transfers
from meshwright.spec.config import ModelConfig
from meshwright.spec.distillation import make_teacher_layout
from meshwright.spec.parameter_entries import AXES_OF
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.policy import DISTILLATION_METRICS, PREFERENCE_METRICS
from meshwright.spec.stage_times import program_for
from meshwright.spec.stages import LOOKED_UP, Stage
from meshwright.spec.teacher import TeacherWork


def predicted_traffic(config: ModelConfig, layout: Layout, work: Work, rank: int = 0) -> dict[str, int]:
    """Return {call site: bytes} that rank `rank` (global) sends in one training step, without call sites that send
    nothing. A call site is the label of a collective call in the source, such as "data.gradients". work: sizes of the
    step.

    The bytes are exact, except where experts' tokens are sent (dispatch and combine, and within an etp group gather and
    sum): these assume that all experts get equally many tokens."""
    return sum_by_site(_StepTraffic(config, layout, work, rank).count_calls())


def predicted_traffic_by_axis(config: ModelConfig, layout: Layout, work: Work, rank: int = 0) -> dict[str, int]:
    """Return {mesh axis, such as "data": bytes} that `rank` sends in one training step. work: sizes of the step."""
    return sum_by_axis(_StepTraffic(config, layout, work, rank).count_calls())


class _StepTraffic(DataCalls):
    """Counter of the bytes that one rank sends in a transformer's training step. work: sizes of the step; rank: global
    rank."""

    def __init__(self, config: ModelConfig, layout: Layout, work: Work, rank: int) -> None:
        table = parameter_table(config)
        self.program = with_transfers(program_for(layout, config, work.sequence))
        super().__init__(table, Partition.of(self.program, config, table, work.sequence), layout, work, rank)
        self.config = config
        self.place = layout.coordinates(rank)
        self.stages = self.partition.stages
        self.steps = consumed_sends.list_rank_steps(self.program, self.place["pp"])
        self.rows = work.batch // (layout.dp * layout.micro_batches)
        dtype = {8: "float64", 4: "float32", 2: "bfloat16"}[work.parameter_bytes]
        same: dict[str, Any] = {"device": work.device, "responses": work.responses, "engine": work.engine}
        self.micro_batch = MicroBatch.of(config, layout, self.rows, work.sequence, dtype=dtype, **same)

    def count_calls(self) -> Counter[tuple[str, str]]:
        """Count all communication of the step; return {(call site, axis): bytes sent}."""
        self.count_data_call("data.targets", "data", "all-reduce", 1, 8)
        self.count_activations()
        units: Counter[str] = Counter()
        for stage, count in self.count_passes().items():
            for unit in self.partition.needed_units(self.stages[stage]):
                units[unit] += count
        for unit, count in units.items():
            self.count_gradients(unit, count)
        self.count_gathers()
        self.count_partial_gradients(units)
        teacher = self.work.teacher
        self.count_outcome(PREFERENCE_METRICS if self.work.responses else DISTILLATION_METRICS if teacher else 0)
        if self.work.estimates_kl:
            self.sent.update(
                _StepTraffic(self.config, replace(self.layout, recompute="none"), self.work, self.rank).count_forward()
            )
            self.count_call("loss.kl", "world", "all-reduce", self.layout.world_size, 16)
        if teacher is not None and not teacher.top_k:
            layout = make_teacher_layout(self.layout, teacher.held, teacher.config)
            size = teacher.item_bytes or self.work.parameter_bytes
            work = replace(self.work, teacher=None, parameter_bytes=size)
            rank = self.rank * layout.world_size // self.layout.world_size
            found = _StepTraffic(teacher.config, layout, work, rank).count_forward()
            self.sent.update({call: sent for call, sent in found.items() if not call[0].startswith("loss.")})
        return self.sent

    def count_forward(self) -> Counter[tuple[str, str]]:
        """Count the communication of forward passes that have no backward: of a teacher, or of KTO's mismatched
        responses. Return {(call site, axis): bytes sent}."""
        self.count_activations()
        self.count_gathers(forward_only=True)
        backward = ("gradients", "backward", "router")
        return Counter({call: sent for call, sent in self.sent.items() if not any(at in call[0] for at in backward)})

    def count_passes(self) -> Counter[int]:
        """Return {stage index: number of micro-batches that this rank runs through the stage in a step}."""
        return Counter(stage for _, kind, stage, *_ in self.steps if kind == Kind.FORWARD)

    # --- activations: collectives of operators, the pipeline

    def count_operators(self, stage: Stage, count: int) -> None:
        """Count the bytes that this rank sends in a stage's tensor-, context- and expert-parallel collectives for
        `count` micro-batches, forward and backward."""
        last = prediction_operators(self.micro_batch) if stage.last else []
        for operator in (*stage_operators(self.micro_batch, stage), *last):
            for one in operator.collectives:
                for site, size in one.sites:
                    self.count_collective(one, site, size, count * one.count * (1 + one.again))
        if stage.last and self.work.teacher is not None:
            self.count_distillation(self.work.teacher, count)
        if self.config.router_loss and not self.work.responses and any(map(self.config.has_experts, stage.layers)):
            # Of responses with preferences every rank counts the targets itself.
            self.count_call("router.targets", "cp", "all-reduce", self.layout.cp, 8 * self.rows, count)

    def count_distillation(self, teacher: TeacherWork, count: int) -> None:
        """Count the bytes that this rank sends in the distillation loss's all-reduces over tp for `count`
        micro-batches. teacher: sizes of the teacher."""
        at, tp = self.micro_batch, self.layout.tp
        for chunk in at.loss_chunks:
            for site, numbers in teacher.list_sums(self.layout):
                self.count_call(site, "tp", "all-reduce", tp, numbers * chunk * at.wide, count)
        if teacher.projected and self.layout.tensor_sequence_parallel:
            self.count_call("distill.hidden", "tp", "all-reduce", tp, at.wide, count)

    def count_collective(self, call: CollectiveCall, site: str, size: int, times: int) -> None:
        """Count the bytes that this rank sends in `times` calls of an operator's collective. site: call site; size:
        bytes of the full vector."""
        axis = "cp" if call.axis == "ring" else call.axis
        ranks = getattr(self.layout, axis)
        if call.operation == "send":
            self.sent[site, axis] += times * size
        elif axis == "tp" and site.startswith("loss."):  # once for each chunk of the loss
            for chunk in self.micro_batch.loss_chunks:
                self.count_call(site, axis, call.operation, ranks, chunk * self.micro_batch.wide, times)
        else:
            self.count_call(site, axis, call.operation, ranks, size, times)

    def count_activations(self) -> None:
        """Count the bytes of the operators' collectives, and of activations and gradients that this rank sends to other
        pipeline stages."""
        for stage, count in self.count_passes().items():
            self.count_operators(self.stages[stage], count)
        size = self.micro_batch.stream_bytes
        kinds = Counter(kind for _, kind, *_ in self.steps)
        self.sent["pipeline.activations", "pp"] += kinds[Kind.SEND_FORWARD] * size
        self.sent["pipeline.gradients", "pp"] += kinds[Kind.SEND_BACKWARD] * size

    # --- parameters

    def count_gathers(self, forward_only: bool = False) -> None:
        """Count the bytes that this rank sends in ZeRO-3's all-gathers of parameters. forward_only: True to count the
        all-gathers of forward passes only."""
        if self.layout.zero < 3:
            return
        gathered: Counter[str] = Counter()
        followed = consumed_sends.find_followed_forwards(self.program, self.place["pp"])
        for _, kind, stage, *of in self.steps:
            units = self.partition.units(self.stages[stage])
            if kind == Kind.FORWARD:
                gathered.update(self.partition.needed_units(self.stages[stage]))
            elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and not forward_only:
                gathered.update(
                    {need for unit in units if unit not in LOOKED_UP for need in self.table.needed_by(unit)}
                )
                if (stage, *of) in followed:  # its forward has kept the last unit for it
                    gathered.subtract(self.table.needed_by(units[-1]))
        for unit, times in gathered.items():
            self.count_unit_gathers(unit, times)

    def count_partial_gradients(self, units: Counter[str]) -> None:
        """Count the bytes that this rank sends to all-reduce, over tp (etp for experts), gradients of which each rank
        has a partial sum. One all-reduce is made for all FSDP units together. units: names of the rank's FSDP units, as
        keys."""
        layout, found = self.layout, Counter[tuple[str, int]]()
        for entry in self.table.entries:
            if entry.unit not in units or (axis := entry.partial_axis(layout)) is None:
                continue
            start, stop = self.table.entry_range(entry, layout)
            flat = next(each for each in self.flats[entry.unit] if each.part == entry.buffer_kind(layout))
            if flat.zero:
                _, shard = self.group_position(AXES_OF[flat.part][1])
                start, stop = max(start, shard * flat.held), min(stop, (shard + 1) * flat.held)
            found[axis, entry.replicas(layout)] += max(0, stop - start)
        for (name, copies), numel in found.items():
            site = "tensor.gradients" if copies == getattr(layout, name) else "tensor.gradients.shared_heads"
            self.count_call(site, name, "all-reduce", copies, numel * self.work.master_bytes)
