"""FLOPs against published closed forms and calculations by hand."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.spec.flops import forward_flops_per_token, training_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.work import keys_per_token


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "gpt3-175b"])
@pytest.mark.parametrize("sequence", [1024, 2048])
def test_gpt_flops_match_megatron_formula(name: str, sequence: int):
    """Narayanan et al. 2021 (arXiv:2104.04473, eq. 3): full attention, full recomputation."""
    config = preset(name)
    h, layers, vocabulary = config.hidden, config.layers, config.vocabulary
    published = 96 * layers * h**2 * (1 + sequence / (6 * h) + vocabulary / (16 * layers * h))
    assert training_flops_per_token(config, sequence, causal=False, recompute="full") == pytest.approx(published)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "qwen3-0.6b", "gemma-2-9b", "llama-3.1-405b"])
def test_training_flops_match_palm_formula(name: str):
    """Chowdhery et al. 2022 (arXiv:2204.02311, appendix B): 6 N + 12 L H Q T, N without the embedding lookup."""
    config = dataclasses.replace(preset(name), sliding_window=None, windowed_layers=None)
    vectors = sum(entry.numel for entry in parameter_table(config).entries if not entry.decay)
    lookup = 0 if config.tied else config.vocabulary * config.hidden
    matrices = parameter_table(config).numel - vectors - lookup
    published = 6 * matrices + 12 * config.layers * config.heads * config.head_dim * 2048
    assert training_flops_per_token(config, 2048, causal=False) == pytest.approx(published)


def test_llama_3_8b_forward_by_hand():
    """Hidden 4096, 32 layers, 32 and 8 heads of 128, intermediate 14336, vocabulary 128256, sequence 8192."""
    forward = forward_flops_per_token(preset("llama-3-8b"), 8192)
    assert forward == {
        "attention.qkv": 32 * 2 * 4096 * (4096 + 2 * 1024),
        "attention.scores": 32 * 2 * 4096 * 8193 / 2,
        "attention.values": 32 * 2 * 4096 * 8193 / 2,
        "attention.output": 32 * 2 * 4096 * 4096,
        "mlp.up": 32 * 2 * 2 * 4096 * 14336,
        "mlp.down": 32 * 2 * 4096 * 14336,
        "head": 2 * 4096 * 128256,
    }


@pytest.mark.parametrize(("sequence", "window"), [(1, None), (7, None), (7, 1), (7, 3), (7, 7), (7, 100)])
def test_attention_flops_count_visible_keys(sequence: int, window: int | None):
    seen = [sum(1 for key in range(query + 1) if window is None or query - key < window) for query in range(sequence)]
    assert keys_per_token(sequence, window) == pytest.approx(sum(seen) / sequence)


def test_sliding_window_counts_in_its_layers():
    config = preset("gemma-2-2b")
    forward = forward_flops_per_token(config, 8192)
    keys = 13 * keys_per_token(8192, 4096) + 13 * keys_per_token(8192)
    assert forward["attention.scores"] == pytest.approx(2 * keys * 8 * 256)


def test_recomputation_adds_repeated_forward_flops():
    config = preset("llama-2-7b")
    forward = forward_flops_per_token(config, 4096)
    plain = training_flops_per_token(config, 4096)
    assert plain == pytest.approx(3 * sum(forward.values()))
    core = forward["attention.scores"] + forward["attention.values"]
    assert training_flops_per_token(config, 4096, recompute="selective") - plain == pytest.approx(core)
    layers = sum(forward.values()) - forward["head"]
    assert training_flops_per_token(config, 4096, recompute="full") - plain == pytest.approx(layers)


def test_training_flops_include_multi_token_prediction():
    """A layer like the last one, the projection of two vectors of 7168, and the output head once more."""
    config = dataclasses.replace(preset("deepseek-v3"), prediction_layers=1)
    without = training_flops_per_token(preset("deepseek-v3"), 4096)
    shorter = training_flops_per_token(dataclasses.replace(preset("deepseek-v3"), layers=60), 4096)
    ends = 3 * (2 * 2 * 7168 * 7168 + 2 * 7168 * 129280)
    assert training_flops_per_token(config, 4096) == pytest.approx(2 * without - shorter + ends)
