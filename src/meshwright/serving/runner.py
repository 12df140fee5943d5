"""Runner, which executes the steps of one rank: Triton kernels on a GPU, compiled kernels or plain torch on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.kernels.choice import load_kernels
from meshwright.serving.native_runner import NativeRunner
from meshwright.serving.rank_starter import PLAIN_TORCH
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.torch_runner import TorchRunner
from meshwright.serving.weights import RankWeights
from meshwright.spec.config import ModelConfig

KERNEL_DTYPES = ("float32", "bfloat16")
"""Dtypes of weights that the kernels have; others run in plain torch."""


class Runner(Protocol):
    """Interface that computes the steps of one rank, on its part of the model.

    Attributes:
        config: Configuration of the model.
        blocks: Number of KV blocks in its pool.
        instruction_set: Instruction set of the kernels, or name of the device.
        version: Version of the kernels, or "torch ..." without kernels; equal versions give equal bits on equal
            devices.
    """

    config: ModelConfig
    blocks: int
    instruction_set: str
    version: str

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Compute this rank's pipeline stage for a batch, and write the tokens' keys and values to the KV cache. Return
        the logits of its output rows, float32 [R, V], or from a stage that is not last the hidden states, float32 [T,
        H]; valid until the next call. `hidden`: the previous stage's hidden states, None on the first."""

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: `weights`, `kv` (cache), `logits`, and with kernels `workspace` (buffers)."""


DEVICE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that the Triton kernels have."""


def build_runner(
    directory: Path,
    mesh: Mesh,
    dtype: str,
    limits: StepLimits,
    threads: int = 1,
    batch_invariant: bool = False,
    instruction_set: str | None = None,
) -> Runner:
    """Build the runner for this rank: load its part of the model and allocate its KV pool.

    Args:
        directory: Checkpoint or Hugging Face directory.
        mesh: Mesh of the replica, with axes tp, pp, and ep inside tp.
        dtype: Dtype of weights and KV cache; with "float32" and "bfloat16" the compiled kernels are used.
        limits: Sizes of the KV pool and of the buffers.
        threads: Number of threads of the kernels.
        batch_invariant: On a GPU, make the bits of a sequence's results independent of the batch; on a CPU they always
            are.
        instruction_set: Instruction set of the kernels, or `PLAIN_TORCH`; None: the fastest measured on this machine.
            Without effect on a GPU.

    Raises:
        UserError: The checkpoint is damaged or no decoder, or needs kernels that cannot be built or run here.
    """
    weights = RankWeights(directory, mesh)
    if mesh.device.type == "cuda":
        return _build_device_runner(weights, mesh, dtype, limits, batch_invariant)
    compiled = dtype in KERNEL_DTYPES and instruction_set != PLAIN_TORCH
    if compiled and (kernels := load_kernels(instruction_set)) is not None:
        kernels.set_threads(threads)
        return NativeRunner(kernels, weights, mesh, dtype, limits)
    if mesh.layout.expert_parallel:
        raise UserError(f"ep{mesh.ep.size} needs the compiled kernels: install g++, or leave it out")
    return TorchRunner(weights, mesh, getattr(torch, dtype), limits)


def _build_device_runner(
    weights: RankWeights, mesh: Mesh, dtype: str, limits: StepLimits, batch_invariant: bool
) -> Runner:
    """Build the runner for a GPU. Raises UserError if the model or the layout is not supported there."""
    if dtype not in DEVICE_DTYPES:
        raise UserError(f"dtype {dtype}: on a GPU serving takes {', '.join(DEVICE_DTYPES)}")
    if mesh.layout.expert_parallel:
        raise UserError(f"ep{mesh.ep.size}: experts are not spread over GPUs yet; tp splits each of them")
    try:
        from meshwright.serving import device_operations
    except ModuleNotFoundError as error:
        raise UserError(f"serving on a GPU needs {error.name}: run pip install triton") from None
    from meshwright.serving.device_runner import DeviceRunner

    return DeviceRunner(
        weights, mesh, getattr(torch, dtype), limits, device_operations, batch_invariant=batch_invariant
    )
