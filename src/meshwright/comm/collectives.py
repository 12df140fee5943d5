"""Every collective call of the project. Each has a site, a static label such as "data.gradients", under which bytes are
recorded, faults are injected and timeouts are reported. On an axis of size 1 nothing is called and nothing copied.

Sums are bitwise equal on every rank and independent of timing and load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch

from meshwright.comm import backend, transport
from meshwright.comm.faults import Fault
from meshwright.comm.handle import DONE, Handle, make_rank_lost_error
from meshwright.comm.mesh import Axis, calls_in_flight
from meshwright.comm.transport import Finish, Message, Posted, RowCounts
from meshwright.errors import RankLost

Post = Callable[[], Posted]
"""Function that posts the transfers of a collective call."""


def all_reduce(tensor: torch.Tensor, axis: Axis, site: str, op: str = "sum", async_op: bool = False) -> Handle:
    """Replace `tensor` on every rank by its elementwise sum (op="max": its maximum) over the ranks of the mesh axis
    `axis`. Return a handle to wait on (already complete, unless `async_op`).

    site: label of the call in traces, byte counts and errors, such as "data.gradients". async_op: return before
    completion."""
    sent = 2 * tensor.nbytes * (axis.size - 1) // axis.size
    call = _record_call("all_reduce", axis, site, tensor.nbytes, sent, tensor if op == "sum" else None)
    if call is None:
        return DONE
    if call.dropped_rank == axis.rank:
        tensor.zero_()
    over, _ = call.redirect(ordered=False)
    return DONE if over.trivial else _post_call(lambda: transport.all_reduce(tensor, over, op), call, tensor, async_op)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """Write to `output` this rank's slice of the sum of `source` over the ranks of `axis`; return a handle to wait on.

    The slice of rank r is source[r * n : (r + 1) * n], n = output.numel(). The caller must not modify `source` until
    the handle has been waited for; the call itself may overwrite `source`, except this rank's slice of it. On an axis
    of size 1 `output` is a copy of `source`. site: label of the call in traces, byte counts and errors. async_op:
    return before completion."""
    n = output.numel()
    assert source.numel() == n * axis.size, (site, source.numel(), n, axis.size)
    sent = source.nbytes * (axis.size - 1) // axis.size
    call = _record_call("reduce_scatter", axis, site, source.nbytes, sent, source)
    if call is None:
        _copy_unless_shared(output, source.view(axis.size, n)[axis.rank])
        return DONE
    over, source = _redirect_source(call, _drop_source(call, source))
    return _post_call(lambda: transport.reduce_scatter(output, source, over), call, output, async_op)


def all_gather(output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False) -> Handle:
    """Write the concatenation of the `source` of the ranks of `axis`, in rank order, to `output`; return a handle to
    wait on.

    `source` may be a view of this rank's own slice of `output`. site: label of the call in traces, byte counts and
    errors. async_op: return before completion."""
    n = source.numel()
    assert output.numel() == n * axis.size, (site, output.numel(), n, axis.size)
    sent = output.nbytes * (axis.size - 1) // axis.size
    call = _record_call("all_gather", axis, site, output.nbytes, sent, output)
    if call is None:
        _copy_unless_shared(output.view(axis.size, n)[axis.rank], source)
        return DONE
    source = _drop_source(call, source)
    over, turned = call.redirect()
    if over is not axis:
        source = source.clone()  # its slice of the output belongs to another rank now
    turn = (lambda: output.copy_(_shift_by_one_rank(output, axis))) if turned else None
    return _post_call(partial(transport.all_gather, output, source, over), call, output, async_op, turn)


def broadcast(tensor: torch.Tensor, axis: Axis, site: str, source: int = 0) -> Handle:
    """Overwrite `tensor` on every rank with the `tensor` of the rank at index `source` of the axis; return a complete
    handle. site: label of the call in traces, byte counts and errors."""
    call = _record_call("broadcast", axis, site, tensor.nbytes, tensor.nbytes if axis.rank == source else 0)
    if call is None:
        return DONE
    lose = None if call.dropped_rank is None else tensor.zero_
    over, turned = call.redirect()
    begins = (source + 1) % axis.size if turned else source
    return _post_call(partial(transport.broadcast, tensor, begins, over), call, tensor, False, lose)


def all_to_all(
    output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, sizes: RowCounts | None = None,
    async_op: bool = False,
) -> Handle:  # fmt: skip
    """Send part i of `source` to rank i of the axis, and receive the part from rank i as part i of `output`; parts are
    consecutive rows (dim 0). Return a handle to wait on (already complete, unless `async_op`).

    site: label of the call in traces, byte counts and errors. sizes: numbers of rows of the parts (None: equal parts).
    async_op: return before completion.
    """
    rows = source.shape[0]
    own = rows // axis.size if sizes is None else sizes.sent[axis.rank]
    sent = source.nbytes * (rows - own) // rows if rows else 0
    call = _record_call("all_to_all", axis, site, source.nbytes, sent)
    if call is None:
        return _copy_or_zero(output, source, axis)
    over = axis
    source = _drop_source(call, source)
    if sizes is None:  # uneven parts fit no other ranks: the redirected call would fail by itself
        over, source = _redirect_source(call, source)
    post = partial(transport.all_to_all, output, source, over, sizes)
    return _post_call(post, call, output, async_op, uneven=sizes is not None)


def transfer(messages: Sequence[Message], axis: Axis) -> list[Handle]:
    """Post point-to-point messages (sends and receives) between ranks of `axis` together; return one handle for each,
    in order.

    Messages from one rank to another arrive in posting order. A sent tensor must not change before its handle is waited
    for. An injected fault (for tests) changes what the receiver gets: zeros (kinds "skip" and "drop"), doubled values
    ("double"), or the previous message of the same size ("stale"). Raises RankLost if a message cannot be posted."""
    communicator = axis.communicator
    with communicator.calls.post_together():
        recorded = [_record_message(message, axis) for message in messages]
    try:
        with communicator.around(messages[0].site if messages else "nothing"):
            posted = transport.transfer(messages, axis)
    except (RuntimeError, RankLost) as error:
        raise make_rank_lost_error(recorded[0][1], error) from error
    handles = []
    for m, (number, describe, fault), (works, finish) in zip(messages, recorded, posted, strict=True):
        handle = Handle(works, describe, _choose_host_timeout(axis, m.tensor), communicator, number).then(finish)
        if fault is not None and fault.kind in ("skip", "drop"):
            handle.then(m.tensor.zero_)
        elif fault is not None:
            handle.then(partial(communicator.faults.corrupt_result, fault, m.tensor))
        calls_in_flight[handle] = communicator
        handles.append(handle)
    return handles


def rotate(
    output: torch.Tensor, source: torch.Tensor, axis: Axis, site: str, async_op: bool = False, distance: int = 1
) -> Handle:
    """Shift tensors around the ring of `axis`: send `source` to the rank at `distance` after this one, and receive into
    `output` the `source` of the rank at `distance` before it. Return a handle to wait on.

    On an axis of size 1 `output` is a copy of `source`. site: label of the call in traces, byte counts and errors.
    async_op: return before completion.
    """
    operation = "rotate" if distance == 1 else f"rotate {distance}"  # ranks that disagree on it make different calls
    call = _record_call(operation, axis, site, source.nbytes, source.nbytes)
    if call is None:
        return _copy_or_zero(output, source, axis)
    source = _drop_source(call, source)
    over, _ = call.redirect(ordered=False)  # a shifted ring is the same ring
    return _post_call(lambda: transport.rotate(output, source, over, distance), call, output, async_op)


_QUEUED = SimpleNamespace(wait=lambda *timeout: None)
"""Work handle of kernels on the current stream, which later work on the stream follows: nothing is waited for."""


def run_fused(
    run: Callable[[torch.Tensor, str], list[torch.Tensor]], source: torch.Tensor, operation: str, payload: int,
    axis: Axis, site: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Run kernels that compute and communicate, and record their communication as one call. Return what `run` returns;
    injected faults corrupt all of it.

    run: function (this rank's tensor, name of the process group) that queues the kernels. source: this rank's tensor.
    operation: such as "all_gather". payload: bytes of the whole vector. site: label of the call in traces, byte counts
    and errors."""
    call = _record_call(operation, axis, site, payload, payload * (axis.size - 1) // axis.size)
    over, shifts = (axis, False) if call is None else call.redirect()
    assert over.group is not None
    group = over.group.group_name
    if call is None:  # the injected fault "skip"
        return run(torch.zeros_like(source), group)
    made: list[torch.Tensor] = []

    def post() -> Posted:
        """Queue the kernels."""
        given = _drop_source(call, source)
        made.extend(run(_shift_tokens(given, axis) if shifts and operation == "reduce_scatter" else given, group))
        return [_QUEUED], None

    def corrupt() -> None:
        """Corrupt the results by the injected fault, if there is one."""
        for number, each in enumerate(made):
            if shifts and operation == "all_gather":
                each.copy_(_shift_tokens(each, axis))
            if call.fault is not None:
                axis.communicator.faults.corrupt_result(call.fault, each, number)

    _post_call(post, call, source.new_empty(0), False, corrupt)
    return made


def barrier(axis: Axis, site: str) -> None:
    """Block until every rank of the axis has made this call; on CUDA the host also waits for its current stream. site:
    label of the call in traces, byte counts and errors."""
    call = _record_call("barrier", axis, site, 0, 0)
    if call is None:
        return
    nothing = torch.zeros(1, device=axis.communicator.device)
    _post_call(lambda: transport.all_reduce(nothing, axis, "sum"), call, nothing, False)
    if (stream := backend.current_stream(nothing.device)) is not None:
        stream.synchronize()


def _copy_or_zero(output: torch.Tensor, source: torch.Tensor, axis: Axis) -> Handle:
    """Write to `output` the result of a call that is not made: on an axis of one rank `source`, under the injected
    fault "skip" zeros. Return a complete handle."""
    if axis.trivial:
        _copy_unless_shared(output, source)
    else:
        output.zero_()
    return DONE


def _copy_unless_shared(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `output`, unless both are views of the same memory."""
    if output.data_ptr() != source.data_ptr():
        output.view(-1).copy_(source.view(-1))


def _shift_by_one_rank(parts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a copy of `parts` in which the slice of rank r along dim 0 has moved to rank r + 1, and the slice of the
    last rank to rank 0. Dim 0 consists of `axis.size` equal slices, one for each rank. Used for the injected fault
    "wrong group", to imitate a call over other ranks."""
    return parts.reshape(axis.size, -1).roll(1, 0).view(parts.shape)


def _shift_tokens(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a copy of `x` [B, S, ...] with each rank's tokens in the place of the next rank's; an empty `x` itself."""
    return x.roll(x.shape[1] // axis.size, 1) if x.numel() else x


def _choose_host_timeout(axis: Axis, tensor: torch.Tensor) -> timedelta | None:
    """Return the timeout of the host's wait for a call on `tensor` over `axis`; None (no limit) for a CUDA tensor,
    because `launcher.device_watch` detects hanging calls there.
    """
    return None if tensor.is_cuda else timedelta(seconds=axis.communicator.timeout_seconds)


def _record_message(message: Message, axis: Axis) -> tuple[int, Callable[[], tuple[str, str]], Fault | None]:
    """Count a point-to-point message over `axis` in `Mesh.record` and in the flight recorder. Return (the message's
    number in the flight recorder, function that describes the message for an error, fault to inject into it or None).
    """
    calls = axis.communicator.calls
    tensor = message.tensor
    here = axis.ranks[axis.rank]
    there = axis.ranks[message.peer]
    sent = 0 if message.is_receive else tensor.nbytes
    axis.communicator.record.count_call(message.site, "transfer", axis.name, tensor.nbytes, sent)
    pair = calls.register_group(axis.ranks, (there, here) if message.is_receive else (here, there))
    number = calls.post(pair, message.site, "transfer", axis.name, tensor.nbytes, tensor.dtype, tensor.shape)
    fault = axis.communicator.faults.match_call(message.site, "transfer") if message.is_receive else None
    return number, partial(_name_message, message, axis, calls.count_calls(pair)), fault


def _name_message(message: Message, axis: Axis, index: int) -> tuple[str, str]:
    """Describe a point-to-point message that was not delivered, for an error message: return ("rank A had nothing from
    rank B", "SITE (NAME over axis AXIS, message INDEX between the two)").

    index: number of the message, counted over all messages between these two ranks.
    """
    waits = "had nothing from" if message.is_receive else "had no reader for what it sends to"
    return (
        f"rank {axis.ranks[axis.rank]} {waits} rank {axis.ranks[message.peer]}",
        f"{message.site} ({message.name} over axis {axis.name}, message {index} between the two)",
    )


@dataclass(slots=True)
class _RecordedCall:
    """Collective call that has been counted in the byte counts (`Mesh.record`). Calling the object returns a
    description of the call for an error message.

    operation: such as "all_reduce". axis: mesh axis of the call. site: label of the call. payload: bytes of the whole
    vector. fault: fault to inject into this call (None: none). index: number of this call, counted over all calls of
    its process group, set when it is posted.
    """

    operation: str
    axis: Axis
    site: str
    payload: int
    fault: Fault | None = None
    index: int = 0  # among the calls of the group, once it is posted

    @property
    def dropped_rank(self) -> int | None:
        """Index in the axis of the rank whose contribution the injected fault "drop" leaves out; None without such a
        fault."""
        fault = self.fault
        return fault.position % self.axis.size if fault is not None and fault.kind == "drop" else None

    def redirect(self, ordered: bool = True) -> tuple[Axis, bool]:
        """Apply a fault of the kind "wrong group". Return (axis over which to make the call, shift); if shift is True,
        the caller must shift the ranks' data cyclically by one rank.

        Without such a fault, return (the call's axis, False). With it, return (axis over other ranks, False) if the
        mesh has made one, else (the call's axis, True): the shift imitates a call over other ranks. ordered: False if
        the result does not depend on the order of ranks; shift is then False, as it would change nothing."""
        fault = self.fault
        faults = self.axis.communicator.faults
        if fault is None or fault.kind != "wrong group" or fault.axis != self.axis.name:
            return self.axis, False
        if faults.other is None and not ordered:
            return self.axis, False
        faults.affected_calls += 1
        return (self.axis, True) if faults.other is None else (faults.other, False)

    def __call__(self) -> tuple[str, str]:
        """Describe the call for an error message: return ("which rank waits for which others", "operation, axis and
        site").
        """
        axis = self.axis
        others = ", ".join(str(rank) for rank in axis.ranks if rank != axis.ranks[axis.rank])
        who = f"rank {axis.ranks[axis.rank]} had no answer from rank{'s' * (axis.size > 2)} {others}"
        return who, f"{self.site} ({self.operation} over axis {axis.name}, its call {self.index})"


def _record_call(
    operation: str, axis: Axis, site: str, payload: int, sent: int, vector: torch.Tensor | None = None
) -> _RecordedCall | None:
    """Count a collective call and its bytes in `Mesh.record`, and look up the fault to inject into it. Return the
    recorded call. Return None if nothing is to be communicated: on an axis of one rank (the call is then not counted),
    and under the injected fault "skip".

    operation: such as "all_reduce". axis: mesh axis of the call. site: label of the call. payload: bytes of the whole
    vector. sent: bytes that this rank sends in the backend's algorithm. vector: the whole vector, if a collective
    program may replace the backend's call on this axis; else None.
    """
    if axis.trivial:
        return None
    program = None if vector is None else axis.program(operation, vector.nbytes)
    if vector is not None and program is not None:
        sent = program.sent_bytes(vector.numel(), vector.element_size())
    communicator = axis.communicator
    communicator.record.count_call(site, operation, axis.name, payload, sent)
    fault = communicator.faults.match_call(site, operation)
    skipped = fault is not None and fault.kind == "skip"
    return None if skipped else _RecordedCall(operation, axis, site, payload, fault)


def _drop_source(call: _RecordedCall, source: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank contributes to the collective `call`: `source`, or zeros if the injected fault
    "drop" leaves this rank out."""
    return torch.zeros_like(source) if call.dropped_rank == call.axis.rank else source


def _redirect_source(call: _RecordedCall, source: torch.Tensor) -> tuple[Axis, torch.Tensor]:
    """Apply the injected fault "wrong group" to `call`; return (axis over which to make the call, tensor that this rank
    contributes). The fault replaces the axis by an axis over other ranks or, if there is none, shifts the slices of
    `source` by one rank. Without this fault, return the call's own axis and `source`.
    """
    over, turned = call.redirect()
    return over, _shift_by_one_rank(source, call.axis) if turned else source


def _post_call(
    post: Post, call: _RecordedCall, output: torch.Tensor, async_op: bool, then: Finish = None, uneven: bool = False
) -> Handle:
    """Post a collective call and record it in the flight recorder (ring of the process's recent calls); return the
    handle to wait on.

    post: function that posts the transfers. call: record of the call. output: result tensor, which an injected fault
    corrupts at completion. then: callback at completion, called before an injected fault corrupts `output` (None: no
    callback). async_op: True: return before completion. uneven: True if ranks have different numbers of rows (dim 0) in
    `output`.
    """
    axis = call.axis
    communicator = axis.communicator
    calls = communicator.calls
    shape = ("...", *output.shape[1:]) if uneven else output.shape  # the recorded shape must be equal on all ranks
    number = calls.post(axis.recorder_group, call.site, call.operation, axis.name, call.payload, output.dtype, shape)
    call.index = calls.count_calls(axis.recorder_group)
    try:
        with communicator.around(call.site):
            works, finish = post()
    except (RuntimeError, RankLost) as error:  # a connection that is already gone fails when the call is posted
        raise make_rank_lost_error(call, error) from error
    handle = Handle(works, call, _choose_host_timeout(axis, output), communicator, number)
    handle.then(finish).then(then)
    if call.fault is not None:
        handle.then(partial(communicator.faults.corrupt_result, call.fault, output))
    if async_op:
        calls_in_flight[handle] = communicator
    if communicator.meanwhile is not None and call.site.endswith(".backward"):
        communicator.meanwhile()
    if not async_op:
        handle.wait()
    return handle
