"""Matching of the communication calls of emulated ranks: the calls of a group's ranks to one collective, and each send
with its receive. Every call is recorded in order."""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from meshwright.emulation.exchange import RankCall, Tensors, compute_results, copy_results, unseen_by_modes
from meshwright.emulation.scheduler import EmulationFailed, Scheduler
from meshwright.flight_recorder.verdict import choose_has, name_ranks

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INTERNAL = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("comm", "emulation"))
_TORCH = os.path.dirname(torch.__file__) + os.sep

GroupKey = tuple[int, str]  # (generation of the default group on this rank, name of the group)


@dataclass(frozen=True, slots=True)
class Event:
    """Record of one communication call of one rank.

    Attributes:
        order: Position among all ranks' calls, from 1.
        rank: Global rank that made the call.
        number: Position among this rank's calls, from 1.
        operation: Name of the call, such as "all_reduce" or "send to 1".
        group: Global ranks of the process group.
        shape: Dtype and shape, such as "float32[4, 8]".
        bytes: Size of the call's inputs or outputs on this rank, whichever is larger.
        place: Code location of the call, as file and line.
    """

    order: int
    rank: int
    number: int
    operation: str
    group: tuple[int, ...]
    shape: str
    bytes: int
    place: str


class CollectiveCall:
    """One collective of a process group: collects the calls of the group's ranks, and is complete when all ranks have
    made the call. operation: name of the collective, such as "all_reduce". ranks: global ranks of the group.

    Attributes:
        calls: {index in the group: that rank's call}.
        results: Result tensors, [index in the group][output]; None until complete.
    """

    def __init__(self, operation: str, ranks: tuple[int, ...]) -> None:
        """Start without calls; arguments: see the class."""
        self.operation, self.ranks = operation, ranks
        self.calls: dict[int, RankCall] = {}
        self.results: list[list[torch.Tensor]] | None = None

    def describe_missing(self) -> str:
        """Return text that names the ranks which have not made the call, such as "rank 2 has not called it"."""
        missing = [rank for at, rank in enumerate(self.ranks) if at not in self.calls]
        return f"{name_ranks(missing)} {choose_has(missing)} not called it"


@dataclass(slots=True, eq=False)
class PostedMessage:
    """A send or receive that a rank has posted: one of the two ends of a message.

    call: the rank's call, with the tensor to send or to fill. sender: index of the sending rank in the group; -1 in a
    receive from any rank, until a send matches the receive. result: copy of the sent tensor; None until both ends are
    posted."""

    call: RankCall
    sender: int
    result: torch.Tensor | None = None


class EmulatedWork(dist.Work):
    """Handle of an asynchronous communication call, the emulation's `torch.distributed.Work`. Results are written to
    the output tensors only when the program waits for the handle (or finds it completed), so that a forgotten `wait`
    gives wrong values in every run.

    Attributes:
        matcher: Matcher of the calls of all ranks.
        ready: Function that returns True once the call is complete.
        describe: Function that returns text on the call, for the deadlock report.
        finish: Function that writes the results to the output tensors and returns the output tensors.
        message: The posted receive if the call is a receive; else None.
    """

    def __init__(
        self, matcher: CallMatcher, ready: Callable[[], bool], describe: Callable[[], str], finish: Any
    ) -> None:
        """Create the handle of a call that is not complete; arguments: see the class."""
        super().__init__()
        self._matcher, self._ready, self._describe, self._finish = matcher, ready, describe, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until the call is complete, then write its results to the output tensors; return True.
        timeout: ignored."""
        self._matcher.scheduler.wait(self._ready, self._describe)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return True if the call is complete, after writing its results to the output tensors. If the call is not
        complete, first let another rank run and check again, so that a program that polls makes progress."""
        if not self._ready():
            self._matcher.scheduler.poll(self._ready, self._describe)
        if self._ready():
            self._deliver()
            return True
        return False

    def is_success(self) -> bool:
        """Return True if the call is complete."""
        return self._ready()

    def synchronize(self) -> None:
        """Wait until the call is complete, exactly as `wait` does: emulated ranks have no streams."""
        self.wait()

    def get_future(self) -> Any:
        """Wait for the call; return a completed future of its output tensors. (C++ code that waits for a future, such
        as DistributedDataParallel's, would let no other rank run.)"""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future

    def _source_rank(self) -> int:
        """Return the index in the group of the rank that sent the received message."""
        assert self.message is not None
        return self.message.sender

    def _deliver(self) -> None:
        """Write the results to the output tensors; do nothing if that has been done."""
        if self._finish is not None:
            self._outputs, self._finish = self._finish(), None

    message: PostedMessage | None = None
    _outputs: Tensors = ()


class CallMatcher:
    """Matcher of the communication calls of emulated ranks: joins the calls that a group's ranks make to one
    collective, and each send with its receive. scheduler: scheduler of the ranks.

    Attributes:
        events: All calls in order.
        on_call: Function called before each communication call with (rank, number of the call on that rank, the
            caller's frame); None: nothing is called.
        on_event: Function called with each recorded call (an `Event`); None: nothing is called.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Start without calls; arguments: see the class."""
        self.scheduler = scheduler
        self.events: list[Event] = []
        self.on_call: Callable[[int, int, FrameType | None], None] | None = None
        self.on_event: Callable[[Event], None] | None = None
        self._collectives: dict[tuple[GroupKey, int], CollectiveCall] = {}
        self._unmatched: dict[tuple[bool, GroupKey, int, int], deque[PostedMessage]] = defaultdict(deque)
        self.store: dict[str, bytes] = {}

    def join(self, group: Any, operation: str, call: RankCall, op: str = "SUM", root: int = 0) -> EmulatedWork:
        """Add the running rank's call to a collective over `group` (an `EmulatedGroup`); the last rank's call computes
        the results. Returns the call's handle.

        operation: name of the collective, such as "all_reduce". call: the running rank's input and output tensors. op:
        name of the reduction, such as "SUM". root: index of the root rank in the group. Raises EmulationFailed if
        another rank of the group makes a call with another operation, reduction, root or shape.
        """
        group.calls += 1
        self._record(group, operation, call)
        key = (group.key, group.calls)
        collective = self._collectives.setdefault(key, CollectiveCall(operation, group.ranks))
        self._check_match(collective, operation, group, call)
        at = group.rank()
        collective.calls[at] = call
        if len(collective.calls) == len(group.ranks):
            del self._collectives[key]
            calls = [collective.calls[each] for each in range(len(group.ranks))]
            collective.results = compute_results(operation, calls, op, root)
            for each in calls:
                each.inputs = ()  # free

        def describe() -> str:
            """Return text on the call and on the ranks that have not made it, for the deadlock report."""
            where = f"{operation} over {name_ranks(group.ranks)} (its call {call.number}, {call.place})"
            return f"{where}: {collective.describe_missing()}"

        def finish() -> Tensors:
            """Copy the collective's results to the output tensors of this rank's call; return these tensors."""
            assert collective.results is not None
            copy_results(call.outputs, collective.results[at])
            return call.outputs

        return EmulatedWork(self, lambda: collective.results is not None, describe, finish)

    def send(self, group: Any, call: RankCall, peer: int, tag: int) -> EmulatedWork:
        """Post a send to the rank at index `peer` of `group` (an `EmulatedGroup`); return its handle, complete once the
        message is received.

        call: contains the tensor to send. tag: must equal the receiver's.
        """
        there = group.ranks[peer]
        self._record(group, f"send to {there}", call)
        message = PostedMessage(call, group.rank())
        self._post(message, True, (group.key, peer, tag))
        where = f"send to rank {there} (its call {call.number}, {call.place})"
        return EmulatedWork(self, lambda: message.result is not None, lambda: where, lambda: call.inputs)

    def receive(self, group: Any, call: RankCall, peer: int, tag: int) -> EmulatedWork:
        """Post a receive from the rank at index `peer` of `group` (an `EmulatedGroup`; -1: any rank); return its
        handle.

        call: contains the tensor to fill. tag: must equal the sender's.
        """
        whom = "any rank" if peer < 0 else f"rank {group.ranks[peer]}"
        self._record(group, f"recv from {whom.removeprefix('rank ')}", call)
        message = PostedMessage(call, peer)
        self._post(message, False, (group.key, group.rank(), tag))
        where = f"recv from {whom} (its call {call.number}, {call.place})"

        def finish() -> Tensors:
            """Copy the received message to the tensor to fill; return the call's output tensors."""
            assert message.result is not None
            copy_results(call.outputs, [message.result])
            return call.outputs

        work = EmulatedWork(self, lambda: message.result is not None, lambda: where, finish)
        work.message = message
        return work

    def _post(self, message: PostedMessage, sends: bool, key: tuple[GroupKey, int, int]) -> None:
        """Match a send or receive with its counterpart if the counterpart has been posted; otherwise store the send or
        receive until then.

        message: the send or receive. sends: True for a send. key: (group, index of the receiving rank, tag).
        """
        others = self._unmatched[not sends, *key]
        other = next(
            (each for each in others if each.sender == message.sender or -1 in (each.sender, message.sender)), None
        )
        if other is None:
            self._unmatched[sends, *key].append(message)
        else:
            others.remove(other)
            self._match(*((message, other) if sends else (other, message)))

    def _match(self, sent: PostedMessage, received: PostedMessage) -> None:
        """Copy the tensor of the send `sent` for the matching receive `received`; both calls are then complete. Raises
        EmulationFailed if dtype or number of elements differ."""
        source, target = sent.call.inputs[0], received.call.outputs[0]
        if source.numel() != target.numel() or source.dtype != target.dtype:
            raise EmulationFailed(
                f"a message does not match: sent {describe_tensor(source)} ({sent.call.place}), received into "
                f"{describe_tensor(target)} ({received.call.place})"
            )
        received.sender = sent.sender
        with unseen_by_modes():
            sent.result = received.result = source.detach().clone()

    def _record(self, group: Any, operation: str, call: RankCall) -> None:
        """Call `on_call`, which may open the debugger; then count the running rank's communication call and append it
        to `events`.

        group: an `EmulatedGroup`. operation: name of the call, such as "all_reduce". call: the rank's tensors; its
        fields `number` and `place` are set here.
        """
        scheduler = self.scheduler
        scheduler.check_stopped()
        rank = scheduler.current()
        frame = find_caller()
        if self.on_call is not None:
            self.on_call(rank.index, rank.calls + 1, frame)
            scheduler.check_stopped()
        rank.calls += 1
        call.number = rank.calls
        call.place = describe_place(frame)
        shown = call.shown
        size = max(sum(each.nbytes for each in call.inputs), sum(each.nbytes for each in call.outputs))
        shape = "" if shown is None else describe_tensor(shown)
        event = Event(len(self.events) + 1, rank.index, rank.calls, operation, group.ranks, shape, size, call.place)
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)

    def _check_match(self, collective: CollectiveCall, operation: str, group: Any, call: RankCall) -> None:
        """Raise EmulationFailed if this rank's call differs from the call that other ranks of the group have made to
        the same collective. Operation and `call.form` (text of reduction, shape and root) must be equal on all ranks.

        collective: the calls of the other ranks. operation: name of this rank's collective. group: an `EmulatedGroup`.
        call: this rank's call."""
        for at, other in collective.calls.items():
            if (collective.operation, other.form) != (operation, call.form):
                raise EmulationFailed(
                    f"different calls in the group of {name_ranks(group.ranks)}: "
                    f"rank {group.ranks[at]} {collective.operation} {other.form} ({other.place}), "
                    f"rank {group.ranks[group.rank()]} {operation} {call.form} ({call.place})"
                )


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor as text, such as "float32[4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def find_caller() -> FrameType | None:
    """Return the stack frame of the user's line that makes the communication call: the innermost frame outside torch
    and Meshwright's packages `comm` and `emulation`. None if there is no such frame.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_INTERNAL, "<")):
        frame = frame.f_back
    return frame


def describe_place(frame: FrameType | None) -> str:
    """Return the code location of a stack frame as text, such as "train.py:12"; "?" for None."""
    if frame is None:
        return "?"
    file = frame.f_code.co_filename
    return f"{file.removeprefix(_PACKAGE) if file.startswith(_PACKAGE) else os.path.basename(file)}:{frame.f_lineno}"
