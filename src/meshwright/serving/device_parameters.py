"""Parameters of a model as the kernels of a GPU read them."""

from __future__ import annotations

import torch

from meshwright.model.attention import Attention
from meshwright.model.layers import RMSNorm
from meshwright.model.rope import half_rotation_order
from meshwright.model.transformer import Transformer
from meshwright.spec.config import ModelConfig


def prepare_parameters(model: Transformer, config: ModelConfig) -> None:
    """Change the parameters of `model`, in place, to those that the kernels read: weights of norms with their centre
    added and the final one divided by the logit divisor, in float32; queries and keys in the order of half-rotations
    (`half_rotation_order`)."""
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.centre:
            module.weight, module.centre = torch.nn.Parameter(module.factors(), requires_grad=False), 0.0
    if model.final_norm is not None and config.logit_divisor != 1:
        divided = model.final_norm.weight.float() / config.logit_divisor
        model.final_norm.weight = torch.nn.Parameter(divided, requires_grad=False)
    order = half_rotation_order(config)
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
