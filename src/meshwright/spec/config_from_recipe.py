"""Build a ModelConfig from a recipe's ``[model]`` table."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, cast

from meshwright.errors import UserError
from meshwright.spec.adapter_config import AdapterConfig, AdapterKind
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface, config_from_path, list_file_keys
from meshwright.spec.families import FAMILIES, Experts
from meshwright.spec.latent_attention import LatentAttention, write_latent_attention
from meshwright.spec.parameters import parameter_table
from meshwright.spec.positions_json import resize_patterns
from meshwright.spec.presets import preset
from meshwright.spec.rope_scaling import read_rope_scaling

if TYPE_CHECKING:
    from meshwright.recipe import AdapterRecipe, ModelRecipe


# Recipe keys that replace the field of the same name in the base configuration.
_KEYS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "max_positions", "rope_theta",
    "sliding_window", "tied", "norm_epsilon", "experts", "experts_per_token", "expert_intermediate",
    "shared_intermediate", "dense_layers", "router_loss", "prediction_layers", "prediction_loss",
    "mup_base_hidden",
)  # fmt: skip


def config_from_recipe(
    model: ModelRecipe, sequence: int, tokenizer_vocabulary: int, adapter: AdapterRecipe | None = None
) -> ModelConfig:
    """Return the ModelConfig that a recipe's ``[model]`` table (`model`) describes. If the table names a preset or a
    Hugging Face directory, all fields are taken from it; the table's other keys then replace single fields.

    ``sequence``: tokens of a sequence (``data.sequence``). ``tokenizer_vocabulary``: number of token ids of the
    tokenizer, which is the model's vocabulary if the table has neither a vocabulary nor a directory. ``adapter``: the
    recipe's ``[adapter]`` table; None: no adapter. Raises ``UserError`` if the model's vocabulary is smaller than the
    tokenizer's, the sequence longer than the model's positions, or the adapter does not fit the model."""
    if model.from_path is not None:
        base = config_from_path(model.from_path)
    elif model.preset is not None:
        base = preset(model.preset)
    else:
        base = _make_default_config(model, sequence, tokenizer_vocabulary)
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
    others = ((config.tied, "a tied output head"), (config.encoder, "an encoder"), (config.latent, "latent attention"),
              (adapter is not None and adapter.kind != "none", "an adapter"))  # fmt: skip
    if config.mup_base_hidden and (other := next((name for found, name in others if found), None)):
        raise UserError(f"model.mup_base_hidden scales input and output weights apart, which {other} does not allow")
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
    return config if adapter is None else with_adapter(config, adapter, model.from_path)


def with_adapter(config: ModelConfig, adapter: AdapterRecipe, base: str | None = None) -> ModelConfig:
    """Return the base model's configuration `config` with the adapter of a recipe's ``[adapter]`` table added. base:
    directory of the base model, which the adapter's configuration records (None: nothing is recorded). Raises
    `UserError` if targets or rank do not fit the model.
    """
    found = make_adapter_config(adapter, base)
    if found is None:
        return config
    config = dataclasses.replace(config, adapter=found)
    parameter_table(config)  # refuses targets and ranks that do not fit
    return config


def make_adapter_config(adapter: AdapterRecipe, base: str | None = None) -> AdapterConfig | None:
    """Return the AdapterConfig of a recipe's ``[adapter]`` table; None for kind "none". base: directory of the base
    model, or None.
    """
    if adapter.kind == "none":
        return None
    alpha = 2.0 * adapter.rank if adapter.alpha is None else adapter.alpha
    packed = None if adapter.base == "bf16" else cast(Any, adapter.base + "-double" * adapter.double_quantization)
    return AdapterConfig(
        cast(AdapterKind, adapter.kind), adapter.rank, alpha, tuple(adapter.targets),
        "" if base is None else os.path.abspath(base), packed=packed,
        dropout=adapter.dropout,
    )  # fmt: skip


def _make_default_config(model: ModelRecipe, sequence: int, vocabulary: int) -> ModelConfig:
    """Return the ModelConfig of a recipe's ``[model]`` table (`model`) that names neither a preset nor a directory. The
    table gives the sizes (``layers``, ``hidden``, ``heads``, ...); all other fields have the defaults of the family, as
    in a ``config.json`` with only these sizes. sequence: tokens of a sequence. vocabulary: number of token ids."""
    assert model.family and model.layers and model.hidden and model.heads  # checked by the recipe
    family, keys, hidden, heads = FAMILIES[model.family], list_file_keys(model.family), model.hidden, model.heads
    if hidden % heads and model.head_dim is None:
        raise UserError(f"model.hidden {hidden} must be a multiple of model.heads {heads}")
    # Two thirds of 4 x hidden: three gated matrices have the parameters of two (Shazeer 2020, arXiv:2002.05202).
    intermediate = -(-8 * hidden // (3 * 64)) * 64 if family.fixed["gated"] else 4 * hidden
    head_dim = model.head_dim or hidden // heads
    sizes = {
        "vocabulary": vocabulary, "hidden": hidden, "layers": model.layers, "heads": heads, "kv_heads": heads,
        "head_dim": head_dim, "intermediate": intermediate, "max_positions": sequence,
    }  # fmt: skip
    data: dict[str, Any] = {keys[field][0]: value for field, value in sizes.items() if keys[field]}
    # Special tokens are the tokenizer's.
    data |= {"model_type": model.family, "architectures": [family.architecture], "bos_token_id": None}
    data["eos_token_id"] = None
    if not family.encoder:
        data[keys["norm_epsilon"][0]] = 1e-5
    if family.windows is not None and family.windows.layers == "all":
        data["sliding_window"] = None
    if "attention_scale" in family.settings:  # 1 / sqrt(head_dim), as in other families
        scale = family.settings["attention_scale"]
        data[scale.key] = head_dim if scale.kind == "inverse_square" else head_dim**-0.5
    if family.latent:
        data |= _make_default_latent(hidden // heads, model.head_dim)
    if family.experts:
        data |= _make_default_experts(model, family.experts, intermediate)
    return config_from_huggingface(data, where="model")


def _make_default_latent(size: int, head_dim: int | None) -> dict[str, Any]:
    """Return the ``config.json`` keys of multi-head latent attention, with default values, for a recipe's ``[model]``
    table. The proportions of the sizes are those of DeepSeek-V2-Lite. size: hidden / heads. head_dim: size of a head's
    query; None: the table does not give it."""
    rotary = 2 * max(1, (size // 4 if head_dim is None else head_dim // 6))
    values = max(1, size if head_dim is None else head_dim - rotary)
    return write_latent_attention(LatentAttention(4 * values, rotary, values), values + rotary)


def _make_default_experts(model: ModelRecipe, keys: Experts, intermediate: int) -> dict[str, Any]:
    """Return the ``config.json`` keys of a mixture of experts, with values, for a recipe's ``[model]`` table (`model`).
    If the table gives no expert width, it is chosen so that a token's experts together cost about as much compute as a
    dense MLP of width `intermediate`; in family mixtral each expert has the width `intermediate`.

    keys: names of the family's ``config.json`` keys for experts. intermediate: width of a dense MLP."""
    experts = model.experts or 8
    chosen = model.experts_per_token or min(2, experts)
    written: dict[str, Any] = {keys.count[0]: experts, "num_experts_per_tok": chosen}
    if keys.width is None:  # experts as wide as the usual MLP
        written["intermediate_size"] = model.expert_intermediate or model.intermediate or intermediate
        width = written["intermediate_size"]
    else:
        width = model.expert_intermediate or max(1, intermediate // (chosen + (keys.shared is not None)))
        written[keys.width] = width
    if keys.normalised:
        written[keys.normalised] = True
    if keys.loss:
        written |= {keys.loss: 0.001, "output_router_logits": keys.loss_switched}
    if keys.shared:
        written[keys.shared] = 1 if keys.shared_copies else width
    if keys.dense == "first":
        written["first_k_dense_replace"] = 0
    if keys.groups:
        written |= {"n_group": 1, "topk_group": 1}
    return written


def _add_derived_sizes(base: ModelConfig, overrides: dict[str, Any]) -> None:
    """Add to ``overrides`` ({ModelConfig field: new value}), in place, the sizes that follow from the overridden
    fields.

    The rules: head_dim = hidden / heads; kv_heads = heads; intermediate = 4 hidden (ungated MLP); one rotary base in
    all layers. A rule is applied only if the configuration `base`, before the overrides, follows it: if `base` has
    fewer key-value heads than heads, their number is not changed. Fields with one value per layer are cut or continued
    to the new number of layers."""
    hidden, heads = overrides.get("hidden", base.hidden), overrides.get("heads", base.heads)
    if base.latent is None and base.head_dim * base.heads == base.hidden and hidden % heads == 0:
        overrides.setdefault("head_dim", hidden // heads)
    if base.kv_heads == base.heads:
        overrides.setdefault("kv_heads", heads)
    if base.intermediate == 4 * base.hidden and not base.gated:
        overrides.setdefault("intermediate", 4 * hidden)
    if "rope_theta" in overrides and base.window_rope_theta == base.rope_theta:
        overrides["window_rope_theta"] = overrides["rope_theta"]
    keys = FAMILIES[base.family].experts
    if keys is not None and keys.width is None:  # one width with two names
        width = overrides.get("expert_intermediate", overrides.get("intermediate", base.intermediate))
        overrides |= {"intermediate": width, "expert_intermediate": width}
    if keys is not None and keys.shared == "" and "expert_intermediate" in overrides:  # a shared expert as wide
        overrides.setdefault("shared_intermediate", overrides["expert_intermediate"])
    if "dense_layers" in overrides:
        overrides["dense_layers"] = tuple(overrides["dense_layers"])
    elif "layers" in overrides:
        overrides["dense_layers"] = tuple(layer for layer in base.dense_layers if layer < overrides["layers"])
    if "layers" in overrides:
        overrides |= resize_patterns(base, overrides["layers"])
