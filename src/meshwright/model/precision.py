"""The precision in which sums are formed: at least float32, and float64 stays float64."""

from __future__ import annotations

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)
