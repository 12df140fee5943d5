"""Runner, which executes the steps of one rank: compiled kernels on a CPU with a compiler, else plain torch."""

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
from meshwright.serving.scheduler import StepBatch
from meshwright.serving.step_limits import StepLimits
from meshwright.serving.torch_runner import TorchRunner
from meshwright.serving.weights import RankWeights
from meshwright.spec.config import ModelConfig

KERNEL_DTYPES = ("float32", "bfloat16")
"""Dtypes of weights that the kernels have; others run in plain torch."""


class Runner(Protocol):
    """Executes steps on this rank's part of a model.

    Attributes:
        config: Configuration of the model.
        blocks: KV blocks.
        instruction_set: Instruction set of the kernels, or the device.
        version: Version of the kernels, "torch ..." without them: equal versions compute equal bits on equal devices.
    """

    config: ModelConfig
    blocks: int
    instruction_set: str
    version: str

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Run a step: write the keys and values of its tokens into their slots; return the logits float32 [R, V] of
        its output rows, or, of a pipeline stage that is not last, the hidden states float32 [T, H]. The result is valid
        until the next call. `hidden`: the previous stage's hidden states, None on the first stage."""

    def memory(self) -> dict[str, int]:
        """Return bytes by kind: `weights`, `kv`, `logits`, and with kernels `workspace`."""


def build_runner(
    directory: Path, mesh: Mesh, dtype: str, limits: StepLimits, threads: int = 1, instruction_set: str | None = None
) -> Runner:
    """Load this rank's part of a model and allocate its KV pool.

    Args:
        directory: Checkpoint or Hugging Face directory.
        mesh: Mesh of the replica: tp, pp, and ep inside tp.
        dtype: Dtype of weights and KV cache; "float32" and "bfloat16" use the kernels.
        limits: Sizes to allocate for.
        threads: Threads of the kernels.
        instruction_set: That of the kernels; None: the one measured as the fastest here.

    Raises:
        UserError: The checkpoint is damaged, or no decoder, or needs kernels that cannot be built here.
    """
    weights = RankWeights(directory, mesh)
    if mesh.device.type == "cpu" and dtype in KERNEL_DTYPES and (kernels := load_kernels(instruction_set)):
        kernels.set_threads(threads)
        return NativeRunner(kernels, weights, mesh, dtype, limits)
    if mesh.layout.expert_parallel:
        raise UserError(f"ep{mesh.ep.size} needs the compiled kernels: install g++, or leave it out")
    return TorchRunner(weights, mesh, getattr(torch, dtype), limits)
