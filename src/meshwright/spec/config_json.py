"""Read and write Hugging Face's ``config.json``.

A missing key has the default that transformers gives it, so that both libraries read the same model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ModelWarning, UserError
from meshwright.limits import shorten_repr
from meshwright.names import list_other_steps
from meshwright.spec.adapter_json import ADAPTER_CONFIG, find_base_directory, make_missing_base_error
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_fields import check_fields
from meshwright.spec.config_reader import Reader
from meshwright.spec.encoder_json import read_encoder, write_encoder
from meshwright.spec.experts_json import read_experts, write_experts
from meshwright.spec.families import FAMILIES, NESTED, Family, Setting
from meshwright.spec.latent_attention import read_latent_attention, write_latent_attention
from meshwright.spec.positions_json import read_rope, read_windows, write_rope, write_windows
from meshwright.spec.unread_families import UNREAD
from meshwright.spec.weight_formats import read_weight_format
from meshwright.untrusted import read_json

_ACTIVATION_KEYS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}
# Activations that transformers assumes where the key is missing; "silu" in all other families.
_DEFAULT_ACTIVATIONS = {
    "gpt2": "gelu_new", "bert": "gelu", "bloom": "gelu_pytorch_tanh", "nemotron": "relu2",
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


def config_from_huggingface(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Convert a ``config.json`` object (`data`), as written by transformers 4 or 5, to a ModelConfig.

    ``where``: name of the configuration in errors. Raises ``UserError`` for an unknown family, a missing or mistyped
    key, contradictory sizes, an unsupported feature, or quantized weights in a format that is not read.
    """
    try:
        return ModelConfig(**read_fields(data, where))
    except UserError as error:
        message = str(error)
        raise UserError(f"{where}: {message[7:]}" if message.startswith("model: ") else message) from None


def config_from_path(path: str | Path) -> ModelConfig:
    """Read the ModelConfig of a model. `path`: a Hugging Face directory or a ``config.json``. Raises ``UserError`` if
    the file is missing or not JSON, or if the model is not supported."""
    return config_from_huggingface(read_config(path), where=str(find_config_file(path)))


def read_decoder_config(directory: Path) -> ModelConfig:
    """Read the ModelConfig of a decoder in the Hugging Face directory `directory`. Raises ``UserError`` if the model is
    an encoder, or of a family that Meshwright can plan but not run."""
    config = config_from_path(directory)
    if config.planning_only:
        raise UserError(f"{directory}: {config.family} can be planned but not run: {config.planning_only}")
    if config.encoder:
        raise UserError(f"{directory}: {config.family} is an encoder, which predicts no next token")
    return config


def find_config_file(path: str | Path) -> Path:
    """Find the ``config.json`` of a model; return its path. `path`: a Hugging Face directory; a PEFT directory (the
    file of its base model is returned, and ``UserError`` raised without one); or a file, which is returned unchanged.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    if (path / "config.json").is_file() or not (path / ADAPTER_CONFIG).is_file():
        return path / "config.json"
    base = find_base_directory(path)
    if base is None:
        raise make_missing_base_error(path)
    return base / "config.json"


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a ``config.json`` and return its JSON object. `path`: the file or its directory. Raises ``UserError`` if the
    file is missing or not a JSON object."""
    file = find_config_file(path)
    try:
        data = read_json(file, "config_bytes")
    except FileNotFoundError:
        advice = f' (a model of the Hub: "hf download {path} --local-dir DIR" fetches it)' if _is_hub_name(path) else ""
        wanted = list_other_steps(file) or f"; a Hugging Face directory or a config.json is needed{advice}"
        raise UserError(f"{file}: no such file{wanted}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: must hold one JSON object, not {type(data).__name__}")
    return data


def _is_hub_name(path: str | Path) -> bool:
    """Return True if `path` does not exist and looks like the name of a model on the Hugging Face Hub, such as
    "Qwen/Qwen3-8B": it has two parts, the first is not a directory, and the second is not a file name."""
    owner, _, name = str(path).partition("/")
    words = re.fullmatch(r"[A-Za-z0-9][\w.-]*", owner) and re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)
    return bool(words) and not Path(owner).exists() and not name.endswith((".json", ".toml"))


def list_file_keys(family: str) -> Mapping[str, tuple[str, ...]]:
    """Return {ModelConfig field: ``config.json`` keys that may hold it} for a family (its ``model_type``). The
    preferred key comes first."""
    return {**_KEYS, **FAMILIES[family].keys}


def read_family(data: Mapping[str, Any], where: str) -> Family:
    """Return the family that ``model_type`` names in a ``config.json`` object (`data`). ``where``: name of the
    configuration in errors. Raises ``UserError`` for an unknown family (with the list of known families), and for
    quantized weights in a format that Meshwright cannot read."""
    name = data.get("model_type")
    known = ", ".join(FAMILIES)
    if name is None:
        raise UserError(f'{where}: "model_type" is missing; it must be one of {known}')
    if not isinstance(name, str) or name not in FAMILIES | NESTED:
        reason = UNREAD.get(name, "is not a known family") if isinstance(name, str) else "is not a known family"
        reason = reason if reason.startswith("is ") else f"is not read: {reason}"
        raise UserError(
            f'{where}: "model_type" {shorten_repr(name)} {reason}; it can be neither planned nor run (known: {known})'
        )
    read_weight_format(data, where)
    if name in NESTED and isinstance(data.get("text_config"), Mapping):
        read_weight_format(data["text_config"], f"{where}: text_config")
    return (FAMILIES | NESTED)[name]


def select_text_config(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the configuration of the language model in a ``config.json`` object (`data`). Usually this is the object
    itself. For a multimodal model it is the object's ``text_config``, completed by the special tokens of the whole
    object; a `ModelWarning` is then issued. where: name of the configuration in errors."""
    if data.get("model_type") not in NESTED:
        return data
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f'{where}: "text_config" must be an object, not {shorten_repr(text)}')
    family = NESTED[data["model_type"]].name
    message = f'{where}: only the language model of this {data["model_type"]} model ("text_config") is read'
    warnings.warn(message, ModelWarning, stacklevel=2)
    whole = {key: data[key] for key in ("bos_token_id", "eos_token_id") if key in data}
    tied = FAMILIES[family].defaults.get("tie_word_embeddings", False)
    whole["tie_word_embeddings"] = data.get("tie_word_embeddings", tied)  # that of the text_config has no effect
    return {key: value for key, value in text.items() if key != "architectures"} | whole | {"model_type": family}


def read_fields(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the ModelConfig fields from a ``config.json`` object (`data`); return {field: value}. where: name of the
    configuration in errors.

    Raises ``UserError`` for values that cannot be read or whose effect is not implemented. Warns with `ModelWarning` of
    unknown fields, of custom code, and of a transformers class (``architectures``) that is not the family's."""
    family, data = read_family(data, where), select_text_config(data, where)
    read = Reader(data, family.defaults, where)
    keys = list_file_keys(family.name)
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
    if family.latent:
        fields |= read_latent_attention(read)
    elif hidden % heads and family.name != "glm4_moe" and (not head_dim_keys or read.get(head_dim_keys)[1] is None):
        missing = ' and there is no "head_dim"' if head_dim_keys else ""
        raise UserError(
            f'{where}: "{keys["hidden"][0]}" {hidden} is not a multiple of "{keys["heads"][0]}" {heads}{missing}'
        )
    else:
        head_dim = hidden // heads  # rounded down in GLM-4.5, as by transformers
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
        read_rope(fields, read)
        read_windows(fields, read)
        fields |= _read_settings(family, read)
        if family.experts:
            fields |= read_experts(read, family.experts, fields["layers"], fields["intermediate"])
        if family.attention_bias:
            fields["qkv_bias"] = fields["output_bias"] = read.boolean("attention_bias")
    bos = read.tokens("bos_token_id", fields["vocabulary"])
    eos = read.tokens("eos_token_id", fields["vocabulary"])
    fields["bos_token"] = bos[0] if bos else None
    fields["eos_token"] = eos[0] if eos else None
    fields["more_eos_tokens"] = eos[1:]
    fields = {**family.fixed, **fields}
    check_fields(data, family, fields, where)
    return fields


def _read_settings(family: Family, read: Reader) -> dict[str, Any]:
    """Read the optional ModelConfig fields of a family (the fields for which ``family.settings`` gives a
    ``config.json`` key); return {field: value}. read: typed access to the file."""
    fields: dict[str, Any] = {}
    for name, setting in family.settings.items():
        if setting.kind == "flag":
            fields[name] = read.boolean(setting.key)
        elif setting.kind == "switch":
            fields[name] = read.boolean(setting.key, numbers=True)
        elif setting.kind == "count":
            fields[name] = read.integer("count", (setting.key,), family.defaults.get(setting.key))
        elif setting.kind == "limit":
            fields[name] = None if read.get((setting.key,))[1] is None else read.number((setting.key,), 1.0)
        elif name != "window_rope_theta":  # which `read_rope` reads, as it may be nested
            value = read.number((setting.key,), family.defaults.get(setting.key, 1.0))
            fields[name] = value**-0.5 if setting.kind == "inverse_square" else value
    return fields


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """Convert a ModelConfig to a ``config.json`` object that transformers 4 and 5 can read; the inverse of
    `config_from_huggingface`. Raises ``UserError`` for a family that can be planned but not run."""
    if config.planning_only:
        raise UserError(f"{config.family} can be planned but not written: {config.planning_only}")
    family = FAMILIES[config.family]
    keys = list_file_keys(config.family)
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
    # Padding ids that transformers assumes may be outside of a small vocabulary.
    written |= {"attention_dropout": 0.0, "pad_token_id": None, **write_rope(config, family)}
    written |= {
        setting.key: _write_setting(config, name, setting)
        for name, setting in family.settings.items()
        if setting.kind != "nested"  # which `write_rope` writes
    }
    if family.experts:
        written |= write_experts(config, family.experts)
    if config.latent:
        written |= write_latent_attention(config.latent, config.head_dim)
    if family.attention_bias:
        written["attention_bias"] = config.qkv_bias
    return written | write_windows(config, family)


def _write_setting(config: ModelConfig, name: str, setting: Setting) -> object:
    """Return the value of the ``config.json`` key that `setting` describes, for the ModelConfig field called `name`."""
    value = config.score_scale if name == "attention_scale" else getattr(config, name)
    if setting.kind != "inverse_square":
        return value
    number = round(value**-2, 9)  # a square root and a square: rounded, so that the number is that of the file
    return int(number) if number == int(number) else number
