"""transformers reads our config.json and builds exactly the tensors of the parameter table."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import transformers

from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_huggingface, config_from_path, config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset
from meshwright.spec.rope_scaling import RopeScaling

LLAMA3 = RopeScaling("llama3", 8.0, 128, low_frequency_factor=1.0, high_frequency_factor=4.0)
YARN = RopeScaling("yarn", 4.0, 128, beta_fast=24.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.5, truncate=False)


def variant(name: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(preset(name), **changes)


VARIANTS = {
    "llama": variant("llama-tiny"),
    "llama untied, odd vocabulary": variant("llama-tiny", tied=False, vocabulary=499),
    "llama with every bias": variant("llama-tiny", qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama, wide heads": variant("llama-tiny", head_dim=16),
    "llama3 scaling": variant("llama-tiny", rope_theta=5e5, rope_scaling=LLAMA3),
    "linear scaling": variant("llama-tiny", rope_scaling=RopeScaling("linear", 2.0)),
    "yarn scaling": variant("llama-tiny", rope_scaling=YARN),
    "mistral": variant("mistral-tiny"),
    "mistral without a window": variant("mistral-tiny", sliding_window=None),
    "qwen2": variant("qwen2-tiny"),
    "qwen2, late windows": variant("qwen2-tiny", sliding_window=8, windowed_layers=(False, False, True)),
    "qwen2, mixed windows": variant("qwen2-tiny", sliding_window=8, windowed_layers=(True, False, True)),
    "qwen3": variant("qwen3-tiny"),
    "qwen3 with biases, window": variant("qwen3-tiny", qkv_bias=True, output_bias=True, sliding_window=8),
    "gpt2": variant("gpt2-tiny"),
    "gpt2 untied, narrow, exact gelu": variant("gpt2-tiny", tied=False, intermediate=100, activation="gelu"),
    "end tokens": variant("llama-tiny", bos_token=1, eos_token=2, more_eos_tokens=(3,)),
}


def build(config: ModelConfig, tmp_path) -> transformers.PreTrainedModel:
    """The model that transformers builds from our config.json, on the meta device."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def built(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[ModelConfig, transformers.PreTrainedModel]:
    """A configuration, and the model that transformers builds from it."""
    return request.param, build(request.param, tmp_path_factory.mktemp("written"))


def test_parameter_names_and_shapes_match_transformers(built: Any):
    config, model = built
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ours = {entry.name: entry.shape for entry in parameter_table(config).entries}
    assert ours == theirs


def test_config_rewritten_by_transformers_gives_same_model(built: Any, tmp_path):
    config, model = built
    model.config.save_pretrained(tmp_path / "again")
    assert config_from_path(tmp_path / "again") == config


def test_transformers_reads_written_config_values(built: Any):
    config, theirs = built[0], built[1].config
    assert theirs.tie_word_embeddings == config.tied
    assert theirs.bos_token_id == config.bos_token
    if config.positions == "learned":
        assert theirs.layer_norm_epsilon == config.norm_epsilon
        assert theirs.n_positions == config.max_positions
        return
    assert theirs.rms_norm_eps == config.norm_epsilon
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["rope_type"] == (config.rope_scaling.kind if config.rope_scaling else "default")
    if config.family in ("qwen2", "qwen3"):
        windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert windows == [config.layer_window(layer) for layer in range(config.layers)]
    elif config.family == "mistral":
        assert theirs.sliding_window == config.sliding_window


@pytest.mark.parametrize("name", ["gemma-2-2b", "bloom-176b"])
def test_planning_families_list_the_tensors_of_transformers(name: str):
    """Cut to two layers, built from the preset's data, because planning-only families are not written."""
    config = dataclasses.replace(preset(name), layers=2, windowed_layers=None, sliding_window=None)
    if name.startswith("gemma"):
        theirs_config = transformers.Gemma2Config(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=2,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
    else:
        theirs_config = transformers.BloomConfig(
            vocab_size=config.vocabulary, hidden_size=config.hidden, n_layer=2, n_head=config.heads
        )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs_config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {entry.name: entry.shape for entry in parameter_table(config).entries} == theirs


def test_a_nemotron_lists_the_tensors_of_transformers():
    """Ungated, with fewer key-value heads than heads: planned, not run."""
    theirs_config = transformers.NemotronConfig(
        vocab_size=499, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    config = config_from_huggingface(theirs_config.to_dict())
    assert config.activation == "relu2" and not config.gated and config.planning_only
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs_config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {entry.name: entry.shape for entry in parameter_table(config).entries} == theirs


def test_every_runnable_preset_has_same_parameter_count_in_transformers(tmp_path):
    """On the meta device; cut to two layers, or one after the dense ones."""
    for name, entry in PRESETS.items():
        if entry.config.planning_only or entry.config.encoder:  # encoders: test_encoder.py
            continue
        layers = max(2, 1 + next(layer for layer in range(99) if layer not in entry.config.dense_layers))
        dense = tuple(layer for layer in entry.config.dense_layers if layer < layers)
        changes = {"windowed_layers": None, "unrotated_layers": (), "dense_layers": dense}
        config = dataclasses.replace(entry.config, layers=layers, **changes)
        count = sum(parameter.numel() for parameter in build(config, tmp_path).parameters())
        biases = sum(
            entry.numel for entry in parameter_table(config).entries if entry.balances
        )  # buffers in transformers
        assert count + biases == parameter_table(config).numel, name


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny") and not name.startswith("bert")])
def test_omitted_maximum_length_equals_transformers_default(name: str):
    data = config_to_huggingface(preset(name))
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        data.pop(key, None)
    theirs = transformers.CONFIG_MAPPING[data["model_type"]].from_dict(data)
    assert config_from_huggingface(data).max_positions == theirs.max_position_embeddings


def test_bloom_intermediate_size_is_four_times_hidden_size():
    data = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_inner": 100}
    with torch.device("meta"):
        theirs = transformers.BloomForCausalLM(transformers.BloomConfig.from_dict(data))
    assert parameter_table(config_from_huggingface(data)).numel == sum(each.numel() for each in theirs.parameters())
