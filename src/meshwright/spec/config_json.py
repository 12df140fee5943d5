"""Read and write Hugging Face's ``config.json``.

A missing key has the default that transformers gives it, so that both libraries read the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_fields import check_fields
from meshwright.spec.config_reader import Reader
from meshwright.spec.encoder_json import read_encoder, write_encoder
from meshwright.spec.experts_json import read_experts, write_experts
from meshwright.spec.families import FAMILIES, Family
from meshwright.spec.rope_scaling import read_rope_scaling, write_rope_scaling
from meshwright.untrusted import read_json

_ACTIVATION_KEYS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}
# Activations that transformers assumes where the key is missing; "silu" in all other families.
_DEFAULT_ACTIVATIONS = {
    "gpt2": "gelu_new", "bert": "gelu", "bloom": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh",
    "nemotron": "relu2",
}  # fmt: skip

# Field of ModelConfig -> keys of a config.json, the usual one first.
_KEYS: dict[str, tuple[str, ...]] = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size",),
    "max_positions": ("max_position_embeddings",),
    "activation": ("hidden_act",),
    "norm_epsilon": ("rms_norm_eps",),
}
_GPT2_KEYS: dict[str, tuple[str, ...]] = _KEYS | {
    "hidden": ("n_embd", "hidden_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": ("n_head", "num_attention_heads"),
    "head_dim": (),  # always hidden / heads
    "intermediate": ("n_inner",),
    "max_positions": ("n_positions", "max_position_embeddings"),
    "activation": ("activation_function",),
    "norm_epsilon": ("layer_norm_epsilon",),
}
_BERT_KEYS: dict[str, tuple[str, ...]] = _KEYS | {
    "kv_heads": ("num_attention_heads",),
    "head_dim": (),
    "norm_epsilon": ("layer_norm_eps",),
}
_FAMILY_KEYS = {
    "gpt2": _GPT2_KEYS,
    "bloom": _GPT2_KEYS | {"hidden": ("hidden_size", "n_embed"), "max_positions": ("seq_length",)},
    "bert": _BERT_KEYS,
    "gemma2": _KEYS | {"activation": ("hidden_activation",)},
    "nemotron": _KEYS | {"norm_epsilon": ("norm_eps",)},
}


def config_from_huggingface(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Convert a ``config.json`` object (`data`), as written by transformers 4 or 5, to a ModelConfig.

    ``where``: name of the configuration in errors. Raises ``UserError`` for an unknown family, a missing or mistyped
    key, contradictory sizes, a quantised model, or an unsupported feature.
    """
    try:
        return ModelConfig(**read_fields(data, where))
    except UserError as error:
        message = str(error)
        raise UserError(f"{where}: {message[7:]}" if message.startswith("model: ") else message) from None


def config_from_path(path: str | Path) -> ModelConfig:
    """Read the ModelConfig of a model. `path`: a Hugging Face directory or a ``config.json``. Raises ``UserError`` if
    the file is missing or not JSON, or if the model is not supported."""
    return config_from_huggingface(read_config(path), where=str(config_file(path)))


def config_file(path: str | Path) -> Path:
    """Return the path of the ``config.json`` in a Hugging Face directory, or `path` itself if it is a file."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a ``config.json`` and return its JSON object. `path`: the file or its directory. Raises ``UserError`` if the
    file is missing or not a JSON object."""
    file = config_file(path)
    try:
        data = read_json(file, "config_bytes")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; a Hugging Face directory or a config.json is needed") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: must hold one JSON object, not {type(data).__name__}")
    return data


def file_keys(family: str) -> Mapping[str, tuple[str, ...]]:
    """Return, by ModelConfig field name, the ``config.json`` keys that may hold the field in a family (its
    ``model_type``), the preferred key first."""
    return _FAMILY_KEYS.get(family, _KEYS)


def read_family(data: Mapping[str, Any], where: str) -> Family:
    """Return the family that ``model_type`` names in a ``config.json`` object (`data`). Raises ``UserError``, with the
    list of known families, for an unknown one, and for a quantized model. ``where``: name of the configuration in
    errors."""
    name = data.get("model_type")
    known = ", ".join(FAMILIES)
    if name is None:
        raise UserError(f'{where}: "model_type" is missing; it must be one of {known}')
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f'{where}: "model_type" {shorten_repr(name)} is not a known family, so it can be neither planned nor run '
            f"(known: {known})"
        )
    for key in ("quantization_config", "compression_config"):
        if data.get(key) is not None:
            raise UserError(f'{where}: quantised models ("{key}") cannot be read; use the unquantised model')
    return FAMILIES[name]


def read_fields(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the ModelConfig fields, by name, from a ``config.json`` object (`data`). where: name of the configuration in
    errors.

    Raises ``UserError`` for values that cannot be read or whose effect is not implemented. Warns with `ModelWarning` of
    unknown fields, of custom code and of another architecture.
    """
    family = read_family(data, where)
    read = Reader(data, family.defaults, where)
    keys = file_keys(family.name)
    heads = read.integer("heads", keys["heads"])
    kv_heads = read.integer("kv_heads", keys["kv_heads"], heads)
    hidden = read.integer("hidden", keys["hidden"])
    if heads % kv_heads:
        raise UserError(
            f'{where}: "{keys["heads"][0]}" {heads} is not a multiple of "{keys["kv_heads"][0]}" {kv_heads}'
        )
    fields: dict[str, Any] = {
        "family": family.name,
        "vocabulary": read.integer("vocabulary", keys["vocabulary"]),
        "hidden": hidden,
        "layers": read.integer("layers", keys["layers"]),
        "heads": heads,
        "kv_heads": kv_heads,
        "activation": read.activation(keys["activation"], _DEFAULT_ACTIVATIONS.get(family.name, "silu")),
        "norm_epsilon": read.number(keys["norm_epsilon"], 1e-6 if family.fixed["norm"] == "rmsnorm" else 1e-5),
        "initializer_range": read.number(("initializer_range",), 0.02),
        "tied": read.boolean("tie_word_embeddings"),
    }
    head_dim_keys = keys["head_dim"]
    if hidden % heads and (not head_dim_keys or read.get(head_dim_keys)[1] is None):
        missing = ' and there is no "head_dim"' if head_dim_keys else ""
        raise UserError(
            f'{where}: "{keys["hidden"][0]}" {hidden} is not a multiple of "{keys["heads"][0]}" {heads}{missing}'
        )
    head_dim = hidden // heads
    fields["head_dim"] = read.integer("head_dim", head_dim_keys, head_dim) if head_dim_keys else head_dim
    if family.name == "bloom":
        # transformers fixes the width. ALiBi positions have no table: the trained length is not in the file.
        fields["intermediate"], positions = 4 * hidden, 2048
    else:
        width, positions = 4 * hidden if family.name == "gpt2" else None, None
        fields["intermediate"] = read.integer("intermediate", keys["intermediate"], width)
    fields["max_positions"] = read.integer("max_positions", keys["max_positions"], positions)
    if family.encoder:
        fields |= read_encoder(read, family, fields["vocabulary"])
    if family.fixed["positions"] == "rope":
        _read_rope(data, fields, where, read)
        _read_windows(data, fields, where, read)
        if family.name == "qwen2_moe":
            fields["qkv_bias"] = read.boolean("qkv_bias")
        if family.experts:
            fields |= read_experts(read, family.name, fields["layers"], fields["intermediate"])
        if family.attention_bias:
            fields["qkv_bias"] = fields["output_bias"] = read.boolean("attention_bias")
        if family.name in ("llama", "nemotron"):
            fields["mlp_bias"] = read.boolean("mlp_bias")
    bos = read.tokens("bos_token_id", fields["vocabulary"])
    eos = read.tokens("eos_token_id", fields["vocabulary"])
    fields["bos_token"] = bos[0] if bos else None
    fields["eos_token"] = eos[0] if eos else None
    fields["more_eos_tokens"] = eos[1:]
    fields = {**family.fixed, **fields}
    check_fields(data, family, fields, where)
    return fields


def _read_rope(data: Mapping[str, Any], fields: dict[str, Any], where: str, read: Reader) -> None:
    """Read the ModelConfig fields ``rope_theta`` and ``rope_scaling`` from a ``config.json`` object (``data``) and add
    them to ``fields``. They are under ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters``
    (transformers 5). where: name of the configuration in errors. read: typed access to ``data``."""
    fields["rope_theta"] = read.number(("rope_theta",), 10000.0)
    # In a file with both keys rope_scaling takes precedence, as in transformers 5.
    for key in ("rope_scaling", "rope_parameters"):
        entry = data.get(key)
        if entry is None or entry == {}:
            continue
        at = f"{where}: {key}"
        if not isinstance(entry, Mapping):
            raise UserError(f"{at} must be an object, not {shorten_repr(entry)}")
        per_type = [value for value in entry.values() if isinstance(value, Mapping)]
        if per_type:
            if any(value != per_type[0] for value in per_type):
                raise UserError(f"{at}: rotary positions that differ between layers are not supported")
            entry = per_type[0]
        inner = Reader(entry, {}, at)
        if inner.number(("partial_rotary_factor",), 1.0) != 1.0 and fields["family"] != "nemotron":
            raise UserError(f'{at}: "partial_rotary_factor" other than 1 is not supported')
        fields["rope_theta"] = inner.number(("rope_theta",), fields["rope_theta"])
        if data.get("original_max_position_embeddings") is not None:
            entry = {**entry, "original_max_position_embeddings": data["original_max_position_embeddings"]}
        fields["rope_scaling"] = read_rope_scaling(entry, max_positions=fields["max_positions"], where=at)
        return


def _read_windows(data: Mapping[str, Any], fields: dict[str, Any], where: str, read: Reader) -> None:
    """Read the ModelConfig fields ``sliding_window`` (tokens) and ``windowed_layers`` from a ``config.json`` object
    (``data``) and add them to ``fields``. where: name of the configuration in errors. read: typed access to
    ``data``."""
    family, layers = fields["family"], fields["layers"]
    if family in ("llama", "nemotron"):  # transformers' Llama has no window and ignores the key
        return
    _, window = read.get(("sliding_window",))
    if family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and not read.boolean("use_sliding_window"):
        window = None
    types = data.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise UserError(f'{where}: "layer_types" must be a list of {layers} names, one for each layer')
        for name in types:
            if name not in ("full_attention", "sliding_attention"):
                raise UserError(
                    f"{where}: layer type {shorten_repr(name)} is not supported (full_attention, sliding_attention)"
                )
        windowed = [name == "sliding_attention" for name in types]
    elif family in ("mistral", "mixtral", "qwen3_moe"):
        windowed = [True] * layers
    elif family == "gemma2":
        windowed = [index % 2 == 0 for index in range(layers)]
    elif family == "qwen2_moe":  # as in transformers 5: every other layer among the first max_window_layers
        first = _window_layers(read)
        windowed = [index % 2 == 0 and index < first for index in range(layers)]
    else:
        first = _window_layers(read)
        windowed = [index >= first for index in range(layers)]
    if window is None or not any(windowed):
        return
    if family in ("mistral", "mixtral", "qwen3_moe") and not all(windowed):
        raise UserError(f'{where}: "layer_types" of a {family} model must be the same for all layers')
    fields["sliding_window"] = read.integer("sliding_window", ("sliding_window",))
    fields["windowed_layers"] = None if all(windowed) else tuple(windowed)


def _window_layers(read: Reader) -> int:
    """Return ``max_window_layers`` of a Qwen2 ``config.json`` (default 28): in qwen2 the index of the first layer with
    a sliding window, in qwen2_moe that of the first layer without one. read: typed access to the file."""
    _, value = read.get(("max_window_layers",), 28)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f'{read.where}: "max_window_layers" must be a whole number, not {shorten_repr(value)}')
    return value


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """Convert a ModelConfig to a ``config.json`` object that transformers 4 and 5 can read; the inverse of
    `config_from_huggingface`. Raises ``UserError`` for a family that can be planned but not run."""
    if config.planning_only:
        raise UserError(f"{config.family} can be planned but not written: {config.planning_only}")
    family = FAMILIES[config.family]
    keys = file_keys(config.family)
    activation = _ACTIVATION_KEYS[config.activation]
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocabulary,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_token,
        "eos_token_id": list(config.eos_tokens) if config.more_eos_tokens else config.eos_token,
        "use_cache": True,
        **{names[0]: getattr(config, field) for field, names in keys.items() if names},
        keys["activation"][0]: "gelu_new"
        if activation == "gelu_pytorch_tanh" and config.family == "gpt2"
        else activation,
    }
    if config.family == "gpt2":
        return written | {"n_ctx": config.max_positions, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if family.encoder:
        return written | write_encoder(config, family)
    scaling = write_rope_scaling(config.rope_scaling) if config.rope_scaling else None
    written |= {
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
    }
    if config.experts:
        written |= write_experts(config)
    if family.attention_bias:
        written["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        written["mlp_bias"] = config.mlp_bias
    if config.family == "qwen2_moe":
        written["qkv_bias"] = config.qkv_bias
    if config.family in ("mistral", "mixtral", "dots1"):
        written["sliding_window"] = config.sliding_window
    if config.family == "qwen3_moe":
        written["use_sliding_window"] = config.sliding_window is not None
        written["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3", "qwen2_moe", "dots1"):
        windowed = [config.layer_window(index) is not None for index in range(config.layers)]
        if config.family != "dots1":
            written["use_sliding_window"] = any(windowed)
        written["sliding_window"] = config.sliding_window
        written["max_window_layers"] = windowed.index(True) if any(windowed) else config.layers
        written["layer_types"] = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    return written
