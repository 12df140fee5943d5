"""Read and write the ``config.json`` keys of a mixture of experts, which the record of its family names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr
from meshwright.spec.families import Experts

if TYPE_CHECKING:
    from meshwright.spec.config import ModelConfig
    from meshwright.spec.config_reader import Reader

_GROUPED = "group_limited_greedy"  # DeepSeek-V2's name of routing with expert groups


def read_experts(read: Reader, keys: Experts, layers: int, intermediate: int) -> dict[str, Any]:
    """Read the ModelConfig fields of a mixture of experts (number of experts, their widths, router); return {field:
    value}. read: typed access to the ``config.json``. keys: names of the family's keys for experts. layers: number of
    layers. intermediate: width of a dense MLP."""
    width = read.integer("expert_intermediate", (keys.width,)) if keys.width else intermediate
    fields: dict[str, Any] = {
        "experts": read.integer("experts", keys.count),
        "experts_per_token": read.integer("experts_per_token", ("num_experts_per_tok",)),
        "expert_intermediate": width,
    }
    if keys.normalised:
        fields["normalise_choice"] = read.boolean(keys.normalised)
    if keys.loss:
        _, weight = read.get((keys.loss,))
        fields["router_loss"] = 0.0 if weight == 0 else read.number((keys.loss,), 0.001)
        if keys.loss_switched and not read.boolean("output_router_logits"):
            fields["router_loss"] = 0.0
    if keys.shared:
        limit = "experts" if keys.shared_copies else "shared_intermediate"
        fields["shared_intermediate"] = read.integer(limit, (keys.shared,)) * (width if keys.shared_copies else 1)
    if keys.shared == "":
        fields["shared_intermediate"] = width
    if keys.scale:
        fields["routed_scale"] = read.number((keys.scale,), 1.0)
    if keys.dense == "first":
        fields["dense_layers"] = tuple(range(min(_read_whole_number(read, "first_k_dense_replace"), layers)))
    elif keys.dense == "listed":
        fields["dense_layers"] = _read_dense_layers(read, layers)
    elif keys.dense == "interleaved":
        mixed = _read_mixed_layers(read, layers)
        fields["dense_layers"] = tuple(layer for layer in range(layers) if layer not in mixed)
    if keys.groups:
        fields |= _read_groups(read, keys)
    return fields


def write_experts(config: ModelConfig, keys: Experts) -> dict[str, Any]:
    """Return the ``config.json`` keys of a mixture of experts with their values; the inverse of `read_experts`. keys:
    names of the family's keys for experts."""
    written: dict[str, Any] = dict.fromkeys(keys.count, config.experts)
    written["num_experts_per_tok"] = config.experts_per_token
    if keys.width:
        written[keys.width] = config.expert_intermediate
    if keys.normalised:
        written[keys.normalised] = config.normalise_choice
    if keys.loss:
        switched = keys.loss_switched and config.router_loss > 0
        written |= {keys.loss: config.router_loss, "output_router_logits": switched}
    if keys.shared:
        copies = config.expert_intermediate if keys.shared_copies else 1
        written[keys.shared] = config.shared_intermediate // copies
    if keys.scale:
        written[keys.scale] = config.routed_scale
    if keys.dense == "first":
        written["first_k_dense_replace"] = len(config.dense_layers)
    elif keys.dense == "listed":
        written |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    elif keys.dense == "interleaved":
        mixed = [layer for layer in range(config.layers) if config.has_experts(layer)]
        written |= {"moe_layers": mixed, "interleave_moe_layer_step": mixed[0] + 1}
    if keys.groups:
        written |= {"n_group": config.expert_groups, "topk_group": config.groups_per_token}
    if keys.groups == "method":
        written["topk_method"] = "greedy" if config.expert_groups == 1 else _GROUPED
    if config.prediction_layers:
        written["num_nextn_predict_layers"] = config.prediction_layers
    return written


def _read_groups(read: Reader, keys: Experts) -> dict[str, int]:
    """Read the ModelConfig fields of group-limited routing, in which a token's experts are in a few groups of experts;
    return {field: value}. read: typed access to the ``config.json``. keys: names of the family's keys for experts."""
    _, method = read.get(("topk_method",)) if keys.groups == "method" else ("", _GROUPED)
    if method not in ("greedy", _GROUPED):
        raise UserError(
            f'{read.where}: unsupported "topk_method" = {shorten_repr(method)}; supported are "greedy" and "{_GROUPED}"'
        )
    groups, used = (read.integer("experts", (key,), 1) for key in ("n_group", "topk_group"))
    if method == "greedy":  # chooses among all experts
        groups = used = 1
    return {"expert_groups": groups, "groups_per_token": used}


def _read_dense_layers(read: Reader, layers: int) -> tuple[int, ...]:
    """Return the indices of the layers with a dense MLP. These are the layers in ``mlp_only_layers``, and the layers
    whose number, counted from 1, is not a multiple of ``decoder_sparse_step``. read: typed access to the
    ``config.json``. layers: number of layers."""
    step = read.integer("layers", ("decoder_sparse_step",), 1)
    _, listed = read.get(("mlp_only_layers",))
    dense = _parse_layer_indices(read, "mlp_only_layers", listed or [])
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)


def _read_mixed_layers(read: Reader, layers: int) -> frozenset[int]:
    """Return the indices of the mixture-of-experts layers: the layers in ``moe_layers`` or, without that key, every
    ``interleave_moe_layer_step``-th layer. read: typed access to the ``config.json``. layers: number of layers.
    """
    step = read.integer("layers", ("interleave_moe_layer_step",), 1)
    _, listed = read.get(("moe_layers",))
    return _parse_layer_indices(read, "moe_layers", [*range(step - 1, layers, step)] if listed is None else listed)


def _parse_layer_indices(read: Reader, key: str, value: object) -> frozenset[int]:
    """Return a list of layer indices (`value`) of a ``config.json`` as a set; ``UserError`` for another type. read:
    typed access to the file. key: name of the list in errors."""
    if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise UserError(f'{read.where}: "{key}" must be a list of layer numbers, not {shorten_repr(value)}')
    return frozenset(value)


def _read_whole_number(read: Reader, key: str) -> int:
    """Return the integer >= 0 under ``key``, 0 if it is missing or null; ``UserError`` for other values. read: typed
    access to the ``config.json``."""
    _, value = read.get((key,), 0)
    value = 0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f'{read.where}: "{key}" must be a whole number, not {shorten_repr(value)}')
    return value
