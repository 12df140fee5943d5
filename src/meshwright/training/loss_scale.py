"""Dynamic loss scaling: gradients in fp16 are computed times a factor, so that small ones do not vanish, and divided by
it before anybody looks at them (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). Free of torch."""

from __future__ import annotations

import math

LEAST, GREATEST = 1.0, 2.0**127
"""Beyond, float32 cannot hold the factor: `torch.amp.GradScaler` stops there too. Below 1 no gradient needs it."""


class LossScale:
    """The factor, a power of two: doubled after `every` finite steps in a row, halved by a step that overflowed.

    All ranks know whether a step was finite, so that they agree on it without a word. `every` 0: it stays as it is.
    """

    def __init__(self, value: float = 1.0, every: int = 0) -> None:
        self.value, self.every = value, every
        self.finite_steps = 0
        """Finite steps in a row since the factor was changed."""

    @property
    def dynamic(self) -> bool:
        return self.every > 0

    def note(self, loss: float, finite: bool) -> bool:
        """A step is over. Returns whether, if it was not finite, a lower factor may help: the loss is a number, and the
        factor could still be halved."""
        if not self.dynamic:
            return False
        if finite:
            self.finite_steps += 1
            if self.finite_steps >= self.every:  # more, where a run that went on has a smaller `every`
                self.value, self.finite_steps = min(GREATEST, self.value * 2), 0
            return False
        self.finite_steps = 0
        if self.value <= LEAST:
            return False
        self.value = max(LEAST, self.value / 2)
        return math.isfinite(loss)

    def state(self) -> dict[str, float | int] | None:
        """What a checkpoint must hold of it."""
        return {"value": self.value, "finite_steps": self.finite_steps} if self.dynamic else None

    def restore(self, state: dict[str, float | int] | None) -> None:
        """Go on from `state`; a checkpoint of a run in another precision has none."""
        if self.dynamic and state is not None:
            self.value, self.finite_steps = float(state["value"]), int(state["finite_steps"])
