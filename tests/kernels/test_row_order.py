"""Order of the rows of weights for the kernels."""

from __future__ import annotations

import pytest

from meshwright.kernels.row_order import find_row_order
from meshwright.spec.presets import preset


@pytest.mark.parametrize("name", ["layers.0.mlp.experts.up.weight", "layers.0.attention.output.weight", "head.weight"])
def test_rows_of_other_weights_of_latent_attention_keep_their_order(name: str):
    assert find_row_order(preset("deepseek-v3-tiny"), name, 96) is None


def test_rotated_features_of_latent_queries_are_paired_half_of_them_apart():
    config = preset("deepseek-v3-tiny")
    assert config.latent is not None and config.rotary_interleaved
    found = find_row_order(config, "layers.0.attention.query_up.weight", 2 * config.head_dim)
    assert found is not None
    half = config.latent.rotary_dim // 2
    plain = config.head_dim - config.latent.rotary_dim
    for head in (found[: config.head_dim], found[config.head_dim :] - config.head_dim):
        assert head[:plain].tolist() == list(range(plain))
        assert (head[plain + half :] - head[plain : plain + half]).tolist() == [1] * half
