"""What each rank does in the tests of placement: it makes its part of a model as training does."""

from __future__ import annotations

import torch

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.transformer import Transformer
from meshwright.parallel.axes import axis_operations
from meshwright.parallel.data import DataParallel
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for


def parameter_bytes(config: ModelConfig, text: str, sequence: int) -> int:
    """Bytes of the parameters that this rank of a run keeps between steps."""
    layout = Layout.parse(text)
    mesh, table = Mesh.create(layout), parameter_table(config)
    partition = Partition.of(program_for(layout, config, sequence), config, table, sequence)
    model = Transformer(
        config, axes=axis_operations(mesh), device="meta", dtype=torch.float32, stages=partition.held(mesh.pp.rank)
    )
    parallel = DataParallel(model, table, mesh, seed=3, parameter_dtype=torch.float32, partition=partition)
    size = parallel.memory()["parameters"]
    mesh.close()
    return size
