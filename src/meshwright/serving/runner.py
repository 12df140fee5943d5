"""Runner, which executes the steps of one rank: Triton kernels on a GPU, compiled kernels or plain torch on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.kernels.choice import PLAIN_TORCH, load_kernels
from meshwright.planner.serving.ledger import KERNEL_DTYPES
from meshwright.serving.logit_rows import StepOutput
from meshwright.serving.native_runner import NativeRunner
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.torch_runner import TorchRunner
from meshwright.serving.weights import RankWeights
from meshwright.spec.config import ModelConfig


class Runner(Protocol):
    """Interface of the runners, which compute the steps of one rank on its part of the model.

    Attributes:
        config: Configuration of the model.
        instruction_set: Instruction set of the CPU kernels, or name of the device.
        version: Version of the kernels, or "torch ..." without kernels; equal versions give equal bits on equal
            devices.
    """

    config: ModelConfig
    instruction_set: str
    version: str

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> StepOutput:
        """Compute this rank's pipeline stage for a batch of T tokens, and write the tokens' keys and values to the KV
        cache. The last stage returns the logits of the R output rows (tokens whose logits are wanted): float32 [R, V]
        for V vocabulary entries, or R objects of type `LogitRow`. Any other stage returns the hidden states, float32
        [T, H] with hidden size H. The result is valid until the next call. `hidden`: the previous stage's hidden states
        [T, H]; None on the first stage."""

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: `weights`, `kv` (cache), `logits`, and with kernels `workspace` (buffers)."""


DEVICE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that the Triton kernels support."""


def build_runner(plan: RankPlan, mesh: Mesh) -> Runner:
    """Build the runner for this rank: load its part of the model and allocate its KV pool.

    plan: settings, of which checkpoint, sizes, instruction set and `batch_invariant` are used. mesh:
    mesh of the replica, with axes tp, pp, and ep inside tp. Raises UserError if the checkpoint is damaged or of an
    encoder, or needs kernels that cannot be built or run here.
    """
    weights = RankWeights(Path(plan.checkpoint), mesh)
    if mesh.device.type == "cuda":
        return _build_device_runner(weights, mesh, plan)
    sizes = plan.sizes
    compiled = sizes.dtype in KERNEL_DTYPES and plan.instruction_set != PLAIN_TORCH
    if compiled and (kernels := load_kernels(plan.instruction_set)) is not None:
        kernels.set_threads(sizes.threads)
        return NativeRunner(kernels, weights, mesh, sizes.dtype, sizes)
    if mesh.layout.expert_parallel:
        raise UserError(f"ep{mesh.ep.size} needs the compiled kernels: install g++, or leave ep out")
    return TorchRunner(weights, mesh, getattr(torch, sizes.dtype), sizes)


def _build_device_runner(weights: RankWeights, mesh: Mesh, plan: RankPlan) -> Runner:
    """Build the runner for a GPU. weights: reader of this rank's weights. mesh: gives the device and the axes tp, pp
    and ep. plan: settings, of which sizes and `batch_invariant` are used. Raises UserError if the dtype is not
    supported on GPUs, or Triton is missing."""
    if plan.sizes.dtype not in DEVICE_DTYPES:
        raise UserError(f"dtype {plan.sizes.dtype}: on a GPU serving takes {', '.join(DEVICE_DTYPES)}")
    try:
        from meshwright.kernels import device_operations
    except ModuleNotFoundError as error:
        raise UserError(f"serving on a GPU needs {error.name}: run pip install triton") from None
    from meshwright.serving.device_runner import DeviceRunner

    dtype, invariant = getattr(torch, plan.sizes.dtype), plan.batch_invariant
    return DeviceRunner(weights, mesh, dtype, plan.sizes, device_operations, batch_invariant=invariant)
