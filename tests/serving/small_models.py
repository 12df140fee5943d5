"""Small random models of every decoder family, in Hugging Face directories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.data.tokenizers.tokenizer import write_tokenizer
from meshwright.kernels.choice import load_kernels
from meshwright.layout import Layout
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.rope_scaling import RopeScaling
from tests.conftest import list_config_features

NEEDS_COMPILER = pytest.mark.skipif(load_kernels() is None, reason="no compiler for the kernels")
FAMILIES = (
    *("llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "gpt2-tiny"),
    *("mixtral-tiny", "qwen2-moe-tiny", "qwen3-moe-tiny", "dots1-tiny"),
    *("granite-tiny", "olmo2-tiny", "olmo3-tiny", "smollm3-tiny", "gemma2-tiny", "gemma3-tiny"),
    *("phi3-tiny", "glm4-tiny", "glm4-moe-tiny", "granitemoe-tiny"),
    *("deepseek-v2-tiny", "deepseek-v3-tiny", "gpt-oss-tiny", "llama4-tiny"),
)


def small_config(name: str, **changes: Any) -> ModelConfig:
    """Three layers, 257 tokens, 64 positions; a window of 7 where the family has windows, in some layers if it can."""
    config = preset(name)
    if config.family in ("mistral", "mixtral", "qwen2", "olmo3", "gemma2", "gemma3_text", "gpt_oss"):
        changes.setdefault("sliding_window", 7)
    if config.family == "llama4_text":
        scaling = RopeScaling("yarn", 4.0, original_max_positions=16)  # scales queries before they are normalised
        changes |= {"sliding_window": 7, "temperature_floor": 3, "rope_scaling": scaling}
    if config.family == "glm4_moe":
        changes.setdefault("head_dim", 10)  # of which 5 features are to be rotated, and 6 are
    if config.family == "qwen2":
        changes.setdefault("windowed_layers", (False, True, True))
    if config.embedding_factor != 1:  # tied, a scaled embedding repeats its token
        changes.setdefault("tied", False)
    changes = {"layers": 3, "vocabulary": 257, "max_positions": 64, "bos_token": None, "eos_token": 256, **changes}
    return dataclasses.replace(config, **changes)


def list_features(name: str) -> set[tuple[object, ...]]:
    """Return the features of a family's model. Families with the same features may differ in numbers, such as the size
    of a head or the part of it that is rotated."""
    return list_config_features(small_config(name))


def list_layout_features(name: str, layout: str) -> set[tuple[object, ...]]:
    """Return the features of a case on several ranks: tp, pp and ep, of two or of more ranks, split what a family's
    features add, so these count in pairs; replicas do not."""
    features, parsed = list_features(name), Layout.parse(layout)
    sizes = {axis: parsed.group_size(axis) for axis in ("tp", "pp", "ep")}
    splits = {(axis, size > 2) for axis, size in sizes.items() if size > 1}
    alone = {(word,) for word in layout.split()} | features
    return alone | {(*split, *feature) for split in splits for feature in features}


def write_model(directory: Path, config: ModelConfig) -> Path:
    """Random weights, large enough that answers differ and depend on the prompt; a tokenizer of bytes."""
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases away from where they have no effect
            parameter.mul_(6 if parameter.dim() > 1 else 1).add_(
                0.1 * torch.randn(parameter.shape, generator=generator)
            )
    save_huggingface(model, directory)
    write_tokenizer(directory, "bytes", 257, None, iter(()))
    return directory
