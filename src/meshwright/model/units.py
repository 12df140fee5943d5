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
        """Hook called before the first use of the parameters of the FSDP unit named `unit`. `x`: the unit's input (None
        before the embedding). Return `x`, possibly wrapped."""
        return x

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """Hook called after the last use of the parameters of the FSDP unit named `unit`. `x`: the unit's output.
        Return `x`, possibly wrapped."""
        return x


NO_UNITS = Units()
