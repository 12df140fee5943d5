"""Late completion: every collective call completes only when it is waited for, and its buffers are poisoned until then.

On real devices a call completes at some time between its start and the wait for it, so that code which reads a result,
changes a sent buffer or frees either too early is right most of the time. Here it never is. While a call is in flight
its results hold NaN (integers: their least value) and its data travel between copies; the wait then checks that nobody
touched the buffers, and delivers the results. A correct engine computes the same bits as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from meshwright.comm import collectives, transport
from meshwright.comm.mesh import Axis
from meshwright.comm.transport import Message, Posted, RowCounts

Delivery = tuple[torch.Tensor, torch.Tensor]
"""Result buffer of the caller, and the copy that the transfer fills."""


class LateCompletion:
    """Replacement, in one process, of the functions that start collective calls (`comm/transport.py`). Every call
    completes as late as possible: when it is waited for. This exposes code that reads or writes a buffer during a call.

    faults (attribute): one line for each buffer that was touched during its call, and for each call without a wait.
    """

    def __init__(self) -> None:
        """Store the original functions; no call is in flight."""
        self.faults: list[str] = []
        self._in_flight: dict[int, str] = {}
        self._calls = 0
        self._site = ""
        self._originals = {name: getattr(transport, name) for name in _REPLACED}

    def check_all_complete(self) -> None:
        """Record a fault for each call that is still in flight. Called at the end, when no call should be in flight."""
        self.faults += [f"{call}: never waited for" for call in self._in_flight.values()]
        self._in_flight.clear()

    # --- in place of the functions of `comm/transport.py`, with their arguments

    def all_reduce(self, tensor: torch.Tensor, axis: Axis, op: str) -> Posted:
        """Start an all-reduce over the mesh axis `axis` on a copy of `tensor`; until the call is waited for, `tensor`
        holds NaN, which exposes early reads. op: reduction, "sum" or "max"."""
        copy = tensor.clone()
        return self._post(partial(self._originals["all_reduce"], copy, axis, op), [(tensor, copy)])

    def broadcast(self, tensor: torch.Tensor, source: int, axis: Axis) -> Posted:
        """Start a broadcast from rank `source` of the mesh axis `axis` on a copy of `tensor`; on the receiving ranks
        `tensor` holds NaN until the call is waited for."""
        copy = tensor.clone()
        post = partial(self._originals["broadcast"], copy, source, axis)
        return self._post(post, [], [tensor]) if axis.rank == source else self._post(post, [(tensor, copy)])

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, axis: Axis) -> Posted:
        """Start an all-gather of `source` over the mesh axis `axis` into a copy; `output` holds NaN until the call is
        waited for, except this rank's own slice if `source` is that slice."""
        copy = torch.empty_like(output)
        parts, copies = output.view(axis.size, -1), copy.view(axis.size, -1)
        own = parts[axis.rank].data_ptr() == source.data_ptr()
        arriving = [(parts[at], copies[at]) for at in range(axis.size) if not (own and at == axis.rank)]
        post = partial(self._originals["all_gather"], copy, source.clone(), axis)
        return self._post(post, arriving, [source])

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, axis: Axis) -> Posted:
        """Start a reduce-scatter of `source` over the mesh axis `axis` on copies; `output` holds NaN until the call is
        waited for. The other ranks' slices of `source` are overwritten, as some algorithms of collectives do."""
        copy, sent, parts = torch.empty_like(output), source.clone(), source.view(axis.size, -1)
        others = [parts[at] for at in range(axis.size) if at != axis.rank]
        post = partial(self._originals["reduce_scatter"], copy, sent, axis)
        return self._post(post, [(output, copy)], others, overwritten=others)

    def rotate(self, output: torch.Tensor, source: torch.Tensor, axis: Axis, distance: int = 1) -> Posted:
        """Start a ring shift over the mesh axis `axis` (each rank sends `source` to the rank at `distance` after it) on
        copies; `output` holds NaN until the call is waited for."""
        copy, sent = torch.empty_like(output), source.clone()
        with self._use_original("transfer"):
            post = partial(self._originals["rotate"], copy, sent, axis, distance)
            return self._post(post, [(output, copy)], [source])

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, axis: Axis, sizes: RowCounts | None = None
    ) -> Posted:
        """Start an all-to-all over the mesh axis `axis` on private copies of `source` and `output`. Until the call is
        waited for, `output` holds NaN. sizes: numbers of rows received from and sent to each rank; None: equal."""
        copy, sent = torch.empty_like(output), source.clone()
        post = partial(self._originals["all_to_all"], copy, sent, axis, sizes)
        return self._post(post, [(output, copy)], [source])

    def transfer(self, messages: Sequence[Message], axis: Axis) -> list[Posted]:
        """Start point-to-point messages between ranks of the mesh axis `axis`. Every tensor sent or received is
        replaced by a private copy. When a message is waited for, it completes: a received copy is written to the tensor
        of its message. Return one handle per message, in order."""
        copies = [torch.empty_like(m.tensor) if m.is_receive else m.tensor.clone() for m in messages]
        copied = [replace(m, tensor=copy) for m, copy in zip(messages, copies, strict=True)]
        posted = self._originals["transfer"](copied, axis)
        found = []
        for m, copy, one in zip(messages, copies, posted, strict=True):
            results, sent = ([(m.tensor, copy)], []) if m.is_receive else ([], [m.tensor])
            found.append(
                self._post(partial(_return_posted, one), results, sent, name=f"{m.site} ({m.name} over {axis.name})")
            )
        return found

    def note_call(self, original: Callable[..., Any], operation: str, axis: Axis, site: str, *rest: Any) -> Any:
        """Store the operation and call site of the next call, for messages about faults; then call `original` with all
        arguments. This method replaces the function `collectives._record_call` (`original`). axis: mesh axis of the
        call."""
        self._site = f"{site} ({operation} over {axis.name})"
        return original(operation, axis, site, *rest)

    def _use_original(self, name: str) -> Any:
        """Return a context manager in which the function `name` of `transport` is the original one. Used around a call
        that makes other calls internally, so that the other calls are not delayed a second time."""
        return mock.patch.object(transport, name, self._originals[name])

    # --- what a call in flight may not see

    def _post(
        self, post: Callable[[], Posted], results: Sequence[Delivery], sent: Sequence[torch.Tensor] = (),
        overwritten: Sequence[torch.Tensor] = (), name: str | None = None,
    ) -> Posted:  # fmt: skip
        """Start a call on copies of its buffers and fill its result buffers with a poison value (NaN). Return (work
        handles, completion callback); the callback checks that the buffers were not touched, and delivers the results.

        post: function that starts the call. results: the call's result buffers with their copies. sent: buffers that
        must not change in flight. overwritten: buffers whose content is undefined afterwards. name: name of the call in
        messages about faults (None: as stored by `note_call`).
        """
        self._calls += 1
        number, call = self._calls, name or self._site
        before = [buffer.clone() for buffer in sent]
        works, finish = post()
        for buffer, _ in results:
            _poison(buffer)
        self._in_flight[number] = call

        def complete() -> None:
            """Record a fault for each buffer that was touched in flight, and copy the results into the result
            buffers."""
            self._in_flight.pop(number, None)
            if finish is not None:
                finish()
            found = dict[str, None]()
            for buffer, old in zip(sent, before, strict=True):
                if _is_freed(buffer):
                    found["freed while it was being sent"] = None
                elif not _has_bits_of(buffer, old):
                    found["changed while it was being sent"] = None
            for buffer, copy in results:
                if _is_freed(buffer):
                    found["freed before its result arrived"] = None
                    continue
                if not _is_poisoned(buffer):
                    found["written before its result arrived"] = None
                buffer.copy_(copy)
            for buffer in overwritten:
                _poison(buffer)
            self.faults += [f"{call}: a buffer was {what}" for what in found]

        return works, complete


_REPLACED = (
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "transfer", "rotate",
)  # fmt: skip


def _return_posted(posted: Posted) -> Posted:
    """Return `posted`, the handles of a call that has already been started. Used to pass a call that has already been
    started to `LateCompletion._post`, which expects a function that starts a call."""
    return posted


@contextmanager
def complete_late() -> Iterator[LateCompletion]:
    """Context manager in which the collective calls of this process on CPU tensors complete only when they are waited
    for. All ranks must enter it together. At its end, calls that were never waited for are recorded as faults."""
    late = LateCompletion()
    record = collectives._record_call
    with (
        mock.patch.multiple(transport, **{name: getattr(late, name) for name in _REPLACED}),
        mock.patch.object(collectives, "_record_call", partial(late.note_call, record)),
    ):
        yield late
    late.check_all_complete()


def _get_poison_value(dtype: torch.dtype) -> float | int | bool:
    """Return the value that marks result elements of this dtype as undefined while a call is in flight: NaN, or the
    smallest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _poison(buffer: torch.Tensor) -> None:
    """Fill a buffer with the poison value of its dtype."""
    buffer.fill_(_get_poison_value(buffer.dtype))


def _is_poisoned(buffer: torch.Tensor) -> bool:
    """Return True if all elements of a buffer have the poison value."""
    value = _get_poison_value(buffer.dtype)
    return bool((buffer.isnan() if isinstance(value, float) else buffer == value).all())


def _has_bits_of(buffer: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the tensors `buffer` and `other`, of equal shape, are bitwise equal, NaN included."""
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (buffer, other))
    return torch.equal(first, second)


def _is_freed(buffer: torch.Tensor) -> bool:
    """Return True if the storage of the tensor `buffer` has been resized to less than its elements need, as FSDP units
    do when they reshard."""
    if buffer.numel() == 0:
        return False
    last = sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return (buffer.storage_offset() + last + 1) * buffer.itemsize > buffer.untyped_storage().nbytes()
