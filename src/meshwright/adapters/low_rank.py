"""Low-rank adapters of linear layers, on one rank's shard of the layer: LoRA, rsLoRA, DoRA.

Shapes: X inputs and Y outputs of the layer on this rank, R rank of the adapter, M adapted matrices in the layer (query,
key and value are one layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.layout import Layout
from meshwright.model.axis_operations import TensorOperations
from meshwright.model.layers import Linear
from meshwright.spec.adapter_entries import adapter_tensor
from meshwright.spec.parameters import ModelParameter, ParameterTable


class Rows(NamedTuple):
    """Output features [start, start + size) of a layer on this rank, those of one adapted matrix."""

    start: int
    size: int


class LowRank(nn.Module):
    """Adapter of one linear layer y = x Wᵀ: y + s x Aᵀ Bᵀ (Hu et al. 2021, arXiv:2106.09685, eq. 3). Parameters: `a` [M
    x R, X], the matrices A stacked, and `b`, the matrices B stacked, [outputs of all adapted matrices, R]; both are
    uninitialised.

    rows: output features of each adapted matrix, in ascending order; inputs: X; rank: R; scale: s; options: `device`
    and `dtype` of the parameters. Attribute `enabled`: False to compute the base layer alone."""

    def __init__(self, rows: Sequence[Rows], inputs: int, rank: int, scale: float, **options: Any) -> None:
        super().__init__()
        self.rows, self.rank, self.scale, self.enabled = tuple(rows), rank, scale, True
        self.a = nn.Parameter(torch.empty(len(rows) * rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(sum(each.size for each in rows), rank, **options))

    def forward(self, x: torch.Tensor, y: torch.Tensor, weight_YX: torch.Tensor) -> torch.Tensor:
        """Return the output of the adapted layer without bias, [..., Y], for its input `x` [..., X] and the base
        layer's output `y` without bias. With a row-parallel layer both are this rank's partial sums. `weight_YX`: the
        base layer's weight, which DoRA reads."""
        return y + self.product(x, y.shape[-1]) if self.enabled else y

    def product(self, x: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return s x Aᵀ Bᵀ, [..., Y], for `x` [..., X]; zeros for output features without adapter. outputs: Y."""
        low = F.linear(x, self.a) * self.scale
        parts, end = [], 0
        factors = zip(self.rows, low.split(self.rank, dim=-1), self.b.split([r.size for r in self.rows]), strict=True)
        for each, low_R, b_YR in factors:
            if each.start > end:
                parts.append(low.new_zeros(*low.shape[:-1], each.start - end))
            parts.append(F.linear(low_R, b_YR))
            end = each.start + each.size
        if end < outputs:
            parts.append(low.new_zeros(*low.shape[:-1], outputs - end))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def attach_adapters(
    model: nn.Module,
    table: ParameterTable,
    layout: Layout | None = None,
    tensor: TensorOperations | None = None,
    **options: Any,
) -> None:
    """Add to the linear layers of `model` the adapters that its parameter `table` lists, and freeze all other
    parameters; do nothing without adapter. layout: parallel layout of which `model` is one rank's part; None: one
    device. tensor: communication of tensor parallelism, by which DoRA sums norms. options: `device` and `dtype` of the
    adapters' parameters. The model's attribute `config` has the adapter's settings."""
    adapter: Any = model.config.adapter
    if adapter is None:
        return
    layout = layout or Layout()
    model.requires_grad_(False)
    tensors = {parameter.name: parameter for parameter in table.tensors}
    modules = dict(model.named_modules())
    for name, first in tensors.items():
        layer, _, suffix = name.rpartition(".adapter.")
        if suffix != "a" or not isinstance(modules.get(layer), Linear):  # of another pipeline stage
            continue
        second, weight = tensors[f"{layer}.adapter.b"], tensors[f"{layer}.weight"]
        rows = list(_list_rows(weight, second, layout))
        inputs = first.local_shape(layout)[1]
        modules[layer].adapter = LowRank(rows, inputs, adapter.rank, adapter.scale, **options)


def _list_rows(weight: ModelParameter, second: ModelParameter, layout: Layout) -> Iterator[Rows]:
    """Yield the output features of a layer that each matrix B in `second` produces on a rank. weight: the layer's
    weight, which may fuse several matrices."""
    adapted = {entry.name.rpartition(".lora_B")[0]: entry for entry in second.entries}
    for entry in weight.entries:
        found = next((each for name, each in adapted.items() if name.endswith(entry.name.removesuffix(".weight"))), None)
        if found is not None:
            yield Rows(weight.local_offset(entry, layout), found.local_shape(layout)[0])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context manager in which `model` computes its base model alone, as if it had no adapters: the reference of
    preference training."""
    found = [module for module in model.modules() if isinstance(module, LowRank)]
    for module in found:
        module.enabled = False
    try:
        yield
    finally:
        for module in found:
            module.enabled = True
