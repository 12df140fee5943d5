"""Rotary tables equal those of transformers to the last bit, and stay exact in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from meshwright.model.rope import RotaryTable, _rotate_halves, compute_inverse_frequencies, rotate
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.presets import preset
from meshwright.spec.rope_scaling import RopeScaling

CPU = torch.device("cpu")
LLAMA = dataclasses.replace(preset("llama-tiny"), head_dim=64, rope_theta=5e5)
TURN = LLAMA.layer_rotation(0)
assert TURN is not None
SCALINGS = {
    "plain": None,
    "linear": RopeScaling("linear", 3.0),
    "llama3": RopeScaling("llama3", 8.0, 8192, low_frequency_factor=1.0, high_frequency_factor=4.0),
    "yarn": RopeScaling("yarn", 4.0, 4096),
    "yarn in full": RopeScaling(
        "yarn", 40.0, 4096, beta_fast=24.0, beta_slow=2.0, mscale=0.707, mscale_all_dim=1.0, truncate=False
    ),
    "yarn, factor given": RopeScaling("yarn", 4.0, 4096, attention_factor=1.25),
}


def config(name: str) -> ModelConfig:
    return dataclasses.replace(LLAMA, rope_scaling=SCALINGS[name])


@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_tables_match_transformers_at_large_positions(name: str):
    ours = config(name)
    their_config = AutoConfig.for_model(**config_to_huggingface(ours))
    positions = torch.tensor([[0, 1, 2, 100, 5000, 131_071]])
    cosine, sine = LlamaRotaryEmbedding(their_config)(torch.zeros(1, 6, 1), positions)
    mine = RotaryTable(ours.layer_rotation(0), torch.float32).look_up(positions, 0, 131_072, CPU)
    torch.testing.assert_close(mine[0][:, 0], cosine[..., :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(mine[1][:, 0], sine[..., :32], rtol=0, atol=1e-6)


def test_pairs_are_halves_apart_as_in_transformers():
    q, k = torch.randn(2, 3, 9, 64), torch.randn(2, 1, 9, 64)
    cosine, sine = RotaryTable(TURN, torch.float32).look_up(None, 0, 9, CPU)
    doubled = [torch.cat([part, part], dim=-1)[:, 0] for part in (cosine, sine)]
    for mine, theirs in zip((q, k), apply_rotary_pos_emb(q, k, *doubled), strict=True):
        torch.testing.assert_close(rotate(mine, cosine, sine), theirs)


def test_a_float64_model_has_float64_angles():
    cosine, _ = RotaryTable(TURN, torch.float64).look_up(None, 0, 5000, CPU)
    assert cosine.dtype == torch.float64
    angle = 4999 * 5e5 ** (-2 * 3 / 64)
    assert abs(float(cosine[0, 0, 4999, 3]) - math.cos(angle)) < 1e-12


def test_bfloat16_model_distinguishes_distant_positions():
    cosine, _ = RotaryTable(TURN, torch.bfloat16).look_up(None, 1000, 1002, CPU)
    assert cosine.dtype == torch.float32
    assert not torch.equal(cosine[0, 0, 0], cosine[0, 0, 1])
    assert rotate(torch.ones(1, 1, 2, 64, dtype=torch.bfloat16), cosine, cosine).dtype == torch.bfloat16


def test_scores_depend_on_the_distance_alone():
    table = RotaryTable(TURN, torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
    near = rotate(q, *table.look_up(None, 7, 8, CPU)) @ rotate(k, *table.look_up(None, 3, 4, CPU)).mT
    far = rotate(q, *table.look_up(None, 907, 908, CPU)) @ rotate(k, *table.look_up(None, 903, 904, CPU)).mT
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)


def test_yarn_keeps_high_frequencies_and_scales_low_ones():
    plain = compute_inverse_frequencies(config("plain").layer_rotation(0), torch.float64)
    yarn = compute_inverse_frequencies(config("yarn").layer_rotation(0), torch.float64)
    assert yarn[0] == plain[0]
    torch.testing.assert_close(yarn[-1], plain[-1] / 4)


def test_rotary_result_on_accelerators_is_contiguous_and_equal():
    x_BSND = torch.randn(2, 5, 3, 64, dtype=torch.bfloat16)
    cosine, sine = RotaryTable(TURN, torch.bfloat16).look_up(None, 0, 5, CPU)
    turned = rotate(x_BSND.transpose(1, 2), cosine, sine)
    assert turned.is_contiguous()
    assert torch.equal(turned, _rotate_halves(x_BSND, cosine.transpose(1, 2), sine.transpose(1, 2)).transpose(1, 2))
    there = rotate(*(each.to("meta") for each in (x_BSND.transpose(1, 2), cosine, sine)))
    assert there.shape == turned.shape and there.transpose(1, 2).is_contiguous()
