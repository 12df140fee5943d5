"""Tensor-parallel layers whose products do not overlap with their collective calls although a recipe asks for it."""

from __future__ import annotations

import re

from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.model.experts import Mixture
from meshwright.model.layers import ColumnParallelLinear, ParallelLinear


def format_exposed_layers(model: nn.Module, mesh: Mesh, compiled: bool) -> list[str]:
    """Return one console line that names the layers of `model` whose products do not overlap with their collective
    calls over tp; no line if `train.tensor_overlap` is off or all of them overlap.

    mesh: device mesh of this rank. compiled: True if blocks are compiled."""
    if mesh.tp.trivial or mesh.communicator.product_overlap == "off":
        return []

    def overlaps(layer: ParallelLinear) -> bool:
        """Return True if the products of `layer` overlap with collective calls. A layer without calls of this axis
        adds its partial sums to others, as the shared expert of a mixture does without expert parallelism."""
        traced = compiled and layer.adapter is not None
        return not (layer.tensor.trivial or traced) and layer.can_overlap(isinstance(layer, ColumnParallelLinear))

    exposed = set[str]()
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear) and not overlaps(module):
            exposed.add(name)
        elif isinstance(module, Mixture) and not module.expert_parallel:
            exposed.add(f"{name}.experts")  # split over tp; the router needs the gathered tokens first
    names = ", ".join(sorted({re.sub(r".*layers\.\d+\.", "", name) for name in exposed}))
    return [f"train.tensor_overlap: products of {names} do not overlap with their collectives"] if exposed else []
