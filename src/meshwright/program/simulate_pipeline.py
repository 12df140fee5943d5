"""When every step of a pipeline program starts and ends, how much memory it holds, and how long ranks stand idle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from meshwright.errors import UserError
from meshwright.program import holdings
from meshwright.program.dataflow import Dataflow
from meshwright.program.durations import Durations, Floats
from meshwright.program.order import Integers
from meshwright.program.pipeline import Component, Kind, PipelineProgram
from meshwright.program.progress import Waits, run, waits

__all__ = ["Durations", "PipelineTiming", "simulate_pipeline"]


@dataclass(frozen=True, eq=False)
class PipelineTiming:
    """What a simulation found; times in the unit of the durations."""

    program: PipelineProgram
    start: Floats  # by step; of a transfer: when its end is posted
    end: Floats  # by step; of a send: when the message has arrived
    order: Integers  # the groups so that each comes after all that it waits for
    flow: Dataflow

    @cached_property
    def _computing(self) -> Integers:
        return np.flatnonzero(self.program.steps.kind <= Kind.UPDATE)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end of a computing step over all ranks."""
        c = self._computing
        return float(self.end[c].max() - self.start[c].min()) if len(c) else 0.0

    @cached_property
    def _groups(self) -> tuple[Integers, Floats, Floats]:
        """Rank, start and end of each computing group, rank by rank."""
        c = self._computing
        _, at = np.unique(self.program.steps.group_index[c], return_index=True)
        chosen = c[at]
        return self.program.steps.rank[chosen], self.start[chosen], self.end[chosen]

    @cached_property
    def busy(self) -> Floats:
        """Time that each rank computes."""
        rank, start, end = self._groups
        return np.bincount(rank, end - start, self.program.ranks).astype(np.float64)

    @cached_property
    def idle(self) -> Floats:
        """Time that each rank waits between its own first and last step."""
        rank, start, end = self._groups
        first, last = np.full(self.program.ranks, np.inf), np.full(self.program.ranks, -np.inf)
        np.minimum.at(first, rank, start)
        np.maximum.at(last, rank, end)
        return np.where(last > first, last - first - self.busy, 0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the whole time in which the ranks do not compute, on average."""
        return 1 - float(self.busy.mean()) / self.makespan if self.makespan else 0.0

    @property
    def bubble_to_ideal(self) -> float:
        """Time beyond the mean work of a rank, as a multiple of that work."""
        busy = float(self.busy.mean())
        return self.makespan / busy - 1 if busy else 0.0

    @cached_property
    def peak_activations(self) -> Floats:
        """Most activations that each rank holds at once, in units of its whole share of one micro-batch."""
        return holdings.peak_activations(self.flow)

    def activations(self, rank: int) -> tuple[Floats, Floats]:
        """Memory over time: (times, activations held from each of them on), in the order of the rank's steps.

        An activation counts from its forward's start to its weight gradient's end, as 1/chunks of the rank's share of
        one micro-batch. What a step frees is gone when the next one starts.
        """
        s = self.program.steps
        born, freed = (steps[s.rank[steps] == rank] for steps in holdings.activation_changes(self.flow))
        order = np.argsort(np.concatenate([2 * s.group[born], 2 * s.group[freed] + 1]), kind="stable")
        times = np.concatenate([self.start[born], self.end[freed]])[order]
        change = np.concatenate([np.ones(len(born)), -np.ones(len(freed))])[order]
        return times, np.cumsum(change) / self.program.chunks

    @cached_property
    def weight_copies(self) -> Floats:
        """Most versions of its weights that each rank holds at once, in units of one copy of its share of the model;
        `holdings.weight_copies` says what counts."""
        return holdings.weight_copies(self.program)

    @cached_property
    def transfers(self) -> Integers:
        """Messages that each rank sends to other ranks."""
        needs, rank = self.flow.needs, self.program.steps.rank
        maker = needs.maker[needs.between_stages]
        crossing = rank[maker] != rank[needs.reader[needs.between_stages]]
        return np.bincount(rank[maker[crossing]], minlength=self.program.ranks)

    @cached_property
    def steady_bubble_fraction(self) -> float:
        """Share of time in which ranks do not compute while the pipeline is full: the mean over ranks, each measured
        from the end of its backwards' first third to the end of their second third. Filling and draining are outside
        when there are at least about 3 times as many micro-batches as ranks."""
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
    """Run a program on a clock.

    A rank takes its groups in order, one at a time, each as soon as what it reads is there. Transfers cost the ranks
    no time: a message leaves when it is made or, where sends are written out, when its send is posted, and the receiver
    waits only when it uses what arrives. Assumes that stages and micro-batches are in range (`check_pipeline` proves
    that and more). Raises ProgramError for a program that cannot go on, with what it waits for; UserError for lists of
    durations of a wrong length and for durations that add up to infinity.
    """
    (flow, wait), s = prepared(program), program.steps
    transfer = durations.table("transfer", program)
    delay = transfer[s.replica[wait.maker], wait.boundary]
    group_start, group_end, order = run(program, wait, group_durations(program, durations), delay)
    if group_end and not np.isfinite(max(group_end)):
        raise UserError("durations: they add up to more than a number can hold; take another unit of time")
    start, end = np.array(group_start, np.float64)[s.group_index], np.array(group_end, np.float64)[s.group_index]
    if program.has_transfers:
        end[wait.leaves] = start[wait.leaves] + delay
        end[wait.arrives] = np.maximum(start[wait.arrives], end[wait.leaves])
    return PipelineTiming(program, start, end, np.array(order, np.int64), flow)


@lru_cache(maxsize=32)
def prepared(program: PipelineProgram) -> tuple[Dataflow, Waits]:
    """What a program's simulations have in common."""
    flow = Dataflow(program)
    return flow, waits(flow)


def group_durations(program: PipelineProgram, durations: Durations) -> Floats:
    """How long each group occupies its rank; transfers: no time."""
    s = program.steps
    table = {
        name: durations.table(name, program) for name in ("forward", "input_gradient", "weight_gradient", "update")
    }
    zero = np.zeros((program.replicas, program.stages))
    backward = table["input_gradient"] + table["weight_gradient"]
    by_kind = [table["forward"], backward, table["input_gradient"], table["weight_gradient"], table["update"]]
    of_step = np.stack([*by_kind, zero, zero, zero, zero])[s.kind, s.replica, s.stage]
    groups = len(s.group_rank)
    if s.component.any():
        of_step = of_step * durations.shares()[s.kind, s.component]
        beside = np.isin(s.component, (Component.DISPATCH, Component.COMBINE))
        computes = np.bincount(s.group_index, np.where(beside, 0.0, of_step), groups)
        result = np.maximum(computes, np.bincount(s.group_index, np.where(beside, of_step, 0.0), groups))
    else:
        result = np.bincount(s.group_index, of_step, groups)
    if durations.overlapped is not None:
        overlapped = durations.table("overlapped", program)[s.replica, s.stage]
        whole = (s.kind <= Kind.BACKWARD) & (s.component == Component.WHOLE)
        forwards = np.bincount(s.group_index, whole & (s.kind == Kind.FORWARD), groups)
        backwards = np.bincount(s.group_index, whole & (s.kind == Kind.BACKWARD), groups)
        pair = (forwards == 1) & (backwards == 1)
        result = np.where(pair, np.bincount(s.group_index, np.where(whole, overlapped, 0.0), groups) / 2, result)
    return np.asarray(result, np.float64)
