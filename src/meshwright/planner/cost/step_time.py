"""Duration of a training step of one layout: micro-batches in the stages, the pipeline's program simulated, and what
data parallelism and the optimizer add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost import engines
from meshwright.planner.cost.bounds import Bounds, StepProperties, bound_seconds
from meshwright.planner.cost.bubbles import closed_makespan, stages_by_rank
from meshwright.planner.cost.piece_times import MICRO_BATCH_PARTS, UNCORRECTED, LayerTimes
from meshwright.planner.cost.pipeline_times import OPTIMIZER_BYTES, PipelineTimes, overlapping_passes
from meshwright.planner.cost.process_groups import ProcessGroups
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
        seconds: Expected.
        low, high: Bounds between which measured runs are expected.
        breakdown: Seconds by part, which add up to `seconds`: compute of the busiest rank; exposed communication of tp
            (tensor), cp (context), ep (expert), data parallelism (data) and stages (pipeline); bubble; optimizer, with
            all that comes once a step: data, norms, and waiting for the slowest device.
        simulated: True if the pipeline schedule was simulated, not computed in closed form.
        bounds: Where `low` and `high` are from.
    """

    seconds: float
    low: float
    high: float
    breakdown: Mapping[str, float]
    simulated: bool
    bounds: Bounds


def step_time(
    config: ModelConfig, layout: Layout, cluster: Cluster, sequence: int, batch: int, *, simulate: bool = True,
    in_place: Floats = UNCORRECTED, **options: Any,
) -> StepTime:  # fmt: skip
    """Predict the time of one training step of `batch` sequences of `sequence` tokens.

    simulate: run the pipeline simulator; else use the closed form, where there is one; in_place: factor for each part
    of a micro-batch by which it takes longer than operations timed alone; options: of `problem_for`. Raises `UserError`
    for what the device lacks and for a batch that the layout cannot divide; `refuse` checks whether the model fits the
    layout.
    """
    problem = problem_for(config, layout, cluster, sequence, batch, **options)
    return StepPredictor(problem, layout, in_place).price(simulate)


def problem_for(
    config: ModelConfig, layout: Layout, cluster: Cluster, sequence: int, batch: int, *, compile: bool = False,
    **options: Any,
) -> Problem:  # fmt: skip
    """Return the planning problem of one layout, in its precision or the cluster's default.

    engine: training engine whose kernels are modelled, "meshwright" unless given; compile: with compiled blocks;
    options: further fields of `Problem`, such as optimizer, documents, pairs.
    """
    whose = engines.engine(options.pop("engine", "meshwright"), compile=compile)
    precision = layout.precision or default_precision(cluster)
    return Problem(config, cluster, sequence, batch, whose, compile, precision=precision, **options)


class StepPredictor:
    """Predictor of the time of one training step under a layout: `PipelineTimes` of one candidate.

    in_place [parts of a micro-batch]: factor by which each part takes longer than operations timed alone; pieces: times
    of the candidate's pieces, if they are known; makespans: cache of simulated pipeline times.
    """

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        in_place: Floats = UNCORRECTED,
        *,
        pieces: LayerTimes | None = None,
        makespans: MakespanCache | None = None,
    ) -> None:
        share = layout.dp * layout.micro_batches
        if problem.batch % share:
            raise UserError(f'layout "{layout}": batch {problem.batch} is not a multiple of dp x mb = {share}')
        if problem.optimizer not in OPTIMIZER_BYTES:
            raise UserError(f'unknown optimizer "{problem.optimizer}" (known: {", ".join(OPTIMIZER_BYTES)})')
        self.problem, self.layout = problem, layout
        self.pieces = pieces or LayerTimes(problem, [StageCandidate(layout, problem.batch // share)], in_place)
        self.groups = ProcessGroups(self.pieces.collectives, [layout])
        self.makespans = makespans or MakespanCache()

    def pipeline(self, program: PipelineProgram | None) -> PipelineTimes:
        """Return the times of the layout's pipeline. program: whose ranks hold the stages; None: as the schedule's name
        says."""
        layout, problem = self.layout, self.problem
        if program is None:
            count, places = layout.pp * layout.chunks, stages_by_rank(layout.schedule, layout.pp, layout.chunks)
        else:
            count, places = program.stages, program.stages_by_rank
        stages = problem.engine.stages(problem.config, count, problem.sequence)
        return PipelineTimes(self.pieces, np.zeros(1, dtype=np.int64), stages, places)

    def price(self, simulate: bool = True, parts: bool = True) -> StepTime:
        """Return the predicted time of the step. simulate: run the pipeline simulator, not the closed form; parts:
        simulate also without messages, to separate their share."""
        layout, problem, groups = self.layout, self.problem, self.groups
        program = None
        if simulate and layout.pp > 1:
            program = program_for(layout, problem.config, problem.sequence)
        of = self.pipeline(program)
        zero = of.level(layout.zero)
        times = of.times(followed_at_once(layout), zero, groups)
        ranks = of.of_ranks(times)
        totals = layout.micro_batches / of.replicas * ranks[0]
        busiest = totals.sum(axis=(1, 2)).argmax()
        breakdown = dict(zip(MICRO_BATCH_PARTS, totals[busiest].sum(axis=0).tolist(), strict=True))
        if problem.teacher is not None:
            breakdown["compute"] *= 1 + problem.teacher.compute_share(problem.config, problem.sequence)
        breakdown |= {"pipeline": 0.0, "bubble": 0.0}
        if layout.pp > 1:
            if program is None:
                makespan, messages = self._closed(of, ranks)
            else:
                makespan, messages = self._simulated(program, self.durations(of, times), parts)
            breakdown["pipeline"] = messages
            breakdown["bubble"] = max(0.0, makespan - messages - float(totals[busiest].sum()))
        passes = overlapping_passes(layout.schedule, layout.pp, layout.micro_batches)
        breakdown["data"] += float(of.gradients(zero, groups, ranks, passes).max())
        breakdown["optimizer"] = float(of.update(zero, groups)[0])
        seconds = sum(breakdown.values())
        cluster = problem.cluster
        factor, once = straggler_terms(cluster)
        breakdown["optimizer"] += (factor - 1) * seconds + once
        seconds = factor * seconds + once
        breakdown = {part: cluster.time_factor * value for part, value in breakdown.items()}
        expected, low, high, bounds = bound_seconds(cluster, StepProperties.of(problem, layout, seconds))
        return StepTime(expected, low, high, breakdown, simulate, bounds)

    def transfer(self) -> float:
        """Return the seconds of a message (activations of a micro-batch) from one pipeline stage to the next."""
        return float(self.groups.seconds("send", "pp", self.pieces.messages(np.zeros(1, dtype=np.int64)))[0])

    def durations(self, of: PipelineTimes, times: Floats, factor: float = 1.0) -> Durations:
        """Return the seconds, times `factor`, of forwards, backwards and messages of each stage. times: of each
        distinct stage."""
        forward, back, weight = factor * times[0].sum(axis=-1)[of.which].T
        return Durations(forward, back, weight, factor * self.transfer() if self.layout.pp > 1 else 0.0)

    def _closed(self, of: PipelineTimes, ranks: Floats) -> tuple[float, float]:
        """Return (seconds of all micro-batches in the pipeline, seconds of these that messages cause) in closed form.
        ranks: seconds of a micro-batch on each distinct rank."""
        layout = self.layout
        phases = np.moveaxis(ranks.sum(axis=-1), -1, 0) / of.replicas
        found, messages = closed_makespan(
            layout.schedule, layout.chunks, layout.micro_batches, phases, of.counts, of.count, self.transfer()
        )
        return float(found[0]), float(messages)

    def _simulated(self, program: PipelineProgram, durations: Durations, parts: bool) -> tuple[float, float]:
        """Return (seconds of all micro-batches in the pipeline, seconds of these that messages cause) by simulation.
        parts: simulate also without messages; if False, the second result is 0."""
        asked = [durations, Durations(durations.forward, durations.input_gradient, durations.weight_gradient)]
        asked = asked[: 1 + parts]
        self.makespans.compute(program, asked)
        makespan, *without = (self.makespans.get(program, each) for each in asked)
        return makespan, makespan - sum(without) if without else 0.0

    def data_seconds(self) -> float:
        """Return the seconds of a step in which a rank communicates for data parallelism, including communication that
        overlaps computation."""
        of, layout = self.pipeline(None), self.layout
        zero = of.level(layout.zero)
        ranks = np.zeros((1, len(of.members), 3, 1))
        once = of.gradients(zero, self.groups, ranks, np.zeros(()), overlaps=False)[:, 0]
        if zero < 2:
            return float(once.max())
        gather, scatter = of.zero_calls(zero, self.groups, of.rank_dense, of.rank_expert)
        return float((once + layout.micro_batches / of.replicas * (2 * gather + scatter)[0]).max())


def pipeline_durations(problem: Problem, layout: Layout, in_place: Floats) -> tuple[PipelineProgram, Durations]:
    """Return (pipeline program of a layout, predicted seconds of its forwards, backwards and messages), for pictures.
    in_place: as of `StepPredictor`."""
    step = StepPredictor(problem, layout, in_place)
    program = program_for(layout, problem.config, problem.sequence)
    of = step.pipeline(program)
    times = of.times(followed_at_once(layout), of.level(layout.zero), step.groups)
    return program, step.durations(of, times, problem.cluster.time_factor)


def followed_at_once(layout: Layout) -> bool:
    """Return True if, under a layout's schedule, the last stage's backward directly follows its forward; False where
    all forwards come first."""
    return layout.schedule not in ("gpipe", "looped-bfs") or layout.pp == 1


def default_precision(cluster: Cluster) -> str:
    """Return the default precision on a cluster, such as "bf16"; on CPUs bf16 if at least 1.2 times as fast as fp32."""
    if cluster.kind == "cpu":
        return "bf16" if (cluster.device.bf16 or 0.0) >= 1.2 * (cluster.device.fp32 or 0.0) else "fp32"
    return "bf16" if cluster.device.bf16 else "fp16" if cluster.device.fp16 else "fp32"
