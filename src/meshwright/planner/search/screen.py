"""Closed-form time and memory of every layout of the search space, as arrays; simulator and ledger then decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout import MIN_MICRO_BATCHES, Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.planner.cost.bubbles import followed_at_once, in_flight, stages_by_rank
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.communication import Array, ProcessGroups, find_distinct
from meshwright.planner.cost.layer_times import LayerTimes
from meshwright.planner.cost.pipeline_times import DataParallelism, PipelineTimes
from meshwright.planner.cost.rates import straggler_terms
from meshwright.planner.cost.reference_step import measured_step_factors
from meshwright.planner.memory.activation_bytes import ActivationBytes, state_bytes_per_parameter, state_sizes
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.planner.search.space import PipelineCandidate, candidates, layout_of, pipeline_candidates
from meshwright.program.durations import Floats


@dataclass
class ScreenedLayouts:
    """Closed-form predictions for all layouts of a search, as arrays with one entry per layout. A layout combines a
    stage layout (tp, cp, ep ...), a pipeline and a ZeRO setting.

    Attributes:
        candidates: All candidate stage layouts.
        layer_times: Times of layers, embedding and head under each stage layout.
        pipelines: All candidate pipelines (ranks, schedule, chunks).
        candidate, pipe: For each layout, the index of its stage layout in `candidates`, and of its pipeline in
            `pipelines`.
        zero: ZeRO stage.
        hybrid: Number of ranks of a ZeRO sharding group; 0: all data-parallel ranks.
        seconds: Seconds of a step.
        bytes: Bytes at the memory peak.
    """

    candidates: list[StageCandidate]
    layer_times: LayerTimes
    pipelines: list[PipelineCandidate]
    candidate: Array
    pipe: Array
    zero: Array
    hybrid: Array
    seconds: Floats
    bytes: Floats

    def column(self, *names: str) -> Array:
        """Return one number per layout: of one property its value, of several an integer that is equal for layouts that
        agree in all. Values that are no numbers are replaced by integers. A name is that of a field of the pipeline
        (`PipelineCandidate`) or of the stage's `Layout`; "rows" (sequences of a micro-batch); or "zero" (ZeRO stage,
        and if its groups are within nodes)."""
        found, *others = (self._column(name) for name in names)
        for other in others:
            found = found * (other.max() + 1) + other
        return found

    def _column(self, name: str) -> Array:
        """Return one number per layout, of one property."""
        if name == "zero":
            return self.zero * 2 + (self.hybrid > 0)
        return self._values(name)[self.pipe if name in PipelineCandidate._fields else self.candidate]

    @cached_method
    def _values(self, name: str) -> Array:
        """Return one number per pipeline or stage layout, of one property. Texts are replaced by integers; equal texts
        have equal integers."""
        layouts = (one if name == "rows" else one.layout for one in self.candidates)
        found = [getattr(one, name) for one in (self.pipelines if name in PipelineCandidate._fields else layouts)]
        return find_distinct(found)[1] if isinstance(found[0], str) else np.array(found)

    def layout(self, index: int) -> Layout:
        """Return the layout with index `index`."""
        candidate, pipeline = self.candidates[self.candidate[index]], self.pipelines[self.pipe[index]]
        return layout_of(self.layer_times.problem, candidate, pipeline, int(self.zero[index]), int(self.hybrid[index]))


def screen(problem: Problem) -> ScreenedLayouts:
    """Predict seconds and bytes of all layouts in the search space of a planning problem in closed form."""
    every = candidates(problem)
    layer_times = LayerTimes(problem, every, measured_step_factors(problem.cluster, problem.precision, problem.engine))
    summed, memory = layer_times.sum_parts(), ActivationBytes(problem, every, layer_times.kinds)
    blocks: list[tuple[Array, ...]] = []
    found = list(pipeline_candidates(problem))
    grids = {ranks: _FittingCandidates(summed, ranks) for ranks in {pipe.ranks for pipe in found}}
    pipelines: dict[tuple[Any, ...], _Pipeline] = {}
    for number, pipe in enumerate(found):
        places = stages_by_rank(pipe.schedule, pipe.ranks, pipe.chunks)
        key = pipe.ranks, pipe.chunks, tuple(map(tuple, places))
        if key not in pipelines:
            pipelines[key] = _Pipeline(grids[pipe.ranks], memory, pipe, places)
        for candidate, *columns in _screen_pipeline(pipelines[key], pipe):
            blocks.append((candidate, np.full(len(candidate), number), *columns))
    no_layout = (np.zeros(0, dtype=np.int64),) * 6
    candidate, pipes, zero, hybrid, seconds, size = map(np.concatenate, zip(*(blocks or [no_layout]), strict=True))
    factor, once = straggler_terms(problem.cluster)
    seconds = (factor * seconds + once) * problem.cluster.time_factor
    return ScreenedLayouts(every, layer_times, found, candidate, pipes, zero, hybrid, seconds, size)


class _Sharding(NamedTuple):
    """ZeRO sharding groups of candidate layouts, as arrays with one entry per candidate. fits: True if the candidate
    can have such groups. hybrid: number of ranks of a group, 0 for all data-parallel ranks. groups: process groups."""

    fits: Array
    hybrid: Array
    groups: ProcessGroups


class _FittingCandidates:
    """Candidate layouts of a pipeline stage with which `ranks` pipeline ranks use all devices of the cluster.

    layer_times: times of layers under all candidates. Attributes, arrays with one entry per candidate that fits:
    `index`: its index in `layer_times`; `dp`: number of data-parallel replicas; `micro`: number of micro-batches;
    `data`: number of data-parallel ranks, dp x cp."""

    def __init__(self, layer_times: LayerTimes, ranks: int) -> None:
        self.layer_times, problem = layer_times, layer_times.problem
        dp, rest = np.divmod(problem.cluster.devices // ranks, layer_times.tp * layer_times.cp)
        fits = (rest == 0) & (dp > 0)
        dp = np.maximum(dp, 1)
        micro, rest = np.divmod(problem.batch, dp * layer_times.rows)
        fits &= (rest == 0) & (micro > 0) & ((layer_times.tp * layer_times.cp * dp) % layer_times.experts == 0)
        self.index = np.flatnonzero(fits)
        self.dp, self.micro = dp[self.index], micro[self.index].astype(np.float64)
        self.data = self.dp * layer_times.cp[self.index]
        self.sharding = {inside: self._sharding(inside) for inside in (False, True)}
        whole = ProcessGroups(layer_times.collectives, [Layout(dp=problem.cluster.devices)] * len(self.index))
        self.transfer = whole.seconds("send", "pp", layer_times.message[self.index])  # any layout has all devices

    def _sharding(self, inside: bool) -> _Sharding:
        """Return the candidates' ZeRO sharding groups. inside: True for groups within nodes (hybrid sharding), False
        for all data-parallel ranks."""
        layer_times, problem, index = self.layer_times, self.layer_times.problem, self.index
        tp, experts = layer_times.tp[index], layer_times.experts[index]
        shards = np.maximum(1, np.minimum(self.data, problem.cluster.devices_per_node // tp))
        sharing = shards * tp
        whole = (experts == 1) | (sharing % experts == 0) | (experts % sharing == 0)
        fits = (shards > 1) & (shards < self.data) & (self.data % shards == 0) & whole
        hybrid = np.where(fits, shards, 0) if inside else np.zeros(len(index), dtype=np.int64)
        distinct = np.stack([layer_times.mesh[index], self.dp, hybrid], axis=1)
        distinct, which = np.unique(distinct, axis=0, return_inverse=True)
        layouts = [
            layer_times.meshes[mesh].with_(dp=dp, **({"zero": 1, "hybrid": size} if size else {}))
            for mesh, dp, size in distinct.tolist()
        ]
        groups = ProcessGroups(layer_times.collectives, layouts, which.reshape(-1))
        return _Sharding(fits if inside else self.data > 1, hybrid, groups)


class _Pipeline:
    """Predicted times and memory of the ranks of one pipeline, under all candidate layouts of its stages at once.
    Pipeline ranks with equal stages are computed once, as one distinct rank.

    grid: candidate layouts of a stage. memory: bytes of activations under each candidate. pipeline: number of ranks,
    schedule, chunks. places: stages on each rank."""

    def __init__(
        self, grid: _FittingCandidates, memory: ActivationBytes, pipeline: PipelineCandidate, places: list[list[int]]
    ) -> None:
        self.grid, self.memory, problem = grid, memory, grid.layer_times.problem
        stages = problem.engine.stages(problem.config, pipeline.ranks * pipeline.chunks, problem.sequence)
        self.of = of = PipelineTimes(grid.layer_times, grid.index, grid.micro, grid.transfer, stages, places)
        index = grid.index
        ends = np.outer(of.first, memory.first[index]) + np.outer(of.last, memory.last[index])
        # [ranks, candidates] of a micro-batch that waits for its backward, and of one whose weight gradients are left.
        self.saved = of.of_rank @ (of.of_kind @ memory.layer[:, index] + ends)
        self.queued = of.of_rank @ (of.of_kind @ memory.queued_layer[:, index])
        self.passing = memory.passing[index]

    @cached_method
    def states(self, zero: int, data: DataParallelism) -> tuple[Floats, Floats]:
        """Return (bytes of model states on each distinct rank [ranks, candidates], bytes of temporary buffers
        [candidates]). ZeRO-2 and 3 gather and reduce one layer at a time in the temporary buffers. zero: ZeRO stage of
        the layouts; data: their communication of data parallelism."""
        of, problem = self.of, self.grid.layer_times.problem
        shards, expert_shards = data.groups.shards
        dense, expert = of.rank_dense, of.rank_expert
        if problem.config.tied_head and of.count > 1:  # a rank with both ends has their matrix once
            both = (of.of_rank @ of.first) * (of.of_rank @ of.last)
            matrix = problem.config.vocabulary * problem.config.hidden / self.grid.layer_times.tp[self.grid.index]
            dense = dense - np.outer(both / of.replicas**2, matrix)
        stay = state_sizes(problem, zero, dense, shards) + state_sizes(problem, zero, expert, expert_shards)
        layer, itemsize = np.zeros(stay.shape[1]), self.grid.layer_times.itemsize
        if data.zero < zero:  # held until the pipeline ends
            gathered = itemsize if zero == 3 else 0
            stay = stay + (dense + expert) * (gathered + state_bytes_per_parameter(problem).gradients)
        elif zero >= 2:
            largest = ((of.dense + of.expert) / of.layers[:, None]).max(axis=0)
            layer = largest * (3 * self.grid.layer_times.gradient_bytes + (2 * itemsize if zero == 3 else 0))
        return stay, layer

    def activations(self, pipeline: PipelineCandidate, at_once: bool) -> Floats:
        """Return the bytes of saved activations at the peak of each distinct rank, over all micro-batches in flight:
        [ranks, candidates]. pipeline: schedule of the pipeline; at_once: True if the last stage runs the backward of a
        micro-batch directly after its forward."""
        of, grid = self.of, self.grid
        ends = [end for members in of.members for end in (members[0], members[-1])]  # one of equal ranks has the most
        # Micro-batches in flight, and those whose weight gradients are left: [times, ranks, candidates].
        waiting, queued = in_flight(pipeline.schedule, pipeline.ranks, pipeline.chunks, grid.micro, ends)
        head = np.zeros(self.saved.shape)  # gradient of the head's weight
        if not at_once:
            head[of.of_rank @ of.last > 0] = np.where(of.keeps_gradient(at_once), self.memory.head[grid.index], 0.0)
        saved, left, head = (np.repeat(each, 2, axis=0) for each in (self.saved, self.queued, head))
        peaks = (waiting * (saved + head) - head + queued * left).max(axis=0)
        return np.asarray(peaks.reshape(-1, 2, peaks.shape[-1]).max(axis=1) / of.replicas)


def _screen_pipeline(
    costs: _Pipeline, pipeline: PipelineCandidate
) -> Iterator[tuple[Array, Array, Array, Floats, Floats]]:
    """Predict time and memory of all layouts with one pipeline. Yield for each ZeRO setting arrays with one entry per
    layout: candidate index, ZeRO stage, ranks of a sharding group, seconds of a step, bytes at the memory peak. costs:
    predicted times and memory of the pipeline's ranks."""
    grid = costs.grid
    fits = grid.micro >= MIN_MICRO_BATCHES.get(pipeline.schedule, 0) * pipeline.ranks
    if pipeline.schedule in BIDIRECTIONAL_SCHEDULES:
        fits = fits & (grid.micro % 2 == 0)
    if not fits.any():
        return
    at_once = followed_at_once(pipeline.schedule, pipeline.ranks)
    activations = costs.activations(pipeline, at_once) + costs.passing
    makespans: dict[DataParallelism | None, Floats] = {}
    engine = grid.layer_times.problem.engine
    settings = [(zero, inside) for zero in engine.zero for inside in ((False, True) if zero else (False,))]
    for zero, inside in settings:
        sharding = grid.sharding[inside]
        chosen = fits & sharding.fits if zero else fits
        if not chosen.any():
            continue
        data = DataParallelism(engine.communicated_zero_stage(zero, pipeline.ranks), sharding.groups)
        if (key := data.per_micro_batch) not in makespans:
            makespans[key], _ = costs.of.makespan(pipeline.schedule, at_once, key)
        seconds = makespans[key] + costs.of.once_seconds(pipeline.schedule == "interleaved", at_once, data)
        states, layer = costs.states(zero, data)
        size = (states + activations).max(axis=0) + layer
        at = np.flatnonzero(chosen)
        yield grid.index[at], np.full(len(at), zero), sharding.hybrid[at], seconds[at], size[at]
