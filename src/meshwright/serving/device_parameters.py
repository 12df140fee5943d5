"""Conversion of a model's parameters to the form that the GPU kernels of serving read."""

from __future__ import annotations

import torch

from meshwright.kernels.row_order import find_half_rotation_order
from meshwright.model.attention import Attention
from meshwright.model.layers import RMSNorm
from meshwright.model.transformer import Transformer
from meshwright.spec.config import ModelConfig


def prepare_parameters(model: Transformer, config: ModelConfig) -> None:
    """Convert the parameters of `model` in place to the form that the GPU kernels read. config: configuration of the
    model.

    Norms that multiply by 1 + weight: 1 is added to their weight. Final norm: its weight is divided by the model's
    logit divisor, in float32. Query and key projections and norms: the features of each head are permuted to the order
    of half-rotations (`find_half_rotation_order`), for RoPE."""
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.centre:
            module.weight, module.centre = torch.nn.Parameter(module.factors(), requires_grad=False), 0.0
    if model.final_norm is not None and config.logit_divisor != 1:
        divided = model.final_norm.weight.float() / config.logit_divisor
        model.final_norm.weight = torch.nn.Parameter(divided, requires_grad=False)
    order = find_half_rotation_order(config)
    for attention in model.modules() if order is not None else ():
        if isinstance(attention, Attention):
            turned = (attention.heads + attention.kv_heads) * config.head_dim
            for rows in (attention.qkv.weight, attention.qkv.bias):
                if rows is not None:
                    heads = rows[:turned].unflatten(0, (-1, config.head_dim))
                    rows[:turned] = heads[:, order].flatten(0, 1)
            for norm in (attention.query_norm, attention.key_norm):
                if norm is not None:
                    norm.weight.copy_(norm.weight[order])
