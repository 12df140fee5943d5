"""Sums over the kernels of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.planner.cost.operators import Operation


def total_flops(operations: Iterable[Operation], *phases: str) -> Any:
    """Return the sum of the operations' FLOPs. phases: count only these, of "forward", "recompute", "input" and
    "weight" (gradients); all if none is given."""
    return sum(one.flops * one.count for one in operations if not phases or one.phase in phases)
