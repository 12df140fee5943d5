"""Seconds of a training step's parts on each pipeline rank, for many candidate layouts at once: micro-batches in the
stages, ZeRO's communication, gradient reductions and the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.adapters import frozen_bytes_per_trained
from meshwright.planner.cost.bubbles import BusiestRank, closed_makespan, find_busiest_rank, stages_by_rank
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.communication import ZERO_CALLS, Array, ProcessGroups, find_distinct
from meshwright.planner.cost.layer_times import LayerTimes
from meshwright.planner.cost.operators import Collective
from meshwright.planner.problem import Problem
from meshwright.program.durations import Floats
from meshwright.program.pipeline import PipelineProgram
from meshwright.spec.parameter_entries import AXES_OF
from meshwright.spec.stages import Stage

OPTIMIZER_BYTES = {"adamw": 42.0, "adam": 42.0, "sgd": 22.0, "momentum": 30.0}
"""Bytes read and written for each parameter that a rank updates, with float32 master weights: AdamW reads master
weight, gradient and two moments and writes all but the gradient (28), writes the parameter (2) and clips (the norm
reads the gradient, the scaling reads and writes it: 12); SGD has no moments, or one."""


class DataParallelism(NamedTuple):
    """Communication of data parallelism. zero: ZeRO stage by which it is predicted (`Engine.communicated_zero_stage`);
    groups: process groups of the candidate layouts."""

    zero: int
    groups: ProcessGroups

    @property
    def per_micro_batch(self) -> DataParallelism | None:
        """The communication in every micro-batch: of ZeRO-2 and ZeRO-3, None below."""
        return self if self.zero >= 2 else None


def exposed_zero_seconds(
    gather: Floats | float, scatter: Floats | float, layers: Floats | int, forward: Floats, back: Floats,
    slowdown: Floats | float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return (forward, backward): exposed seconds of ZeRO-2 and ZeRO-3 communication in one micro-batch of a stage, if
    the next layer is prefetched. Exposed are the first all-gather and, for every other layer, the excess of its
    communication over its computation. All-gather and reduce-scatter share the links, so that they take the sum of
    their seconds on separate communicators too (`collectives.communicators`).

    gather, scatter: seconds of a layer's all-gather and reduce-scatter; layers: number of layers in the stage; forward,
    back: seconds of computation in the stage; slowdown: seconds that computation loses for each overlapped second of
    communication."""
    waited = gather + (layers - 1) * np.maximum(0.0, gather - forward / layers)
    both = gather + scatter
    waited_back = scatter + (layers - 1) * np.maximum(0.0, both - back / layers)
    taken = slowdown * (layers * gather - waited), slowdown * np.maximum(0.0, layers * both - waited_back)
    return waited + taken[0], waited_back + taken[1]


def exposed_seconds(calls: Floats, work: Floats, layers: Floats | int, slowdown: Floats | float) -> Floats:
    """Return the exposed seconds of communication that overlaps a forward or backward pass, layer by layer. They are
    one layer's communication, or the excess of all communication over the pass if this is more, plus the slow-down of
    the computation.

    calls: seconds of the communication; work: seconds of the pass; layers: number of layers; slowdown: seconds that
    computation loses for each overlapped second of communication."""
    waited = np.maximum(calls / layers, calls - work * (layers - 1) / layers)
    return waited + slowdown * (calls - np.minimum(calls, waited))


def place_stages(
    problem: Problem, layout: Layout, program: PipelineProgram | None = None
) -> tuple[tuple[Stage, ...], list[list[int]]]:
    """Return (pipeline stages of a layout, numbers of the stages on each pipeline rank). program: the layout's pipeline
    program, which places the stages; None: as the schedule's name says."""
    if program is None:
        count, places = layout.pp * layout.chunks, stages_by_rank(layout.schedule, layout.pp, layout.chunks)
    else:
        count, places = program.stages, program.stages_by_rank
    return problem.engine.stages(problem.config, count, problem.sequence), places


class PipelineTimes:
    """Predictor of the seconds of a training step on each pipeline rank, under candidate layouts with the same pipeline
    stages.

    Stages with equal layers are computed once, as one distinct stage; pipeline ranks with equal stages, as one distinct
    rank. Dimensions: distinct stages [s], distinct ranks [r], phases (forward, input gradients, weight gradients),
    parts [p] (compute and communication, or 1 if summed), candidates [n].

    Attributes:
        layer_times: Times of layers, embedding and head.
        index: Indices of the candidates in `layer_times` [n].
        micro: Number of micro-batches of a step [n].
        transfer: Seconds of one message between stages (activations of a micro-batch) [n].
        count: Number of stages of the pipeline.
        which: For each stage, the index of its distinct stage.
        of_rank: Number of stages on each distinct rank, by distinct stage [r, s].
        members: For each distinct rank, the pipeline ranks equal to it.
        replicas: Copies of the model that the ranks together hold: 2 under bidirectional schedules.
        layers, rank_layers: Number of layers of each distinct stage [s] and rank [r, 1].
        dense, expert: Numbers of dense and expert-parallel parameters of each distinct stage [s, n].
    """

    def __init__(
        self, layer_times: LayerTimes, index: Array, micro: Floats, transfer: Floats, stages: Sequence[Stage],
        places: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """Prepare the predictions. stages: all stages of the pipeline; places: stage indices of each pipeline rank;
        other arguments: attributes of the object."""
        self.layer_times, self.index, self.count, self.ranks = layer_times, index, len(stages), len(places)
        self.micro, self.transfer = micro, transfer
        self.replicas = sum(map(len, places)) // len(stages)
        kinds = [tuple(counts) for counts in layer_times.layer_counts(stages).tolist()]
        distinct, self.which = find_distinct((of, one.first, one.last) for of, one in zip(kinds, stages, strict=True))
        self.examples = [stages[at] for at in np.unique(self.which, return_index=True)[1]]
        held = (np.bincount(self.which[list(place)], minlength=len(distinct)).tolist() for place in places)
        equal, of_place = find_distinct(map(tuple, held))
        self.of_rank = np.array(equal, dtype=np.float64)
        self.members = [np.flatnonzero(of_place == number).tolist() for number in range(len(equal))]
        self.counts = np.array([len(each) for each in self.members], dtype=np.float64)
        self.of_kind = layer_times.layer_counts(self.examples).astype(np.float64)
        self.layers = self.of_kind.sum(axis=1)
        self.rank_layers = (self.of_rank @ self.layers)[:, None]
        self.first, self.last = (np.array([getattr(one, end) for one in self.examples]) for end in ("first", "last"))
        coefficients = np.column_stack([self.of_kind, self.first, self.last, -1.0 * (self.first & self.last)])
        self.dense, self.expert = np.moveaxis(np.tensordot(coefficients, layer_times.parameters[..., index], 1), 1, 0)
        self.rank_dense, self.rank_expert = self.of_rank @ self.dense, self.of_rank @ self.expert

    def keeps_gradient(self, at_once: bool) -> Array:
        """Return for each candidate [n]: True if the forward of the last stage computes and saves the head's gradients.
        at_once: True if the last stage runs each backward directly after its forward."""
        return self.layer_times.keeps_gradient(self.index, int(self.layers[self.last][0]), at_once)

    @cached_method
    def stage_seconds(self, at_once: bool, data: DataParallelism | None) -> Floats:
        """Return the seconds of a micro-batch in each distinct stage: [s, phases, p, n] (dimensions: see the class).

        at_once: True if the last stage runs each backward directly after its forward; data: ZeRO's communication in
        every micro-batch, whose exposed seconds are added to the last part ("data")."""
        layer_times, index = self.layer_times, self.index
        if data is not None:
            found = self.stage_seconds(at_once, None).copy()
            layers = self.layers[:, None]
            gather, scatter = self.zero_seconds(data, (self.dense / layers, self.expert / layers))
            if layer_times.problem.engine.copies_gathered:  # read and written, before forward and backward
                moved = 2 * layer_times.itemsize * (self.dense + self.expert) * (gather > 0)
                found[:, :2, 0] += (moved / layer_times.rates.memory)[:, None]
            forward, input_gradient, weight_gradient = np.moveaxis(add_parts(found), 1, 0)
            back, slowdown = input_gradient + weight_gradient, data.groups.gradient_slowdown(True)
            waits = exposed_zero_seconds(gather, scatter, layers, forward, back, slowdown)
            found[:, :2, -1] += np.stack(waits, axis=1)
            return found
        found = np.asarray(np.tensordot(self.of_kind, layer_times.layer[..., index], 1))
        found[self.first] += layer_times.first[..., index]
        computed_later, kept = layer_times.last[..., index]
        found[self.last] += np.where(self.keeps_gradient(at_once), kept, computed_later)
        return found

    def zero_seconds(
        self, data: DataParallelism, numbers: tuple[Floats, Floats], layers: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Return the seconds of data parallelism's (all-gathers of parameters, reductions of gradients) in one
        micro-batch; with `layers`, of those that are made once a step.

        data: communication of data parallelism; numbers: numbers of (dense, expert-parallel) parameters [..., n];
        layers: number of layers, each of which sends a separate message unless the engine has a bucket size."""
        times, groups, repeats = self.layer_times, data.groups, layers is None
        taken: dict[bool, Floats] = {True: np.zeros((1, 1)), False: np.zeros((1, 1))}
        frozen = frozen_bytes_per_trained(times.problem.config, times.dtype) if repeats else 0.0
        for numel, shards, axes in zip(numbers, groups.shards, (AXES_OF["dense"], AXES_OF["experts"]), strict=True):
            for call in ZERO_CALLS if numel.any() else ():
                if call.repeats != repeats or data.zero not in call.stages:
                    continue
                size = numel * (times.itemsize + frozen if call.of_parameters else times.gradient_bytes)
                if call.of_shard:
                    size = size / shards
                axis, messages = axes[call.group], np.ones(())
                if layers is not None:
                    messages = self._count_messages(call.operation, groups.ranks(axis), size, layers)
                seconds = messages * groups.seconds(call.operation, axis, size / messages)
                taken[call.of_parameters] = taken[call.of_parameters] + seconds
        return taken[True], taken[False]

    def _count_messages(self, operation: Collective, ranks: Floats, size: Floats, layers: Floats) -> Floats:
        """Return the number of messages in which `size` bytes are sent once a step, at least one. operation: such as
        "all-gather"; ranks: number of ranks that take part; layers: number of layers."""
        engine = self.layer_times.problem.engine
        largest = np.maximum(engine.bucket_bytes or 1.0, engine.bucket_rank_bytes * ranks)
        least = np.ceil(size / largest) if engine.bucket_bytes else layers
        turns = ranks if engine.broadcasts and operation == "all-gather" else 1.0
        return np.asarray(np.maximum(turns, least), dtype=np.float64)

    @cached_method
    def rank_seconds(self, at_once: bool, data: DataParallelism | None) -> tuple[Floats, BusiestRank]:
        """Return (seconds of a micro-batch on each distinct rank, summed over its stages [r, phases, p, n]; times of
        the busiest rank). Arguments: see `stage_seconds`."""
        ranks: Floats = np.tensordot(self.of_rank, self.stage_seconds(at_once, data), 1)
        return ranks, find_busiest_rank(add_parts(ranks) / self.replicas, self.counts)

    def makespan(self, schedule: str, at_once: bool, data: DataParallelism | None) -> tuple[Floats, Floats]:
        """Return (makespan, seconds of the makespan due to messages) of a pipeline schedule in closed form, each [n].
        schedule: such as "1f1b"; other arguments: see `stage_seconds`."""
        _, busiest = self.rank_seconds(at_once, data)
        if self.ranks == 1:
            return self.micro * busiest.total, np.zeros(())
        return closed_makespan(schedule, self.micro, busiest, self.count, self.transfer)

    @cached_method
    def once_seconds(self, interleaved: bool, at_once: bool, data: DataParallelism) -> Floats:
        """Return the seconds that occur once a step, on the slowest rank [n]: exposed gradient reductions, exposed
        all-gathers of updated parameters, and the optimizer step. Arguments: see `gradient_seconds`."""
        exposed = self.gradient_seconds(interleaved, at_once, data).max(axis=0)
        return np.asarray(exposed + self.optimizer_seconds(data))

    def gradient_seconds(self, interleaved: bool, at_once: bool, data: DataParallelism) -> Floats:
        """Return the exposed seconds, once a step, of gradient reductions and of all-gathers of updated parameters on
        each distinct rank: [r, n].

        interleaved: True under the schedule "interleaved", in which communication overlaps the forward or backward of
        one micro-batch for each pipeline rank; False if it overlaps those of one; at_once: True if the last stage runs
        each backward directly after its forward."""
        engine, layers = self.layer_times.problem.engine, self.rank_layers
        gathers, sums = self.once_calls(data)
        if not engine.overlaps_data:
            return sums + gathers
        passes = np.minimum(self.ranks, self.micro) if interleaved else np.ones(())
        busy = add_parts(self.rank_seconds(at_once, data.per_micro_batch)[0])
        forward, backward = (passes * each.max(axis=0) for each in (busy[:, 0], busy[:, 1] + busy[:, 2]))
        slowdown = data.groups.gradient_slowdown(data.zero > 0)
        waits = exposed_seconds(sums, backward, layers, slowdown)
        return waits + (exposed_seconds(gathers, forward, layers, slowdown) if engine.overlaps_gathers else gathers)

    @cached_method
    def once_calls(self, data: DataParallelism) -> tuple[Floats, Floats]:
        """Return the seconds, once a step, of (all-gathers of updated parameters, gradient reductions) on each distinct
        rank, each [r, n]; overlapped seconds are included."""
        return self.zero_seconds(data, (self.rank_dense, self.rank_expert), self.rank_layers)

    def optimizer_seconds(self, data: DataParallelism) -> Floats:
        """Return the seconds of the optimizer step on the rank that updates the most parameters: [n]."""
        layer_times = self.layer_times
        shards, expert_shards = data.groups.shards if data.zero else (1, 1)
        updated = (self.rank_dense / shards + self.rank_expert / expert_shards).max(axis=0)
        return np.asarray(updated * OPTIMIZER_BYTES[layer_times.problem.optimizer] / layer_times.rates.memory)


def add_parts(times: Floats) -> Floats:
    """Return `times`, seconds [..., parts, candidates], summed over the parts."""
    return np.asarray(times[..., 0, :] if times.shape[-2] == 1 else times.sum(axis=-2))
