"""Tensor parallelism beside the model: the gradients of which each rank of tp has only a part.

The model itself splits the products and meets where they end (model/layers.py, attention.py, loss.py; Shoeybi et al.
2019, arXiv:1909.08053; with sequence parallelism Korthikanti et al. 2022, arXiv:2205.05198). Left over are tensors
that several ranks hold alike and that each of them uses for its own tokens or heads alone: norms, learned positions
and biases after a reduce-scatter (sequence parallelism), norms of queries and keys, key-value heads that ranks share.
The parameter table says which; here they are summed, once a step, all units together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis, Mesh
from meshwright.parallel.zero import FsdpUnit
from meshwright.spec.parameters import ParameterTable

GRADIENT_SITE = "tensor.gradients"
SHARED_HEADS_SITE = "tensor.gradients.shared_heads"


class PartialGradients:
    """This rank's shards of the gradients that are sums over ranks of tp. Ranks of one tp group own the same ranges of
    their flat buffers, so that what one of them sums the others sum too."""

    def __init__(self, units: Iterable[FsdpUnit], table: ParameterTable, mesh: Mesh) -> None:
        views: dict[int, list[torch.Tensor]] = {}
        neighbours: dict[int, Axis] = {}
        for row in table.rows:  # also those that this rank has nothing of: all ranks make the groups
            copies = row.replicas(mesh.layout)
            if "tp" in row.gradient_axes(mesh.layout) and copies not in neighbours:
                neighbours[copies] = mesh.neighbours("tp", copies)
        for unit in units:
            for part, low, high in unit.flat.within(unit.start, unit.stop):
                if part.partial:
                    views.setdefault(part.copies, []).append(unit.gradient[low - unit.start : high - unit.start])
        self._groups = [
            (neighbours[copies], GRADIENT_SITE if copies == mesh.tp.size else SHARED_HEADS_SITE, found)
            for copies, found in views.items()
        ]

    def all_reduce(self) -> None:
        """Replace the partial gradients by their sums."""
        under_way = []
        for axis, site, views in self._groups:
            together = torch.cat(views)
            under_way.append((all_reduce(together, axis, site, async_op=True), together, views))
        for handle, together, views in under_way:
            handle.wait()
            for view, total in zip(views, together.split([view.numel() for view in views]), strict=True):
                view.copy_(total)
