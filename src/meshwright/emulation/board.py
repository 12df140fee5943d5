"""Board on which emulated ranks post their communication calls: it matches the calls of a group's ranks with each other
and sends with receives, and records every call in order."""

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

from meshwright.emulation.exchange import Part, Tensors, compute_results, copy_results, unseen_by_modes
from meshwright.emulation.scheduler import EmulationFailed, Scheduler
from meshwright.flight_recorder.verdict import choose_has, name_ranks

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INTERNAL = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("comm", "emulation"))
_TORCH = os.path.dirname(torch.__file__) + os.sep

GroupKey = tuple[int, str]  # (generation of the default group on this rank, name of the group)


@dataclass(frozen=True, slots=True)
class Event:
    """Record of one communication call of one rank. order: position among all ranks' calls, from 1. number: position
    among this rank's calls, from 1. operation: such as "all_reduce", "send to 1". group: global ranks of the process
    group. shape: dtype and shape, such as "float32[4, 8]". bytes: size of the call's inputs or outputs on this rank,
    whichever is larger. place: file and line of the call."""

    order: int
    rank: int
    number: int
    operation: str
    group: tuple[int, ...]
    shape: str
    bytes: int
    place: str


class Meeting:
    """One collective call of a group, from the first rank that posts it until all ranks of the group have; then it is
    complete. operation: such as "all_reduce". ranks: global ranks of the group. Attributes: `parts`: tensors of each
    rank that has posted the call, by index in the group; `results`: result tensors, [index in the group][output], None
    until complete."""

    def __init__(self, operation: str, ranks: tuple[int, ...]) -> None:
        self.operation, self.ranks = operation, ranks
        self.parts: dict[int, Part] = {}
        self.results: list[list[torch.Tensor]] | None = None

    def describe_missing(self) -> str:
        """Return text on the ranks that have not made the call, such as "rank 2 has not called it"."""
        missing = [rank for at, rank in enumerate(self.ranks) if at not in self.parts]
        return f"{name_ranks(missing)} {choose_has(missing)} not called it"


@dataclass(slots=True, eq=False)
class Letter:
    """Send or receive that a rank has posted: one end of a message between two ranks.

    part: the posted call, with the tensor to send or to fill. sender: index of the sending rank in the group; -1 for a
    receive from any rank, until a send matches it. result: copy of the sent tensor; None until both ends are posted.
    """

    part: Part
    sender: int
    result: torch.Tensor | None = None


class EmulatedWork(dist.Work):
    """Handle of a communication call in flight. The call's results are written to the output tensors only when the
    program waits for the handle (or finds it completed), so that a forgotten `wait` shows in every run. letter: the
    posted receive, if the call is one; None for other calls."""

    def __init__(self, board: Board, ready: Callable[[], bool], describe: Callable[[], str], finish: Any) -> None:
        """Store what to wait for. ready: True once the call is complete. finish: writes the results."""
        super().__init__()
        self._board, self._ready, self._describe, self._finish = board, ready, describe, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until the call is complete, then write its results to the output tensors; return True.
        timeout: ignored."""
        self._board.scheduler.wait(self._ready, self._describe)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return True if the call is complete, after writing its results to the output tensors. If it is not complete,
        first let another rank run and check again, so that a program that polls makes progress."""
        if not self._ready():
            self._board.scheduler.poll(self._ready, self._describe)
        if self._ready():
            self._deliver()
            return True
        return False

    def is_success(self) -> bool:
        """Return True if the call is complete."""
        return self._ready()

    def synchronize(self) -> None:
        """Wait for the call's completion, as `wait`."""
        self.wait()

    def get_future(self) -> Any:
        """Wait for the call; return a completed future of its output tensors. The call is waited for here because C++
        code that waits for a future, such as DistributedDataParallel's, would let no other rank run."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future

    def _source_rank(self) -> int:
        """Return the index in the group of the rank that sent the received message."""
        assert self.letter is not None
        return self.letter.sender

    def _deliver(self) -> None:
        """Write the results to the output tensors; do nothing if that has been done."""
        if self._finish is not None:
            self._outputs, self._finish = self._finish(), None

    letter: Letter | None = None
    _outputs: Tensors = ()


class Board:
    """Board on which emulated ranks post their calls. It matches the calls that a group's ranks make to one collective,
    and each send with its receive.

    scheduler: scheduler of the ranks. Attributes: `events`: all calls in order; `on_call`: None, or a function called
    before each call with (rank, number of the call on that rank, the caller's frame); `on_event`: None, or a function
    called with each recorded call.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.events: list[Event] = []
        self.on_call: Callable[[int, int, FrameType | None], None] | None = None
        self.on_event: Callable[[Event], None] | None = None
        self._meetings: dict[tuple[GroupKey, int], Meeting] = {}
        self._unmatched: dict[tuple[bool, GroupKey, int, int], deque[Letter]] = defaultdict(deque)
        self.store: dict[str, bytes] = {}

    def join(self, group: Any, operation: str, part: Part, op: str = "SUM", root: int = 0) -> EmulatedWork:
        """Post this rank's call of a collective over `group` (an `EmulatedGroup`); return its handle.

        operation: such as "all_reduce". part: this rank's input and output tensors. op: name of the reduction, such as
        "SUM". root: index of the root rank in the group. Raises EmulationFailed if another rank of the group makes
        another call, or one of another shape.
        """
        group.calls += 1
        self._record(group, operation, part)
        key = (group.key, group.calls)
        meeting = self._meetings.setdefault(key, Meeting(operation, group.ranks))
        self._check_match(meeting, operation, group, part)
        at = group.rank()
        meeting.parts[at] = part
        if len(meeting.parts) == len(group.ranks):
            del self._meetings[key]
            parts = [meeting.parts[each] for each in range(len(group.ranks))]
            meeting.results = compute_results(operation, parts, op, root)
            for each in parts:
                each.inputs = ()  # free

        def describe() -> str:
            where = f"{operation} over {name_ranks(group.ranks)} (its call {part.number}, {part.place})"
            return f"{where}: {meeting.describe_missing()}"

        def finish() -> Tensors:
            assert meeting.results is not None
            copy_results(part.outputs, meeting.results[at])
            return part.outputs

        return EmulatedWork(self, lambda: meeting.results is not None, describe, finish)

    def send(self, group: Any, part: Part, peer: int, tag: int) -> EmulatedWork:
        """Post a message to the rank at index `peer` of `group` (an `EmulatedGroup`); return the handle, complete once
        the message is received. part: contains the tensor to send. tag: must equal the receiver's."""
        there = group.ranks[peer]
        self._record(group, f"send to {there}", part)
        letter = Letter(part, group.rank())
        self._post(letter, True, (group.key, peer, tag))
        where = f"send to rank {there} (its call {part.number}, {part.place})"
        return EmulatedWork(self, lambda: letter.result is not None, lambda: where, lambda: part.inputs)

    def receive(self, group: Any, part: Part, peer: int, tag: int) -> EmulatedWork:
        """Post the receipt of a message from the rank at index `peer` of `group` (an `EmulatedGroup`; -1: any rank);
        return the handle. part: contains the tensor to fill. tag: must equal the sender's."""
        whom = "any rank" if peer < 0 else f"rank {group.ranks[peer]}"
        self._record(group, f"recv from {whom.removeprefix('rank ')}", part)
        letter = Letter(part, peer)
        self._post(letter, False, (group.key, group.rank(), tag))
        where = f"recv from {whom} (its call {part.number}, {part.place})"

        def finish() -> Tensors:
            assert letter.result is not None
            copy_results(part.outputs, [letter.result])
            return part.outputs

        work = EmulatedWork(self, lambda: letter.result is not None, lambda: where, finish)
        work.letter = letter
        return work

    def _post(self, letter: Letter, sends: bool, key: tuple[GroupKey, int, int]) -> None:
        """Match a send or receive with its counterpart if that has been posted; otherwise keep it until the counterpart
        is. letter: the send or receive. sends: True for a send. key: (group, index of the receiving rank, tag)."""
        others = self._unmatched[not sends, *key]
        other = next(
            (each for each in others if each.sender == letter.sender or -1 in (each.sender, letter.sender)), None
        )
        if other is None:
            self._unmatched[sends, *key].append(letter)
        else:
            others.remove(other)
            self._match(*((letter, other) if sends else (other, letter)))

    def _match(self, sent: Letter, received: Letter) -> None:
        """Deliver the message `sent` to the rank that posted `received`. Raises EmulationFailed if dtype or number of
        elements differ."""
        source, target = sent.part.inputs[0], received.part.outputs[0]
        if source.numel() != target.numel() or source.dtype != target.dtype:
            raise EmulationFailed(
                f"a message does not match: sent {describe_tensor(source)} ({sent.part.place}), received into "
                f"{describe_tensor(target)} ({received.part.place})"
            )
        received.sender = sent.sender
        with unseen_by_modes():
            sent.result = received.result = source.detach().clone()

    def _record(self, group: Any, operation: str, part: Part) -> None:
        """Count the running rank's call and append it to `events`; before that, call `on_call`, which may open the
        debugger.

        group: an `EmulatedGroup`. operation: such as "all_reduce". part: the rank's tensors; its fields `number` and
        `place` are set here.
        """
        scheduler = self.scheduler
        scheduler.check_stopped()
        rank = scheduler.current()
        frame = find_caller()
        if self.on_call is not None:
            self.on_call(rank.index, rank.calls + 1, frame)
            scheduler.check_stopped()
        rank.calls += 1
        part.number = rank.calls
        part.place = describe_place(frame)
        shown = part.shown
        size = max(sum(each.nbytes for each in part.inputs), sum(each.nbytes for each in part.outputs))
        shape = "" if shown is None else describe_tensor(shown)
        event = Event(len(self.events) + 1, rank.index, rank.calls, operation, group.ranks, shape, size, part.place)
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)

    def _check_match(self, meeting: Meeting, operation: str, group: Any, part: Part) -> None:
        """Raise EmulationFailed if this rank's collective call differs from those that other ranks of the group have
        posted to the same `meeting`, in operation or in `part.form` (reduction, shape, root as text)."""
        for at, other in meeting.parts.items():
            if (meeting.operation, other.form) != (operation, part.form):
                raise EmulationFailed(
                    f"different calls in the group of {name_ranks(group.ranks)}: "
                    f"rank {group.ranks[at]} {meeting.operation} {other.form} ({other.place}), "
                    f"rank {group.ranks[group.rank()]} {operation} {part.form} ({part.place})"
                )


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor as text, such as "float32[4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def find_caller() -> FrameType | None:
    """Return the innermost stack frame outside torch, comm/ and emulation/: that of the program's line that makes the
    communication call. None if there is no such frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_INTERNAL, "<")):
        frame = frame.f_back
    return frame


def describe_place(frame: FrameType | None) -> str:
    """Return the code location of a frame as text, such as "train.py:12"."""
    if frame is None:
        return "?"
    file = frame.f_code.co_filename
    return f"{file.removeprefix(_PACKAGE) if file.startswith(_PACKAGE) else os.path.basename(file)}:{frame.f_lineno}"
