"""Seconds of a training step of one layout: micro-batches in the stages, the simulated pipeline schedule, communication
of data parallelism and the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost import engines
from meshwright.planner.cost.bounds import Bounds, StepProperties, bound_seconds
from meshwright.planner.cost.bubbles import followed_at_once
from meshwright.planner.cost.communication import ProcessGroups
from meshwright.planner.cost.layer_times import MICRO_BATCH_PARTS, UNCORRECTED, LayerTimes
from meshwright.planner.cost.pipeline_times import OPTIMIZER_BYTES, DataParallelism, PipelineTimes, place_stages
from meshwright.planner.cost.rates import straggler_terms
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.program.durations import Durations, Floats
from meshwright.program.makespan import MakespanCache
from meshwright.program.pipeline import PipelineProgram
from meshwright.spec.config import ModelConfig
from meshwright.spec.stage_times import program_for

PARTS = (*MICRO_BATCH_PARTS, "pipeline", "bubble", "optimizer")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of a training step.

    Attributes:
        seconds: Expected seconds.
        low, high: Bounds within which measured runs are expected.
        breakdown: Seconds by part, which sum to `seconds`: compute of the busiest rank; exposed communication of tp
            ("tensor"), cp ("context"), ep ("expert"), data parallelism ("data") and between stages ("pipeline");
            "bubble"; "optimizer", which includes everything that happens once a step, such as gradient norms and
            waiting for the slowest device.
        bounds: Source of `low` and `high`.
    """

    seconds: float
    low: float
    high: float
    breakdown: Mapping[str, float]
    bounds: Bounds


def step_time(
    config: ModelConfig, layout: Layout, cluster: Cluster, sequence: int, batch: int, *, simulate: bool = True,
    step_factors: Floats = UNCORRECTED, **options: Any,
) -> StepTime:  # fmt: skip
    """Predict the seconds of one training step of `batch` sequences (over all ranks) of `sequence` tokens.

    simulate: True for the pipeline simulator; False for the closed form, if the schedule has one; step_factors: for
    each part of a micro-batch, the factor by which it takes longer than its operations timed alone; options: options of
    `problem_for`. Raises `UserError` if the device lacks the precision, or the layout does not divide the batch. Other
    reasons why a layout is infeasible are not checked."""
    problem = problem_for(config, layout, cluster, sequence, batch, **options)
    return StepPredictor(problem, layout, step_factors).price(simulate)


def problem_for(
    config: ModelConfig, layout: Layout, cluster: Cluster, sequence: int, batch: int, *, compile: bool = False,
    **options: Any,
) -> Problem:  # fmt: skip
    """Return the planning problem of one layout, in the layout's precision or else the cluster's default.

    sequence: tokens of a sequence; batch: sequences of a step over all ranks; compile: True if layers are compiled by
    torch.compile; options: further fields of `Problem`, such as optimizer, and `engine`, the training engine (a name,
    "meshwright" unless given).
    """
    whose = engines.engine(options.pop("engine", "meshwright"), compile=compile)
    precision = layout.precision or default_precision(cluster)
    return Problem(config, cluster, sequence, batch, whose, compile, precision=precision, **options)


class StepPredictor:
    """Predictor of the seconds of one training step under one layout.

    step_factors: for each part of a micro-batch (compute, tensor, context, expert, data), the factor by which it takes
    longer than its operations timed alone; layer_times: predicted times of layers, embedding and head, None to predict
    them here; index: index of the layout in `layer_times`; makespans: cache of simulated pipeline times."""

    def __init__(
        self, problem: Problem, layout: Layout, step_factors: Floats = UNCORRECTED, *,
        layer_times: LayerTimes | None = None, index: int = 0, makespans: MakespanCache | None = None,
    ) -> None:  # fmt: skip
        share = layout.dp * layout.micro_batches
        if problem.batch % share:
            raise UserError(f'layout "{layout}": batch {problem.batch} is not a multiple of dp x mb = {share}')
        if problem.optimizer not in OPTIMIZER_BYTES:
            raise UserError(f'unknown optimizer "{problem.optimizer}" (known: {", ".join(OPTIMIZER_BYTES)})')
        self.problem, self.layout = problem, layout
        self.at_once = followed_at_once(layout.schedule, layout.pp)
        self.layer_times = layer_times or LayerTimes(
            problem, [StageCandidate(layout, problem.batch // share)], step_factors
        )
        self.index = np.array([index])
        self.groups = ProcessGroups(self.layer_times.collectives, [layout])
        self.data = DataParallelism(problem.engine.communicated_zero_stage(layout.zero, layout.pp), self.groups)
        self.makespans = makespans or MakespanCache()

    def pipeline(self, program: PipelineProgram | None) -> PipelineTimes:
        """Return the times of the layout's pipeline. program: schedule program that assigns stages to ranks; None: the
        standard assignment of the layout's schedule."""
        micro, transfer = np.array([float(self.layout.micro_batches)]), np.array([self.transfer])
        placed = place_stages(self.problem, self.layout, program)
        return PipelineTimes(self.layer_times, self.index, micro, transfer, *placed)

    def price(self, simulate: bool = True, parts: bool = True) -> StepTime:
        """Return the predicted seconds of the step. simulate: True for the pipeline simulator, False for the closed
        form; parts: True to separate the seconds due to messages, which takes a second simulation without messages."""
        layout, problem, data = self.layout, self.problem, self.data
        program = program_for(layout, problem.config, problem.sequence) if simulate and layout.pp > 1 else None
        of = self.pipeline(program)
        ranks, _ = of.rank_seconds(self.at_once, data.per_micro_batch)
        totals = layout.micro_batches / of.replicas * ranks[..., 0]
        busiest = totals.sum(axis=(1, 2)).argmax()
        breakdown = dict(zip(MICRO_BATCH_PARTS, totals[busiest].sum(axis=0).tolist(), strict=True))
        if problem.teacher is not None:
            breakdown["compute"] *= 1 + problem.teacher.compute_share(problem.config, problem.sequence)
        breakdown |= {"pipeline": 0.0, "bubble": 0.0}
        if layout.pp > 1:
            if program is None:
                closed = of.makespan(layout.schedule, self.at_once, data.per_micro_batch)
                makespan, messages = (np.asarray(each).item() for each in closed)
            else:
                every = self.durations(of)
                asked = [every, replace(every, transfer=0.0)][: 1 + parts]
                self.makespans.compute(program, asked)
                makespan, *without = (self.makespans.get(program, each) for each in asked)
                messages = makespan - sum(without) if without else 0.0
            breakdown["pipeline"] = messages
            breakdown["bubble"] = max(0.0, makespan - messages - float(totals[busiest].sum()))
        breakdown["data"] += float(of.gradient_seconds(layout.schedule == "interleaved", self.at_once, data).max())
        breakdown["optimizer"] = float(of.optimizer_seconds(data)[0])
        seconds = sum(breakdown.values())
        cluster = problem.cluster
        factor, once = straggler_terms(cluster)
        breakdown["optimizer"] += (factor - 1) * seconds + once
        seconds = factor * seconds + once
        breakdown = {part: cluster.time_factor * value for part, value in breakdown.items()}
        expected, low, high, bounds = bound_seconds(cluster, StepProperties.of(problem, layout, seconds))
        return StepTime(expected, low, high, breakdown, bounds)

    @cached_property
    def transfer(self) -> float:
        """Seconds of one message between pipeline stages (activations of a micro-batch)."""
        return float(self.groups.seconds("send", "pp", self.layer_times.message[self.index])[0])

    def durations(self, pipeline: PipelineTimes, factor: float = 1.0) -> Durations:
        """Return the seconds, multiplied by `factor`, of forward, input-gradient and weight-gradient passes in each
        stage, and of messages. pipeline: times of the pipeline."""
        times = pipeline.stage_seconds(self.at_once, self.data.per_micro_batch)
        forward, back, weight = factor * times[..., 0].sum(axis=-1)[pipeline.which].T
        return Durations(forward, back, weight, factor * self.transfer if self.layout.pp > 1 else 0.0)

    def data_seconds(self) -> float:
        """Return the seconds of a step during which a rank communicates for data parallelism, overlapped or not."""
        of, layout = self.pipeline(None), self.layout
        gathers, sums = of.once_calls(self.data)
        once = (gathers + sums)[:, 0]
        if self.data.per_micro_batch is None:
            return float(once.max())
        layers = of.rank_layers  # a call each, as in the exposed time: each has its latency
        gather, scatter = of.zero_seconds(self.data, (of.rank_dense / layers, of.rank_expert / layers))
        return float((once + layout.micro_batches / of.replicas * (layers * (2 * gather + scatter))[:, 0]).max())


def default_precision(cluster: Cluster) -> str:
    """Return the precision of layouts that name none: "bf16" if the cluster's devices have it, else "fp16" or "fp32".
    On CPUs "bf16" is chosen only if it is at least 1.2 times as fast as fp32."""
    bf16, fp16, fp32 = (cluster.device.peak(name) or 0.0 for name in ("bf16", "fp16", "fp32"))
    if cluster.kind == "cpu":
        return "bf16" if bf16 >= 1.2 * fp32 else "fp32"
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"
