"""Dynamic loss scaling for fp16: the loss is multiplied by a factor so that small gradients do not underflow, and
gradients are divided by it before use (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). Free of torch."""

from __future__ import annotations

import math

LEAST = 1.0
GREATEST = 2.0**127
"""Range of the scale: float32 overflows beyond, as in `torch.amp.GradScaler`, and no gradient needs less than 1."""


class LossScale:
    """Loss scale of 16-bit training: a factor on the loss that keeps small gradients from underflow. A dynamic scale is
    doubled after `every` finite steps in a row, and halved after a step whose loss or gradient norm is not finite.

    every: 0 for a constant scale. value: initial scale.

    All ranks update the scale from one all-reduced flag, so their scales stay equal without communication."""

    def __init__(self, value: float = 1.0, every: int = 0) -> None:
        """Start at the scale `value`. every: number of finite steps in a row after which it is doubled, 0 for a
        constant scale."""
        self.value = value
        self.every = every
        self.finite_steps = 0
        """Finite steps in a row since the scale was changed."""

    @property
    def dynamic(self) -> bool:
        """True if the scale changes during training, False if it is constant."""
        return self.every > 0

    def update(self, loss: float, finite: bool) -> bool:
        """Update the scale after a step. loss: the step's loss; finite: True if loss and gradient norm were both
        finite.

        Returns True if the scale was halved because the gradients overflowed with a finite loss, so that the next step
        may succeed; else False."""
        if not self.dynamic:
            return False
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if self.finite_steps >= self.every:  # more if a resumed run has a smaller `every`
            self.value = min(GREATEST, self.value * 2)
            self.finite_steps = 0
        if finite or self.value <= LEAST:
            return False
        self.value = max(LEAST, self.value / 2)
        return math.isfinite(loss)

    def state(self) -> dict[str, float | int] | None:
        """Return the checkpoint entry {"value": scale, "finite_steps": finite steps since the last change}; None for a
        constant scale."""
        return {"value": self.value, "finite_steps": self.finite_steps} if self.dynamic else None

    def restore(self, state: dict[str, float | int] | None) -> None:
        """Restore the scale from `state`, a checkpoint entry that the method `state` returned. None (from a run in
        another precision) keeps the initial scale."""
        if self.dynamic and state is not None:
            self.value = float(state["value"])
            self.finite_steps = int(state["finite_steps"])
