"""Transport of collectives: by the collective program that serves an axis, else by NCCL's own calls, or on gloo by
sends and receives between the final buffers.

Each function posts the transfers and returns (works, finish): the result is valid once every work has been waited for
and `finish`, if any, has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.comm.mesh import Axis

Finish = Callable[[], Any] | None
"""Callback at the completion of a call; None: none."""
Posted = tuple[list[Any], Finish]
"""Work handles of a call, and the callback at its completion."""

EXCHANGE_TAG = 0  # gloo tag of the sends and receives of collectives
MESSAGE_TAG = 1  # gloo tag of messages in the same group


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a point-to-point transfer over a mesh axis.

    is_receive: True: `tensor` is received from the rank at index `peer` of the axis; False: it is sent there. site:
    label of the call in traces, byte counts and errors. name: label of the message in error reports, such as
    "2RECV_F3".
    """

    tensor: torch.Tensor
    peer: int
    is_receive: bool
    site: str
    name: str


class RowCounts(NamedTuple):
    """Numbers of rows (dim 0) in an uneven all-to-all: rows received from each rank of the axis, and rows sent to each
    rank."""

    received: list[int]
    sent: list[int]


def uses_native_calls(axis: Axis, tensor: torch.Tensor) -> bool:
    """Return True if reduce-scatter and all-gather of `tensor` over `axis` use the backend's own calls. False for CPU
    tensors on gloo with several ranks, for which the project sends the data directly between the final buffers instead.
    """
    return axis.size == 1 or tensor.device.type != "cpu" or axis.backends["cpu"] != "gloo"


# torch 2.13 renamed these two.
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, axis: Axis) -> Posted:
    """Post a reduce-scatter: output[:] = sum over ranks of source[rank * n : (rank + 1) * n], n = output.numel().

    If the axis runs a collective program in place of the backend's call, `source` is overwritten. Returns (work
    handles, completion callback or None); the callback must be called when the work is complete.
    """
    program = axis.program("reduce_scatter", source.nbytes)
    if program is not None:
        mine = source.view(axis.size, -1)[axis.rank]

        def run() -> None:
            """Run the collective program in place on `source`, then copy this rank's slice to `output`."""
            program.run(source)
            if mine.data_ptr() != output.data_ptr():
                output.view(-1).copy_(mine)

        return [axis.communicator.programs.post(run, source, program.batched)], None
    if uses_native_calls(axis, source):
        # Flat: gloo on CUDA tensors refuses an output and a source whose shapes differ in more than dim 0.
        return [native_reduce_scatter(output.view(-1), source.view(-1), group=axis.group, async_op=True)], None
    parts = source.view(axis.size, -1)
    arrived = [parts[rank] if rank == axis.rank else torch.empty_like(parts[rank]) for rank in range(axis.size)]
    works = _post_exchange(list(parts), arrived, axis)

    def finish() -> None:
        """Add up the received parts into `output`: this rank's own part first, then the others in rank order."""
        # This rank's own part first (`output` may be its memory), then the others in their order: always the same sum.
        others = [part for rank, part in enumerate(arrived) if rank != axis.rank]
        total = torch.add(parts[axis.rank], others[0], out=output.view(-1))
        for part in others[1:]:
            total.add_(part)

    return works, finish


def all_gather(output: torch.Tensor, source: torch.Tensor, axis: Axis) -> Posted:
    """Post an all-gather over the mesh axis: `output` becomes the concatenation of the ranks' `source`. A rank's
    `source` may be a view of its slice of `output`. Returns (work handles, completion callback or None); the callback
    must be called when the work is complete.
    """
    program = axis.program("all_gather", output.nbytes)
    if program is None and uses_native_calls(axis, source):
        return [native_all_gather(output.view(-1), source.view(-1), group=axis.group, async_op=True)], None
    parts = output.view(axis.size, -1)
    if parts[axis.rank].data_ptr() != source.data_ptr():
        parts[axis.rank].copy_(source.view(-1))
    if program is not None:
        return [axis.communicator.programs.post(lambda: program.run(output), output, program.batched)], None
    return _post_exchange([source.view(-1)] * axis.size, list(parts), axis), None


def all_reduce(tensor: torch.Tensor, axis: Axis, op: str) -> Posted:
    """Post an all-reduce of `tensor` over the mesh axis `axis`, in place; op: "sum" or "max". Collective programs are
    used for sums only.

    Returns (work handles, completion callback or None); the callback must be called when the work is complete.
    """
    program = axis.program("all_reduce", tensor.nbytes) if op == "sum" else None
    if program is not None:
        return [axis.communicator.programs.post(lambda: program.run(tensor), tensor, program.batched)], None
    operation = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return [dist.all_reduce(tensor, op=operation, group=axis.group, async_op=True)], None


def broadcast(tensor: torch.Tensor, source: int, axis: Axis) -> Posted:
    """Post a broadcast of `tensor` in place, from the rank at index `source` of the axis.

    Returns (work handles, completion callback or None); the callback must be called when the work is complete.
    """
    return [dist.broadcast(tensor, group=axis.group, group_src=source, async_op=True)], None


def all_to_all(output: torch.Tensor, source: torch.Tensor, axis: Axis, sizes: RowCounts | None = None) -> Posted:
    """Post an all-to-all over the mesh axis `axis` along dim 0: part i of `source` goes to rank i, and the part from
    rank i becomes part i of `output`.

    sizes: numbers of rows of the parts (None: equal parts). Returns (work handles, None), without a completion
    callback.
    """
    received, sent = sizes or (None, None)
    return [dist.all_to_all_single(output, source, received, sent, group=axis.group, async_op=True)], None


def transfer(messages: Sequence[Message], axis: Axis) -> list[Posted]:
    """Post point-to-point messages between ranks of the mesh axis `axis` together; their tensors must be contiguous.

    Returns for each message (work handles, completion callback or None); the callback must be called when the work is
    complete.
    """
    if messages and axis.backends[messages[0].tensor.device.type] != "gloo":
        operations = [
            dist.P2POp(dist.irecv if m.is_receive else dist.isend, m.tensor, axis.ranks[m.peer], axis.group)
            for m in messages
        ]
        works = dist.batch_isend_irecv(operations)
        # NCCL may coalesce them into one work.
        return [([work], None) for work in works] if len(works) == len(messages) else [(works, None)] * len(messages)
    group = axis.group
    assert group is not None
    posted: list[Posted | None] = [None] * len(messages)
    for at in sorted(range(len(messages)), key=lambda at: not messages[at].is_receive):  # receives first
        m = messages[at]
        if m.is_receive:  # gloo sends host memory only
            buffer = m.tensor if m.tensor.device.type == "cpu" else torch.empty_like(m.tensor, device="cpu")
            copy = None if buffer is m.tensor else partial(m.tensor.copy_, buffer)
            posted[at] = [group.recv([buffer], m.peer, MESSAGE_TAG)], copy
        else:
            posted[at] = [group.send([m.tensor.cpu()], m.peer, MESSAGE_TAG)], None
    return [each for each in posted if each is not None]


def rotate(output: torch.Tensor, source: torch.Tensor, axis: Axis, distance: int = 1) -> Posted:
    """Post a ring shift: send `source` to the rank of the axis at `distance` after this one, and receive into `output`
    the `source` of the rank at `distance` before it.

    Returns (work handles, completion callback or None); the callback must be called when the work is complete.
    """
    if distance % axis.size == 0 and axis.backends[source.device.type] == "gloo":  # no rank is connected to itself
        output.copy_(source)
        return [], None
    receive = Message(output, (axis.rank - distance) % axis.size, True, "", "rotate")
    send = Message(source, (axis.rank + distance) % axis.size, False, "", "rotate")
    (works, finish), (sent, _) = transfer([receive, send], axis)
    return works if works is sent else works + sent, finish


def _post_exchange(outgoing: list[torch.Tensor], incoming: list[torch.Tensor], axis: Axis) -> list[Any]:
    """Post the sends of outgoing[i] to rank i of `axis` and the receives of incoming[i] from rank i, for all other
    ranks; return the work handles.

    Each rank sends first to its right neighbour. Methods of the process group are called directly, because `dist.isend`
    and `dist.irecv` look up the group at each call.
    """
    group = axis.group
    assert group is not None
    left = [(axis.rank - distance) % axis.size for distance in range(1, axis.size)]
    works = [group.recv([incoming[rank]], rank, EXCHANGE_TAG) for rank in left]
    return works + [group.send([outgoing[rank]], rank, EXCHANGE_TAG) for rank in reversed(left)]
