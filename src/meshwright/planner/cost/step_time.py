"""How long a training step takes: what stages compute and tell each other, the pipeline's program on a clock, and what
data parallelism and the optimizer add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost import engines
from meshwright.planner.cost.bubbles import closed_makespan, places_of
from meshwright.planner.cost.communication import group_of, held, neighbours
from meshwright.planner.cost.data_time import (
    OPTIMIZER_BYTES,
    gradient_waits,
    level_in_time,
    passes_beside,
    update_bytes,
    updated,
    zero_calls,
)
from meshwright.planner.cost.engines import Engine
from meshwright.planner.cost.micro_batch import (
    AS_ADDED,
    ITEMSIZE,
    MICRO_BATCH_PARTS,
    MicroBatch,
    layer_kinds,
    zero_waits,
)
from meshwright.planner.cost.rates import Collectives, Group, Rates, constants
from meshwright.planner.hardware.cluster import Cluster
from meshwright.program.durations import Durations, Floats
from meshwright.program.makespan import MakespanCache
from meshwright.program.pipeline import PipelineProgram
from meshwright.spec.config import ModelConfig
from meshwright.spec.stage_times import program_for
from meshwright.spec.stages import Stage, stages_of

DATA = MICRO_BATCH_PARTS.index("data")
_BOTH = slice(0, 1), slice(1, None)  # phases of the way there, and back
PARTS = (*MICRO_BATCH_PARTS, "pipeline", "bubble", "optimizer")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of a training step.

    Attributes:
        seconds: Expected.
        low, high: Bounds between which measured runs are expected.
        breakdown: Seconds by part, which add up to `seconds`: compute of the busiest rank; exposed communication of tp
            (tensor), cp (context), ep (expert), data parallelism (data) and stages (pipeline); bubble; optimizer.
        simulated: True if the pipeline schedule was simulated, not computed in closed form.
    """

    seconds: float
    low: float
    high: float
    breakdown: Mapping[str, float]
    simulated: bool


def with_bounds(cluster: Cluster, seconds: float) -> tuple[float, float, float]:
    """Return calibrated (expected, low, high) seconds of a step on a cluster. seconds: predicted without calibration.
    If other programs disturbed the machine's measurement, the upper bound is for a run that they disturb as much."""
    band, found = constants()["band"], cluster.calibration
    busy = 0.0 if cluster.measured is None else cluster.measured.disturbed or 0.0
    high = band["high"] / (1 - busy)
    if found is None:
        return seconds, seconds * band["low"], seconds * high
    return found.bounds(seconds, band["low"], high)


def step_time(
    config: ModelConfig,
    layout: Layout,
    cluster: Cluster,
    sequence: int,
    batch: int,
    *,
    engine: str | Engine = "meshwright",
    compile: bool = False,
    optimizer: str = "adamw",
    simulate: bool = True,
    documents: float = 1.0,
    parts: bool = True,
    in_place: Floats = AS_ADDED,
    pairs: bool = False,
) -> StepTime:
    """Predict the time of one training step of `batch` sequences of `sequence` tokens.

    engine: training engine whose kernels are modelled; compile: with compiled blocks; optimizer: such as "adamw";
    simulate: run the pipeline simulator; else use the closed form, where there is one; documents: average number packed
    into a sequence; parts: simulate also without messages, to separate their share; in_place: factor for each part of a
    micro-batch (compute, tensor, context, expert, data) by which it takes longer than operations timed alone; pairs:
    training on response pairs, whose loss computes the logits twice. Raises `UserError` for what the device lacks and
    for a batch that the layout cannot divide; `refuse` checks whether the model fits the layout.
    """
    whose = engines.engine(engine, compile=compile)
    if batch % (layout.dp * layout.micro_batches):
        share = layout.dp * layout.micro_batches
        raise UserError(f'layout "{layout}": batch {batch} is not a multiple of dp x mb = {share}')
    if optimizer not in OPTIMIZER_BYTES:
        raise UserError(f'unknown optimizer "{optimizer}" (known: {", ".join(OPTIMIZER_BYTES)})')
    step = Step(config, layout, cluster, sequence, batch, whose, documents, in_place, pairs=pairs)
    return step.priced(optimizer, simulate, parts)


def durations_of(
    config: ModelConfig, layout: Layout, cluster: Cluster, sequence: int, batch: int, *, engine: str | Engine,
    documents: float = 1.0, in_place: Floats = AS_ADDED, pairs: bool = False,
) -> tuple[PipelineProgram, Durations]:  # fmt: skip
    """Return (pipeline program of a layout, predicted seconds of its forwards, backwards and messages), for pictures.

    sequence: tokens of a sequence; batch: sequences over all ranks; documents: average number packed into a sequence;
    in_place: factor for each part of a micro-batch by which it takes longer than operations timed alone; pairs:
    training on response pairs.
    """
    step = Step(
        config, layout, cluster, sequence, batch, engines.engine(engine), documents, in_place, pairs=pairs
    )  # fmt: skip
    program = program_for(layout, config, sequence)
    forward, back, weight = cluster.time_factor * np.array(step.stages(program.stages)).sum(axis=2).T
    transfer = cluster.time_factor * step.transfer() if layout.pp > 1 else 0.0
    return program, Durations(forward, back, weight, transfer)


class Step:
    """Predictor of the time of one training step under a layout.

    sequence, batch: tokens of a sequence, sequences over all ranks; documents: average number packed into a sequence;
    in_place: factor for each part of a micro-batch by which it takes longer than operations timed alone; work:
    predictor of the micro-batch to reuse; makespans: cache of simulated pipeline times; pairs: training on response
    pairs.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        cluster: Cluster,
        sequence: int,
        batch: int,
        engine: Engine,
        documents: float,
        in_place: Floats = AS_ADDED,
        *,
        work: MicroBatch | None = None,
        makespans: MakespanCache | None = None,
        pairs: bool = False,
    ) -> None:
        self.config, self.layout, self.sequence, self.engine = config, layout, sequence, engine
        self.collectives = Collectives(cluster) if work is None else work.collectives
        self.makespans = makespans or MakespanCache()
        precision = layout.precision or default_precision(cluster)
        self.itemsize = ITEMSIZE[precision]
        self.rates = Rates.of(cluster, precision, engine.fusion)
        rows = batch // (layout.dp * layout.micro_batches)
        self.work = work or MicroBatch(
            config,
            layout,
            self.collectives,
            self.rates,
            rows,
            sequence,
            engine,
            self.itemsize,
            documents,
            in_place,
            pairs,
        )
        self.held = held(config, layout)
        self.zero = level_in_time(layout.zero, layout.pp, engine)
        self.gradient_bytes = engine.gradient_bytes if self.itemsize == 2 else 4

    def group(self, axis: str) -> Group:
        """Return the size of a process group of an axis such as "data": number of ranks, and how many share a node."""
        return group_of(self.layout, axis, self.collectives.cluster)

    def seconds(self, operation: Any, axis: str, size: Floats) -> Floats:
        """Return the seconds of a collective on a vector of `size` bytes. operation: such as "all-reduce"; axis: such
        as "data"."""
        return self.collectives.seconds(operation, self.group(axis), size)

    def stages(self, count: int) -> list[Floats]:
        """Return the seconds of a micro-batch in each of the pipeline's `count` stages: arrays [phases (forward, input
        gradients, weight gradients), parts (compute, tensor, context, expert, data)]."""
        kinds: dict[tuple[object, ...], Floats] = {}
        times = []
        for stage in stages_of(self.config, count, self.sequence):
            kind = (*layer_kinds(self.config, stage).items(), stage.first, stage.last)
            if kind not in kinds:
                kinds[kind] = self.stage(stage)
            times.append(kinds[kind])
        return times

    def stage(self, stage: Stage) -> Floats:
        """Return the seconds of a micro-batch in a pipeline stage: [phases (forward, input gradients, weight
        gradients), parts (compute, tensor, context, expert, data)], exposed communication of ZeRO-2 and 3 included."""
        found = self.work.stage(stage, followed_at_once(self.layout))
        if self.zero < 2:
            return found
        layers = len(stage.layers)
        dense, spread = (np.array(numel / layers) for numel in self.held.of_stage(self.config, stage))
        gather, scatter = zero_calls(self.zero, self.seconds, dense, spread, self.itemsize, self.gradient_bytes)
        there, *back = found.sum(axis=1)
        waits = zero_waits(gather, scatter, layers, there, sum(back), self.share())
        found[:2, DATA] += waits
        return found

    def share(self) -> float:
        """Return the slow-down of computation that overlaps gradient communication, as a fraction of the
        communication's seconds."""
        axes = ("data", "expert_data") if self.layout.zero == 0 else ("shard", "expert_shard")
        return max(self.collectives.tax(self.group(axis)) for axis in axes[: 1 + self.layout.expert_parallel])

    def priced(self, optimizer: str, simulate: bool = True, parts: bool = True) -> StepTime:
        """Return the predicted time of the step. optimizer: such as "adamw"; simulate: run the pipeline simulator, not
        the closed form; parts: simulate also without messages, to separate their share."""
        layout, config = self.layout, self.config
        program = program_for(layout, config, self.sequence) if simulate and layout.pp > 1 else None
        count = layout.pp * layout.chunks if program is None else program.stages
        stages, times = stages_of(config, count, self.sequence), self.stages(count)
        places = places_of(layout.schedule, layout.pp, layout.chunks) if program is None else program.stages_by_rank
        replicas = _replicas(places, count)
        totals = np.array([layout.micro_batches / replicas * sum(times[at] for at in place) for place in places])
        busiest = totals.sum(axis=(1, 2)).argmax()
        breakdown = dict(zip(MICRO_BATCH_PARTS, totals[busiest].sum(axis=0).tolist(), strict=True))
        breakdown |= {"pipeline": 0.0, "bubble": 0.0}
        if layout.pp > 1:
            makespan, messages = self.pipeline(program, times, places, parts)
            breakdown["pipeline"] = messages
            breakdown["bubble"] = max(0.0, makespan - messages - float(totals[busiest].sum()))
        breakdown["data"] += self.gradients(stages, places, times)
        breakdown["optimizer"] = self.update(stages, places, optimizer)
        seconds = sum(breakdown.values())
        cluster = self.collectives.cluster
        breakdown = {part: cluster.time_factor * value for part, value in breakdown.items()}
        return StepTime(*with_bounds(cluster, seconds), breakdown, simulate)

    def transfer(self) -> float:
        """Return the seconds of a message (activations of a micro-batch) from one pipeline stage to the next."""
        size = self.work.rows * self.sequence / self.layout.cp * self.config.hidden * self.itemsize
        if self.layout.tensor_sequence_parallel or (self.engine.scatters and self.layout.tp > 1):
            size /= self.layout.tp
        return self.collectives.seconds("send", neighbours(self.layout, self.collectives.cluster), size)

    def pipeline(
        self, program: PipelineProgram | None, times: list[Floats], places: list[list[int]], parts: bool
    ) -> tuple[float, float]:
        """Return (seconds of all micro-batches in the pipeline, seconds of these that messages cause).

        program: pipeline program to simulate, None for the closed form; times: seconds of a micro-batch in each stage
        [phases (forward, input gradients, weight gradients), parts (compute, tensor ...)]; places: stage indices of
        each rank; parts: simulate also without messages; if False, the second result of a simulation is 0.
        """
        forward, back, weight = np.array(times).sum(axis=2).T
        transfer = self.transfer()
        if program is None:
            layout = self.layout
            phases = np.array([[each[place].sum() for place in places] for each in (forward, back, weight)])
            phases /= _replicas(places, len(times))
            closed, messages = closed_makespan(
                layout.schedule, layout.chunks, layout.micro_batches, phases, np.ones(layout.pp), len(times), transfer
            )
            return float(closed), float(messages)
        asked = [Durations(forward, back, weight, transfer), Durations(forward, back, weight)][: 1 + parts]
        self.makespans.compute(program, asked)
        makespan, *without = (self.makespans.get(program, each) for each in asked)
        return makespan, makespan - sum(without) if without else 0.0

    # --- once a step

    def of_ranks(self, stages: tuple[Stage, ...], places: list[list[int]]) -> list[tuple[float, float, int]]:
        """Return (dense parameters, expert-parallel parameters, layers), numbers for each distinct pipeline rank.
        places: stage indices of each rank."""
        sizes = [(*self.held.of_stage(self.config, stage), len(stage.layers)) for stage in stages]
        alike = dict.fromkeys(tuple(sizes[at] for at in place) for place in places)
        return [(sum(each[0] for each in of), sum(each[1] for each in of), sum(each[2] for each in of)) for of in alike]

    def gradients(self, stages: tuple[Stage, ...], places: list[list[int]], times: list[Floats]) -> float:
        """Return the exposed seconds of gradient reductions and parameter all-gathers, once a step. places: stage
        indices of each rank; times: seconds of a micro-batch in each stage, [phases (forward, input gradients, weight
        gradients), parts]."""
        phases = [[sum(float(times[at][part].sum()) for at in place) for place in places] for part in _BOTH]
        passes = passes_beside(self.layout.schedule, self.layout.pp, self.layout.micro_batches)
        first_forward, last_backward = (passes * max(each) for each in phases)
        return max(
            float(
                gradient_waits(
                    self.zero, self.seconds, np.array(dense), np.array(spread), *self.shards(), layers,
                    first_forward, last_backward, self.share(), self.engine, self.itemsize, self.gradient_bytes,
                )
            )
            for dense, spread, layers in self.of_ranks(stages, places)
        )  # fmt: skip

    def data_seconds(self) -> float:
        """Return the seconds of a step in which a rank communicates for data parallelism, including communication that
        overlaps computation."""
        layout, stages = self.layout, stages_of(self.config, self.layout.pp * self.layout.chunks, self.sequence)
        places = places_of(layout.schedule, layout.pp, layout.chunks)
        alone = replace(self.engine, overlaps_data=False)
        most = 0.0
        for dense, spread, layers in self.of_ranks(stages, places):
            numel = np.array(dense), np.array(spread)
            gather, scatter = zero_calls(self.zero, self.seconds, *numel, self.itemsize, self.gradient_bytes)
            once = gradient_waits(
                self.zero, self.seconds, *numel, *self.shards(), layers, np.zeros(()), np.zeros(()), 0.0, alone,
                self.itemsize, self.gradient_bytes,
            )  # fmt: skip
            passes = layout.micro_batches / _replicas(places, len(stages))
            most = max(most, float(once + passes * (2 * gather + scatter)))
        return most

    def shards(self) -> tuple[int, int]:
        """Return (number of ranks over which ZeRO shards dense parameters, number for experts)."""
        return self.layout.group_size("shard"), self.layout.group_size("expert_shard")

    def update(self, stages: tuple[Stage, ...], places: list[list[int]], optimizer: str) -> float:
        """Return the seconds of the optimizer step on the rank that updates most parameters. places: stage indices of
        each rank; optimizer: such as "adamw"."""
        most = max(
            float(updated(self.layout.zero, np.array(dense), np.array(spread), *self.shards()))
            for dense, spread, _ in self.of_ranks(stages, places)
        )
        return most * update_bytes(optimizer, self.engine, self.itemsize) / self.rates.memory


def followed_at_once(layout: Layout) -> bool:
    """Return True if, under a layout's schedule, the last stage's backward directly follows its forward; False where
    all forwards come first."""
    return layout.schedule not in ("gpipe", "looped-bfs") or layout.pp == 1


def default_precision(cluster: Cluster) -> str:
    """Return the default precision on a cluster, such as "bf16"; on CPUs bf16 if at least 1.2 times as fast as fp32."""
    if cluster.kind == "cpu":
        return "bf16" if (cluster.device.bf16 or 0.0) >= 1.2 * (cluster.device.fp32 or 0.0) else "fp32"
    return "bf16" if cluster.device.bf16 else "fp16" if cluster.device.fp16 else "fp32"


def _replicas(places: list[list[int]], stages: int) -> int:
    """Return the number of copies of the model that the pipeline ranks together hold: 2 under bidirectional schedules,
    else 1. places: stage indices of each rank; stages: number of stages."""
    return sum(map(len, places)) // stages
