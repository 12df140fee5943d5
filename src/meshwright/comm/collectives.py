"""Every collective call of the project. Each has a site, a static name such as "data.gradients", under which its bytes
are recorded, faults are planted and time-outs are reported. On an axis of size 1 nothing is called and nothing copied.

Sums are the same on every rank and depend on neither timing nor load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from meshwright.comm import transport
from meshwright.comm.faults import Fault
from meshwright.comm.handle import DONE, Handle, lost
from meshwright.comm.mesh import Axis, calls_under_way
from meshwright.comm.transport import Message
from meshwright.errors import RankLost


def all_reduce(tensor: torch.Tensor, axis: Axis, site: str, op: str = "sum", async_op: bool = False) -> Handle:
    """Replace `tensor` by its sum (op="max": its maximum) over the ranks of `axis`, the same on all of them."""
    if axis.trivial:
        return DONE
    size = tensor.numel() * tensor.element_size()
    sent = 2 * size * (axis.size - 1) // axis.size
    if op == "sum":
        sent = _sent(axis, "all_reduce", tensor, sent)
    call, fault = _enter("all_reduce", axis, site, size, sent)
    if fault is not None and fault.kind == "skip":
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        tensor.zero_()
    over, _ = axis.communicator.faults.over(fault, axis, ordered=False)
    if over.trivial:
        return DONE
    return _run(lambda: transport.all_reduce(tensor, over, op), call, fault, axis, tensor, async_op)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """output[n] = sum over ranks of their source[r * n : (r + 1) * n], r this rank's place. `source` must stay as it is
    until the handle has been waited for; it may then be reused, and where a program serves the axis, of it only this
    rank's part has a meaning. On an axis of size 1 `output` is a copy of `source` (none, if they are one memory)."""
    n = output.numel()
    assert source.numel() == n * axis.size, (site, source.numel(), n, axis.size)
    mine = source.view(-1)[axis.rank * n : (axis.rank + 1) * n]
    if axis.trivial:
        _copy(output, mine)
        return DONE
    size = source.numel() * source.element_size()
    sent = _sent(axis, "reduce_scatter", source, size * (axis.size - 1) // axis.size)
    call, fault = _enter("reduce_scatter", axis, site, size, sent)
    if fault is not None and fault.kind == "skip":
        _copy(output, mine)
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        source = torch.zeros_like(source)
    over, turned = axis.communicator.faults.over(fault, axis)
    if turned:
        source = _turned(source, axis)
    return _run(lambda: transport.reduce_scatter(output, source, over), call, fault, axis, output, async_op)


def all_gather(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """output = the concatenation of the ranks' `source`, in their order. `source` may lie in `output` at its place."""
    n = source.numel()
    assert output.numel() == n * axis.size, (site, output.numel(), n, axis.size)
    mine = output.view(-1)[axis.rank * n : (axis.rank + 1) * n]
    if axis.trivial:
        _copy(mine, source)
        return DONE
    size = output.numel() * output.element_size()
    sent = _sent(axis, "all_gather", output, size * (axis.size - 1) // axis.size)
    call, fault = _enter("all_gather", axis, site, size, sent)
    if fault is not None and fault.kind == "skip":
        _copy(mine, source)
        return DONE
    lose: Callable[[], Any] | None = None
    if fault is not None and fault.kind == "drop":
        lost = fault.position % axis.size
        lose = output.view(-1)[lost * n : (lost + 1) * n].zero_
    over, turned = axis.communicator.faults.over(fault, axis)
    if over is not axis:
        source = source.clone()  # its place in the output is another's now
    if turned:
        lose = partial(_turn, output, axis)
    return _run(lambda: transport.all_gather(output, source, over), call, fault, axis, output, async_op, lose)


def broadcast(tensor: torch.Tensor, axis: Axis, site: str, source: int = 0, async_op: bool = False) -> Handle:
    """Give every rank the `tensor` of the rank at place `source` of the axis."""
    if axis.trivial:
        return DONE
    size = tensor.numel() * tensor.element_size()
    call, fault = _enter("broadcast", axis, site, size, size if axis.rank == source else 0)
    if fault is not None and fault.kind == "skip":
        return DONE
    lose = tensor.zero_ if fault is not None and fault.kind == "drop" else None
    over, turned = axis.communicator.faults.over(fault, axis)
    begins = (source + 1) % axis.size if turned else source
    return _run(lambda: transport.broadcast(tensor, begins, over), call, fault, axis, tensor, async_op, lose)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    axis: Axis,
    site: str,
    output_sizes: list[int] | None = None,
    source_sizes: list[int] | None = None,
    async_op: bool = False,
) -> Handle:
    """Send the i-th part of `source` (split along dim 0, evenly or by `source_sizes`) to the i-th rank of the axis and
    receive theirs into `output`, in order."""
    if axis.trivial:
        _copy(output, source)
        return DONE
    size = source.numel() * source.element_size()
    own = source_sizes[axis.rank] if source_sizes else source.shape[0] // axis.size
    sent = size - (size // source.shape[0] * own if source.shape[0] else 0)
    call, fault = _enter("all_to_all", axis, site, size, sent)
    if fault is not None and fault.kind == "skip":
        output.zero_()
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        source = torch.zeros_like(source)
    # Uneven parts fit nobody else: there such a call fails by itself.
    uneven = source_sizes is not None or output_sizes is not None
    over, turned = (axis, False) if uneven else axis.communicator.faults.over(fault, axis)
    if turned:
        source = _turned(source, axis)
    return _run(
        lambda: transport.all_to_all(output, source, over, output_sizes, source_sizes),
        call, fault, axis, output, async_op, uneven=uneven,
    )  # fmt: skip


def transfer(messages: Sequence[Message], axis: Axis) -> list[Handle]:
    """Post messages between single ranks together; a handle for each, in their order.

    Messages from one rank to another arrive in the order in which they are posted. A tensor that is sent must stay as
    it is until its handle has been waited for. A planted fault is served by the receiver: nothing arrives (skip, drop:
    zeros), it arrives doubled, or the message before it of the same size arrives again.
    """
    communicator = axis.communicator
    calls, whats, faults = [], list[Callable[[], tuple[str, str]]](), list[Fault | None]()
    for m in messages:
        size, here, there = m.tensor.nbytes, axis.ranks[axis.rank], axis.ranks[m.peer]
        communicator.record.note(m.site, "transfer", axis.name, size, 0 if m.arrives else size)
        pair = communicator.calls.group(axis.ranks, (there, here) if m.arrives else (here, there))
        dtype, shape = m.tensor.dtype, m.tensor.shape
        calls.append(communicator.calls.post(pair, m.site, "transfer", axis.name, size, dtype, shape))
        whats.append(partial(_name_message, m, axis, communicator.calls.count(pair)))
        planted = m.arrives and communicator.faults.active is not None
        faults.append(communicator.faults.at(m.site, "transfer") if planted else None)
    try:
        if (around := communicator.around) is None or not messages:
            posted = transport.transfer(messages, axis)
        else:
            with around(messages[0].site):
                posted = transport.transfer(messages, axis)
    except (RuntimeError, RankLost) as error:
        raise lost(whats[0], error) from error
    handles = []
    for m, call, what, fault, (works, finish) in zip(messages, calls, whats, faults, posted, strict=True):
        handle = Handle(works, what, _timeout(axis, m.tensor), communicator, call).then(finish)
        if fault is not None and fault.kind in ("skip", "drop"):
            handle.then(m.tensor.zero_)
        elif fault is not None:
            handle.then(partial(communicator.faults.spoil_result, fault, m.tensor))
        calls_under_way[handle] = communicator
        handles.append(handle)
    return handles


def rotate(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """Send `source` to the next rank of the axis, of the last one to the first, and receive that of the rank before
    into `output`. On an axis of size 1 `output` is a copy of `source`."""
    if axis.trivial:
        _copy(output, source)
        return DONE
    size = source.numel() * source.element_size()
    call, fault = _enter("rotate", axis, site, size, size)
    if fault is not None and fault.kind == "skip":
        output.zero_()
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        source = torch.zeros_like(source)
    over, _ = axis.communicator.faults.over(fault, axis, ordered=False)  # a ring turned by one is the same ring
    return _run(lambda: transport.rotate(output, source, over), call, fault, axis, output, async_op)


def all_gather_rows(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> None:
    """output = the ranks' `source` one after the other along dim 0, of which the i-th rank's has sizes[i] rows."""
    mine = output.split(sizes)[axis.rank]
    if axis.trivial:
        _copy(mine, source)
        return
    call, fault = _enter("all_gather", axis, site, output.nbytes, source.nbytes * (axis.size - 1))
    if fault is not None and fault.kind == "skip":
        output.zero_()
        _copy(mine, source)
        return
    lose = None
    if fault is not None and fault.kind == "drop":
        lose = output.split(sizes)[fault.position % axis.size].zero_
    _run(lambda: transport.all_gather_rows(output, source, axis, sizes), call, fault, axis, output, False, lose, True)


def reduce_scatter_rows(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, sizes: list[int]) -> None:
    """output = the sum over ranks of the part of their `source` that is this rank's: the i-th rank's has sizes[i] rows
    (dim 0), in the order of the ranks."""
    mine = source.split(sizes)[axis.rank]
    if axis.trivial:
        _copy(output, mine)
        return
    call, fault = _enter("reduce_scatter", axis, site, source.nbytes, source.nbytes - mine.nbytes)
    if fault is not None and fault.kind == "skip":
        _copy(output, mine)
        return
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        source = torch.zeros_like(source)
    post = partial(transport.reduce_scatter_rows, output, source, axis, sizes)
    _run(post, call, fault, axis, output, False, uneven=True)


def barrier(axis: Axis, site: str) -> None:
    """Return when every rank of the axis has come here: the host too, which on CUDA a collective call alone does not
    hold up."""
    if axis.trivial:
        return
    call, _ = _enter("barrier", axis, site, 0, 0)
    nothing = torch.zeros(1, device=axis.communicator.device)
    _run(lambda: transport.all_reduce(nothing, axis, "sum"), call, None, axis, nothing, False)
    if nothing.is_cuda:
        torch.cuda.current_stream(nothing.device).synchronize()


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        output.view(-1).copy_(source.view(-1))


def _turned(parts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The ranks' parts, one after the other, as if each rank stood one place further on."""
    return parts.reshape(axis.size, -1).roll(1, 0).view(parts.shape)


def _turn(parts: torch.Tensor, axis: Axis) -> None:
    parts.copy_(_turned(parts, axis))


def _sent(axis: Axis, operation: str, vector: torch.Tensor, native: int) -> int:
    """Bytes that this rank sends: those of the program that serves here, or else `native`."""
    program = axis.program(operation, vector.nbytes)
    return native if program is None else program.sent_bytes(vector.numel(), vector.element_size())


def _timeout(axis: Axis, tensor: torch.Tensor) -> timedelta | None:
    """How long the host waits. NCCL's own watchdog ends a call that hangs; a time-out given to its wait would block
    the host."""
    return None if tensor.is_cuda else timedelta(seconds=axis.communicator.timeout_seconds)


def _name_message(message: Message, axis: Axis, index: int) -> tuple[str, str]:
    """Who waits for whom, and where; index: among the messages from the one to the other."""
    peer = axis.ranks[message.peer]
    waits = f"had nothing from rank {peer}" if message.arrives else f"had no reader for what it sends to rank {peer}"
    return (
        f"rank {axis.ranks[axis.rank]} {waits}",
        f"{message.site} ({message.name} over axis {axis.name}, message {index} between the two)",
    )


@dataclass(slots=True)
class _Entered:
    """A call that has been recorded; calling it says how to name it in an error: who waits, where. payload: bytes."""

    operation: str
    axis: Axis
    site: str
    payload: int
    index: int = 0  # among the calls of the group, once it is posted

    def post(self, tensor: torch.Tensor, uneven: bool) -> int:
        """Write it to the ring of calls; its number there. uneven: without the number of rows, which is another in
        every call. Of a call that a planted fault skips, others see nothing."""
        axis, calls = self.axis, self.axis.communicator.calls
        group = axis.calls_group
        shape = ("...", *tensor.shape[1:]) if uneven else tensor.shape
        number = calls.post(group, self.site, self.operation, axis.name, self.payload, tensor.dtype, shape)
        self.index = calls.count(group)
        return number

    def __call__(self) -> tuple[str, str]:
        axis = self.axis
        others = ", ".join(str(rank) for rank in axis.ranks if rank != axis.ranks[axis.rank])
        who = f"rank {axis.ranks[axis.rank]} had no answer from rank{'s' * (axis.size > 2)} {others}"
        return who, f"{self.site} ({self.operation} over axis {axis.name}, its call {self.index})"


def _enter(operation: str, axis: Axis, site: str, payload: int, sent: int) -> tuple[_Entered, Fault | None]:
    """Record the call; returns it, and the fault planted here."""
    communicator = axis.communicator
    communicator.record.note(site, operation, axis.name, payload, sent)
    faults = communicator.faults
    call = _Entered(operation, axis, site, payload)
    return call, faults.at(site, operation) if faults.active is not None else None


def _run(
    post: Callable[[], transport.Posted],
    call: _Entered,
    fault: Fault | None,
    axis: Axis,
    output: torch.Tensor,
    async_op: bool,
    then: Callable[[], Any] | None = None,
    uneven: bool = False,
) -> Handle:
    """Post the transfers; `then` runs once they have come through, before a planted fault spoils the result."""
    number = call.post(output, uneven)
    try:
        if (around := axis.communicator.around) is None:
            works, finish = post()
        else:
            with around(call.site):
                works, finish = post()
    except (RuntimeError, RankLost) as error:  # a connection that is already gone fails when the call is posted
        raise lost(call, error) from error
    handle = Handle(works, call, _timeout(axis, output), axis.communicator, number).then(finish).then(then)
    if fault is not None:
        handle.then(lambda: axis.communicator.faults.spoil_result(fault, output))
    if async_op:
        calls_under_way[handle] = axis.communicator
    else:
        handle.wait()
    return handle
