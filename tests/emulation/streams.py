"""Simulator of CUDA streams on emulated ranks, in which a program fails if it uses memory that a kernel in flight still
reads or writes.

A rank computes on one stream, in program order. Each communicator has its own stream, as under NCCL: its kernels
run in posted order, start when the tensors they read are computed, and end late: at a random later call of the rank, or
only when they are waited for. From post to end, what a kernel writes is poisoned (filled with NaN), and what it reads
must not change. The host runs ahead of both: it sees a copy to host memory only after waiting for its event.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial, reduce
from itertools import islice
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from meshwright.comm import backend
from meshwright.emulation import call_matcher
from meshwright.emulation.call_matcher import CallMatcher, EmulatedWork, GroupKey, describe_place, find_caller
from meshwright.emulation.exchange import RankCall, Tensors, compute_results, unseen_by_modes
from meshwright.emulation.process_group import EmulatedGroup
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.emulation.scheduler import EmulationFailed, Scheduler


class StreamFault(EmulationFailed):
    """Raised if a program uses memory that a kernel in flight reads or writes, without waiting for the kernel."""


class _Operand(NamedTuple):
    """Tensor that a kernel in flight reads or writes. address: of the tensor's memory when the kernel was posted.
    before: copy of a tensor that is read; None for a tensor that is written, which is poisoned (filled with NaN)."""

    tensor: torch.Tensor
    address: int
    before: torch.Tensor | None

    def find_misuse(self) -> str | None:
        """Return how the tensor was misused since the kernel was posted: "was freed", "was overwritten" (an output) or
        "was changed" (an input); None if it was not."""
        if self.tensor.data_ptr() != self.address or not self.tensor.untyped_storage().nbytes():
            return "was freed"
        if self.before is None:
            return None if _is_poisoned(self.tensor) else "was overwritten"
        return None if torch.equal(_view_bytes(self.tensor), _view_bytes(self.before)) else "was changed"


class _Kernel:
    """One kernel on a communicator's stream: a collective call, or messages posted as one group. name: text on the call
    and its code location, for error messages."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, False
        self.works: list[EmulatedWork] = []
        self.operands: list[_Operand] = []
        self.issued: list[float] = []
        """Shared with the ranks of a collective: the times at which each of their streams reaches the kernel."""

    def is_ready(self) -> bool:
        """Return True if all ranks have posted their parts."""
        return all(work._ready() for work in self.works)

    def end(self) -> Tensors:
        """Check that the kernel's operands were not misused, write the results and return the output tensors. Raises
        StreamFault for misuse."""
        self.done = True
        with unseen_by_modes():
            for operand in self.operands:
                if (misuse := operand.find_misuse()) is not None:
                    role = "output" if operand.before is None else "input"
                    raise StreamFault(f"an {role} of {self.name} {misuse} before the call was waited for")
        for work in self.works:
            work._deliver()
        return [output for work in self.works for output in work._outputs]


class StreamCallMatcher(CallMatcher):
    """CallMatcher whose communication calls are kernels on the communicators' streams. seed, early: as of
    `StreamRanks`."""

    def __init__(self, scheduler: Scheduler, seed: int, early: float) -> None:
        super().__init__(scheduler)
        self._random, self._early = random.Random(seed), early
        self._queues: dict[tuple[int, GroupKey], deque[_Kernel]] = defaultdict(deque)
        """Kernels in flight by rank and communicator, in posted order."""
        self._group: _Kernel | None = None  # to which messages are added that are posted together
        self._issued: dict[tuple[GroupKey, int], list[float]] = defaultdict(list)
        self.streams = [ComputeStream() for _ in scheduler.ranks]

    @property
    def stream(self) -> ComputeStream:
        """Stream on which the running rank computes."""
        return self.streams[self.scheduler.current().index]

    @contextlib.contextmanager
    def use_stream(self, stream: ComputeStream) -> Iterator[None]:
        """Context manager in which the running rank queues its work on `stream`. Stand-in for `torch.cuda.stream`."""
        rank, computing = self.scheduler.current().index, self.stream
        self.streams[rank] = stream
        try:
            yield
        finally:
            self.streams[rank] = computing

    def join(self, group: Any, operation: str, call: RankCall, op: str = "SUM", root: int = 0) -> EmulatedWork:
        """Post this rank's call in a collective call of `group` as a kernel on the group's stream; return the handle.
        operation: such as "all_reduce". call: this rank's tensors. op: name of the reduction. root: index of the root
        rank in the group. Raises EmulationFailed if another rank of the group makes another call, or one of another
        shape."""
        written = () if operation == "broadcast" and group.rank() == root else call.outputs
        kernel = self._make_kernel(operation)
        self._hold(kernel, call, written)
        kernel.works.append(super().join(group, operation, call, op, root))
        kernel.issued = self._issued[group.key, group.calls]
        return self._enqueue(group, kernel)

    def send(self, group: Any, call: RankCall, peer: int, tag: int) -> EmulatedWork:
        """Post a message to the rank at index `peer` of `group`, as a kernel of its own or, during `post_together`, in
        the common kernel; return the handle. call: contains the tensor to send. tag: must equal the receiver's."""
        return self._post_message(group, call, partial(super().send, group, call, peer, tag))

    def receive(self, group: Any, call: RankCall, peer: int, tag: int) -> EmulatedWork:
        """Post the receipt of a message, as a kernel of its own or, during `post_together`, in the common kernel.
        Arguments and result as of `CallMatcher.receive`."""
        return self._post_message(group, call, partial(super().receive, group, call, peer, tag))

    def post_together(self, messages: Sequence[dist.P2POp]) -> list[EmulatedWork]:
        """Post messages as one kernel; return a list with its handle. Stand-in for
        `torch.distributed.batch_isend_irecv`."""
        self._group = kernel = self._make_kernel("messages")
        group: Any = messages[0].group
        try:
            for each in messages:
                (group.send if each.op is dist.isend else group.recv)([each.tensor], each.group_peer, each.tag)
        finally:
            self._group = None
        return [self._enqueue(group, kernel)]

    def _post_message(self, group: Any, call: RankCall, post: Callable[[], EmulatedWork]) -> EmulatedWork:
        """Post one end of a message, as a kernel of its own or, during `post_together`, in the common kernel; return
        the handle. call: the end's tensor. post: calls `send` or `receive` of the base class."""
        kernel = self._group or self._make_kernel("a message")
        self._hold(kernel, call, call.outputs)
        kernel.works.append(work := post())
        return work if kernel is self._group else self._enqueue(group, kernel)

    def _make_kernel(self, operation: str) -> _Kernel:
        """Return a new simulated kernel of the running rank, labelled `operation` (text for error messages). Before
        that, end a random number of the rank's earlier kernels in which all ranks have posted their parts."""
        rank = self.scheduler.current()
        self.stream.host += self._random.expovariate(1.0)
        for (owner, _), queue in list(self._queues.items()):
            while owner == rank.index and queue and queue[0].is_ready() and self._random.random() < self._early:
                queue.popleft().end()
        return _Kernel(f"{operation} (call {rank.calls + 1} of rank {rank.index}, {describe_place(find_caller())})")

    @unseen_by_modes()
    def _hold(self, kernel: _Kernel, call: RankCall, written: Tensors) -> None:
        """Add a call's tensors to the operands of `kernel`: copy those that it reads, poison those that it writes (fill
        them with NaN). call: this rank's tensors in the call. written: the output tensors."""
        reads, call.inputs = call.inputs, [each.detach().clone() for each in call.inputs]
        places = {_find_place(each) for each in written}
        kept = {_find_place(each) for each in reads} if len(written) > 1 else set()
        # In place, a sum overwrites what it reads; a gather leaves the rank's own part as it is.
        for tensor, before in zip(reads, call.inputs, strict=True):
            if tensor.numel() and (_find_place(tensor) not in places or _find_place(tensor) in kept):
                kernel.operands.append(_Operand(tensor.detach(), tensor.data_ptr(), before))
        for tensor in written:
            if _find_place(tensor) not in kept and tensor.numel():
                tensor.data.fill_(_choose_poison(tensor.dtype))
                kernel.operands.append(_Operand(tensor.detach(), tensor.data_ptr(), None))

    def _enqueue(self, group: Any, kernel: _Kernel) -> EmulatedWork:
        """Append a kernel to the stream of the communicator of `group`; return a handle whose `wait` makes the compute
        stream wait for the kernel."""
        stream = self.stream
        queue = self._queues[self.scheduler.current().index, group.key]
        queue.append(kernel)
        kernel.issued.append(max(stream.host, stream.device))

        def ready() -> bool:
            """Return True if the kernel and all before it on its stream can end."""
            return kernel.done or all(each.is_ready() for each in islice(queue, queue.index(kernel) + 1))

        def finish() -> Tensors:
            """End the kernel and those before it."""
            while not kernel.done:
                queue.popleft().end()
            stream.device = max(stream.device, *kernel.issued) + self._random.expovariate(1.0)
            return [output for work in kernel.works for output in work._outputs]

        return EmulatedWork(self, ready, lambda: kernel.works[0]._describe(), finish)


class ComputeStream:
    """Stream on which one rank computes, with the methods of `torch.cuda.Stream` that the engine calls. Attributes
    `host`, `device`: simulated seconds that the host and the stream have reached."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self._copies: list[_CopyToHost] = []

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of `source` to `target`, which stays poisoned (NaN) until the host has waited for the copy."""
        self._copies.append(copy := _CopyToHost(target, source))
        copy.read()  # before later work on this stream
        target.fill_(_choose_poison(target.dtype))

    def wait_event(self, event: StreamEvent) -> None:
        """Make this stream's later work wait for an event on another stream: the copies before it have then read their
        sources."""
        for copy in event.copies[: event.copies_before]:
            copy.read()
        self.device = max(self.device, event.seconds)

    def synchronize(self) -> None:
        """Make the host wait for all queued work."""
        self.record_event().synchronize()

    def record_event(self, event: None = None) -> StreamEvent:
        """Return an event that is reached after all work that is queued now. event: as the stand-in for
        `torch.cuda.Event` makes it."""
        return StreamEvent(self, self._copies, len(self._copies), self.device)


COPY_SECONDS = 1.0
"""Simulated seconds of a copy to host memory on the copy stream."""


class CopyStream(ComputeStream):
    """Stream that copies to host memory while the rank computes on another. A copy reads its source late: when the host
    or the computing stream waits for it. _: arguments of `torch.cuda.Stream`."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self._follows = False

    def wait_stream(self, stream: ComputeStream) -> None:
        """Make copies that are queued later wait for the work that `stream` has now."""
        self._follows = True
        self.device = max(self.device, stream.device)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of `source` to `target`, which stays poisoned (NaN) until the host has waited for the copy. It
        copies NaN if this stream does not wait for the work that computes `source`."""
        self.device += COPY_SECONDS
        if not self._follows:
            source = torch.full_like(source, _choose_poison(source.dtype))
        self._copies.append(_CopyToHost(target, source))
        target.fill_(_choose_poison(target.dtype))


class _CopyToHost:
    """Copy of `source` to the tensor `target` in host memory, which a stream makes."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source, self._before = target, source.detach(), source.detach().clone()
        self._is_read = self._is_made = False

    def read(self) -> None:
        """Read the source. Raises StreamFault if it has changed since the copy was queued."""
        if not self._is_read and not torch.equal(_view_bytes(self._source), _view_bytes(self._before)):
            raise StreamFault("a tensor was changed while a stream copied it to the host")
        self._is_read = True

    def make(self) -> None:
        """Write the target, once."""
        self.read()
        if not self._is_made:
            self._target.copy_(self._before)
        self._is_made = True


class StreamEvent(NamedTuple):
    """Event on a stream, with the methods of `torch.cuda.Event` that the engine calls. copies: all copies to the host
    that were queued on `stream`; copies_before: number of them before the event. seconds: simulated time at which the
    stream reaches the event."""

    stream: ComputeStream
    copies: list[_CopyToHost]
    copies_before: int
    seconds: float

    def synchronize(self) -> None:
        """Make the host wait for the event, and make the copies that were queued before it."""
        self.stream.host = max(self.stream.host, self.seconds)
        for copy in self.copies[: self.copies_before]:
            copy.make()

    def query(self) -> bool:
        """Return True if the stream has reached the event at the host's time."""
        return self.seconds <= self.stream.host

    def elapsed_time(self, end: StreamEvent) -> float:
        """Return the simulated milliseconds from this event to the event `end`."""
        return 1000 * (end.seconds - self.seconds)


class StreamRanks(EmulatedRanks):
    """Emulated ranks with simulated streams: `comm` makes the calls that it makes under NCCL. Use it as a context
    manager. seed: for the random times at which kernels end. early: probability with which a kernel ends at a later
    call of the rank; 0: kernels end only when they are waited for."""

    backend = "nccl"
    matcher: StreamCallMatcher

    def __init__(self, world_size: int, *, seed: int = 0, early: float = 0.3) -> None:
        super().__init__(world_size)
        self.seed, self.early = seed, early

    def _make_matcher(self) -> CallMatcher:
        """Return the matcher that simulates the streams of all ranks."""
        return StreamCallMatcher(self.scheduler, self.seed, self.early)

    def _patch_process(self, stack: contextlib.ExitStack) -> None:
        """Patch torch.distributed and Python as the base class does, and make `comm` and the checkpoint code use the
        simulated streams; closing `stack` undoes it."""
        super()._patch_process(stack)
        copy = torch.Tensor.copy_

        def copy_late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            """Copy a tensor as `Tensor.copy_`; asynchronous copies, which are to host memory, arrive late."""
            if not non_blocking:
                return copy(target, source)
            self.matcher.stream.copy_to_host(target, source)
            return target

        for where, name, value in (
            (dist, "split_group", _split_world),
            (EmulatedGroup, "bound_device_id", torch.device("cpu")),
            (dist, "batch_isend_irecv", self.matcher.post_together),
            (backend, "current_stream", lambda device: self.matcher.stream),
            (torch.Tensor, "copy_", copy_late),
            (torch.cuda, "Stream", CopyStream),
            (torch.cuda, "Event", lambda enable_timing: None),
            (torch.cuda, "stream", self.matcher.use_stream),
            (
                call_matcher,
                "_INTERNAL",
                (*call_matcher._INTERNAL, __file__),
            ),  # events name the code that posts a call, not this file
            (call_matcher, "compute_results", _compute_results_own_first),
        ):
            stack.enter_context(mock.patch.object(where, name, value))


def _split_world(parent: None, split_ranks: list[list[int]], timeout: timedelta, backend: str) -> Any:
    """Make the disjoint groups `split_ranks` of global ranks; return this rank's (None: in none). Stand-in for
    `torch.distributed.split_group`, whose other arguments it ignores."""
    made = [dist.new_group(ranks) for ranks in split_ranks]
    return next((group for group, ranks in zip(made, split_ranks, strict=True) if dist.get_rank() in ranks), None)


@unseen_by_modes()
@torch.no_grad()
def _compute_results_own_first(
    operation: str, calls: Sequence[RankCall], op: str, root: int
) -> list[list[torch.Tensor]]:
    """Stand-in for `compute_results`, whose arguments it takes: a reduce-scatter adds a rank's own part first, then the
    others in rank order, as `comm.transport` does in the step without streams that is the reference."""
    if operation != "reduce_scatter":
        return compute_results(operation, calls, op, root)
    assert op == "SUM", op
    ranks = range(len(calls))
    orders = [[rank, *(other for other in ranks if other != rank)] for rank in ranks]
    return [[reduce(torch.add, [calls[source].inputs[rank] for source in order])] for rank, order in enumerate(orders)]


def _choose_poison(dtype: torch.dtype) -> float | int:
    """Return the value that fills poisoned tensors (outputs in flight) of a dtype: NaN, the greatest integer, or
    True."""
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _is_poisoned(tensor: torch.Tensor) -> bool:
    """Return True if all elements of a tensor are the poison of its dtype (see `_choose_poison`)."""
    poison = _choose_poison(tensor.dtype)
    return bool((tensor.isnan() if poison != poison else tensor == poison).all())


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as uint8, 1-D, for comparisons in which NaN equals NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _find_place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address, size in bytes) of a tensor's memory."""
    return tensor.data_ptr(), tensor.nbytes
