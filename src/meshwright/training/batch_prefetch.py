"""Prefetch of the next step's batch: it is read, pinned and copied while the GPU still computes the present step, so
that the GPU does not wait for the host between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch

from meshwright.comm import backend

Batch = TypeVar("Batch")


class BatchPrefetcher(Generic[Batch]):
    """Loader of training batches that may load one step in advance.

    load: function (index of the step) -> batch, the same at every call. device: device of the batch's tensors. On CUDA
    a batch that is loaded in advance is copied on a separate stream, so that the copies do not queue behind the present
    step's kernels."""

    def __init__(self, load: Callable[[int], Batch], device: torch.device) -> None:
        """Start without a batch; arguments: see the class."""
        self._load, self._device = load, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: tuple[int, Batch, Any] | None = None  # step, its batch, and the event after its copies

    def prefetch(self, step: int) -> None:
        """Load the batch of the step with index `step`, for a later `take`; the host does not wait for its copies."""
        on_copies: AbstractContextManager[Any] = nullcontext()
        if self._copies is not None:
            on_copies = torch.cuda.stream(self._copies)
        with on_copies:
            batch = self._load(step)
        self._next = step, batch, None if self._copies is None else self._copies.record_event()

    def take(self, step: int) -> Batch:
        """Return the batch of the step with index `step`: the one loaded in advance, if it is of this step; else load
        it now. Work that is queued afterwards on the current stream may read it."""
        found, self._next = self._next, None
        if found is None or found[0] != step:
            return self._load(step)
        _, batch, copied = found
        stream = backend.current_stream(self._device)
        if stream is not None:
            stream.wait_event(copied)
            for tensor in list_tensors(batch):
                if tensor.is_cuda:  # its memory is the copy stream's: not reused there before the step has read it
                    tensor.record_stream(stream)
        return batch


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from list_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from list_tensors(getattr(value, field.name))
