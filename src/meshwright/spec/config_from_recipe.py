"""Build a ModelConfig from a recipe's ``[model]`` table."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, cast

from meshwright.errors import UserError
from meshwright.spec.adapter_config import AdapterConfig, AdapterKind
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.families import FAMILIES
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.rope_scaling import read_rope_scaling

if TYPE_CHECKING:
    from meshwright.recipe import AdapterRecipe, ModelRecipe


# Recipe keys that replace the field of the same name in the base configuration.
_KEYS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "max_positions", "rope_theta",
    "sliding_window", "tied", "norm_epsilon", "experts", "experts_per_token", "expert_intermediate",
    "shared_intermediate", "dense_layers", "router_loss", "prediction_layers", "prediction_loss",
)  # fmt: skip


def config_from_recipe(
    model: ModelRecipe, sequence: int, tokenizer_vocabulary: int, adapter: AdapterRecipe | None = None
) -> ModelConfig:
    """Return the ModelConfig that a recipe's ``[model]`` table (`model`) describes, with the adapter of its
    ``[adapter]`` table (None: no adapter). The table may name a preset or a
    Hugging Face directory; its own keys then override those fields.

    ``sequence``: tokens of a sequence (``data.sequence``). ``tokenizer_vocabulary``: number of token ids of the
    tokenizer, which is the model's vocabulary if the table gives none and names no directory. Raises ``UserError`` if
    the model's vocabulary is smaller than the tokenizer's, the sequence longer than the model's positions, or the
    adapter does not fit the model.
    """
    if model.from_path is not None:
        base = config_from_path(model.from_path)
    elif model.preset is not None:
        base = preset(model.preset)
    else:
        base = _default_config(model, sequence, tokenizer_vocabulary)
    overrides: dict[str, Any] = {name: value for name in _KEYS if (value := getattr(model, name)) is not None}
    _add_derived_sizes(base, overrides)
    if model.from_path is None:
        overrides.setdefault("vocabulary", tokenizer_vocabulary)
    if model.rope_scaling is not None:
        overrides["rope_scaling"] = read_rope_scaling(
            model.rope_scaling,
            max_positions=overrides.get("max_positions", base.max_positions),
            where="model.rope_scaling",
        )
    if overrides.get("vocabulary", base.vocabulary) != base.vocabulary:
        # The base's special tokens belong to the base's tokenizer.
        overrides |= {"bos_token": None, "eos_token": None, "more_eos_tokens": ()}
    config = dataclasses.replace(base, **overrides)
    if config.vocabulary < tokenizer_vocabulary:
        raise UserError(
            f"model.vocabulary {config.vocabulary} is smaller than the tokenizer's {tokenizer_vocabulary}; "
            "use the model's own tokenizer or a larger vocabulary"
        )
    if sequence > config.max_positions:
        raise UserError(
            f"data.sequence {sequence} is longer than the model's {config.max_positions} positions; "
            "shorten it or set model.max_positions"
        )
    if adapter is not None and adapter.kind != "none":
        config = dataclasses.replace(config, adapter=_make_adapter(adapter, model))
        parameter_table(config)  # refuses targets and ranks that do not fit
    return config


def _make_adapter(adapter: AdapterRecipe, model: ModelRecipe) -> AdapterConfig:
    """Return the AdapterConfig of a recipe's ``[adapter]`` table. model: its ``[model]`` table, which names the base
    model."""
    alpha = 2.0 * adapter.rank if adapter.alpha is None else adapter.alpha
    base = "" if model.from_path is None else os.path.abspath(model.from_path)
    kind = cast(AdapterKind, adapter.kind)
    packed = None if adapter.base == "bf16" else cast(Any, adapter.base)
    return AdapterConfig(kind, adapter.rank, alpha, tuple(adapter.targets), base, packed=packed)


def _default_config(model: ModelRecipe, sequence: int, vocabulary: int) -> ModelConfig:
    """Return the ModelConfig of a recipe's ``[model]`` table (`model`) that names neither a preset nor a directory: the
    table gives the sizes (``layers``, ``hidden``, ``heads``, ...), the family the defaults of other fields. sequence:
    tokens of a sequence. vocabulary: number of token ids."""
    assert model.family and model.layers and model.hidden and model.heads  # checked by the recipe
    hidden, heads = model.hidden, model.heads
    if hidden % heads and model.head_dim is None:
        raise UserError(f"model.hidden {hidden} must be a multiple of model.heads {heads}")
    fixed = FAMILIES[model.family].fixed
    gated = bool(fixed["gated"])
    # Two thirds of 4 x hidden: three gated matrices have the parameters of two (Shazeer 2020, arXiv:2002.05202).
    intermediate = -(-8 * hidden // (3 * 64)) * 64 if gated else 4 * hidden
    fields: dict[str, Any] = {
        "family": model.family,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "layers": model.layers,
        "heads": heads,
        "kv_heads": model.kv_heads or heads,
        "head_dim": model.head_dim or hidden // heads,
        "intermediate": intermediate,
        "max_positions": sequence,
        "norm_epsilon": 1e-5,
        "activation": "silu" if gated else "gelu_tanh",
        "tied": not gated,
    }
    for name, setting in FAMILIES[model.family].settings.items():
        if setting.kind == "factor":
            fields[name] = FAMILIES[model.family].defaults.get(setting.key, 1.0)
    if "attention_scale" in FAMILIES[model.family].settings:
        fields["attention_scale"] = fields["head_dim"] ** -0.5
    if FAMILIES[model.family].encoder:
        fields |= {"token_types": 2, "head": "masked", "activation": "gelu", "norm_epsilon": 1e-12}
    if FAMILIES[model.family].latent:
        fields |= _default_latent(fields["head_dim"], model.head_dim)
    if FAMILIES[model.family].experts:
        fields |= _default_experts(model, intermediate)
    return ModelConfig(**{**fixed, **fields})


def _default_latent(size: int, head_dim: int | None) -> dict[str, Any]:
    """Return the fields of latent attention of a recipe's ``[model]`` table, by ModelConfig field name, in the
    proportions of DeepSeek-V2-Lite. size: hidden / heads. head_dim: size of a head's query, if the table gives it."""
    rotary = 2 * max(1, (size // 4 if head_dim is None else head_dim // 6))
    values = max(1, size if head_dim is None else head_dim - rotary)
    return {"latent": LatentAttention(4 * values, rotary, values), "head_dim": values + rotary}


def _default_experts(model: ModelRecipe, intermediate: int) -> dict[str, Any]:
    """Return the mixture-of-experts fields of a recipe's ``[model]`` table (`model`), by ModelConfig field name. If the
    table gives no expert width, it is chosen so that the experts of a token together cost about as much compute as a
    dense MLP of width `intermediate`; in family mixtral each expert is as wide as that MLP."""
    assert model.family
    fixed, keys = FAMILIES[model.family].fixed, FAMILIES[model.family].experts
    assert keys is not None
    experts = model.experts or 8
    chosen = model.experts_per_token or min(2, experts)
    width = model.expert_intermediate
    one_width = keys.width is None
    if one_width:  # experts as wide as the usual MLP
        width = width or model.intermediate or intermediate
    else:
        width = width or max(1, intermediate // (chosen + bool(fixed.get("shared_intermediate", 1))))
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_intermediate": width,
        "shared_intermediate": fixed.get("shared_intermediate", width),
        "normalise_choice": fixed.get("normalise_choice", True),
        "router_loss": 0.0 if fixed["router_bias"] else 0.001,
    } | ({"intermediate": width} if one_width else {})


def _add_derived_sizes(base: ModelConfig, overrides: dict[str, Any]) -> None:
    """Add sizes that follow from overridden ones to ``overrides`` ({ModelConfig field name: new value}), in place. A
    rule is applied only if `base`, the configuration to be changed, obeys it: head_dim = hidden / heads, kv_heads =
    heads, intermediate = 4 hidden (ungated MLP). Fields with one value per layer are cut or extended to the new number
    of layers."""
    hidden, heads = overrides.get("hidden", base.hidden), overrides.get("heads", base.heads)
    if base.latent is None and base.head_dim * base.heads == base.hidden and hidden % heads == 0:
        overrides.setdefault("head_dim", hidden // heads)
    if base.kv_heads == base.heads:
        overrides.setdefault("kv_heads", heads)
    if base.intermediate == 4 * base.hidden and not base.gated:
        overrides.setdefault("intermediate", 4 * hidden)
    keys = FAMILIES[base.family].experts
    if keys is not None and keys.width is None:  # one width with two names
        width = overrides.get("expert_intermediate", overrides.get("intermediate", base.intermediate))
        overrides |= {"intermediate": width, "expert_intermediate": width}
    if "dense_layers" in overrides:
        overrides["dense_layers"] = tuple(overrides["dense_layers"])
    elif "layers" in overrides:
        overrides["dense_layers"] = tuple(layer for layer in base.dense_layers if layer < overrides["layers"])
    if "layers" in overrides:
        overrides["unrotated_layers"] = tuple(layer for layer in base.unrotated_layers if layer < overrides["layers"])
    if base.windowed_layers is not None and "layers" in overrides:
        # One entry per layer: cut the list, or repeat the last entry.
        layers = overrides["layers"]
        overrides["windowed_layers"] = (base.windowed_layers + base.windowed_layers[-1:] * layers)[:layers]
