"""How long a training step takes: what stages compute and tell each other, the pipeline's program on a clock, and what
data parallelism and the optimizer add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.config import ModelConfig
from meshwright.model.stage_times import program_for
from meshwright.model.stages import Stage, stages_of
from meshwright.plan import engines
from meshwright.plan.bubbles import closed_bubble
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import calls, group_of, held, neighbours
from meshwright.plan.engines import Engine
from meshwright.plan.operations import operations
from meshwright.plan.rates import Group, Rates, attention_kernel, collective_seconds, constants
from meshwright.program.durations import Durations
from meshwright.program.pipeline import PipelineProgram
from meshwright.program.simulate_pipeline import simulate_pipeline

PARTS = ("compute", "tensor", "context", "expert", "data", "pipeline", "bubble", "optimizer")
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}

OPTIMIZER_BYTES = {"adamw": 42.0, "sgd": 22.0}
"""Moved for each parameter that a rank updates, with float32 masters: AdamW reads master, gradient and two moments and
writes all but the gradient (28), writes the parameter (2) and clips (a norm's look at the gradient, a product: 12)."""

NARROW_OPTIMIZER_BYTES = {"adamw": 20.0, "sgd": 12.0}
"""The same where everything is bf16."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: the expected, and the bounds between which nine of ten measured runs lie. `breakdown` adds up
    to `seconds`: compute of the rank that has the most to do, what it waits for ranks of tp (tensor), cp (context) and
    ep (expert), for gathers and sums of data parallelism that nothing hides (data), for messages between stages
    (pipeline), for other stages (bubble), and the optimizer. `simulated`: by the program on a clock, not in closed
    form."""

    seconds: float
    low: float
    high: float
    breakdown: Mapping[str, float]
    simulated: bool


@dataclass(slots=True)
class StageTime:
    """Seconds of one micro-batch on one stage, by part: forward, the way back for inputs (with what is repeated), and
    for weights."""

    forward: dict[str, float] = field(default_factory=dict)
    input: dict[str, float] = field(default_factory=dict)
    weight: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, part: str, seconds: float) -> None:
        into = {"forward": self.forward, "weight": self.weight}.get(phase, self.input)
        into[part] = into.get(part, 0.0) + seconds

    @property
    def seconds(self) -> tuple[float, float, float]:
        return sum(self.forward.values()), sum(self.input.values()), sum(self.weight.values())

    def of(self, part: str) -> float:
        return sum(each.get(part, 0.0) for each in (self.forward, self.input, self.weight))


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
) -> StepTime:
    """Time of one step of `batch` sequences of `sequence` tokens.

    simulate: run the pipeline's program on a clock; else its closed form, where there is one. documents: in a row, on
    average. Raises UserError for what the device lacks and for a batch that the layout cannot share; whether the model
    fits the layout, `model.refuse` says.
    """
    whose = engines.engine(engine, compile=compile)
    if batch % (layout.dp * layout.micro_batches):
        share = layout.dp * layout.micro_batches
        raise UserError(f'layout "{layout}": batch {batch} is not a multiple of dp x mb = {share}')
    if optimizer not in OPTIMIZER_BYTES:
        raise UserError(f'unknown optimizer "{optimizer}" (known: {", ".join(OPTIMIZER_BYTES)})')
    step = _Step(config, layout, cluster, sequence, batch, whose, documents)
    return step.priced(optimizer, simulate)


@lru_cache(maxsize=256)
def _stages(config: ModelConfig, count: int, sequence: int) -> tuple[Stage, ...]:
    return stages_of(config, count, sequence)


class _Step:
    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        cluster: Cluster,
        sequence: int,
        batch: int,
        engine: Engine,
        documents: float,
    ) -> None:
        self.config, self.layout, self.cluster, self.sequence, self.engine = config, layout, cluster, sequence, engine
        self.precision = layout.precision or ("bf16" if cluster.device.bf16 else "fp16")
        self.itemsize = ITEMSIZE[self.precision]
        self.rates, self.kernel = Rates.of(cluster, self.precision), attention_kernel(engine, cluster)
        self.rows = batch // (layout.dp * layout.micro_batches)
        self.held, self.documents = held(config, layout), documents
        # All forwards come first there; in all else the last stage's backward follows its forward.
        self.at_once = layout.schedule not in ("gpipe", "looped-bfs") or layout.pp == 1
        self.gradient_bytes = engine.gradient_bytes if self.itemsize == 2 else 4

    # --- a stage and a micro-batch

    def stage(self, stage: Stage) -> StageTime:
        found = StageTime()
        arguments = self.config, self.layout, self.rows, self.sequence, stage, self.engine
        # Seconds of attention in each phase, and of weight gradients.
        beside: dict[str, float] = dict.fromkeys(("forward", "again", "input", "weight"), 0.0)
        options = {"itemsize": self.itemsize, "documents": self.documents, "at_once": self.at_once}
        for one in operations(*arguments, attention=self.kernel, **options):  # type: ignore[arg-type]
            seconds = self.rates.seconds(one, self.kernel)
            found.add(one.phase, "compute", seconds)
            if one.phase == "weight" or one.name.startswith(("attention.core", "attention.scores", "attention.values")):
                beside[one.phase] += seconds
        hidden: dict[tuple[str, str], float] = {}
        for call in calls(*arguments, self.cluster, self.itemsize):
            seconds = call.seconds(self.cluster)
            if call.beside is None:
                found.add(call.phase, call.axis, seconds)
            else:
                key = ("weight" if call.beside == "weight" else call.phase, call.axis)
                hidden[key] = hidden.get(key, 0.0) + seconds
        for (cover, axis), seconds in hidden.items():
            # In a ring all but the last piece's attention have a message beside them.
            covered = beside[cover] * ((self.layout.cp - 1) / self.layout.cp if axis == "context" else 1)
            tax = self.tax(group_of(self.layout, "cp" if axis == "context" else "tp", self.cluster))
            waited = max(0.0, seconds - covered)
            found.add("input" if cover == "weight" else cover, axis, waited + tax * (seconds - waited))
        self.gathers(found, stage)
        return found

    def gathers(self, found: StageTime, stage: Stage) -> None:
        """Of ZeRO-2 and 3, in every micro-batch: parameters are gathered a layer ahead of their use, gradients
        scattered a layer behind: forward = gather of the first + sum of max(compute, next gather)."""
        layers = len(stage.layers)
        if self.layout.zero < 2:
            return
        dense, spread = self.held.of_stage(self.config, stage)
        gather = scatter = tax = 0.0
        for numel, axis in ((dense, "shard"), (spread, "expert_data")):
            group, share = group_of(self.layout, axis, self.cluster), numel / layers
            if self.layout.zero == 3:
                gather += collective_seconds(self.cluster, "all-gather", group, share * self.itemsize)
            scatter += collective_seconds(self.cluster, "reduce-scatter", group, share * self.gradient_bytes)
            tax = max(tax, self.tax(group)) if group.ranks > 1 else tax
        there, *back = found.seconds
        computing, returning = there / layers, sum(back) / layers
        if self.layout.zero == 3:
            waited = gather + (layers - 1) * max(0.0, gather - computing)
            found.add("forward", "data", waited + tax * (layers * gather - waited))
        both = gather + scatter
        waited = scatter + (layers - 1) * max(0.0, both - returning)
        found.add("input", "data", waited + tax * max(0.0, layers * both - waited))

    def tax(self, group: Group) -> float:
        return float(constants()["overlap"]["tax"]["inside" if group.nodes == 1 else "across"])

    # --- the pipeline

    def priced(self, optimizer: str, simulate: bool) -> StepTime:
        layout, config = self.layout, self.config
        if layout.pp == 1:
            stages = _stages(config, 1, self.sequence)
            times = [self.stage(stages[0])]
            places: list[list[int]] = [[0]]
            makespan, transfers, replicas = None, 0.0, 1
        else:
            program = None if not simulate else program_for(layout, config, self.sequence)
            count = program.stages if program is not None else layout.pp * layout.chunks
            stages = _stages(config, count, self.sequence)
            kinds: dict[tuple[object, ...], StageTime] = {}
            times = []
            for stage in stages:
                kind = (*self.kind(stage), stage.first, stage.last)
                if kind not in kinds:
                    kinds[kind] = self.stage(stage)
                times.append(kinds[kind])
            makespan, transfers, places = self.pipeline(program, times)
            replicas = 1 if program is None else program.replicas
        micro_batches = layout.micro_batches / replicas
        totals = [{part: micro_batches * sum(times[at].of(part) for at in place) for part in PARTS} for place in places]
        busiest = max(totals, key=lambda parts: sum(parts.values()))
        breakdown = dict(busiest)
        busy = sum(busiest.values())
        if makespan is not None:
            breakdown["pipeline"] = transfers
            breakdown["bubble"] = max(0.0, makespan - transfers - busy)
        last_backward = max(sum(sum(times[at].seconds[1:]) for at in place) for place in places)
        breakdown["data"] += self.gradients(stages, places, last_backward)
        breakdown["optimizer"] = self.update(stages, places, optimizer)
        seconds = sum(breakdown.values())
        band = constants()["band"]
        return StepTime(seconds, seconds * band["low"], seconds * band["high"], breakdown, simulate)

    def kind(self, stage: Stage) -> tuple[object, ...]:
        config = self.config
        return tuple(sorted((config.layer_window(at) or 0, config.has_experts(at)) for at in stage.layers))

    def transfer(self) -> float:
        """Seconds of a message from stage to stage."""
        layout = self.layout
        size = self.rows * self.sequence / layout.cp * self.config.hidden * self.itemsize
        if layout.tensor_sequence_parallel or (self.engine.scatters and layout.tp > 1):
            size /= layout.tp
        return collective_seconds(self.cluster, "send", neighbours(layout, self.cluster), size)

    def pipeline(self, program: PipelineProgram | None, times: list[StageTime]) -> tuple[float, float, list[list[int]]]:
        """Makespan, how much of it messages cost, and which stages each rank has (a rank of two replicas: both)."""
        forward, back, weight = (np.array(each) for each in zip(*(time.seconds for time in times), strict=True))
        transfer = self.transfer()
        layout = self.layout
        if program is None:
            places = [list(range(rank, len(times), layout.pp)) for rank in range(layout.pp)]
            if layout.schedule in ("zb-v", "v-half", "v-min", "dualpipe-v"):
                places = [[rank, len(times) - 1 - rank] for rank in range(layout.pp)]
            makespan, waited = closed_bubble(layout, forward, back, weight, places, transfer)
            return makespan, waited, places
        places = [[] for _ in range(program.ranks)]
        for replica in program.placement:
            for stage, rank in enumerate(replica):
                places[rank].append(stage)
        durations = Durations(forward, back, weight, transfer)
        without = simulate_pipeline(program, Durations(forward, back, weight)).makespan
        makespan = simulate_pipeline(program, durations).makespan
        return makespan, makespan - without, places

    # --- once a step

    def gradients(self, stages: tuple[Stage, ...], places: list[list[int]], last_backward: float) -> float:
        """What sums of gradients (and ZeRO's gathers of new parameters) cost beyond the backward pass beside which they
        run. ZeRO-2 and 3 did it in every micro-batch."""
        layout, cluster = self.layout, self.cluster
        slowest = 0.0
        for place in places:
            layers = sum(len(stages[at].layers) for at in place)
            sums = gathers = tail = tax = 0.0
            for kind, axis in ((0, "shard"), (1, "expert_data")):
                numel = sum(self.held.of_stage(self.config, stages[at])[kind] for at in place)
                group, replicas = group_of(layout, axis, cluster), group_of(layout, "replica", cluster)
                size = numel * self.gradient_bytes
                if layout.zero == 0:
                    group = group_of(layout, "data", cluster) if kind == 0 else group
                    reduced = collective_seconds(cluster, "all-reduce", group, size)
                elif layout.zero == 1:
                    reduced = collective_seconds(cluster, "reduce-scatter", group, size)
                else:
                    reduced = 0.0
                if layout.zero and layout.hybrid and kind == 0:
                    reduced += collective_seconds(cluster, "all-reduce", replicas, size / layout.hybrid)
                if layout.zero in (1, 2):
                    gathers += collective_seconds(cluster, "all-gather", group, numel * self.itemsize)
                sums += reduced
                tax = max(tax, self.tax(group) if group.ranks > 1 else 0.0)
            tail = sums / layers
            waited = sums
            if self.engine.overlaps_data:
                waited = max(tail, sums - last_backward * (layers - 1) / layers)
                waited += tax * (sums - min(sums, waited))
            slowest = max(slowest, waited + gathers)
        return slowest

    def update(self, stages: tuple[Stage, ...], places: list[list[int]], optimizer: str) -> float:
        narrow = self.engine.gradient_bytes == 2 and self.itemsize == 2
        moved = (NARROW_OPTIMIZER_BYTES if narrow else OPTIMIZER_BYTES)[optimizer]
        most = 0.0
        for place in places:
            numel = 0.0
            for kind, axis in ((0, "shard"), (1, "expert_data")):
                shards = group_of(self.layout, axis, self.cluster).ranks if self.layout.zero else 1
                numel += sum(self.held.of_stage(self.config, stages[at])[kind] for at in place) / shards
            most = max(most, numel)
        return most * moved / self.rates.memory
