"""Snapshots of the training state in host memory, so that training continues while they are written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.comm import backend
from meshwright.parallel.flat_buffers import TensorSlice

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all CUDA contexts
CHUNK_BYTES = 2**30
"""Bytes of one copy from a GPU and of one range of pinned memory at most, a power of two: between two copies the GPU
can send the few numbers that the host waits for in each step."""


@dataclass(slots=True)
class Snapshot:
    """Copy of slices of the training state in host memory.

    slices: the copied slices, whose tensors are views of `buffers`. buffers: one buffer per dtype, wider dtypes first.
    sources: on CUDA, the tensors that are copied, which must not be freed before the copies are complete; empty after
    `wait`, and on CPUs. stream: on CUDA, the stream that changes the state. ready: on CUDA, the event that follows the
    last copy and must have completed before the buffers are read. Both are None on CPUs. waits: events on `stream`
    before and after its wait for the copies; None before `wait_on_stream`, and on CPUs."""

    slices: tuple[TensorSlice, ...]
    buffers: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]
    stream: torch.cuda.Stream | None
    ready: torch.cuda.Event | None
    waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def wait(self) -> None:
        """Wait until the copies of this snapshot from the GPU to host memory are complete, and release their
        sources."""
        if self.ready is not None:
            self.ready.synchronize()
        self.sources = ()

    def wait_on_stream(self) -> None:
        """Make the GPU, not the host, wait until the copies are complete; called before the state changes."""
        if self.stream is not None and self.ready is not None and self.waits is None:
            begin = self.stream.record_event(torch.cuda.Event(enable_timing=True))
            self.stream.wait_event(self.ready)
            self.waits = begin, self.stream.record_event(torch.cuda.Event(enable_timing=True))

    def read_wait(self, ended: bool = False) -> float | None:
        """Return the seconds for which the stream of the GPU has waited for the copies, 0 on a CPU. None if the GPU has
        not done so yet. ended: True to make the host wait until the GPU has passed `wait_on_stream`; if that was not
        called, the result is 0."""
        if self.ready is None or (ended and self.waits is None):
            return 0.0
        if self.waits is None or not (ended or self.waits[1].query()):
            return None
        begin, end = self.waits
        end.synchronize()  # reached already, unless `ended`
        return begin.elapsed_time(end) / 1000


class SnapshotBuffers:
    """Host buffers that all snapshots of a run reuse, because allocating memory takes longer than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self._copies: Any = None
        """On CUDA, the stream that copies."""

    def reserve(self, slices: Sequence[TensorSlice]) -> None:
        """Allocate the host buffers for snapshots of `slices` and touch every memory page, so that `take` causes no
        page faults."""
        for dtype, group in _group_by_dtype(slices).items():
            self._get_buffer(dtype, group).fill_(0)  # the first write allocates the pages

    def take(self, slices: Sequence[TensorSlice]) -> Snapshot:
        """Copy the slices to host memory and return the snapshot. On CUDA the copies are queued on a separate stream,
        without synchronization, so that the next step computes meanwhile: `Snapshot.wait_on_stream` must be called
        before the slices change."""
        copied: list[TensorSlice] = []
        used: list[torch.Tensor] = []
        stream = next(filter(None, (backend.current_stream(item.tensor.device) for item in slices)), None)
        with self._start_copies(stream):
            for dtype, group in _group_by_dtype(slices).items():
                buffer = self._get_buffer(dtype, group)
                position = 0
                for source in _merge_adjacent(group):
                    target = buffer[position : position + source.numel()]
                    for part in [slice(None)] if stream is None else split_in_chunks(target):
                        target[part].copy_(source[part], non_blocking=True)
                    position += source.numel()
                used.append(buffer[:position])
                position = 0
                for item in group:
                    size = item.stop - item.start
                    view = buffer[position : position + size]
                    copied.append(replace(item, tensor=view))
                    position += size
        ready = None if stream is None else self._copies.record_event()
        sources = () if stream is None else tuple(item.tensor for item in slices)
        return Snapshot(tuple(copied), tuple(used), sources, stream, ready)

    def _start_copies(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """Return a context manager in which copies are queued on the copy stream, after the work that is queued on
        `stream` now. stream: stream that computes; None on a CPU."""
        if stream is None:
            return nullcontext()
        self._copies = self._copies or torch.cuda.Stream(stream.device)
        self._copies.wait_stream(stream)
        return torch.cuda.stream(self._copies)

    def _get_buffer(self, dtype: torch.dtype, group: Sequence[TensorSlice]) -> torch.Tensor:
        """Return the host buffer into which all slices of one dtype are copied: the buffer of an earlier snapshot if it
        is large enough, else a new buffer (in pinned memory if a slice is on a CUDA device).

        group: the slices of this dtype."""
        pinned = any(item.tensor.is_cuda for item in group)
        size = sum(item.stop - item.start for item in group)
        buffer = self._buffers.get((dtype, pinned))
        if buffer is None or buffer.numel() < size:
            self._buffers.pop((dtype, pinned), None)  # freed before the new one is allocated
            buffer = None
            buffer = self._buffers[dtype, pinned] = torch.empty(size, dtype=dtype)
            if pinned:
                pin_in_place(buffer)
        return buffer


def pin_in_place(buffer: torch.Tensor) -> None:
    """Pin the pages of a 1-D CPU tensor, in chunks, until the tensor object is freed, so that GPUs copy to it
    asynchronously. PyTorch's allocator of pinned memory would round the size up to a power of two: 12 GiB of state
    would take 16 GiB a rank. If the system refuses a chunk, the rest stays unpinned: copies to it then block."""
    runtime = torch.cuda.cudart()
    for part in split_in_chunks(buffer):
        chunk = buffer[part]
        if int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, PORTABLE)):
            with suppress(RuntimeError):  # CUDA reports the refusal once more, in the next launch of a kernel
                torch.zeros(1, device="cuda")
            return
        weakref.finalize(buffer, runtime.cudaHostUnregister, chunk.data_ptr())


def split_in_chunks(buffer: torch.Tensor) -> Iterator[slice]:
    """Split a 1-D CPU tensor where its address is a multiple of `CHUNK_BYTES`, and so at the bounds of pages; yield the
    elements of each part."""
    start, size = 0, buffer.element_size()
    while start < buffer.numel():
        rest = CHUNK_BYTES - (buffer.data_ptr() + start * size) % CHUNK_BYTES
        yield slice(start, min(start + rest // size, buffer.numel()))
        start += rest // size


def _group_by_dtype(slices: Sequence[TensorSlice]) -> dict[torch.dtype, list[TensorSlice]]:
    """Group slices by dtype; return dtype -> slices, wider dtypes first, so that elements are aligned in the file."""
    groups: dict[torch.dtype, list[TensorSlice]] = {}
    for item in sorted(slices, key=lambda item: -item.tensor.element_size()):
        groups.setdefault(item.tensor.dtype, []).append(item)
    return groups


def _merge_adjacent(slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
    """Merge the slices' tensors that are adjacent in memory into single views, for fewer and longer copies; return the
    list of tensors and views."""
    joined: list[torch.Tensor] = []
    for item in slices:
        tensor = item.tensor.detach()
        assert tensor.ndim == 1 and tensor.is_contiguous() and tensor.numel() == item.stop - item.start, item.name
        if joined:
            last = joined[-1]
            same = last.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            if same and last.storage_offset() + last.numel() == tensor.storage_offset():
                joined[-1] = last.as_strided((last.numel() + tensor.numel(),), (1,))
                continue
        joined.append(tensor)
    return joined
