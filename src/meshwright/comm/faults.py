"""Faults planted at collective call sites, so that `verify --mutate` can show that it would notice them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

KINDS = ("skip", "double", "drop", "wrong group", "stale")
"""skip: the call does not happen; double: its result is twice too large; drop: one rank's part is missing; wrong group:
it is made over other ranks than those of its axis, or with them in another order; stale: the result of the call before
(of the same size) is delivered again."""

_REMEMBER = "remember"  # not a fault: the call before the stale one


@dataclass(frozen=True, slots=True)
class Fault:
    """One spoilt call site. `position`: the place in the group of the rank whose part `drop` loses. `call`: the only
    call that is spoilt, counted from 1 since the fault was planted; None: all of them."""

    site: str
    operation: str
    kind: str
    position: int = 1
    call: int | None = None
    axis: str = ""  # over which the call is made
    groups: tuple[
        tuple[int, ...], ...
    ] = ()  # over which a "wrong group" has it made; none: over the right ranks, turned

    def __str__(self) -> str:
        which = "" if self.call is None else f", call {self.call} alone"
        return f"{self.site} ({self.operation}): {self.kind}{which}"


class NamedAxis(Protocol):
    """An axis of the mesh as faults see it: they are matched by its name."""

    @property
    def name(self) -> str: ...


AxisType = TypeVar("AxisType", bound=NamedAxis)


class Faults(Generic[AxisType]):
    """The fault planted in this process, if any. All ranks of a group plant the same one, so that nothing hangs."""

    def __init__(self) -> None:
        self.active: Fault | None = None
        self.struck = 0  # calls whose result was spoilt
        self.other: AxisType | None = None
        self._calls = 0
        self._before: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def plant(self, fault: Fault | None, other: AxisType | None = None) -> None:
        """Plant a fault (None: take it away again). `other`: the wrong group of this rank (`Mesh.plant` makes it)."""
        if fault is not None and fault.kind not in KINDS:
            raise ValueError(f'unknown fault "{fault.kind}" (known: {", ".join(KINDS)})')
        self.active, self.other = fault, other
        self.struck = self._calls = 0
        self._before.clear()

    def at(self, site: str, operation: str) -> Fault | None:
        """The fault to be served at this call, or None."""
        fault = self.active
        if fault is None or fault.site != site or fault.operation != operation:
            return None
        self._calls += 1
        if fault.call is None or fault.call == self._calls:
            self.struck += fault.kind not in ("stale", "wrong group")
            return fault
        return dataclasses.replace(fault, kind=_REMEMBER) if fault.kind == "stale" else None

    def over(self, fault: Fault | None, axis: AxisType, ordered: bool = True) -> tuple[AxisType, bool]:
        """The axis over which a call is made, and True if its ranks are taken in another order: `axis` in its own
        order, unless `fault` says otherwise. `ordered`: the order makes a difference to the call."""
        if fault is None or fault.kind != "wrong group" or fault.axis != axis.name:
            return axis, False
        if self.other is None and not ordered:
            return axis, False
        self.struck += 1
        return (axis, True) if self.other is None else (self.other, False)

    def spoil_result(self, fault: Fault, output: torch.Tensor) -> None:
        """Change the finished result in place as the fault says (double, stale)."""
        if fault.kind == "double":
            output.mul_(2)
        elif fault.kind in ("stale", _REMEMBER):
            key = (output.shape, output.dtype)
            true_result = output.clone()
            before = self._before.get(key)
            if before is not None and fault.kind == "stale":
                self.struck += not torch.equal(before, output)
                output.copy_(before)
            self._before[key] = true_result
