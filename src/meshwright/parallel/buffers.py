"""Whole gradient buffers that exist only while the backward pass collects into them (ZeRO-2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

REDUCTIONS_IN_FLIGHT = 2
"""Gradient reductions that may be under way before the backward pass waits for the oldest: this bounds how many whole
buffers there are."""


def kept_buffers(sizes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """How many buffers of which size are kept from unit to unit, given the sizes of each unit's buffers in order: where
    neighbours have the same (layers), those of the unit that the backward pass is in and one for each reduction under
    way."""
    kept: dict[int, int] = {}
    for unit, run in groupby(sizes):
        length = len(list(run))
        for size in set(unit) if length > 1 else ():
            several = unit.count(size) * min(length, 1 + REDUCTIONS_IN_FLIGHT // len(unit))
            kept[size] = max(kept.get(size, 0), several)
    return kept


class TransientBuffers:
    """A small pool of them. Layers' buffers are kept for the next layer, others (an embedding's) given back at once."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]]) -> None:
        self._device, self._dtype = device, dtype
        self._kept = kept_buffers(sizes)
        self._free: dict[int, list[torch.Tensor]] = {size: [] for size in self._kept}

    def take(self, size: int) -> torch.Tensor:
        """A buffer of `size` elements with whatever is in it."""
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=self._dtype, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Nobody uses the buffer any more."""
        free = self._free.get(buffer.numel())
        if free is not None and len(free) < self._kept[buffer.numel()]:
            free.append(buffer)

    def kept(self) -> list[torch.Tensor]:
        """The buffers that wait for their next use."""
        return [buffer for free in self._free.values() for buffer in free]
