"""Run collective programs on tensors over torch.distributed: prepared once per rank, run many times.

On CPU tensors a long vector is cut into segments, a few of which run at a time: while one segment is in transfer
another is reduced, still in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.collectives import cutting
from meshwright.comm.backend import format_backend_error, get_group_backends
from meshwright.comm.lowering import AwaitReceive, AwaitSend, LocalCopy, Message, RankProgram, Reduce, lower
from meshwright.errors import RankLost, UserError
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.program.check_collective import CheckedCollective

SEGMENTS_IN_FLIGHT = 2
TAG = 77  # of the first segment in flight; calls without a program use lower tags

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "mean": torch.add,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}

Memory = Callable[[int, int], torch.Tensor]
"""The memory of adjacent slots: (first, count) -> 1-D tensor."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Range of a vector on which the collective program runs once. Segments are independent; their runs can overlap.

    plan: schedule of this rank. n: number of elements of a slot (buffer of one chunk of the segment). data: function
    (first slot, number of slots) -> memory of these slots in the vector. output: such a function for a separate output;
    None: the operation works in place. finish: callback after the run; None: no callback.
    """

    plan: RankProgram
    n: int
    data: Memory
    output: Memory | None = None
    finish: Callable[[], object] | None = None


class ScratchBuffers:
    """Scratch buffers that are reused from run to run. Programs that never run concurrently may share them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def take(self, name: str, lane: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return the 1-D scratch buffer of one purpose and lane, with `numel` elements and the dtype and device of
        `like`; its contents are undefined. The buffer is allocated on first use.

        name: purpose, such as "staging". lane: number of a lane (segments of a vector that run one after another);
        concurrent lanes get different buffers."""
        size, key = numel * like.element_size(), (name, lane, like.device)
        if key not in self._kept or self._kept[key].numel() < size:
            self._kept[key] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._kept[key][:size].view(like.dtype)


class Executable:
    """Collective program (each rank's sends, receives and reductions) prepared to run on this rank. All ranks of
    `group` construct it and run it, in the same order.

    checked: verified program. group: process group with as many ranks as the program (None: the world).
    timeout_seconds: limit of one wait for CPU tensors, after which RankLost names the waiting ranks and the step.
    buffers: scratch memory to share with programs that never run concurrently; None: new buffers. device: device of the
    vectors. Attribute `batched`: True for NCCL, where each group of messages is one call on the current CUDA stream."""

    def __init__(
        self,
        checked: CheckedCollective,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
        buffers: ScratchBuffers | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        program = self.program = checked.program
        self.checked = checked
        self.group: Any = dist.group.WORLD if group is None else group
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank(self.group)
        if len(self.ranks) != program.ranks:
            raise UserError(f"{self.name} is for {program.ranks} ranks; there are {len(self.ranks)}")
        self._timeout = timedelta(seconds=timeout_seconds)
        self._adjacent = lower(checked, self.rank)
        self._slot_by_slot: RankProgram | None = None
        self._combine = _COMBINE[program.reduction]
        self._buffers = ScratchBuffers() if buffers is None else buffers
        self.batched = get_group_backends(self.group)[torch.device(device).type] == "nccl"
        self._first = cutting.find_first_chunks(program)

    @property
    def name(self) -> str:
        """Operation and algorithm of the collective program, such as "all-reduce ring"."""
        return f"{self.program.operation} {self.program.algorithm}"

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes that this rank sends for a vector of `numel` elements, padding included.

        itemsize: bytes of an element.
        """
        return cutting.compute_sent_bytes(self.checked, self.rank, numel, itemsize, whole=self.batched)

    # --- running

    def run(self, vector: torch.Tensor | None, output: torch.Tensor | None = None) -> None:
        """Run the program in place on `vector`, the operation's whole vector, contiguous (None: barrier).

        output: receives the result of an all-to-all; None for other operations. In all-gather, gather, scatter and
        reduce-scatter, rank r owns slice r of the vector. Elements that the operation does not define have arbitrary
        values afterwards. Raises RankLost, and UserError for vectors that the program cannot take."""
        assert (output is not None) == self.program.has_output, self.name
        if vector is None:
            device = f"cuda:{torch.cuda.current_device()}" if self.batched else "cpu"
            vector = torch.zeros(1, dtype=torch.uint8, device=device)
        assert vector.is_contiguous() and (output is None or output.is_contiguous()), self.name
        if vector.numel() == 0:
            return
        if vector.is_cpu or self.batched:
            self._run_flat(vector.view(-1), None if output is None else output.view(-1))
            return
        host = vector.cpu().view(-1)  # gloo sends host memory only
        result = host if output is None else torch.empty_like(host)
        self._run_flat(host, None if output is None else result)
        (vector if output is None else output).view(-1).copy_(result)

    def _run_flat(self, vector: torch.Tensor, output: torch.Tensor | None) -> None:
        """Run the program on the 1-D `vector`, in memory from which the backend can send: GPU memory with NCCL, CPU
        memory otherwise. output: receives the result of an all-to-all; None for other operations, whose result is
        written into `vector`."""
        if self.program.reduction == "mean" and not vector.is_floating_point():
            raise UserError(f"{self.name}: a mean needs floating point numbers, not {vector.dtype}")
        if self.program.operation not in cutting.OWNED:
            cuts = cutting.split_segments(self.program, vector.numel(), vector.element_size(), whole=self.batched)
            self._run_segments([self._make_segment(vector, *cut) for cut in cuts])
        elif self._needs_no_padding(vector.numel()):
            self._run_segments(self._split_rank_slices(vector, output))
        else:
            self._run_padded(vector, output)
        if self.program.reduction == "mean":
            self._divide_by_ranks(vector)

    def _run_segments(self, segments: list[_Segment]) -> None:
        """Run the program on each segment of the vector. On gloo the segments are distributed over at most
        `SEGMENTS_IN_FLIGHT` lanes (lists of segments), which run concurrently."""
        if self.batched:
            for segment in segments:
                self._run_in_batches(segment)
            return
        lanes = [
            self._run_lane(lane, segments[lane::SEGMENTS_IN_FLIGHT])
            for lane in range(min(SEGMENTS_IN_FLIGHT, len(segments)))
        ]
        # Advance the lanes in turn by one group each. Ranks cannot deadlock: a group that a rank has not posted yet
        # follows the group in which it waits, on that rank and in the program.
        while lanes:
            lanes = [lane for lane in lanes if next(lane, False)]

    def _run_lane(self, lane: int, segments: Sequence[_Segment]) -> Iterator[bool]:
        """Run the program on several segments of the vector, one after the other. This generator yields True after it
        has posted a group of messages, so that the caller can advance other lanes in the meantime. lane: number of this
        list of segments among the lists (lanes) that run concurrently; each lane has a separate message tag and
        separate scratch buffers. segments: segments of this lane, in order.
        """
        tag = TAG + lane
        for segment in segments:
            memory = self._get_slot_memory(segment, lane)
            staging = self._get_scratch_memory("staging", lane, segment, segment.plan.staging)
            works: list[Any] = [None] * segment.plan.messages
            for group in segment.plan.groups:
                for sent in group.before:
                    self._wait_for_message(works, sent.message)
                recv, send = self.group.recv, self.group.send
                for call, messages in ((recv, group.receives), (send, group.sends), (recv, group.ahead)):
                    for message in messages:
                        tensor = self._get_message_memory(message, memory, staging)
                        self._post_message(works, message, call, tensor, tag)
                yield True
                for event in group.after:
                    if isinstance(event, (AwaitReceive, AwaitSend)):
                        self._wait_for_message(works, event.message)
                    else:
                        self._apply_locally(event, memory, staging)
            if segment.finish is not None:
                segment.finish()

    def _run_in_batches(self, segment: _Segment) -> None:
        """Run the program on a segment with one batched call per group of messages on the current CUDA stream, as NCCL
        requires (one ncclGroup)."""
        memory = self._get_slot_memory(segment, 0)
        staging = self._get_scratch_memory("staging", 0, segment, segment.plan.staging)
        memory_of = partial(self._get_message_memory, memory=memory, staging=staging)
        early: list[Message] = []
        for group in segment.plan.groups:
            transfers = [
                dist.P2POp(call, memory_of(message), group=self.group, group_peer=message.peer)
                for call, messages in ((dist.irecv, early + group.receives), (dist.isend, group.sends))
                for message in messages
            ]
            for work in dist.batch_isend_irecv(transfers) if transfers else ():
                work.wait()
            early = group.ahead
            for event in group.after:
                if isinstance(event, (Reduce, LocalCopy)):
                    self._apply_locally(event, memory, staging)
        if segment.finish is not None:
            segment.finish()

    def _get_message_memory(self, message: Message, memory: Memory, staging: Memory) -> torch.Tensor:
        """Return the memory from which `message` is sent or into which it is received. memory, staging: functions
        (first slot, number of slots) -> 1-D tensor with these slots (chunk buffers) of the vector, or of the staging
        buffer, which receives messages that are then reduced into the vector.
        """
        if message.size == 0:
            return self._buffers.take("signal", 0, 1, memory(0, 1))
        return memory(message.slot, message.size) if message.staging < 0 else staging(message.staging, message.size)

    def _post_message(
        self, works: list[Any], message: Message, call: Callable[..., Any], tensor: torch.Tensor, tag: int
    ) -> None:
        """Post a message with `call`, the send or recv of the process group. Raises RankLost.

        works: list of work handles, in which the new handle is stored at index `message.number`. tensor: memory of the
        message. tag: message tag."""
        try:
            works[message.number] = call([tensor], message.peer, tag)
        except RuntimeError as error:  # a lost connection fails immediately
            raise self._make_rank_lost_error(message, error) from error

    def _wait_for_message(self, works: list[Any], message: Message) -> None:
        """Wait until a posted message is complete; raises RankLost on a timeout. works: work handles by message
        number."""
        try:
            works[message.number].wait(self._timeout)
        except RuntimeError as error:
            raise self._make_rank_lost_error(message, error) from error
        works[message.number] = None

    def _make_rank_lost_error(self, message: Message, error: RuntimeError) -> RankLost:
        """Build the RankLost error for a message that failed: which rank waits for which, in which step, and the
        backend's error."""
        get_process_writer().give_up()
        group = int(self.program.steps.group[message.step])
        among = "" if self.ranks == list(range(len(self.ranks))) else f" of ranks {', '.join(map(str, self.ranks))}"
        return RankLost(
            f"rank {self.ranks[self.rank]} waits for rank {self.ranks[message.peer]}: step {group} "
            f"({self.program.describe(message.step)}) of {self.name}{among}: {format_backend_error(error)[:200]}"
        )

    def _apply_locally(self, event: Reduce | LocalCopy, memory: Memory, staging: Memory) -> None:
        """Execute `event`, a local copy or reduction in the rank's schedule. memory, staging: functions (first slot,
        number of slots) -> 1-D tensor with these slots (chunk buffers) of the vector, or of the staging buffer, which
        holds received data that are not yet reduced.
        """
        target = memory(event.slot, event.size)
        source = staging(event.staging, event.size) if isinstance(event, Reduce) else memory(event.source, event.size)
        if isinstance(event, LocalCopy) and not event.combine:
            target.copy_(source)
        else:
            self._combine(target, source, out=target)

    def _divide_by_ranks(self, vector: torch.Tensor) -> None:
        """Divide the sums that this rank holds in `vector` by the number of ranks, in place, for the reduction "mean".
        On ranks without a result (a reduce to another rank) do nothing."""
        operation, size = self.program.operation, vector.numel() // self.program.ranks
        if operation == "reduce-scatter":
            vector = vector[self.rank * size : (self.rank + 1) * size]
        if operation != "reduce" or self.rank == self.program.root:
            vector.div_(self.program.ranks)

    # --- memory

    def _make_segment(self, vector: torch.Tensor, start: int, n: int) -> _Segment:
        """Return the segment of `vector` that begins at element `start` and has chunks of `n` elements. Used for
        operations in which ranks own no slice of the vector, such as a broadcast. A segment beyond the end of the
        vector uses a padded copy, which is copied back after the run.
        """
        length = n * self.program.chunks
        part = vector[start : start + length]
        if part.numel() == length:
            return _Segment(self._adjacent, n, _view_slots(part, n))
        padded = self._buffers.take("padded", 0, length, vector)
        padded[: part.numel()] = part
        padded[part.numel() :] = 0
        return _Segment(self._adjacent, n, _view_slots(padded, n), finish=lambda: part.copy_(padded[: part.numel()]))

    def _needs_no_padding(self, numel: int) -> bool:
        """Return True if each rank's slice of a vector of `numel` elements consists of whole chunks, without
        padding."""
        return (
            cutting.compute_chunk_length(self.program, numel) * self.program.chunks == numel
            and self.program.chunks % self.program.ranks == 0
        )

    def _split_rank_slices(self, vector: torch.Tensor, output: torch.Tensor | None) -> list[_Segment]:
        """Split a vector in which each rank owns a slice into independent segments, which can run concurrently. Each
        segment takes the same range of elements from every chunk, and so a part of every rank's slice. output: result
        of an all-to-all, split like the vector; None: the operation works in place.
        """
        chunks = self.program.chunks
        n = vector.numel() // chunks
        wanted = max(cutting.SEGMENT_BYTES // chunks, cutting.CHUNK_BYTES) // vector.element_size()
        count = 1 if self.batched else max(1, round(n / wanted))
        if count == 1:
            return [
                _Segment(self._adjacent, n, _view_slots(vector, n), None if output is None else _view_slots(output, n))
            ]
        if self._slot_by_slot is None:
            self._slot_by_slot = lower(self.checked, self.rank, merge=False)
        length = -(-n // count)
        return [
            _Segment(
                self._slot_by_slot,
                min(length, n - start),
                _view_strided_slots(vector, n, start, length),
                None if output is None else _view_strided_slots(output, n, start, length),
            )
            for start in range(0, n, length)
        ]

    def _run_padded(self, vector: torch.Tensor, output: torch.Tensor | None) -> None:
        """Run the program on a copy of `vector` in which every rank's slice is padded to whole chunks, and copy the
        result back.

        output: receives the result of an all-to-all; None: the operation works in place."""
        n, ranks = cutting.compute_chunk_length(self.program, vector.numel()), self.program.ranks
        padded = self._buffers.take("padded", 0, n * self.program.chunks, vector).zero_()
        result = padded if output is None else self._buffers.take("padded output", 0, padded.numel(), vector)
        target = vector if output is None else output
        share = vector.numel() // ranks
        places = [slice(first * n, first * n + share) for first in self._first[:-1]]
        for rank, place in enumerate(places):
            padded[place] = vector[rank * share : (rank + 1) * share]
        data, after = _view_slots(padded, n), None if output is None else _view_slots(result, n)
        self._run_segments([_Segment(self._adjacent, n, data, after)])
        for rank, place in enumerate(places):
            target[rank * share : (rank + 1) * share] = result[place]

    def _get_slot_memory(self, segment: _Segment, lane: int) -> Memory:
        """Return a function (first slot, number of slots) -> 1-D tensor that gives access to a segment's slots, in the
        vector, the output or scratch memory. A slot is the buffer of one chunk of the segment. lane: number of the lane
        (segments of the vector that run one after another), which has its own scratch buffer.
        """
        program, data, output = self.program, segment.data, segment.output
        if output is None and program.scratch == 0:
            return data
        scratch = self._get_scratch_memory("scratch", lane, segment, program.scratch)
        chunks, first_scratch = program.chunks, program.first_scratch

        def memory(slot: int, count: int) -> torch.Tensor:
            """Return the memory of the `count` adjacent slots (buffers of one chunk each) from `slot` on, as a 1-D
            tensor."""
            if slot < chunks:
                return data(slot, count)
            if slot >= first_scratch:
                return scratch(slot - first_scratch, count)
            assert output is not None
            return output(slot - chunks, count)

        return memory

    def _get_scratch_memory(self, name: str, lane: int, segment: _Segment, slots: int) -> Memory:
        """Return a function (first slot, number of slots) -> 1-D tensor that gives access to a scratch buffer of
        `slots` slots, each as large as a chunk of `segment`. The buffer is allocated once and reused by later runs.

        name: purpose of the buffer, such as "staging". lane: number of the lane (list of segments of the vector that
        run one after the other); lanes run concurrently, so each has its own buffer.
        """
        return _view_slots(self._buffers.take(name, lane, slots * segment.n, segment.data(0, 1)), segment.n)


def _view_slots(tensor: torch.Tensor, n: int) -> Memory:
    """Return a function (first slot, number of slots) -> 1-D view of these slots in `tensor`; a slot has `n`
    elements."""
    return lambda slot, count: tensor[slot * n : (slot + count) * n]


def _view_strided_slots(tensor: torch.Tensor, n: int, start: int, length: int) -> Memory:
    """Return a function (slot, number of slots = 1) -> view of one slot in `tensor`, which consists of chunks of `n`
    elements: slot i is the elements [start, start + length) of chunk i. The slots are not adjacent in memory, so each
    call returns a single slot.
    """
    pieces = tensor.view(-1, n)[:, start : start + length].unbind()
    return lambda slot, count: pieces[slot]
