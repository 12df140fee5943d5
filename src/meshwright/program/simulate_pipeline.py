"""When every step of a pipeline program starts and ends, how much memory it holds, and how long ranks stand idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.errors import UserError
from meshwright.program.dataflow import GRADIENT, OUTPUT, Dataflow, Needs
from meshwright.program.order import Integers, ProgramError
from meshwright.program.pipeline import SENDING, Component, Kind, PipelineProgram

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Durations:
    """How long steps last, in any unit of time, on one micro-batch.

    Each is one number for all stages, one a stage, or one a replica and stage [replicas, stages].
    forward, input_gradient, weight_gradient: a full backward lasts the sum of the last two.
    transfer: from a stage to the next one and back; one number, or one a boundary (stages - 1). Between two stages of
        one rank it takes no time.
    update: of one stage's weights. overlapped: a forward and a backward in one group (None: the sum of both); where
        they are of two stages, the mean of the stages' values.
    parts: the share of attention, dispatch, MLP and combine in a forward and in a backward whose layers are cut. In a
        group, attention and MLP run one after the other while dispatch and combine are under way beside them.
    """

    forward: ArrayLike
    input_gradient: ArrayLike
    weight_gradient: ArrayLike
    transfer: ArrayLike = 0.0
    update: ArrayLike = 0.0
    overlapped: ArrayLike | None = None
    parts: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.25)

    @classmethod
    def per_rank(
        cls,
        shape: PipelineProgram | tuple[int, int],
        forward: ArrayLike = 1.0,
        input_gradient: ArrayLike = 1.0,
        weight_gradient: ArrayLike = 1.0,
        transfer: ArrayLike = 0.0,
        update: ArrayLike = 0.0,
        overlapped: ArrayLike | None = None,
    ) -> Durations:
        """Durations of a rank's whole share of the model, of which a chunk takes 1/chunks.

        shape: the program, or (ranks, chunks) of one whose stages follow the ranks in turn. Each duration is one
        number, one a rank, or one a stage, which is taken as it is; where a rank holds one stage of a replica, the
        list goes by stage. transfer: as in `Durations`. Raises UserError for a list of another length.
        """
        if isinstance(shape, tuple):
            ranks, chunks = shape
            placement: Sequence[Sequence[int]] = [[stage % ranks for stage in range(ranks * chunks)]]
        else:
            ranks, chunks, placement = shape.ranks, shape.chunks, shape.placement
        stages = len(placement[0])

        def by_stage(name: str, value: ArrayLike) -> Floats:
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                return np.full(stages, array / chunks)
            if array.shape == (stages,):
                return array
            if array.shape == (ranks,):
                return np.asarray(array[np.asarray(placement)] / chunks, np.float64)
            counts = f"{ranks} (one a rank)" + (f" or {stages} (one a stage)" if stages != ranks else "")
            raise UserError(f"{name}: {array.size} values; right is 1 or {counts}")

        return cls(
            by_stage("forward", forward),
            by_stage("input gradient", input_gradient),
            by_stage("weight gradient", weight_gradient),
            transfer,
            by_stage("update", update),
            None if overlapped is None else by_stage("overlapped", overlapped),
        )

    def table(self, name: str, program: PipelineProgram) -> Floats:
        """One duration by [replica, stage]; of `transfer`, by boundary [replica, stages - 1]."""
        array = np.asarray(getattr(self, name), np.float64)
        columns = program.stages - (name == "transfer")
        if (array.ndim and array.shape[-1] != columns) or array.ndim > 2:
            each = "boundary between stages" if name == "transfer" else "stage"
            raise UserError(f"{name.replace('_', ' ')}: {array.size} values; right is 1 or {columns} (one a {each})")
        if not np.isfinite(array).all() or (array < 0).any():
            raise UserError(f"{name.replace('_', ' ')}: a duration is a finite number that is not negative")
        return np.broadcast_to(array, (program.replicas, columns))


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
    def _peaks(self) -> Floats:
        return np.array([self.activations(rank)[1].max(initial=0.0) for rank in range(self.program.ranks)])

    @property
    def peak_activations(self) -> Floats:
        """Most activations that each rank holds, in units of its whole share of one micro-batch."""
        return self._peaks

    def activations(self, rank: int) -> tuple[Floats, Floats]:
        """Memory over time: (times, activations held from that time on), times ascending.

        An activation counts from its forward's start to its weight gradient's end, as 1/chunks of the rank's share of
        one micro-batch. One that is freed when another begins is freed first.
        """
        program, steps = self.program, self.program.steps
        values = program.replicas * program.stages * program.micro_batches
        first, last = self.flow.first[:values], self.flow.last
        kept = np.flatnonzero(first >= 0)
        kept = kept[steps.rank[first[kept]] == rank]
        # Freed by the weight gradient, or by the backward that holds it.
        freed = np.where(last[2 * values + kept] >= 0, last[2 * values + kept], last[values + kept])
        whole = (last[2 * values + kept] >= 0) | (steps.kind[np.maximum(freed, 0)] == Kind.BACKWARD)
        freed = freed[(freed >= 0) & whole]
        # A rank does one group at a time, so its own order decides, not a comparison of times.
        born_group, freed_group = steps.group_index[first[kept]], steps.group_index[freed]
        group = np.concatenate([2 * born_group, 2 * freed_group + 1])
        time = np.concatenate([self.start[first[kept]], self.end[freed]])
        change = np.concatenate([np.full(len(kept), 1.0), np.full(len(freed), -1.0)]) / program.chunks
        order = np.argsort(group, kind="stable")
        return time[order], np.cumsum(change[order])

    @cached_property
    def weight_copies(self) -> Floats:
        """Most versions of its weights that each rank holds at once, in units of one copy of its share of the model.

        A program without updates holds one version of each replica's stages. An update makes a new version; a forward
        uses the newest one on its rank at that time, its backward the same one. A version that a later one replaced is
        held until the last backward that uses it.
        """
        program, s = self.program, self.program.steps
        held = np.bincount(np.asarray(program.placement).ravel(), minlength=program.ranks) / program.chunks
        if not program.asynchronous:
            return held.astype(np.float64)
        events: list[list[tuple[int, int, int]]] = [[] for _ in range(program.ranks)]
        version: dict[tuple[int, int], int] = {}
        used_by: dict[tuple[int, int, int], int] = {}
        made: dict[tuple[int, int], list[int]] = {}
        last_use: dict[tuple[int, int, int], int] = {}
        columns = (s.kind.tolist(), s.replica.tolist(), s.stage.tolist(), s.micro_batch.tolist(), s.group.tolist())
        for kind, replica, stage, micro_batch, group in zip(*columns, strict=True):
            place = (replica, stage)
            if kind == Kind.FORWARD:
                used_by[*place, micro_batch] = version.get(place, 0)
            elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
                last_use[*place, used_by.get((*place, micro_batch), 0)] = group
            elif kind == Kind.UPDATE:
                version[place] = version.get(place, 0) + 1
                made.setdefault(place, []).append(group)
        for place, updates in made.items():
            for number, replaced in enumerate(updates):
                until = last_use.get((*place, number), -1)
                # In turn within a group's number: a version in no further use goes, a new one comes, a used one goes.
                rank_events = events[program.placement[place[0]][place[1]]]
                rank_events.append((replaced, 0, -1) if until < replaced else (until, 2, -1))
                rank_events.append((replaced, 1, +1))
        most = [max(np.cumsum([0, *(change for *_, change in sorted(rank))])) for rank in events]
        return np.asarray(held + np.array(most) / program.chunks, np.float64)

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
    that and more). Raises ProgramError for a program that cannot go on, with what it waits for.
    """
    flow, s = Dataflow(program), program.steps
    groups = len(s.group_rank)
    duration = _group_durations(program, durations)
    waiting, awaited, delay = _arrivals(program, flow.needs, durations)

    by_waiting = np.argsort(waiting, kind="stable")
    first = np.searchsorted(waiting[by_waiting], np.arange(groups + 1)).tolist()
    awaits, delays = awaited[by_waiting].tolist(), delay[by_waiting].tolist()
    bounds = np.searchsorted(s.group_rank, np.arange(program.ranks + 1)).tolist()
    lasts = duration.tolist()
    start, end = [0.0] * groups, [-1.0] * groups
    position, clock = bounds[:-1], [0.0] * program.ranks
    done: list[int] = []
    blocked: dict[int, list[int]] = {}
    runnable = list(range(program.ranks))
    while runnable:
        rank = runnable.pop()
        group, now, stop = position[rank], clock[rank], bounds[rank + 1]
        while group < stop:
            for need in range(first[group], first[group + 1]):
                made = end[awaits[need]]
                if made < 0:
                    blocked.setdefault(awaits[need], []).append(rank)
                    break
                made += delays[need]
                if made > now:
                    now = made
            else:
                start[group] = now
                now += lasts[group]
                end[group] = now
                done.append(group)
                if group in blocked:
                    runnable.extend(blocked.pop(group))
                group += 1
                continue
            break
        position[rank], clock[rank] = group, now
    if blocked:
        raise _stuck(program, blocked, position)
    step_start, step_end = np.array(start)[s.group_index], np.array(end)[s.group_index]
    if program.has_transfers:
        leaves, arrives, delay = _messages(program, durations)
        step_end[leaves] = step_start[leaves] + delay
        step_end[arrives] = np.maximum(step_start[arrives], step_end[leaves])
    return PipelineTiming(program, step_start, step_end, np.array(done, np.int64), flow)


def _group_durations(program: PipelineProgram, durations: Durations) -> Floats:
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
        of_step = of_step * np.array([1.0, *durations.parts])[s.component]
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


def _arrivals(program: PipelineProgram, needs: Needs, durations: Durations) -> tuple[Integers, Integers, Floats]:
    """What groups wait for on other ranks: (group that waits, group that it waits for, time from there to here).

    What a group needs on its own rank must stand before it there; raises ProgramError where it does not.
    """
    s = program.steps
    missing = np.flatnonzero(needs.maker < 0)
    if len(missing):
        reader = int(needs.reader[missing[0]])
        raise _error(
            program, reader, f"waits for {_name_missing(program, needs, int(missing[0]))}, which no rank makes"
        )
    crossing = s.rank[needs.reader] != s.rank[needs.maker]
    _require_before(program, needs.maker[~crossing], needs.reader[~crossing])
    reader, maker = needs.reader[crossing], needs.maker[crossing]
    what, stage = needs.what[crossing], needs.stage[crossing]
    replica = s.replica[reader]
    boundary = np.where(needs.between_stages[crossing], np.minimum(stage, s.stage[reader]), -1)
    transfer = durations.table("transfer", program)
    delay = np.where(boundary >= 0, transfer[replica, np.maximum(boundary, 0)] if transfer.size else 0.0, 0.0)
    leaves = maker
    if program.has_transfers:
        leaves = find_transfers(program, Kind.SEND_FORWARD, what, replica, stage, s.micro_batch[reader])
        arrives = find_transfers(program, Kind.RECEIVE_FORWARD, what, replica, s.stage[reader], s.micro_batch[reader])
        for steps, verb in ((leaves, "sends"), (arrives, "receives")):
            if (steps < 0).any():
                at = int(np.flatnonzero(steps < 0)[0])
                rank = s.rank[maker[at] if verb == "sends" else reader[at]]
                value = program.describe(int(maker[at]))
                raise _error(program, int(reader[at]), f"waits for {value}, which rank {rank} never {verb}")
        _require_before(program, maker, leaves)
        _require_before(program, arrives, reader)
    return s.group_index[reader], s.group_index[leaves], np.asarray(delay, np.float64)


def _messages(program: PipelineProgram, durations: Durations) -> tuple[Integers, Integers, Floats]:
    """Every written-out message: its send, its receive, and how long it is under way."""
    s = program.steps
    leaves = np.flatnonzero(np.isin(s.kind, SENDING))
    forward = s.kind[leaves] == Kind.SEND_FORWARD
    ahead = np.where(forward, 1, -1)
    what, stage = np.where(forward, OUTPUT, GRADIENT), s.stage[leaves]
    arrives = find_transfers(
        program, Kind.RECEIVE_FORWARD, what, s.replica[leaves], stage + ahead, s.micro_batch[leaves]
    )
    delay = durations.table("transfer", program)[s.replica[leaves], np.minimum(stage, stage + ahead)]
    met = arrives >= 0
    return leaves[met], arrives[met], delay[met]


def find_transfers(
    program: PipelineProgram, kind: Kind, what: Integers, replica: Integers, stage: Integers, micro_batch: Integers
) -> Integers:
    """The sends (kind SEND_FORWARD) or receives (RECEIVE_FORWARD) of outputs and gradients; -1 where there is none.

    stage: of the rank that sends or receives, as in the step.
    """
    s, flow = program.steps, Dataflow(program)
    steps = np.flatnonzero((s.kind == kind) | (s.kind == kind + 2))
    table = np.full(2 * program.replicas * program.stages * program.micro_batches, -1, np.int64)
    made = np.where(s.kind[steps] == kind, OUTPUT, GRADIENT)
    table[flow.key(made, s.replica[steps], s.stage[steps], s.micro_batch[steps])] = steps
    return table[flow.key(what, replica, stage, micro_batch)]


def _require_before(program: PipelineProgram, earlier: Integers, later: Integers) -> None:
    """Raise for the first of `later` whose counterpart does not stand in a group before it on the same rank."""
    s = program.steps
    wrong = np.flatnonzero((s.rank[earlier] != s.rank[later]) | (s.group[earlier] >= s.group[later]))
    if len(wrong):
        at = wrong[np.argmin(later[wrong])]
        a, b = int(earlier[at]), int(later[at])
        if s.rank[a] != s.rank[b]:
            raise _error(program, b, f"waits for {program.describe(a)}, which is on rank {s.rank[a]}")
        where = "in the same group" if s.group[a] == s.group[b] else f"only step {s.group[a]} of this rank"
        raise _error(program, b, f"waits for {program.describe(a)}, which is {where}")


def _name_missing(program: PipelineProgram, needs: Needs, at: int) -> str:
    s, reader = program.steps, int(needs.reader[at])
    tick = "'" * int(s.replica[reader])
    letter = "F" if needs.what[at] == OUTPUT else "B"
    return f"{needs.stage[at]}{tick}{letter}{s.micro_batch[reader]}"


def _stuck(program: PipelineProgram, blocked: dict[int, list[int]], position: list[int]) -> ProgramError:
    """Name the first rank that cannot go on, and what it waits for."""
    s = program.steps
    rank, awaited = min((ranks[0], group) for group, ranks in blocked.items())
    step = int(np.searchsorted(s.group_index, position[rank]))
    other = int(np.searchsorted(s.group_index, awaited))
    return _error(
        program,
        step,
        f"waits for {program.describe(other)} of rank {s.rank[other]}, which cannot be reached either",
    )


def _error(program: PipelineProgram, step: int, reason: str) -> ProgramError:
    s = program.steps
    return ProgramError(int(s.rank[step]), int(s.group[step]), program.describe(step), reason)
