"""Verification of pipeline schedules: every micro-batch is trained exactly once, in a valid order, without deadlock.

Checks that stages are placed on existing ranks; every micro-batch runs forward and backward through every stage of one
replica, on the stage's rank; values are produced before they are read; no ranks wait for each other in a cycle;
explicit transfers send and receive each value once, in the same order at both ends, and end even with synchronous
sends; updates apply every gradient once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.program import pipeline_memory
from meshwright.program.dataflow import GRADIENT, OUTPUT, Dataflow
from meshwright.program.durations import Floats
from meshwright.program.matching import match_steps, order_steps
from meshwright.program.order import Integers, Mask, ProgramError
from meshwright.program.pipeline import (
    ARRIVING,
    COMPUTING,
    LETTERS,
    SENDING,
    Component,
    Kind,
    PipelineProgram,
    find_placement_error,
)
from meshwright.program.progress import find_remote_reads, run_groups

_WHOLE_STEP = 1 << Component.WHOLE
_ALL_COMPONENTS = sum(1 << part for part in Component if part)
_WITH_WEIGHTS = 1 << Component.ATTENTION | 1 << Component.MLP


@dataclass(frozen=True)
class CheckedPipeline:
    """Verified pipeline schedule, with its matched sends and receives, a valid order of its steps, and its peak
    activations.

    Attributes:
        program: The schedule.
        sends, receives: [transfers], step indices of explicit sends and their receives; empty if the schedule has none.
        order: [groups], indices of the groups (steps that a rank runs together) in dependency order.
        peak_activations: [ranks], peak of saved activations, counted in micro-batches: 1 is one micro-batch saved on
            all stages that the rank has in one replica (copy of the model).
    """

    program: PipelineProgram
    sends: Integers
    receives: Integers
    order: Integers
    peak_activations: Floats


def check_pipeline(program: PipelineProgram) -> CheckedPipeline:
    """Verify that the pipeline schedule `program` runs forward and backward of every micro-batch exactly once and
    cannot deadlock; return it with its matched transfers.

    Raises `ProgramError` (rank, step, reason) at the first violation. The first stage must have input-gradient steps
    like all other stages, although nothing reads the gradient of the input data; an executor may skip them.
    """
    _check_placement(program)
    _check_steps(program)
    _check_groups(program)
    _check_micro_batches(program)
    flow = Dataflow(program)
    sends = receives = np.empty(0, np.int64)
    if program.has_transfers:
        _check_transfers(flow)
    wait = find_remote_reads(flow)
    if program.has_transfers:
        sends, receives, order = _match_steps(program)
    else:
        zero = np.zeros(len(program.steps.group_rank))
        order = np.array(run_groups(program, wait, zero, np.zeros(len(wait.reader)))[2], np.int64)
    if program.asynchronous:
        _check_updates(program)
    return CheckedPipeline(program, sends, receives, order, pipeline_memory.compute_peak_activations(flow))


def _check_placement(program: PipelineProgram) -> None:
    """Raise `ProgramError` unless the schedule has at least one rank, micro-batch and stage, each stage is on an
    existing rank, all replicas have equally many stages, and all ranks hold equally many stages of each replica."""
    ranks, stages = program.ranks, program.stages if program.placement else 0
    if ranks < 1 or program.micro_batches < 1 or stages < 1:
        counts = f"{ranks} ranks, {program.micro_batches} micro-batches, {stages} stages"
        raise ProgramError(0, 0, "placement", f"{counts}; a program has at least one of each")
    if error := find_placement_error(program.placement, ranks):
        rank, reason = error
        raise ProgramError(rank, 0, "placement", reason)


def _check_steps(program: PipelineProgram) -> None:
    """Raise `ProgramError` for the first invalid step. A step is invalid if its kind, rank, stage, replica (copy of the
    model), micro-batch or component is out of range, if it runs on another rank than that of its stage, or if it sends
    a value beyond the first or last stage (or receives one from there)."""
    p, s = program, program.steps

    program.refuse((s.kind < 0) | (s.kind >= len(Kind)), "there is no step of kind {kind}")
    program.refuse((s.component < 0) | (s.component >= len(Component)), "there is no such component of a layer")
    for column, size, what in (
        (s.rank, p.ranks, "rank"),
        (s.replica, p.replicas, "replica"),
        (s.stage, p.stages, "stage"),
        (s.micro_batch, p.micro_batches, "micro-batch"),
    ):
        number = f"{{{what.replace('-', '_')}}}"
        allowed = f"{what}{'es' * (what == 'micro-batch') or 's'} are 0 to {size - 1}"
        program.refuse((column < 0) | (column >= size), f"there is no {what} {number}; {allowed}")
    home = np.asarray(p.placement)[s.replica, s.stage]
    elsewhere = home != s.rank
    holder = home[np.argmax(elsewhere)] if len(s) else 0
    program.refuse(elsewhere, f"rank {{rank}} does not hold the stage; rank {holder} does")
    ahead = s.has_kind((Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD))
    program.refuse(ahead & (s.stage == p.stages - 1), "there is no stage after the last one")
    back = s.has_kind((Kind.SEND_BACKWARD, Kind.RECEIVE_FORWARD))
    program.refuse(back & (s.stage == 0), "there is no stage before the first one")


def _check_groups(program: PipelineProgram) -> None:
    """Raise `ProgramError` for an invalid group (steps that a rank runs together).

    A group must not mix computation, updates and transfers. A group may have at most one forward, one backward and one
    weight gradient of a whole stage; steps of single layer components (attention, MLP ...) may share a group.
    """
    s = program.steps
    groups = len(s.group_rank)

    def count(chosen: Mask) -> Integers:
        """Return, for each step, how many steps of its group are True in the mask `chosen` [steps]: [steps]."""
        return np.bincount(s.group_index[chosen], minlength=groups)[s.group_index]

    computes, updates = s.has_kind(COMPUTING), s.kind == Kind.UPDATE
    sorts = (count(computes) > 0).astype(int) + (count(updates) > 0) + (count(~computes & ~updates) > 0)
    whole = computes & (s.component == Component.WHOLE)
    forward, weights = s.kind == Kind.FORWARD, s.kind == Kind.WEIGHT_GRADIENT
    backward = computes & ~forward & ~weights
    twice = (count(whole & forward) > 1) | (count(whole & backward) > 1) | (count(whole & weights) > 1)
    program.refuse(sorts > 1, "its group mixes computation, updates and transfers; use separate groups for each")
    program.refuse(twice & computes, "its group computes two forwards, two backwards or two weight gradients together")


def _check_micro_batches(program: PipelineProgram) -> None:
    """Raise `ProgramError` unless each micro-batch runs through all stages of exactly one replica (copy of the model),
    once forward and once backward. A pass through a stage may be one step or one step for each layer component
    (attention, dispatch, MLP, combine). A backward may also be split into input gradient and weight gradient."""
    p, s = program, program.steps
    computing = np.flatnonzero(s.has_kind(COMPUTING))
    entered = np.unique(s.micro_batch[computing])
    if len(entered) < p.micro_batches:
        absent = int(np.argmin(np.append(entered, -1) == np.arange(len(entered) + 1)))
        rank = p.placement[0][0]
        reason = f"missing: micro-batch {absent} of {p.micro_batches} runs through no stage"
        raise ProgramError(rank, int((s.group_rank == rank).sum()), f"0F{absent}", reason)
    shape = (len(COMPUTING), p.replicas, p.stages, p.micro_batches)
    columns = (s.kind[computing], s.replica[computing], s.stage[computing], s.micro_batch[computing])
    number = np.ravel_multi_index(columns, shape)
    _check_unique(program, computing, number * len(Component) + s.component[computing], "computed")
    parts = np.bincount(number, weights=1 << s.component[computing], minlength=int(np.prod(shape)))
    forward, backward, inputs, weights = parts.astype(np.int64).reshape(shape)

    def find_first(kinds: tuple[Kind, ...], where: Mask) -> tuple[int, int, int, int]:
        """Return (replica, stage, micro-batch, step index) of the first True in `where`.

        where: mask [replicas, stages, micro-batches]. The step index is that of the first step of one of `kinds` for
        this replica, stage and micro-batch, -1 if there is none.
        """
        replica, stage, micro_batch = (int(index[0]) for index in np.nonzero(where))
        there = (s.replica == replica) & (s.stage == stage) & (s.micro_batch == micro_batch) & s.has_kind(kinds)
        return replica, stage, micro_batch, int(np.argmax(there)) if there.any() else -1

    def refuse(bad: Mask, kinds: tuple[Kind, ...], reason: str) -> None:
        """Raise `ProgramError` with message `reason` if `bad` has a True entry. The error names the first step of one
        of `kinds` for the replica, stage and micro-batch of the first True entry.

        bad: mask [replicas, stages, micro-batches].
        """
        if bad.any():
            raise program.make_error(find_first(kinds, bad)[3], reason)

    def refuse_missing(bad: Mask, kind: Kind) -> None:
        """Raise `ProgramError` if `bad` has a True entry; the message says, for the first one, that the rank of the
        stage has no step of kind `kind` for the micro-batch.

        bad: mask [replicas, stages, micro-batches].
        """
        if bad.any():
            replica, stage, micro_batch, _ = find_first((kind,), bad)
            rank = p.placement[replica][stage]
            mine = (s.rank == rank) & (s.stage == stage) & (s.replica == replica) & (s.micro_batch == micro_batch)
            # Report it at the first existing step of this micro-batch, else after the rank's last step.
            at = int(s.group[np.argmax(mine)]) if mine.any() else int((s.group_rank == rank).sum())
            what = f"{stage}{chr(39) * replica}{LETTERS[kind]}{micro_batch}"
            raise ProgramError(rank, at, what, f"missing: the rank never computes it, on stage {stage} that it holds")

    both = (backward & inputs) != 0
    gradient = backward | inputs
    cut = "its components must be attention, dispatch, MLP and combine, once each, or it must be whole"
    refuse(both, (Kind.INPUT_GRADIENT,), "computed twice: a full backward computes it too")
    enters = ((forward | gradient | weights) != 0).any(axis=1)  # [replica, micro-batch]
    twice = enters.sum(axis=0) > 1
    if twice.any():
        micro_batch = int(np.argmax(twice))
        replica = int(np.flatnonzero(enters[:, micro_batch])[1])
        step = int(np.argmax((s.micro_batch == micro_batch) & (s.replica == replica)))
        raise program.make_error(step, f"micro-batch {micro_batch} also runs through another replica")
    runs = np.broadcast_to(enters[:, np.newaxis], forward.shape)
    refuse_missing(runs & (forward == 0), Kind.FORWARD)
    refuse((forward > _WHOLE_STEP) & (forward != _ALL_COMPONENTS), (Kind.FORWARD,), cut)
    refuse_missing(runs & (gradient == 0), Kind.BACKWARD)
    refuse((gradient > _WHOLE_STEP) & (gradient != _ALL_COMPONENTS), (Kind.BACKWARD, Kind.INPUT_GRADIENT), cut)

    wanted = np.where(inputs == _WHOLE_STEP, _WITH_WEIGHTS, inputs & _WITH_WEIGHTS)
    refuse_missing((inputs != 0) & (weights == 0) & (wanted != 0), Kind.WEIGHT_GRADIENT)
    refuse((inputs == 0) & (weights != 0), (Kind.WEIGHT_GRADIENT,), "computed twice: the full backward computes it too")
    wrong = (weights != 0) & (weights != _WHOLE_STEP) & (weights != wanted)
    refuse(wrong, (Kind.WEIGHT_GRADIENT,), "its components must be those of the input gradient that have weights")


def _check_unique(program: PipelineProgram, steps: Integers, number: Integers, verb: str) -> None:
    """Raise `ProgramError` if two steps do the same work, such as two sends of one value; the error names the later
    step.

    steps: step indices. number: [steps], identifier of each step's work, equal for steps that do the same work. verb:
    participle for the message, such as `sent`.
    """
    order = np.argsort(number, kind="stable")
    again = np.flatnonzero(number[order][1:] == number[order][:-1])
    if len(again):
        at = again[np.argmin(steps[order][again + 1])]
        former, later = int(steps[order][at]), int(steps[order][at + 1])
        raise program.make_error(later, f"{verb} twice, first in step {program.steps.group[former]}")


def _check_transfers(flow: Dataflow) -> None:
    """Raise `ProgramError` for an invalid send or receive: both ends are on one rank, no step produces its value, or an
    earlier step has already sent (or received) the value.

    flow: the schedule's data flow (step that produces each activation or gradient).
    """
    program, s = flow.program, flow.program.steps
    sends, receives = np.flatnonzero(s.has_kind(SENDING)), np.flatnonzero(s.has_kind(ARRIVING))
    homes = np.asarray(program.placement)
    for steps, kind, verb in ((sends, Kind.SEND_FORWARD, "sent"), (receives, Kind.RECEIVE_FORWARD, "received")):
        what = np.where(s.kind[steps] == kind, OUTPUT, GRADIENT)
        goes_up = (what == OUTPUT) == (verb == "sent")
        other = s.stage[steps] + np.where(goes_up, 1, -1)
        inside = homes[s.replica[steps], other] == s.rank[steps]
        if inside.any():
            at = int(np.argmax(inside))
            reason = f"stage {other[at]} is on the same rank; values are not {verb} within a rank"
            raise program.make_error(int(steps[at]), reason)
        maker = s.stage[steps] if verb == "sent" else other
        unknown = flow.last_step[flow.compute_value_index(what, s.replica[steps], maker, s.micro_batch[steps])] < 0
        if unknown.any():
            step = int(steps[np.argmax(unknown)])
            reason = f"micro-batch {s.micro_batch[step]} does not run through replica {s.replica[step]}"
            raise program.make_error(step, reason)
        _check_unique(program, steps, flow.index_values(what, steps), verb)


def _match_steps(program: PipelineProgram) -> tuple[Integers, Integers, Integers]:
    """Match explicit sends with receives in message order between each pair of ranks, and order all groups (steps that
    a rank runs together). Returns three arrays of indices: (send steps, receive steps, groups). The i-th receive step
    receives the value of the i-th send step. In the order of `groups` all groups can run even if each send waits for
    its receive. Raises `ProgramError` for a send or receive without a counterpart, different values at both ends, and a
    deadlock."""
    s = program.steps
    is_send, is_receive = s.has_kind(SENDING), s.has_kind(ARRIVING)
    ahead = s.has_kind((Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD))
    other = np.where(is_send | is_receive, s.stage + np.where(ahead, 1, -1), s.stage)
    peer = np.asarray(program.placement)[s.replica, other]
    sends, receives = match_steps(program, peer, is_send, is_receive)
    same = (s.kind[receives] == s.kind[sends] + 1) & (s.replica[sends] == s.replica[receives])
    same &= (s.micro_batch[sends] == s.micro_batch[receives]) & (other[sends] == s.stage[receives])
    if not same.all():
        at = int(np.argmin(same))
        reason = f"is matched with {program.locate(int(sends[at]))}: two ranks must receive in the order of the sends"
        raise program.make_error(int(receives[at]), reason)
    order = order_steps(program, sends, receives)
    return sends, receives, np.argsort(order.level, kind="stable")


def _check_updates(program: PipelineProgram) -> None:
    """Raise `ProgramError` unless updates (optimizer steps) are correct: exactly one update applies each weight
    gradient, after the step that computes it; and all stages of a replica (copy of the model) are updated after the
    same micro-batches."""
    s = program.steps
    replicas, stages = program.replicas, program.stages
    final = np.flatnonzero(s.has_kind((Kind.BACKWARD, Kind.WEIGHT_GRADIENT)))
    updates = np.flatnonzero(s.kind == Kind.UPDATE)
    for replica in range(replicas):
        of_replica = updates[s.replica[updates] == replica]
        if len(of_replica) and not (s.replica[final] == replica).any():
            raise program.make_error(int(of_replica[0]), f"no micro-batch runs through replica {replica}")
        expected: list[int] | None = None
        for stage in range(stages):
            rank = program.placement[replica][stage]
            mine = of_replica[s.stage[of_replica] == stage]
            gradients = final[(s.replica[final] == replica) & (s.stage[final] == stage)]
            if not len(gradients):
                continue
            # `latest`: last group that computes a gradient of a micro-batch up to each number.
            order = np.argsort(s.micro_batch[gradients], kind="stable")
            numbers, groups = s.micro_batch[gradients][order], s.group[gradients][order]
            latest = np.maximum.accumulate(groups)
            until = s.micro_batch[mine]
            applied = np.searchsorted(numbers, until, side="right")  # gradients that are in the weights after an update
            nothing = np.flatnonzero(np.diff(applied, prepend=0) <= 0)
            if len(nothing):
                at = int(nothing[0])
                before = "its gradients were applied by an earlier update"
                none = f"no micro-batch up to {until[at]} runs through its stage"
                raise program.make_error(int(mine[at]), before if applied[:at].any() else none)
            early = np.flatnonzero(latest[applied - 1] >= s.group[mine])
            if len(early):
                at = early[0]
                late = int(gradients[order][np.flatnonzero(groups >= s.group[mine[at]])[0]])
                reason = f"applies gradients too early: {program.describe(late)} runs in step {s.group[late]}"
                raise program.make_error(int(mine[at]), reason)
            missed = applied[-1] if len(applied) else 0
            if missed < len(numbers):
                reason = f"no update of rank {rank} applies this gradient"
                raise program.make_error(int(gradients[order][missed]), reason)
            expected = until.tolist() if expected is None else expected
            unlike = [i for i, pair in enumerate(zip(until.tolist(), expected, strict=False)) if pair[0] != pair[1]]
            if unlike:
                reason = f"stage 0 is not updated after micro-batch {until[unlike[0]]}"
                raise program.make_error(int(mine[unlike[0]]), reason)
