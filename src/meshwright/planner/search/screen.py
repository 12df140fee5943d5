"""Closed-form time and memory of every layout of a search space, on arrays; simulator and ledger then decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout import LEAST_MICRO_BATCHES, Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES, RECOMPUTE
from meshwright.planner.cost.bubbles import closed_makespan, in_flight, stages_by_rank
from meshwright.planner.cost.piece_times import LayerTimes
from meshwright.planner.cost.pipeline_times import PipelineTimes, overlapping_passes
from meshwright.planner.cost.process_groups import Array, ProcessGroups
from meshwright.planner.cost.rates import straggler_terms
from meshwright.planner.cost.reference_step import measured_step_factors
from meshwright.planner.memory.activation_bytes import ActivationBytes, state_bytes_per_parameter, state_sizes
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.planner.search.space import PipelineCandidate, candidates, layout_of, pipeline_candidates
from meshwright.program.durations import Floats

CANDIDATE_PROPERTIES: dict[str, Callable[[StageCandidate], Any]] = {
    "tp": lambda one: one.layout.tp, "cp": lambda one: one.layout.cp, "rows": lambda one: one.rows,
    "recompute": lambda one: RECOMPUTE.index(one.layout.recompute),
    "sequence": lambda one: one.layout.tensor_sequence_parallel * 2 + (one.layout.cp_method == "ring"),
    "experts": lambda one: (one.layout.ep, one.layout.etp), "ep": lambda one: one.layout.ep,
}  # fmt: skip
PIPELINE_PROPERTIES: dict[str, Callable[[PipelineCandidate], Any]] = {
    "pp": lambda pipe: pipe.ranks, "schedule": lambda pipe: (pipe.schedule, pipe.chunks),
    "schedule name": lambda pipe: pipe.schedule,
}  # fmt: skip


@dataclass(slots=True)
class ScreenedLayouts:
    """Closed-form predictions as columns, one entry per layout.

    Attributes:
        candidates: Candidates for the work of a stage.
        pieces: Times of each candidate's pieces.
        pipelines: Candidate pipelines.
        candidate, pipe: Index into `candidates` and into `pipelines`.
        zero: ZeRO stage.
        hybrid: Ranks of a ZeRO sharding group; 0: all.
        seconds: Of a step.
        bytes: At the memory peak.
    """

    candidates: list[StageCandidate]
    pieces: LayerTimes
    pipelines: list[PipelineCandidate]
    candidate: Array
    pipe: Array
    zero: Array
    hybrid: Array
    seconds: Floats
    bytes: Floats

    def column(self, name: str) -> Array:
        """Return a property of every layout, one of `CANDIDATE_PROPERTIES` or `PIPELINE_PROPERTIES`, as an array; of
        schedules and of experts as numbers that are equal for equal ones."""
        if name in CANDIDATE_PROPERTIES:
            return self.by_candidate(CANDIDATE_PROPERTIES[name])
        return self.by_pipeline(PIPELINE_PROPERTIES[name])

    def by_candidate(self, get: Callable[[StageCandidate], Any]) -> Array:
        """Return a property of every layout's stage as an array. get: function that returns it."""
        return _as_numbers(map(get, self.candidates))[self.candidate]

    def by_pipeline(self, get: Callable[[PipelineCandidate], Any]) -> Array:
        """Return a property of every layout's pipeline as an array. get: function that returns it."""
        return _as_numbers(map(get, self.pipelines))[self.pipe]

    def layout(self, at: int) -> Layout:
        """Return the layout with index `at`."""
        return layout_of(
            self.pieces.problem, self.candidates[self.candidate[at]], self.pipelines[self.pipe[at]], int(self.zero[at]),
            int(self.hybrid[at]),
        )  # fmt: skip


def _as_numbers(values: Iterable[Any]) -> Array:
    """Return numbers as an array, and other values as numbers that are equal for equal ones."""
    numbers: dict[object, int] = {}
    return np.array(
        [each if isinstance(each, int | float) else numbers.setdefault(each, len(numbers)) for each in values]
    )


def screen(problem: Problem) -> ScreenedLayouts:
    """Return the closed-form seconds and bytes of every layout of the search space of a planning problem."""
    every = candidates(problem)
    factors = measured_step_factors(problem.cluster, problem.precision, problem.engine)
    pieces = LayerTimes(problem, every, factors)
    summed, memory = pieces.summed(), ActivationBytes(problem, every, pieces.kinds)
    blocks: list[tuple[Array, ...]] = []
    found = list(pipeline_candidates(problem))
    numbers = {pipe: number for number, pipe in enumerate(found)}
    for ranks in dict.fromkeys(pipe.ranks for pipe in found):
        grid = _FittingCandidates(summed, ranks)
        pipelines: dict[tuple[Any, ...], _Pipeline] = {}
        for pipe in (pipe for pipe in found if pipe.ranks == ranks):
            places = stages_by_rank(pipe.schedule, ranks, pipe.chunks)
            key = pipe.chunks, tuple(map(tuple, places))
            if key not in pipelines:
                pipelines[key] = _Pipeline(grid, memory, pipe, places)
            for columns in _screen_pipeline(pipelines[key], pipe):
                blocks.append((*columns, np.full(len(columns[0]), numbers[pipe])))
    if not blocks:
        blocks = [tuple(np.zeros(0) for _ in range(6))]
    candidate, zero, hybrid, seconds, size, pipe_column = (
        np.concatenate(column) for column in zip(*blocks, strict=True)
    )
    factor, once = straggler_terms(problem.cluster)
    seconds = (factor * seconds + once) * problem.cluster.time_factor
    return ScreenedLayouts(every, pieces, found, candidate, pipe_column, zero, hybrid, seconds, size)


class _Sharding(NamedTuple):
    """ZeRO's sharding groups of each candidate. fits: the candidate has them; hybrid: ranks of a group, 0 for all
    data-parallel ranks."""

    fits: Array
    hybrid: Array
    groups: ProcessGroups


class _FittingCandidates:
    """Candidates that fill the cluster with `ranks` pipeline ranks: indices, data-parallel sizes, micro-batches."""

    def __init__(self, pieces: LayerTimes, ranks: int) -> None:
        self.pieces, problem = pieces, pieces.problem
        dp, rest = np.divmod(problem.cluster.devices // ranks, pieces.tp * pieces.cp)
        fits = (rest == 0) & (dp > 0)
        dp = np.maximum(dp, 1)
        micro, rest = np.divmod(problem.batch, dp * pieces.rows)
        fits &= (rest == 0) & (micro > 0) & ((pieces.tp * pieces.cp * dp) % pieces.experts == 0)
        self.index = np.flatnonzero(fits)
        self.dp, self.micro, self.data = dp[self.index], micro[self.index], (dp * pieces.cp)[self.index]
        self.sharding = {inside: self._sharding(inside) for inside in (False, True)}
        whole = ProcessGroups(pieces.collectives, [Layout(dp=problem.cluster.devices)] * len(self.index))
        self.transfer = whole.seconds("send", "pp", pieces.messages(self.index))  # any layout has all devices

    def _sharding(self, inside: bool) -> _Sharding:
        """Return ZeRO's sharding groups. inside: only within nodes."""
        pieces, problem, index = self.pieces, self.pieces.problem, self.index
        tp, experts = pieces.tp[index], pieces.experts[index]
        shards = np.maximum(1, np.minimum(self.data, problem.cluster.devices_per_node // tp))
        sharing = shards * tp
        whole = (experts == 1) | (sharing % experts == 0) | (experts % sharing == 0)
        fits = (shards > 1) & (shards < self.data) & (self.data % shards == 0) & whole
        hybrid = np.where(fits, shards, 0) if inside else np.zeros(len(index), dtype=np.int64)
        layouts, numbers, which = [], dict[tuple[int, ...], int](), []
        mesh = pieces.mesh[index]
        for key in zip(mesh.tolist(), self.dp.tolist(), hybrid.tolist(), strict=True):
            if key not in numbers:
                numbers[key] = len(numbers)
                zero = {"zero": 1, "hybrid": key[2]} if key[2] else {}
                layouts.append(pieces.meshes[key[0]].with_(dp=key[1], **zero))
            which.append(numbers[key])
        groups = ProcessGroups(pieces.collectives, layouts, np.array(which, dtype=np.int64))
        return _Sharding(fits if inside else self.data > 1, hybrid, groups)

    def levels(self) -> Iterator[tuple[int, bool]]:
        """Yield the candidate settings of ZeRO: (ZeRO stage, True if it shards only inside nodes)."""
        problem = self.pieces.problem
        for zero in problem.engine.zero:
            yield zero, False
            if zero and problem.cluster.nodes > 1:
                yield zero, True


class _Pipeline:
    """A pipeline under all candidates of a grid: times of its ranks, and their memory."""

    def __init__(
        self, grid: _FittingCandidates, memory: ActivationBytes, pipe: PipelineCandidate, places: list[list[int]]
    ) -> None:
        self.grid, self.memory, problem = grid, memory, grid.pieces.problem
        stages = problem.engine.stages(problem.config, pipe.ranks * pipe.chunks, problem.sequence)
        self.of = of = PipelineTimes(grid.pieces, grid.index, stages, places)
        index = grid.index
        ends = np.outer(memory.first[index], of.first) + np.outer(memory.last[index], of.last)
        # [candidates, ranks] of a micro-batch that waits for its backward, and of one whose weight gradients are left.
        self.saved = (memory.layer[index] @ of.of_kind.T + ends) @ of.of_rank.T
        self.queued = memory.queued_layer[index] @ of.of_kind.T @ of.of_rank.T
        self._seconds: dict[tuple[bool, int, bool, bool], tuple[Floats, Floats]] = {}
        self._states: dict[tuple[int, bool], tuple[Floats, Floats]] = {}

    def seconds(self, pipe: PipelineCandidate, at_once: bool, zero: int, inside: bool) -> tuple[Floats, Floats]:
        """Return, of distinct ranks, (seconds of a micro-batch [phases, candidates, ranks], seconds once a step).
        at_once: backwards directly follow forwards; zero: ZeRO stage; inside: it shards only inside nodes."""
        key = at_once, zero, inside, pipe.schedule == "interleaved"
        if key not in self._seconds:
            of, groups = self.of, self.grid.sharding[inside].groups
            ranks = of.of_ranks(of.times(at_once, zero, groups))
            passes = overlapping_passes(pipe.schedule, pipe.ranks, self.grid.micro)
            once = of.gradients(zero, groups, ranks, passes).max(axis=0) + of.update(zero, groups)
            self._seconds[key] = np.moveaxis(ranks[..., 0], -1, 0), once
        return self._seconds[key]

    def states(self, zero: int, inside: bool) -> tuple[Floats, Floats]:
        """Return (bytes of model states [candidates, ranks], bytes of a layer that ZeRO-2, 3 gather and reduce
        [candidates])."""
        if (zero, inside) not in self._states:
            of, problem = self.of, self.grid.pieces.problem
            shards, expert_shards = (each[:, None] for each in self.grid.sharding[inside].groups.shards)
            dense, expert = of.rank_dense, of.rank_expert
            if problem.config.tied_head and of.count > 1:  # a rank with both ends has their matrix once
                both = (of.of_rank @ of.first) * (of.of_rank @ of.last)
                matrix = problem.config.vocabulary * problem.config.hidden / self.grid.pieces.tp[self.grid.index]
                dense = dense - np.outer(matrix, both / of.replicas**2)
            stay = state_sizes(problem, zero, dense, shards) + state_sizes(problem, zero, expert, expert_shards)
            layer, itemsize = np.zeros(len(stay)), self.grid.pieces.itemsize
            if of.level(zero) < zero:  # held until the pipeline is through
                gathered = itemsize if zero == 3 else 0
                stay = stay + (dense + expert) * (gathered + state_bytes_per_parameter(problem).gradients)
            elif zero >= 2:
                largest = ((of.dense + of.expert) / of.layers).max(axis=1)
                layer = largest * (3 * self.grid.pieces.gradient_bytes + (2 * itemsize if zero == 3 else 0))
            self._states[zero, inside] = stay, layer
        return self._states[zero, inside]

    def activations(self, pipe: PipelineCandidate, at_once: bool) -> Floats:
        """Return the bytes of activations of all micro-batches in flight, at the peak of each distinct rank
        [candidates, ranks]. at_once: backwards directly follow forwards."""
        of, grid = self.of, self.grid
        found = np.zeros(self.saved.shape)
        for number, members in enumerate(of.members):
            ends = members[0], members[-1]  # of equal ranks one or the other has the most
            waiting, queued = in_flight(pipe.schedule, pipe.ranks, pipe.chunks, grid.micro, ends)  # [times, ranks, n]
            head: Floats | float = 0.0  # gradient of the head's weight
            if not at_once and of.of_rank[number] @ of.last:
                head = np.where(of.keeps_gradient(at_once), self.memory.head[grid.index], 0.0)
            peaks = waiting * (self.saved[:, number] + head) - head + queued * self.queued[:, number]
            found[:, number] = peaks.max(axis=(0, 1))
        return found / of.replicas


def _screen_pipeline(of: _Pipeline, pipe: PipelineCandidate) -> Iterator[tuple[Array, ...]]:
    """Yield columns for each ZeRO stage: candidate indices, stage, ranks of a sharding group, seconds, bytes."""
    grid = of.grid
    fits = grid.micro >= LEAST_MICRO_BATCHES.get(pipe.schedule, 0) * pipe.ranks
    if pipe.schedule in BIDIRECTIONAL_SCHEDULES:
        fits = fits & (grid.micro % 2 == 0)
    if not fits.any():
        return
    at_once = pipe.schedule not in ("gpipe", "looped-bfs") or pipe.ranks == 1
    activations = of.activations(pipe, at_once)
    for zero, inside in grid.levels():
        sharding = grid.sharding[inside]
        chosen = fits & sharding.fits if zero else fits
        if not chosen.any():
            continue
        phases, once = of.seconds(pipe, at_once, of.of.level(zero), inside)
        if pipe.ranks == 1:
            makespan = grid.micro * (phases[0] + phases[1] + phases[2])[:, 0]
        else:
            makespan, _ = closed_makespan(
                pipe.schedule, pipe.chunks, grid.micro, phases / of.of.replicas, of.of.counts, of.of.count,
                grid.transfer,
            )  # fmt: skip
        states, layer = of.states(zero, inside)
        size = (states + activations).max(axis=1) + of.memory.passing[grid.index] + layer
        yield (
            grid.index[chosen], np.full(int(chosen.sum()), zero), sharding.hybrid[chosen], (makespan + once)[chosen],
            size[chosen],
        )  # fmt: skip
