"""Bytes that elementwise operations read and write per element, by operation and fusion (`elementwise.toml`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from meshwright.planner.cost.engines import Fusion
from meshwright.toml import read_packaged_toml

WIDE = 4
"""Bytes of a float32 value."""


class MemoryAccess(NamedTuple):
    """Memory accesses of an elementwise operation per element. kernels: number of kernels; narrow: reads and writes of
    values in the model's type; wide: reads and writes of float32 values."""

    kernels: float
    narrow: float
    wide: float = 0.0

    def bytes(self, itemsize: int) -> float:
        """Return the bytes read and written per element. itemsize: bytes of a value in the model's type."""
        return self.narrow * itemsize + self.wide * WIDE


class Traffic(NamedTuple):
    """Memory accesses of an elementwise operation per element, in the forward and in the backward."""

    forward: MemoryAccess
    backward: MemoryAccess


@cache
def traffic(operation: str, fusion: Fusion = "eager") -> Traffic:
    """Return the memory accesses of an elementwise operation in forward and backward. operation: key of
    elementwise.toml, such as "rmsnorm"; fusion: "eager" (one kernel per operation), "kernels" (hand-fused) or
    "compiled" (torch.compile)."""
    table = read_packaged_toml("meshwright.planner.cost", "elementwise.toml")[operation]
    forward, backward = table.get(fusion) or table["any"]
    return Traffic(MemoryAccess(*forward), MemoryAccess(*backward))
