"""A copy of the state in host memory, taken as fast as memory can be copied; training goes on while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.parallel.flat_buffers import TensorSlice


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Pieces in host memory. `buffers` hold them back to back in this order, wider dtypes first.

    `ready`: on CUDA the event after the last copy; the buffers may be read once it has happened.
    """

    pieces: tuple[TensorSlice, ...]
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

    def reserve(self, pieces: Sequence[TensorSlice]) -> None:
        """Allocate what a snapshot of such pieces needs, pages touched."""
        for dtype, group in _by_dtype(pieces).items():
            self._buffer(dtype, group).fill_(0)  # pages are made when they are first written

    def take(self, pieces: Sequence[TensorSlice]) -> Snapshot:
        """Copy the pieces. On CUDA the copies are queued on the current stream, before whatever changes the state
        next; nothing waits here."""
        copied: list[TensorSlice] = []
        used: list[torch.Tensor] = []
        ready: torch.cuda.Event | None = None
        for dtype, group in _by_dtype(pieces).items():
            buffer = self._buffer(dtype, group)
            position = 0
            for source in _neighbours_joined(group):
                buffer[position : position + source.numel()].copy_(source, non_blocking=True)
                position += source.numel()
            used.append(buffer[:position])
            position = 0
            for piece in group:
                size = piece.stop - piece.start
                view = buffer[position : position + size]
                copied.append(replace(piece, tensor=view))
                position += size
        if any(piece.tensor.is_cuda for piece in pieces):
            ready = torch.cuda.Event()
            ready.record()
        return Snapshot(tuple(copied), tuple(used), ready)

    def _buffer(self, dtype: torch.dtype, group: Sequence[TensorSlice]) -> torch.Tensor:
        pinned = any(piece.tensor.is_cuda for piece in group)
        size = sum(piece.stop - piece.start for piece in group)
        buffer = self._buffers.get((dtype, pinned))
        if buffer is None or buffer.numel() < size:
            self._buffers.pop((dtype, pinned), None)  # before the new one is made
            buffer = torch.empty(size, dtype=dtype, pin_memory=pinned)
            self._buffers[dtype, pinned] = buffer
        return buffer


def _by_dtype(pieces: Sequence[TensorSlice]) -> dict[torch.dtype, list[TensorSlice]]:
    """Pieces by dtype, wider ones first, so that every element in a file lies at a multiple of its size."""
    groups: dict[torch.dtype, list[TensorSlice]] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.element_size()):
        groups.setdefault(piece.tensor.dtype, []).append(piece)
    return groups


def _neighbours_joined(pieces: Sequence[TensorSlice]) -> list[torch.Tensor]:
    """The pieces' tensors, those that follow each other in the same memory as one: fewer, longer copies."""
    joined: list[torch.Tensor] = []
    for piece in pieces:
        tensor = piece.tensor.detach()
        assert tensor.ndim == 1 and tensor.is_contiguous() and tensor.numel() == piece.stop - piece.start, piece.name
        if joined:
            last = joined[-1]
            same = last.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            if same and last.storage_offset() + last.numel() == tensor.storage_offset():
                joined[-1] = last.as_strided((last.numel() + tensor.numel(),), (1,))
                continue
        joined.append(tensor)
    return joined
