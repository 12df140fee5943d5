"""Weights of a model with an adapter, merged by the papers' equations in float64: the reference of verification. It
shares no code with `adapters/`, which never forms these matrices in training."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import ParameterTable

PREFIX = "base_model.model."


def merge_adapter_weights(
    table: ParameterTable, adapter: AdapterConfig | None, leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Merge a LoRA or DoRA adapter into the base model's weights by differentiable operations; return {parameter name:
    merged tensor in its model shape}. leaves: {name: flattened value} of every parameter of base and adapter. table:
    parameter table, which has the shapes. adapter: kind, rank and alpha; None: no adapter.

    LoRA: W + s B A, s = alpha / rank (arXiv:2106.09685, eq. 3), or alpha / sqrt(rank) for rsLoRA (arXiv:2312.03732, eq.
    8). DoRA: m (W + s B A) / ||W + s B A|| (arXiv:2402.09353, eq. 5 and 11); the norm is taken for each row, and no
    gradient flows through it.
    """
    merged = {}
    for entry in table.entries:
        if entry.name.startswith(PREFIX):
            continue
        weight, module = leaves[entry.name].view(entry.model_shape), PREFIX + entry.name.removesuffix(".weight")
        if adapter is not None and f"{module}.lora_A.weight" in leaves:
            divisor = math.sqrt(adapter.rank) if adapter.kind == "rslora" else adapter.rank
            first = leaves[f"{module}.lora_A.weight"].view(adapter.rank, -1)
            second = leaves[f"{module}.lora_B.weight"].view(-1, adapter.rank)
            weight = weight + adapter.alpha / divisor * second @ first
            if adapter.kind == "dora":
                magnitude = leaves[f"{module}.lora_magnitude_vector"]
                weight = (magnitude / weight.detach().norm(dim=1))[:, None] * weight
        merged[entry.name] = weight
    return merged
