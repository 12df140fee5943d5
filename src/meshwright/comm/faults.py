"""Faults planted at collective call sites, so that `verify --mutate` can show that it would notice them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KINDS = ("skip", "double", "drop", "stale")
"""skip: the call does not happen; double: its result is twice too large; drop: one rank's part is missing;
stale: the result of the call before is delivered again."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One spoilt call site. `position`: the place in the group of the rank whose part `drop` loses."""

    site: str
    operation: str
    kind: str
    position: int = 1


class Faults:
    """The fault planted in this process, if any. All ranks of a group plant the same one, so that nothing hangs."""

    def __init__(self) -> None:
        self.active: Fault | None = None
        self.struck = 0  # calls that the fault has spoilt
        self._before: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def plant(self, fault: Fault | None) -> None:
        """Plant a fault (None: take it away again)."""
        if fault is not None and fault.kind not in KINDS:
            raise ValueError(f'unknown fault "{fault.kind}" (known: {", ".join(KINDS)})')
        self.active = fault
        self.struck = 0
        self._before.clear()

    def at(self, site: str, operation: str) -> Fault | None:
        """The fault to be served at this call, or None."""
        fault = self.active
        if fault is None or fault.site != site or fault.operation != operation:
            return None
        self.struck += 1
        return fault

    def spoil_result(self, fault: Fault, output: torch.Tensor) -> None:
        """Change the finished result in place as the fault says (double, stale)."""
        if fault.kind == "double":
            output.mul_(2)
        elif fault.kind == "stale":
            key = (output.numel(), output.dtype)
            true_result = output.clone()
            before = self._before.get(key)
            if before is not None:
                output.copy_(before.view_as(output))
            self._before[key] = true_result
