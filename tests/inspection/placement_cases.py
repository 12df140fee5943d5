"""Functions that ranks run in the placement tests: each builds its part of a model as in training."""

from __future__ import annotations

import torch

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.parallel.parallelize import parallelize
from meshwright.spec.config import ModelConfig


def parameter_bytes(config: ModelConfig, text: str, sequence: int) -> int:
    """Return the bytes of the parameters that this rank keeps between steps."""
    layout = Layout.parse(text)
    mesh = Mesh.create(layout)
    size = parallelize(config, mesh, sequence, seed=3, parameter_dtype=torch.float32).engine.memory()["parameters"]
    mesh.close()
    return size
