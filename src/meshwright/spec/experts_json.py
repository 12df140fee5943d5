"""Read and write the ``config.json`` keys of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr

if TYPE_CHECKING:
    from meshwright.spec.config import ModelConfig
    from meshwright.spec.config_reader import Reader


def read_experts(read: Reader, family: str, layers: int, intermediate: int) -> dict[str, Any]:
    """Read the ModelConfig fields of a mixture of experts, by name: number of experts, their widths, router. read:
    typed access to the ``config.json``. family: its ``model_type``. layers: number of layers. intermediate: width of a
    dense MLP."""
    fields: dict[str, Any] = {
        "experts": read.integer("experts", _experts_keys(family)),
        "experts_per_token": read.integer("experts_per_token", ("num_experts_per_tok",)),
        "expert_intermediate": intermediate
        if family == "mixtral"
        else read.integer("expert_intermediate", ("moe_intermediate_size",)),
    }
    if family == "dots1":
        first = _read_whole_number(read, "first_k_dense_replace")
        fields["dense_layers"] = tuple(range(min(first, layers)))
        fields["shared_intermediate"] = fields["expert_intermediate"] * read.integer("experts", ("n_shared_experts",))
        fields["routed_scale"] = read.number(("routed_scaling_factor",), 1.0)
    else:
        _, weight = read.get(("router_aux_loss_coef",))
        fields["router_loss"] = 0.0 if weight == 0 else read.number(("router_aux_loss_coef",), 0.001)
    if family in ("qwen2_moe", "qwen3_moe"):
        fields["dense_layers"] = _dense_layers(read, layers)
    if family == "qwen2_moe":
        fields["shared_intermediate"] = read.integer("shared_intermediate", ("shared_expert_intermediate_size",))
    if family != "mixtral":
        fields["normalise_choice"] = read.boolean("norm_topk_prob")
    return fields


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` keys of a mixture of experts with their values; the inverse of `read_experts`."""
    written: dict[str, Any] = dict.fromkeys(_experts_keys(config.family), config.experts)
    written["num_experts_per_tok"] = config.experts_per_token
    if config.family != "mixtral":
        written["moe_intermediate_size"] = config.expert_intermediate
        written["norm_topk_prob"] = config.normalise_choice
    if config.family == "dots1":
        return written | {
            "first_k_dense_replace": len(config.dense_layers),
            "n_shared_experts": config.shared_intermediate // config.expert_intermediate,
            "routed_scaling_factor": config.routed_scale,
            "n_group": 1,
            "topk_group": 1,
        }
    written["router_aux_loss_coef"] = config.router_loss
    written["output_router_logits"] = False
    if config.family in ("qwen2_moe", "qwen3_moe"):
        written["decoder_sparse_step"] = 1
        written["mlp_only_layers"] = list(config.dense_layers)
    if config.family == "qwen2_moe":
        written["shared_expert_intermediate_size"] = config.shared_intermediate
    return written


def _experts_keys(family: str) -> tuple[str, ...]:
    """Return the ``config.json`` keys that may hold the number of experts in a family, in order of precedence
    (transformers 4, then 5)."""
    return {
        "mixtral": ("num_local_experts",),
        "qwen2_moe": ("num_experts",),
        "qwen3_moe": ("num_experts", "num_local_experts"),
        "dots1": ("n_routed_experts",),
    }[family]


def _dense_layers(read: Reader, layers: int) -> tuple[int, ...]:
    """Return the indices of the layers with a dense MLP: those listed in ``mlp_only_layers``, and those whose number,
    counted from 1, is not a multiple of ``decoder_sparse_step``. read: typed access to the ``config.json``. layers:
    number of layers."""
    step = read.integer("layers", ("decoder_sparse_step",), 1)
    _, listed = read.get(("mlp_only_layers",))
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in listed):
        raise UserError(f'{read.where}: "mlp_only_layers" must be a list of layer numbers, not {shorten_repr(listed)}')
    listed = frozenset(listed)
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def _read_whole_number(read: Reader, key: str) -> int:
    """Return the integer >= 0 under ``key``, 0 if it is missing or null; ``UserError`` for other values. read: typed
    access to the ``config.json``."""
    _, value = read.get((key,), 0)
    value = 0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f'{read.where}: "{key}" must be a whole number, not {shorten_repr(value)}')
    return value
