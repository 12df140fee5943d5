"""Units: the parts of a model whose parameters are gathered and released together (ZeRO hangs on these calls)."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

X = TypeVar("X", torch.Tensor, None)


class Units(Protocol):
    """Told when the forward pass enters and leaves a unit; what it returns takes the place of `x`, so that the
    backward pass comes by in the opposite order."""

    def enter(self, unit: str, x: X) -> X:
        """Before the first use of the unit's parameters. `x` is its input; None before the embedding."""

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """After the last use of the unit's parameters. `x` is its output."""


class NoUnits:
    """All parameters are always there."""

    def enter(self, unit: str, x: X) -> X:
        return x

    def leave(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        return x
