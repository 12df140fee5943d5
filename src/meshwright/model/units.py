"""FSDP units: parts of a model (the embedding, each layer, the head) whose parameters are all-gathered and resharded
together. ZeRO hooks into these calls."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

X = TypeVar("X", torch.Tensor, None)


class Units(Protocol):
    """Hooks that the model calls around each FSDP unit, to all-gather its parameters before use and reshard them after;
    the returned tensor replaces `x`, so that hooks of backward run in reverse order."""

    def enter(self, unit: str, x: X) -> X:
        """Called before the first use of the parameters of the FSDP unit named `unit`. Return `x`, the unit's input
        (None before the embedding), possibly wrapped.
        """

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """Called after the last use of the parameters of the FSDP unit named `unit`. Return `x`, the unit's output,
        possibly wrapped.
        """


class NoUnits:
    """Implementation of `Units` whose hooks around FSDP units (embedding, layer, head) do nothing: for a model whose
    parameters are all unsharded."""

    def enter(self, unit: str, x: X) -> X:
        """Return `x`, the input of the FSDP unit named `unit`, unchanged."""
        return x

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, the output of the FSDP unit named `unit`, unchanged."""
        return x
