"""Every collective call of the project. Each has a site, a static name such as "data.gradients", under which its bytes
are recorded, faults are planted and time-outs are reported. On an axis of size 1 nothing is called and nothing copied.

Sums are the same on every rank and depend on neither timing nor load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import transport
from meshwright.comm.faults import Fault
from meshwright.comm.mesh import Axis
from meshwright.errors import RankLost


class Handle:
    """A call under way. `wait` may be called again; the result is there after the first."""

    __slots__ = ("_finishers", "_what", "_works")

    def __init__(self, works: Sequence[Any] = (), what: Callable[[], str] | None = None) -> None:
        self._works = works
        self._finishers: list[Callable[[], None]] = []
        self._what = what

    def then(self, finish: Callable[[], None] | None) -> Handle:
        """Run `finish` when the call has been waited for."""
        if finish is not None:
            self._finishers.append(finish)
        return self

    def wait(self) -> None:
        """Return when the result may be used (on CUDA: by later work on the current stream). Raises RankLost."""
        works, finishers = self._works, self._finishers
        self._works, self._finishers = (), []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            where = self._what() if self._what else "a collective call"
            raise RankLost(f"{where}: {' '.join(str(error).split())[:300]}") from error
        for finish in finishers:
            finish()


DONE = Handle()
"""The handle of a call that had nothing to do."""


def all_reduce(tensor: torch.Tensor, axis: Axis, site: str, op: str = "sum", async_op: bool = False) -> Handle:
    """Replace `tensor` by its sum (or, with op="max", its maximum) over the ranks of `axis`, the same on all of them."""
    if axis.size == 1:
        return DONE
    size = tensor.numel() * tensor.element_size()
    what, fault = _enter("all_reduce", axis, site, size, 2 * size * (axis.size - 1) // axis.size)
    if fault is not None and fault.kind == "skip":
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        tensor.zero_()
    works, finish = _post(what, lambda: transport.all_reduce(tensor, axis, op))
    return _leave(Handle(works, what).then(finish), fault, axis, tensor, async_op)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """output[n] = sum over ranks of their source[r * n : (r + 1) * n], r this rank's place. `source` stays untouched
    until the handle has been waited for; it may then be reused. On an axis of size 1 `output` is a copy of `source`
    (none, if they are the same memory)."""
    n = output.numel()
    assert source.numel() == n * axis.size, (site, source.numel(), n, axis.size)
    mine = source.view(-1)[axis.rank * n : (axis.rank + 1) * n]
    if axis.size == 1:
        _copy(output, mine)
        return DONE
    size = source.numel() * source.element_size()
    what, fault = _enter("reduce_scatter", axis, site, size, size * (axis.size - 1) // axis.size)
    if fault is not None and fault.kind == "skip":
        _copy(output, mine)
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        source = torch.zeros_like(source)
    works, finish = _post(what, lambda: transport.reduce_scatter(output, source, axis))
    return _leave(Handle(works, what).then(finish), fault, axis, output, async_op)


def all_gather(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """output = the concatenation of the ranks' `source`, in their order. `source` may lie in `output` at its place."""
    n = source.numel()
    assert output.numel() == n * axis.size, (site, output.numel(), n, axis.size)
    mine = output.view(-1)[axis.rank * n : (axis.rank + 1) * n]
    if axis.size == 1:
        _copy(mine, source)
        return DONE
    size = output.numel() * output.element_size()
    what, fault = _enter("all_gather", axis, site, size, size * (axis.size - 1) // axis.size)
    if fault is not None and fault.kind == "skip":
        _copy(mine, source)
        return DONE
    works, finish = _post(what, lambda: transport.all_gather(output, source, axis))
    handle = Handle(works, what).then(finish)
    if fault is not None and fault.kind == "drop":
        lost = fault.position % axis.size
        handle.then(lambda: output.view(-1)[lost * n : (lost + 1) * n].zero_() and None)
    return _leave(handle, fault, axis, output, async_op)


def broadcast(tensor: torch.Tensor, axis: Axis, site: str, source: int = 0, async_op: bool = False) -> Handle:
    """Give every rank the `tensor` of the rank at place `source` of the axis."""
    if axis.size == 1:
        return DONE
    size = tensor.numel() * tensor.element_size()
    what, fault = _enter("broadcast", axis, site, size, size if axis.rank == source else 0)
    if fault is not None and fault.kind == "skip":
        return DONE
    works, finish = _post(
        what, lambda: ([dist.broadcast(tensor, group=axis.group, group_src=source, async_op=True)], None)
    )
    if fault is not None and fault.kind == "drop":
        return _leave(Handle(works, what).then(lambda: tensor.zero_() and None), fault, axis, tensor, async_op)
    return _leave(Handle(works, what).then(finish), fault, axis, tensor, async_op)


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
    if axis.size == 1:
        _copy(output, source)
        return DONE
    size = source.numel() * source.element_size()
    own = source_sizes[axis.rank] if source_sizes else source.shape[0] // axis.size
    sent = size - (size // source.shape[0] * own if source.shape[0] else 0)
    what, fault = _enter("all_to_all", axis, site, size, sent)
    if fault is not None and fault.kind == "skip":
        output.zero_()
        return DONE
    if fault is not None and fault.kind == "drop" and axis.rank == fault.position % axis.size:
        source = torch.zeros_like(source)
    works, finish = _post(
        what,
        lambda: (
            [dist.all_to_all_single(output, source, output_sizes, source_sizes, group=axis.group, async_op=True)],
            None,
        ),
    )
    return _leave(Handle(works, what).then(finish), fault, axis, output, async_op)


def barrier(axis: Axis, site: str) -> None:
    """Return when every rank of the axis has come here."""
    if axis.size == 1:
        return
    what, _ = _enter("barrier", axis, site, 0, 0)
    works, _ = _post(what, lambda: ([dist.barrier(group=axis.group, async_op=True)], None))
    Handle(works, what).wait()


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        output.view(-1).copy_(source.view(-1))


def _enter(operation: str, axis: Axis, site: str, payload: int, sent: int) -> tuple[Callable[[], str], Fault | None]:
    communicator = axis.communicator
    number = communicator.record.note(site, operation, axis.name, payload, sent)

    def what() -> str:
        return (
            f"rank {axis.ranks[axis.rank]} was left alone in {site} ({operation} over axis {axis.name}, "
            f"ranks {', '.join(map(str, axis.ranks))}, call {number})"
        )

    faults = communicator.faults
    return what, faults.at(site, operation) if faults.active is not None else None


def _post(what: Callable[[], str], post: Callable[[], transport.Posted]) -> transport.Posted:
    try:
        return post()
    except RuntimeError as error:  # a connection that is already gone fails when the call is posted
        raise RankLost(f"{what()}: {' '.join(str(error).split())[:300]}") from error


def _leave(handle: Handle, fault: Fault | None, axis: Axis, output: torch.Tensor, async_op: bool) -> Handle:
    if fault is not None:
        handle.then(lambda: axis.communicator.faults.spoil_result(fault, output))
    if not async_op:
        handle.wait()
    return handle
