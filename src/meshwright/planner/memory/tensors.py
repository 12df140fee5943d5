"""Tensors of which memory snapshots consist: saved activations and temporaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Number


@dataclass(frozen=True, slots=True)
class Saved:
    """An activation saved by a forward for its backward. name: such as "layers.3.mlp.up.input"; dtype: torch's type
    name; bytes: of its whole storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: Number


class Temporary(NamedTuple):
    """A tensor of a memory snapshot that is neither persistent nor a saved activation. category: of the memory ledger,
    such as "workspace"; bytes: negative for a saved activation that is already freed."""

    category: str
    name: str
    bytes: int
