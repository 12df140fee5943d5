"""Maps parameter entries on disk to the parameters of a transformers model in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

GRANITE_MOE = {
    "router.layer": "router.weight", "input_linear": "experts.gate_up_proj", "output_linear": "experts.down_proj",
}  # fmt: skip
"""Granite's tensors on disk -> in memory."""


def entry_in_transformers(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The view of an entry, by its name on disk, in the parameters (or gradients) of a model of transformers.

    In memory a layer's experts are stacked: `experts.gate_up_proj` [experts, 2 x width, hidden], gates first, and
    `experts.down_proj` [experts, hidden, width]; `block_sparse_moe` of Mixtral's files is `mlp`.
    """
    for theirs, mapped in GRANITE_MOE.items():
        name = name.replace(f"block_sparse_moe.{theirs}.weight", f"block_sparse_moe.{mapped}")
    if "block_sparse_moe.router" in name:
        return tensors[name]
    if name.endswith("]"):  # an expert's part of a tensor that is stacked on disk too
        whole, _, expert = name.removesuffix("]").rpartition("[")
        return tensors[whole][int(expert)]
    start, _, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
    if not rest:
        return tensors[start]
    number, part, _ = rest.split(".")
    if part in ("down_proj", "w2"):
        return tensors[f"{start}.experts.down_proj"][int(number)]
    return tensors[f"{start}.experts.gate_up_proj"][int(number)].chunk(2)[part in ("up_proj", "w3")]
