"""The precision in which sums are formed: at least float32, and float64 stays float64."""

from __future__ import annotations

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def adds_in_float32(x: torch.Tensor) -> bool:
    """Return True if matrix products of tensors like `x` can be added to a float32 sum without being rounded first, by
    the argument `out_dtype` of `torch.addmm`: for 16-bit types on CUDA."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
