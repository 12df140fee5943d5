"""Simulation of pipeline schedules: start and end of every step, memory of each rank, and idle time (bubble)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from meshwright.errors import UserError
from meshwright.program import pipeline_memory
from meshwright.program.dataflow import Dataflow
from meshwright.program.durations import Durations, Floats
from meshwright.program.order import Integers
from meshwright.program.pipeline import Component, Kind, PipelineProgram
from meshwright.program.progress import RemoteReads, find_remote_reads, run_groups

__all__ = ["Durations", "PipelineTiming", "simulate_pipeline"]


@dataclass(frozen=True, eq=False)
class PipelineTiming:
    """Result of the simulation of a pipeline schedule; times are in the unit of the step durations.

    Attributes:
        program: The schedule.
        start, end: [steps]. A send or receive starts when it is posted, and ends when the message has arrived.
        order: [groups], indices of the groups (steps run together) in dependency order.
        flow: Data flow of the program.
    """

    program: PipelineProgram
    start: Floats  # [steps]; of a send or receive: when it is posted
    end: Floats  # [steps]; of a send or receive: when the message has arrived
    order: Integers  # [groups], in dependency order
    flow: Dataflow

    @cached_property
    def _computing(self) -> Integers:
        """Indices of the compute steps and updates (optimizer steps), which are all steps except sends and receives."""
        return np.flatnonzero(self.program.steps.kind <= Kind.UPDATE)

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end of a compute or update step over all ranks, in the unit of the step
        durations."""
        c = self._computing
        return float(self.end[c].max() - self.start[c].min()) if len(c) else 0.0

    @cached_property
    def _groups(self) -> tuple[Integers, Floats, Floats]:
        """Rank, start time and end time of each group (steps run together) of compute or update steps, sorted by rank:
        three arrays [groups]."""
        c = self._computing
        _, at = np.unique(self.program.steps.group_index[c], return_index=True)
        chosen = c[at]
        return self.program.steps.rank[chosen], self.start[chosen], self.end[chosen]

    @cached_property
    def busy(self) -> Floats:
        """Total time of the compute steps and updates (optimizer steps) of each rank, in the unit of the step
        durations, indexed by rank."""
        rank, start, end = self._groups
        return np.bincount(rank, end - start, self.program.ranks).astype(np.float64)

    @cached_property
    def idle(self) -> Floats:
        """Idle time of each rank between the start of its first and the end of its last compute step, in the unit of
        the step durations, indexed by rank."""
        rank, start, end = self._groups
        first, last = np.full(self.program.ranks, np.inf), np.full(self.program.ranks, -np.inf)
        np.minimum.at(first, rank, start)
        np.maximum.at(last, rank, end)
        return np.where(last > first, last - first - self.busy, 0.0)

    @property
    def bubble_fraction(self) -> float:
        """Mean over ranks of the fraction of the makespan in which a rank does not compute: 1 - mean busy time /
        makespan."""
        return 1 - float(self.busy.mean()) / self.makespan if self.makespan else 0.0

    @property
    def bubble_to_ideal(self) -> float:
        """Bubble time relative to the ideal (bubble-free) time: makespan / mean busy time of the ranks - 1."""
        busy = float(self.busy.mean())
        return self.makespan / busy - 1 if busy else 0.0

    @cached_property
    def peak_activations(self) -> Floats:
        """Peak of saved activations of each rank, indexed by rank. Activations are counted in micro-batches: 1 is one
        micro-batch saved on all stages that the rank has in one replica (copy of the model)."""
        return pipeline_memory.compute_peak_activations(self.flow)

    def compute_activations(self, rank: int) -> tuple[Floats, Floats]:
        """Return the saved activations of rank `rank` over time, as (times [events], amounts [events]); amounts[i] is
        saved from times[i] to times[i + 1]. The amounts are counted in micro-batches: 1 is one micro-batch saved on all
        stages that the rank has in one replica (copy of the model).

        An activation is saved from the start of its forward to the end of its weight gradient (or full backward).
        Events are these starts and ends, in execution order. Memory freed at the end of a step is free before the next
        step starts.
        """
        s = self.program.steps
        born, freed = (steps[s.rank[steps] == rank] for steps in pipeline_memory.find_activation_events(self.flow))
        order = np.argsort(np.concatenate([2 * s.group[born], 2 * s.group[freed] + 1]), kind="stable")
        times = np.concatenate([self.start[born], self.end[freed]])[order]
        change = np.concatenate([np.ones(len(born)), -np.ones(len(freed))])[order]
        return times, np.cumsum(change) / self.program.chunks

    @cached_property
    def weight_copies(self) -> Floats:
        """Peak number of weight copies that each rank holds, indexed by rank. One copy is one version of the weights of
        all stages that the rank has in one replica (copy of the model). A replaced version of the weights is kept until
        the last backward that uses it."""
        return pipeline_memory.count_weight_copies(self.program)

    @cached_property
    def messages_sent(self) -> Integers:
        """Number of messages (activations and gradients) that each rank sends to other ranks, indexed by rank."""
        needs, rank = self.flow.reads, self.program.steps.rank
        maker = needs.maker[needs.between_stages]
        crossing = rank[maker] != rank[needs.reader[needs.between_stages]]
        return np.bincount(rank[maker[crossing]], minlength=self.program.ranks)

    @cached_property
    def steady_bubble_fraction(self) -> float:
        """Bubble fraction while the pipeline is full: the fraction of time in which a rank idles during the middle
        third of its backwards, averaged over ranks. With at least about 3 times as many micro-batches as ranks, the
        middle third contains no warm-up or cool-down."""
        s, c = self.program.steps, self._computing
        shares = []
        for rank in range(self.program.ranks):
            mine = c[s.rank[c] == rank]
            backwards = mine[np.isin(s.kind[mine], (Kind.BACKWARD, Kind.INPUT_GRADIENT))]
            if len(backwards) < 3:
                return self.bubble_fraction
            third = len(backwards) // 3
            begin, end = self.end[backwards[third - 1]], self.end[backwards[2 * third - 1]]
            group_rank, starts, ends = self._groups
            on_rank = group_rank == rank
            inside = np.clip(ends[on_rank], begin, end) - np.clip(starts[on_rank], begin, end)
            shares.append(1 - float(inside.sum()) / (end - begin) if end > begin else 0.0)
        return float(np.mean(shares))


def simulate_pipeline(program: PipelineProgram, durations: Durations) -> PipelineTiming:
    """Simulate the pipeline schedule `program` with the given step durations; return start and end of every step.

    A rank runs its groups (steps run together) in order, one at a time, each as soon as its inputs have arrived.
    Transfers take no time of the ranks: a message leaves when it is produced or, with explicit transfers, when its send
    is posted, and the receiver waits only when it uses the message. Stages and micro-batches must be in range
    (`check_pipeline` verifies that and more). Raises ProgramError for a deadlock; UserError for durations of a wrong
    length or with an infinite sum.
    """
    (flow, wait), s = analyze_program(program), program.steps
    transfer = durations.tabulate("transfer", program)
    delay = transfer[s.replica[wait.maker], wait.boundary]
    group_start, group_end, order = run_groups(program, wait, compute_group_durations(program, durations), delay)
    if group_end and not np.isfinite(max(group_end)):
        raise UserError("durations: their sum overflows; use a larger unit of time")
    start, end = np.array(group_start, np.float64)[s.group_index], np.array(group_end, np.float64)[s.group_index]
    if program.has_transfers:
        end[wait.leaves] = start[wait.leaves] + delay
        end[wait.arrives] = np.maximum(start[wait.arrives], end[wait.leaves])
    return PipelineTiming(program, start, end, np.array(order, np.int64), flow)


@lru_cache(maxsize=32)
def analyze_program(program: PipelineProgram) -> tuple[Dataflow, RemoteReads]:
    """Return (data flow of the pipeline schedule `program`, values that ranks read from other ranks); cached for
    repeated simulations."""
    flow = Dataflow(program)
    return flow, find_remote_reads(flow)


def compute_group_durations(program: PipelineProgram, durations: Durations) -> Floats:
    """Return the time that each group (steps run together) of the schedule `program` occupies its rank: [groups], in
    the unit of `durations`. Groups of transfers take 0.
    """
    s = program.steps
    table = {
        name: durations.tabulate(name, program) for name in ("forward", "input_gradient", "weight_gradient", "update")
    }
    zero = np.zeros((program.replicas, program.stages))
    backward = table["input_gradient"] + table["weight_gradient"]
    by_kind = [table["forward"], backward, table["input_gradient"], table["weight_gradient"], table["update"]]
    of_step = np.stack([*by_kind, zero, zero, zero, zero])[s.kind, s.replica, s.stage]
    groups = len(s.group_rank)
    if s.component.any():
        of_step = of_step * durations.compute_component_shares()[s.kind, s.component]
        is_all_to_all = np.isin(s.component, (Component.DISPATCH, Component.COMBINE))
        computes = np.bincount(s.group_index, np.where(is_all_to_all, 0.0, of_step), groups)
        result = np.maximum(computes, np.bincount(s.group_index, np.where(is_all_to_all, of_step, 0.0), groups))
    else:
        result = np.bincount(s.group_index, of_step, groups)
    if durations.overlapped is not None:
        overlapped = durations.tabulate("overlapped", program)[s.replica, s.stage]
        whole = (s.kind <= Kind.BACKWARD) & (s.component == Component.WHOLE)
        forwards = np.bincount(s.group_index, whole & (s.kind == Kind.FORWARD), groups)
        backwards = np.bincount(s.group_index, whole & (s.kind == Kind.BACKWARD), groups)
        pair = (forwards == 1) & (backwards == 1)
        result = np.where(pair, np.bincount(s.group_index, np.where(whole, overlapped, 0.0), groups) / 2, result)
    return np.asarray(result, np.float64)
