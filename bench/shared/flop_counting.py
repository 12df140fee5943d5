"""FLOPs of the engine's model, counted by torch's FlopCounterMode, including custom operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.adapters import low_rank
from meshwright.adapters.attach import attach_adapters
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model import grouped_product, tiled_attention
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.documents import Documents
from meshwright.model.transformer import Transformer
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

ROWS, SEQUENCE = 2, 24


def inside(function: Callable[..., Any]) -> Callable[..., int]:
    """The FLOPs of an operator: those of what it is made of, computed once for all layers. Attention goes query by
    query, so that no key is touched that a query does not see."""
    known: dict[Any, int] = {}

    def flops(*arguments: Any, out_val: Any = None, **options: Any) -> int:
        key = _describe([arguments, *options.items()])
        if key in known:
            return known[key]
        tile, tiled_attention.TILE_QUERIES = tiled_attention.TILE_QUERIES, 1
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                function(*arguments, **options)
        finally:
            tiled_attention.TILE_QUERIES = tile
        known[key] = int(counter.get_total_flops())
        return known[key]

    flops._get_raw = True  # type: ignore[attr-defined]
    return flops


def _describe(value: Any) -> Any:
    """Describe an operator's arguments: shapes, and the elements of tensors of integers, by which operators choose what
    they multiply."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), None if value.is_floating_point() else tuple(value.flatten().tolist())
    return tuple(map(_describe, value)) if isinstance(value, list | tuple) else value


OURS = {
    torch.ops.meshwright.tiled_attention: inside(tiled_attention._compute_attention),
    torch.ops.meshwright.tiled_attention_backward: inside(tiled_attention._compute_gradients),
    torch.ops.meshwright.grouped_product: inside(grouped_product._compute_grouped_product._init_fn),
    torch.ops.meshwright.grouped_product_input: inside(grouped_product._compute_input_gradient._init_fn),
    torch.ops.meshwright.grouped_product_weight: inside(grouped_product._compute_weight_gradient._init_fn),
    torch.ops.meshwright.add_low_rank: inside(low_rank._add_low_rank._init_fn),
    torch.ops.meshwright.add_expert_low_rank: inside(
        lambda y, low, b, ends, starts, sizes: [
            grouped_product._compute_grouped_product._init_fn(part, weight, ends, None, 0)
            for part, weight in zip(low.split(b.shape[2], dim=1), b.split(sizes, dim=1), strict=True)
        ]
    ),
}


def small(name: str, **changes: Any) -> ModelConfig:
    config = preset(name)
    if config.experts:
        changes = {"experts": 4, **changes}
    return dataclasses.replace(config, layers=3, vocabulary=96, **changes)


def count(
    config: ModelConfig, recompute: str = "none", mesh: Mesh | None = None, documents: Documents | None = None
) -> tuple[int, int]:
    """FLOPs of a forward and of the backward after it, on this rank. The loss makes the head's gradients in its
    forward: they are counted there."""
    axes = SINGLE_DEVICE if mesh is None else build_axes(mesh)
    axes = dataclasses.replace(axes, recompute=ActivationCheckpointing(recompute))
    model = Transformer(config, axes=axes, dtype=torch.float32)
    attach_adapters(model, parameter_table(config), None if mesh is None else mesh.layout, axes.tensor)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(0, 90, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    if mesh is not None:
        tokens, targets, documents = shard_sequences(tokens, targets, documents or Documents(), mesh)
    with FlopCounterMode(display=False, custom_mapping=OURS) as forward:
        loss = model(tokens, targets, documents)
    with FlopCounterMode(display=False, custom_mapping=OURS) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def count_on_rank(layout_text: str, config: ModelConfig) -> tuple[int, int]:
    mesh = Mesh.create(Layout.parse(layout_text))
    try:
        return count(config, mesh.layout.recompute, mesh)
    finally:
        mesh.close()
