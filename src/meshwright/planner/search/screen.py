"""Closed-form time and memory of every layout of a search space, on arrays; simulator and ledger then decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout import LEAST_MICRO_BATCHES, Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.planner.cost.bubbles import closed_makespan, in_flight, places_of
from meshwright.planner.cost.communication import group_of, held, neighbours
from meshwright.planner.cost.data_time import (
    gradient_waits,
    level_in_time,
    passes_beside,
    update_bytes,
    updated,
    zero_calls,
)
from meshwright.planner.cost.measured_rates import Chosen
from meshwright.planner.cost.micro_batch import ITEMSIZE, MicroBatch, layer_kinds, zero_waits
from meshwright.planner.cost.rates import Collectives, Cost, Group, Rates
from meshwright.planner.cost.reference_step import in_place
from meshwright.planner.memory.micro_memory import KeptOfWays, bytes_each, state_sizes
from meshwright.planner.search.space import Pipe, Problem, Way, pipes, ways
from meshwright.program.durations import Floats
from meshwright.spec.stages import Stage, stages_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class Priced:
    """Closed-form predictions as columns, one entry per layout: indices into `ways` and `pipes`, ZeRO stage, ranks of a
    ZeRO sharding group (0: all), seconds of a step, peak bytes. work: micro-batch predictor of each of `ways`."""

    ways: list[Way]
    work: list[MicroBatch]
    pipes: list[Pipe]
    way: Array
    pipe: Array
    zero: Array
    hybrid: Array
    seconds: Floats
    bytes: Floats


def screen(problem: Problem) -> Priced:
    """Return the closed-form seconds and bytes of every layout of the search space of a planning problem."""
    work = _Ways(problem)
    blocks: list[tuple[Array, ...]] = []
    every = list(pipes(problem))
    numbers = {pipe: number for number, pipe in enumerate(every)}
    for ranks in dict.fromkeys(pipe.ranks for pipe in every):
        here = _Ranks(work, ranks)
        stages: dict[tuple[Any, ...], _Stages] = {}
        for pipe in (pipe for pipe in every if pipe.ranks == ranks):
            key = pipe.chunks, tuple(map(tuple, places_of(pipe.schedule, ranks, pipe.chunks)))
            if key not in stages:
                stages[key] = _Stages(here, pipe)
            blocks += [(*found, np.full(len(found[0]), numbers[pipe])) for found in _priced(here, stages[key], pipe)]
    if not blocks:
        blocks = [tuple(np.zeros(0) for _ in range(6))]
    way, zero, hybrid, seconds, size, pipe_column = (np.concatenate(column) for column in zip(*blocks, strict=True))
    seconds = seconds * problem.cluster.time_factor
    return Priced(work.ways, work.work, every, way, pipe_column, zero, hybrid, seconds, size)


class _Ways:
    """Predictions for all candidates (stage layout, rows of a micro-batch): seconds [candidates, phases], bytes."""

    def __init__(self, problem: Problem) -> None:
        self.problem, config, engine = problem, problem.config, problem.engine
        self.ways = ways(problem)
        self.collectives = Collectives(problem.cluster)
        self.itemsize = ITEMSIZE[problem.precision]
        self.gradient_bytes = engine.gradient_bytes if self.itemsize == 2 else 4
        self.rates = Rates.of(problem.cluster, problem.precision, engine.fusion)
        self.kinds = list(layer_kinds(config, Stage(0, range(config.layers), first=True, last=True)))
        longer = in_place(problem.cluster, problem.precision, problem.engine)
        self.work = [
            MicroBatch(
                config, way.layout, self.collectives, self.rates, way.rows, problem.sequence, engine, self.itemsize,
                problem.documents, longer, problem.pairs,
            )
            for way in self.ways
        ]  # fmt: skip
        self.layer = np.array([[each.layer(kind).sum(axis=1) for kind in self.kinds] for each in self.work])
        ends: dict[tuple[Any, ...], tuple[Floats, Floats]] = {}  # neither experts nor what is computed again matter
        for way, each in zip(self.ways, self.work, strict=True):
            if (key := _ends(way)) not in ends:
                last = np.array([each.last(kept).sum(axis=1) for kept in (False, True)])
                ends[key] = each.first().sum(axis=1), last
        self.first, self.last = (np.array([ends[_ends(way)][which] for way in self.ways]) for which in (0, 1))
        self.memory = KeptOfWays(problem, self.ways, self.kinds)

        def column(of: Any) -> Array:
            return np.array([of(way.layout) for way in self.ways])

        self.rows = np.array([way.rows for way in self.ways])
        self.tp, self.cp = column(lambda one: one.tp), column(lambda one: one.cp)
        self.experts = column(lambda one: one.ep * one.etp)
        # Into how many parts ranks of tp cut what goes to the next stage.
        self.cuts = column(lambda one: one.tp if one.tensor_sequence_parallel or engine.scatters else 1)
        meshes: dict[tuple[int, ...], int] = {}
        self.mesh = column(lambda one: meshes.setdefault((one.tp, one.cp, one.ep, one.etp), len(meshes)))
        _, firsts = np.unique(self.mesh, return_index=True)
        self.meshes = [self.ways[at].layout for at in firsts]
        self.held = [held(config, layout) for layout in self.meshes]


def _ends(way: Way) -> tuple[Any, ...]:
    """Return what the seconds of embedding and head depend on: (tp, sequence parallelism, cp, rows)."""
    return way.layout.tp, way.layout.tensor_sequence_parallel, way.layout.cp, way.rows


class _Ranks:
    """Candidates possible with `ranks` pipeline ranks: indices `at`, data-parallel sizes, numbers of micro-batches."""

    def __init__(self, of: _Ways, ranks: int) -> None:
        self.of, self.ranks = of, ranks
        inner = of.problem.cluster.devices // ranks
        dp, rest = np.divmod(inner, of.tp * of.cp)
        fits = (rest == 0) & (dp > 0)
        dp = np.maximum(dp, 1)
        micro, rest = np.divmod(of.problem.batch, dp * of.rows)
        fits &= (rest == 0) & (micro > 0) & ((of.tp * of.cp * dp) % of.experts == 0)
        self.at = np.flatnonzero(fits)
        self.dp, self.micro, self.data = dp[self.at], micro[self.at], (dp * of.cp)[self.at]
        self.groups = {inside: _Groups(self, inside) for inside in (False, True)}
        message = of.rows[self.at] * of.problem.sequence / of.cp[self.at] * of.problem.config.hidden * of.itemsize
        self.message = message / of.cuts[self.at]

    def levels(self) -> Iterator[tuple[int, bool]]:
        """Yield the candidate settings of ZeRO: (ZeRO stage, True if it shards only inside nodes)."""
        for zero in self.of.problem.engine.zero:
            yield zero, False
            if zero and self.of.problem.cluster.nodes > 1:
                yield zero, True


class _Groups:
    """Process groups of each candidate, and costs of collectives, as arrays. inside: ZeRO shards only inside nodes."""

    def __init__(self, here: _Ranks, inside: bool) -> None:
        of = here.of
        self.cluster, self.collectives, self.experts = of.problem.cluster, of.collectives, of.problem.config.experts
        tp, experts = of.tp[here.at], of.experts[here.at]
        shards = np.maximum(1, np.minimum(here.data, self.cluster.devices_per_node // tp))
        sharing = shards * tp
        whole = (experts == 1) | (sharing % experts == 0) | (experts % sharing == 0)
        self.fits = (shards > 1) & (shards < here.data) & (here.data % shards == 0) & whole
        self.hybrid = np.where(self.fits, shards, 0) if inside else np.zeros(len(here.at), dtype=np.int64)
        if not inside:
            self.fits = here.data > 1
        self.layouts, numbers = [], dict[tuple[int, ...], int]()
        which = []
        for key in zip(of.mesh[here.at].tolist(), here.dp.tolist(), self.hybrid.tolist(), strict=True):
            if key not in numbers:
                numbers[key] = len(numbers)
                zero = {"zero": 1, "hybrid": key[2]} if key[2] else {}
                self.layouts.append(of.meshes[key[0]].with_(dp=key[1], **zero))
            which.append(numbers[key])
        self.which = np.array(which, dtype=np.int64)
        self.stages = neighbours(Layout(dp=of.problem.cluster.devices), self.cluster)  # a layout has all of them
        self._costs: dict[tuple[str, str], Cost | Chosen] = {}
        self._groups: dict[str, list[Group]] = {}
        self._shares: dict[bool, Floats] = {}

    def groups(self, axis: str) -> list[Group]:
        """Return the distinct process groups of an axis such as "data"."""
        if axis not in self._groups:
            self._groups[axis] = [group_of(layout, axis, self.cluster) for layout in self.layouts]
        return self._groups[axis]

    def ranks(self, axis: str) -> Floats:
        """Return the number of ranks in a process group of an axis such as "data": [candidates]."""
        return np.array([group.ranks for group in self.groups(axis)], dtype=np.float64)[self.which]

    def seconds(self, operation: Any, axis: str, size: Floats) -> Floats:
        """Return the seconds of a collective over an axis such as "data", on `size` bytes: [..., candidates]."""
        return self._cost(operation, axis).at(size)

    def sends(self, size: Floats) -> Floats:
        """Return the seconds of messages of `size` bytes to the next pipeline stage: [..., candidates]."""
        return self._cost("send", "pp").at(size)

    def _cost(self, operation: Any, axis: str) -> Cost | Chosen:
        """Return the cost function of a collective over an axis for all candidates; cached."""
        if (operation, axis) not in self._costs:
            groups = [self.stages] * len(self.layouts) if axis == "pp" else self.groups(axis)
            costs = [self.collectives.costs(operation, group)[0] for group in groups]
            if all(isinstance(each, Cost) for each in costs):
                parts = (np.array([getattr(each, name) for each in costs]) for name in ("start", "byte", "root"))
                self._costs[operation, axis] = Cost(*(part[self.which] for part in parts))
            else:
                self._costs[operation, axis] = Chosen(costs, self.which)
        return self._costs[operation, axis]

    @cached_property
    def shards(self) -> tuple[Floats, Floats]:
        """Number of ranks over which ZeRO shards (dense, expert-parallel) parameters: [candidates] each."""
        return self.ranks("shard"), self.ranks("expert_shard")

    def share(self, zero: int) -> Floats:
        """Return seconds by which computation slows per second of overlapped gradient communication: [candidates]."""
        sharded = zero > 0
        if sharded not in self._shares:
            most = np.array([self.collectives.tax(group) for group in self.groups("shard" if sharded else "data")])
            if self.experts:
                axis = "expert_shard" if sharded else "expert_data"
                spread = zip(self.groups(axis), self.layouts, strict=True)
                apart = [self.collectives.tax(group) * layout.expert_parallel for group, layout in spread]
                most = np.maximum(most, apart)
            self._shares[sharded] = most[self.which]
        return self._shares[sharded]


class _Like(NamedTuple):
    """Groups of pipeline ranks with equal stages: stages [groups, kinds of stages], counts (sizes), members (ranks)."""

    stages: Floats  # [ranks, stages]
    counts: Floats  # [ranks]
    members: list[list[int]]


class _Stages:
    """Distinct stages of a pipeline (`pipe`): seconds [candidates, stages, phases], parameters and saved bytes."""

    def __init__(self, here: _Ranks, pipe: Pipe) -> None:
        of, config, at = here.of, here.of.problem.config, here.at
        self.here = here
        self.memory = memory = of.memory
        self.replicas = 2 if pipe.schedule in BIDIRECTIONAL_SCHEDULES else 1
        self.count, self.pipe_ranks = pipe.ranks * pipe.chunks, pipe.ranks
        rows: dict[tuple[Any, ...], int] = {}
        self.examples, which = list[Stage](), []
        for stage in stages_of(config, self.count, of.problem.sequence):
            key = (*sorted(layer_kinds(config, stage).items(), key=repr), stage.first, stage.last)
            if key not in rows:
                rows[key] = len(rows)
                self.examples.append(stage)
            which.append(rows[key])
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places_of(pipe.schedule, pipe.ranks, pipe.chunks)):
            alike.setdefault(tuple(np.bincount([which[n] for n in place], minlength=len(rows)).tolist()), []).append(
                rank
            )
        self.ranks = _Like(
            np.array(list(alike), dtype=np.float64), np.array([len(each) for each in alike.values()], dtype=np.float64),
            list(alike.values()),
        )  # fmt: skip
        self.of_kind = np.array([[layer_kinds(config, each)[kind] for kind in of.kinds] for each in self.examples])
        self.layers = self.of_kind.sum(axis=1)
        self.first = np.array([each.first for each in self.examples])
        self.last = np.array([each.last for each in self.examples])
        sizes = np.array([[one.of_stage(config, stage) for stage in self.examples] for one in of.held])
        self.dense, self.spread = (sizes[of.mesh[at], :, part] for part in (0, 1))
        ends = np.outer(memory.first[at], self.first) + np.outer(memory.last[at], self.last)
        # [ways, ranks] of a micro-batch that waits for its backward, and of one whose weight gradients are left.
        self.kept = (np.einsum("wk,sk->ws", memory.layer[at], self.of_kind) + ends) @ self.ranks.stages.T
        self.queued = np.einsum("wk,sk->ws", memory.queued_layer[at], self.of_kind) @ self.ranks.stages.T
        self._times: dict[tuple[bool, int, bool], Floats] = {}
        self._once: dict[tuple[bool, int, bool, bool], tuple[Floats, Floats]] = {}
        self._states: dict[tuple[int, bool], tuple[Floats, Floats]] = {}

    def of_ranks(self, pipe: Pipe, at_once: bool, zero: int, inside: bool) -> tuple[Floats, Floats]:
        """Return, of distinct ranks, (seconds of a micro-batch [phases, candidates, ranks], seconds once a step).
        at_once: backwards directly follow forwards; zero: ZeRO stage; inside: it shards only inside nodes."""
        key = at_once, zero, inside, pipe.schedule == "interleaved"
        if key not in self._once:
            of, groups, engine = self.here.of, self.here.groups[inside], self.here.of.problem.engine
            phases = np.einsum("wsp,rs->pwr", self.times(at_once, zero, inside), self.ranks.stages)
            passes = passes_beside(pipe.schedule, pipe.ranks, self.here.micro)
            first_forward, last_backward = (passes * each.max(axis=1) for each in (phases[0], phases[1:].sum(axis=0)))
            dense, spread = self.parameters
            waits = gradient_waits(
                zero, groups.seconds, dense.T, spread.T, *groups.shards, (self.ranks.stages @ self.layers)[:, None],
                first_forward, last_backward, groups.share(zero), engine, of.itemsize, of.gradient_bytes,
            )  # fmt: skip
            moved = update_bytes(of.problem.optimizer, engine, of.itemsize) / of.rates.memory
            update = updated(zero, dense.T, spread.T, *groups.shards).max(axis=0) * moved
            self._once[key] = phases, waits.max(axis=0) + update
        return self._once[key]

    @cached_property
    def parameters(self) -> tuple[Floats, Floats]:
        """(Dense, expert-parallel) parameters of each distinct rank: [candidates, ranks] each."""
        return self.dense @ self.ranks.stages.T, self.spread @ self.ranks.stages.T

    def states(self, zero: int, inside: bool) -> tuple[Floats, Floats]:
        """Return (persistent bytes [candidates, ranks], bytes of a layer that ZeRO-2, 3 gather, reduce
        [candidates])."""
        if (zero, inside) not in self._states:
            of = self.here.of
            shards, spread_shards = (each[:, None] for each in self.here.groups[inside].shards)
            dense, spread = self.parameters
            if of.problem.config.tied_head and self.count > 1:  # a rank with both ends has their matrix once
                both = (self.ranks.stages @ self.first) * (self.ranks.stages @ self.last)
                matrix = of.problem.config.vocabulary * of.problem.config.hidden / of.tp[self.here.at]
                dense = dense - np.outer(matrix, both / self.replicas**2)
            stay = state_sizes(of.problem, zero, dense, shards) + state_sizes(of.problem, zero, spread, spread_shards)
            layer = np.zeros(len(stay))
            if (
                zero == 3 and level_in_time(zero, self.pipe_ranks, of.problem.engine) < 3
            ):  # gathered once, until all is over
                stay = stay + (dense + spread) * (of.itemsize + bytes_each(of.problem).gradients)
            elif zero >= 2:
                largest = ((self.dense + self.spread) / self.layers).max(axis=1)
                layer = largest * (3 * of.gradient_bytes + (2 * of.itemsize if zero == 3 else 0))
            self._states[zero, inside] = stay, layer
        return self._states[zero, inside]

    def times(self, at_once: bool, zero: int, inside: bool) -> Floats:
        """Return the seconds of each stage [candidates, stages, phases], exposed ZeRO-2 and 3 communication included.
        at_once: backwards directly follow forwards; zero: ZeRO stage; inside: it shards only inside nodes."""
        key = (at_once, zero, inside) if zero >= 2 else (at_once, 0, False)
        if key not in self._times:
            self._times[key] = self._waiting(at_once, zero, inside) if zero >= 2 else self._plain(at_once)
        return self._times[key]

    def head_kept(self, number: int, at_once: bool) -> Floats | float:
        """Return the bytes of head gradient that ranks of group `number` save per micro-batch: [candidates], or 0."""
        if at_once or not self.ranks.stages[number] @ self.last:
            return 0.0
        return np.where(self._keeps(at_once), self.memory.head[self.here.at], 0.0)

    def _keeps(self, at_once: bool) -> Array:
        """Return if the forward computes the head's gradient: [candidates]. at_once: backwards directly follow it."""
        last = next(stage for stage in self.examples if stage.last)
        return np.array([self.here.of.work[way].keeps(last, at_once) for way in self.here.at])

    def _plain(self, at_once: bool) -> Floats:
        """Return `times` without ZeRO-2 and 3 communication: [candidates, stages, phases]."""
        of, at = self.here.of, self.here.at
        found = np.einsum("wkp,sk->wsp", of.layer[at], self.of_kind)
        found += of.first[at][:, None, :] * self.first[None, :, None]
        head = np.where(self._keeps(at_once)[:, None], of.last[at, 1], of.last[at, 0])
        found += head[:, None, :] * self.last[None, :, None]
        return np.asarray(found, dtype=np.float64)

    def _waiting(self, at_once: bool, zero: int, inside: bool) -> Floats:
        """Return `times` with ZeRO-2 and 3 communication: [candidates, stages, phases]."""
        of, groups = self.here.of, self.here.groups[inside]
        times = self.times(at_once, 0, False).copy()
        gather, scatter = zero_calls(
            zero, groups.seconds, (self.dense / self.layers).T, (self.spread / self.layers).T, of.itemsize,
            of.gradient_bytes,
        )  # fmt: skip
        gather = np.broadcast_to(gather, scatter.shape)
        there, back = times[..., 0], times[..., 1] + times[..., 2]
        waits = zero_waits(gather.T, scatter.T, self.layers, there, back, groups.share(zero)[:, None])
        times[..., 0] += waits[0]
        times[..., 1] += waits[1]
        return times


def _priced(here: _Ranks, stages: _Stages, pipe: Pipe) -> Iterator[tuple[Array, ...]]:
    """Yield columns for each ZeRO stage: candidate indices, stage, ranks of a sharding group, seconds, bytes."""
    fits = here.micro >= LEAST_MICRO_BATCHES.get(pipe.schedule, 0) * pipe.ranks
    if pipe.schedule in BIDIRECTIONAL_SCHEDULES:
        fits = fits & (here.micro % 2 == 0)
    if not fits.any():
        return
    at_once = pipe.schedule not in ("gpipe", "looped-bfs") or pipe.ranks == 1
    kept = np.zeros(stages.kept.shape)
    for number, members in enumerate(stages.ranks.members):
        ends = members[0], members[-1]  # of ranks that are alike one or the other has the most
        waiting, queued = in_flight(pipe.schedule, pipe.ranks, pipe.chunks, here.micro, ends)  # [moments, ranks, ways]
        head = stages.head_kept(number, at_once)
        held_then = waiting * (stages.kept[:, number] + head) - head + queued * stages.queued[:, number]
        kept[:, number] = held_then.max(axis=(0, 1))
    kept /= stages.replicas
    for zero, inside in here.levels():
        chosen = fits & here.groups[inside].fits if zero else fits
        if not chosen.any():
            continue
        seconds = _seconds(here, stages, pipe, at_once, zero, inside)
        size = _bytes(here, stages, kept, zero, inside)
        number = int(chosen.sum())
        yield (
            here.at[chosen], np.full(number, zero), here.groups[inside].hybrid[chosen], seconds[chosen], size[chosen],
        )  # fmt: skip


def _seconds(here: _Ranks, stages: _Stages, pipe: Pipe, at_once: bool, zero: int, inside: bool) -> Floats:
    """Return the seconds of a step: [candidates]. at_once: backwards follow forwards; inside: ZeRO shards in nodes."""
    in_time = level_in_time(zero, pipe.ranks, here.of.problem.engine)
    phases, once = stages.of_ranks(pipe, at_once, in_time, inside)
    if pipe.ranks == 1:
        makespan = here.micro * phases.sum(axis=0)[:, 0]
    else:
        makespan, _ = closed_makespan(
            pipe.schedule, pipe.chunks, here.micro, phases / stages.replicas, stages.ranks.counts, stages.count,
            here.groups[inside].sends(here.message),
        )  # fmt: skip
    return np.asarray(makespan + once, dtype=np.float64)


def _bytes(here: _Ranks, stages: _Stages, kept: Floats, zero: int, inside: bool) -> Floats:
    """Return the peak bytes: [candidates]. kept: saved activations [candidates, ranks]; inside: ZeRO within nodes."""
    stay, layer = stages.states(zero, inside)
    return np.asarray((stay + kept).max(axis=1) + stages.memory.passing[here.at] + layer, dtype=np.float64)
