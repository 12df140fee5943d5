"""Arithmetic of a training run, and the TF32 setting of CUDA."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshwright.errors import UserError
from meshwright.spec.policy import FUSED_ACCUMULATION_MIN_NUMEL

PARAMETER_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Parameter dtype of each precision of the layout notation."""


class Arithmetic(NamedTuple):
    """Dtypes and numerical settings of a run.

    parameter_dtype: dtype of parameters and compute. master_dtype: dtype of master weights, gradients and optimizer
    state. fused_accumulation_min_numel: minimum number of elements of a weight whose gradient matmul accumulates
    directly into the gradient buffer. compile_backend: backend of torch.compile, used only if the recipe sets
    `train.compile`.
    """

    parameter_dtype: torch.dtype
    master_dtype: torch.dtype = torch.float32
    fused_accumulation_min_numel: int = FUSED_ACCUMULATION_MIN_NUMEL
    compile_backend: str = "inductor"


def set_matmul_precision(precision: str | None, device: torch.device) -> None:
    """Enable TF32 for float32 matmuls on CUDA if `precision` is "tf32"; for any other precision, or None, disable it.
    The setting holds for the whole process. `UserError` for tf32 on another device."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif precision == "tf32":
        raise UserError(f"precision tf32 needs CUDA devices, and the ranks compute on {device.type}; use fp32")
