"""A copy of the state in host memory, taken as fast as memory can be copied; training goes on while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.parallel.flat_buffers import TensorSlice


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Slices in host memory. `buffers` hold them back to back in this order, wider dtypes first.

    `ready`: on CUDA the event after the last copy; the buffers may be read once it has happened.
    """

    slices: tuple[TensorSlice, ...]
    buffers: tuple[torch.Tensor, ...]
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Return when the copies have arrived."""
        if self.ready is not None:
            self.ready.synchronize()


class SnapshotBuffers:
    """Host memory that is allocated once and used for every snapshot: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, bool], torch.Tensor] = {}

    def reserve(self, slices: Sequence[TensorSlice]) -> None:
        """Allocate what a snapshot of such slices needs, pages touched."""
        for dtype, group in _by_dtype(slices).items():
            self._buffer(dtype, group).fill_(0)  # pages are made when they are first written

    def take(self, slices: Sequence[TensorSlice]) -> Snapshot:
        """Copy the slices. On CUDA the copies are queued on the current stream, before whatever changes the state
        next; nothing waits here."""
        copied: list[TensorSlice] = []
        used: list[torch.Tensor] = []
        ready: torch.cuda.Event | None = None
        for dtype, group in _by_dtype(slices).items():
            buffer = self._buffer(dtype, group)
            position = 0
            for source in _neighbours_joined(group):
                buffer[position : position + source.numel()].copy_(source, non_blocking=True)
                position += source.numel()
            used.append(buffer[:position])
            position = 0
            for item in group:
                size = item.stop - item.start
                view = buffer[position : position + size]
                copied.append(replace(item, tensor=view))
                position += size
        if any(item.tensor.is_cuda for item in slices):
            ready = torch.cuda.Event()
            ready.record()
        return Snapshot(tuple(copied), tuple(used), ready)

    def _buffer(self, dtype: torch.dtype, group: Sequence[TensorSlice]) -> torch.Tensor:
        pinned = any(item.tensor.is_cuda for item in group)
        size = sum(item.stop - item.start for item in group)
        buffer = self._buffers.get((dtype, pinned))
        if buffer is None or buffer.numel() < size:
            self._buffers.pop((dtype, pinned), None)  # before the new one is made
            buffer = torch.empty(size, dtype=dtype, pin_memory=pinned)
            self._buffers[dtype, pinned] = buffer
        return buffer


def _by_dtype(slices: Sequence[TensorSlice]) -> dict[torch.dtype, list[TensorSlice]]:
    """Slices by dtype, wider ones first, so that every element in a file lies at a multiple of its size."""
    groups: dict[torch.dtype, list[TensorSlice]] = {}
    for item in sorted(slices, key=lambda item: -item.tensor.element_size()):
        groups.setdefault(item.tensor.dtype, []).append(item)
    return groups


def _neighbours_joined(slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
    """The slices' tensors, those that follow each other in the same memory as one: fewer, longer copies."""
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
