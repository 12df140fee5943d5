"""Fault injection at collective call sites, with which `verify --mutate` shows that it detects errors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("skip", "double", "drop", "wrong group", "stale")
"""skip: the call does not happen; double: its result is twice too large; drop: one rank's contribution is missing;
wrong group: it is made over other ranks than those of its axis, or with them in another order; stale: the result of the
previous call (of the same size) is delivered again."""

_REMEMBER = "remember"  # not a fault: stores the result for the next stale call


@dataclass(frozen=True, slots=True)
class Fault:
    """Deliberate error in collective calls, injected to test that it is detected.

    kind: "skip": the call is not made; "drop": one rank's contribution is missing; "double": the result is multiplied
    by 2; "stale": the result of the previous call is returned; "wrong group": the call is made over other ranks.

    site: label of the calls. operation: such as "all_reduce". position: index in the group of the rank that "drop"
    leaves out. call: number of the only call to corrupt, counted from 1 since injection; None: every call. axis: name
    of the mesh axis of the calls. groups: rank groups for "wrong group"; empty: the group keeps its ranks, but their
    data are shifted cyclically by one rank.
    """

    site: str
    operation: str
    kind: str
    position: int = 1
    call: int | None = None
    axis: str = ""
    groups: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        which = "" if self.call is None else f", call {self.call} alone"
        return f"{self.site} ({self.operation}): {self.kind}{which}"


class Faults:
    """Fault injection of one process: holds the active fault, if any, and applies it to collective calls. All ranks of
    a group inject the same fault, so that no call hangs.

    affected_calls: number of calls that the fault has affected so far."""

    def __init__(self) -> None:
        self.active: Fault | None = None
        self.affected_calls = 0  # calls with an injected fault
        self.other: Any = None  # axis over the wrong ranks
        self._calls = 0
        self._before: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def inject(self, fault: Fault | None, other: Any = None) -> None:
        """Activate a fault in this process in place of the previous fault; None: deactivate the previous fault. other:
        for the kind "wrong group", this rank's axis over the wrong ranks (made by `Mesh.inject`); None: the ranks' data
        are shifted cyclically by one rank instead. Raises ValueError for an unknown kind."""
        if fault is not None and fault.kind not in KINDS:
            raise ValueError(f'unknown fault "{fault.kind}" (known: {", ".join(KINDS)})')
        self.active = fault
        self.other = other
        self.affected_calls = 0
        self._calls = 0
        self._before.clear()

    def match_call(self, site: str, operation: str) -> Fault | None:
        """Return the fault to apply to the collective call that is about to be made; None if no fault applies. Call
        this method exactly once per collective call, because a fault may apply only to the n-th call with its site and
        operation.

        site: label of the collective call. operation: such as "all_reduce".
        """
        fault = self.active
        if fault is None or fault.site != site or fault.operation != operation:
            return None
        self._calls += 1
        if fault.call is None or fault.call == self._calls:
            self.affected_calls += fault.kind not in ("stale", "wrong group")
            return fault
        return dataclasses.replace(fault, kind=_REMEMBER) if fault.kind == "stale" else None

    def corrupt_result(self, fault: Fault, output: torch.Tensor, number: int = 0) -> None:
        """Corrupt the finished result `output` of a call in place, for two kinds of `fault`: "double" multiplies it by
        2; "stale" replaces it by the result of the previous matching call with the same shape, dtype and
        `number`, the number of this result among those of a call."""
        if fault.kind == "double":
            output.mul_(2)
        elif fault.kind in ("stale", _REMEMBER):
            key = number, output.shape, output.dtype
            true_result = output.clone()
            before = self._before.get(key)
            if before is not None and fault.kind == "stale":
                self.affected_calls += not torch.equal(before, output)
                output.copy_(before)
            self._before[key] = true_result
