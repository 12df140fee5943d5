"""FSDP units: parts of a model (the embedding, each layer, the head) whose parameters are all-gathered and resharded
together. ZeRO hooks into these calls."""

from __future__ import annotations

from typing import TypeVar

import torch

X = TypeVar("X", torch.Tensor, None)


class Units:
    """Hooks that the model calls before and after each FSDP unit, to all-gather the unit's parameters before use and
    reshard them after use. The model continues with the tensor that a hook returns, so that a subclass can wrap it in
    an autograd function whose backward calls hooks, too. The hooks of this base class do nothing; it serves models with
    unsharded parameters."""

    def enter(self, unit: str, x: X) -> X:
        """Hook called before the first use of the parameters of the FSDP unit named `unit`.

        `x`: the unit's input (None before the embedding). Return `x`; a subclass may return `x` as the output of an
        autograd identity function, whose backward runs after the unit's backward."""
        return x

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """Hook called after the last use of the parameters of the FSDP unit named `unit` in forward.

        `x`: the unit's output. Return `x`; a subclass may return `x` as the output of an autograd identity function,
        whose backward runs before the unit's backward."""
        return x


NO_UNITS = Units()
