"""FSDP units: parts of a model (the embedding, each layer, the head) whose parameters are all-gathered and resharded
together. ZeRO hooks into these calls."""

from __future__ import annotations

from typing import TypeVar

import torch

X = TypeVar("X", torch.Tensor, None)


class Units:
    """Hooks that the model calls around each FSDP unit, to all-gather its parameters before use and reshard them after;
    the returned tensor replaces `x`, so that hooks of backward run in reverse order. Those of this class do nothing:
    for a model whose parameters are all unsharded."""

    def enter(self, unit: str, x: X) -> X:
        """Called before the first use of the parameters of the FSDP unit named `unit`. Return `x`, the unit's input
        (None before the embedding), possibly wrapped.
        """
        return x

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """Called after the last use of the parameters of the FSDP unit named `unit`. Return `x`, the unit's output,
        possibly wrapped.
        """
        return x


NO_UNITS = Units()
