"""The parallelism of a model in one place: what is applied to it on one rank, in which order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshwright.adapters.attach import attach_adapters
from meshwright.comm.mesh import Mesh
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.transformer import Transformer
from meshwright.parallel.context import make_context_operations
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.parallel.pipeline import check_programs_match
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.parallel.tensor import TensorParallel
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.program.pipeline import PipelineProgram
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for


class ParallelModel(NamedTuple):
    """Model on one rank.

    `model`: modules of the rank's pipeline stages; `engine`: ZeRO engine that owns their parameters; `program`:
    pipeline program (order of forwards, backwards and transfers), which `parallel.step.ForwardBackward` runs."""

    model: Transformer
    engine: ZeroEngine
    program: PipelineProgram


def build_axes(mesh: Mesh) -> AxisOperations:
    """Build the operations through which this rank's model communicates (tensor, context and expert parallelism) and
    recomputes activations, as `mesh.layout` selects. Data and pipeline parallelism act from outside the model
    (`parallel/zero_engine.py`, `parallel/pipeline.py`)."""
    layout = mesh.layout
    return AxisOperations(
        tensor=TensorParallel(mesh.tp, layout.tensor_sequence_parallel, layout.recompute != "selective"),
        context=make_context_operations(mesh),
        dispatcher=AllToAllTokenDispatcher(mesh.ep, mesh.etp) if layout.expert_parallel else None,
        recompute=ActivationCheckpointing(layout.recompute),
    )


def parallelize(
    config: ModelConfig, mesh: Mesh, sequence: int, *, seed: int | None, parameter_dtype: torch.dtype,
    master_dtype: torch.dtype = torch.float32, compile_backend: str | None = None,
) -> ParallelModel:  # fmt: skip
    """Build this rank's part of the model of configuration `config`: the modules of its pipeline stages with their ZeRO
    engine, and the pipeline program, as `mesh.layout` selects them. Every rank calls it.

    `mesh`: device mesh of this rank; `sequence`: number of tokens of a sequence, for which the FLOPs of pipeline stages
    are balanced; `seed`: initialises the parameters (None: the caller loads values into the master weights later);
    `parameter_dtype`: dtype of parameters and compute; `master_dtype`: dtype of master weights and gradients;
    `compile_backend`: torch.compile backend for transformer blocks and loss (None: blocks and loss run eagerly). Raises
    UserError on every rank if ranks have different pipeline programs."""
    layout = mesh.layout
    table = parameter_table(config)

    # Pipeline: the program determines the number of stages, the partition those of this rank.
    program = program_for(layout, config, sequence)
    check_programs_match(program, mesh)
    partition = Partition.of(program, config, table, sequence)

    # Tensor, sequence, context and expert parallelism and recomputation are operations of the model's layers. Built on
    # "meta", because the unsharded model may not fit on one rank.
    axes = build_axes(mesh)
    stages = partition.stages_on(mesh.pp.rank)
    model = Transformer(config, axes=axes, device="meta", dtype=parameter_dtype, stages=stages)
    attach_adapters(model, table, layout, axes.tensor, device="meta", dtype=parameter_dtype)

    # ZeRO and data parallelism: parameters become views of flat buffers, initial values are written into shards.
    engine = ZeroEngine(
        model, table, mesh, seed=seed, parameter_dtype=parameter_dtype, master_dtype=master_dtype, partition=partition
    )

    # torch.compile last: block by block, with the parallel operations inside.
    if compile_backend is not None:
        model.compile_blocks(backend=compile_backend)
    return ParallelModel(model, engine, program)
