"""Grouped-query attention.

Shapes: B sequences, S tokens of a sequence (on this rank), H hidden, N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.attention_inputs import AttentionInputs
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.layers import ColumnParallelLinear, Linear, RMSNorm, RowParallelLinear, normalise
from meshwright.model.rope import rotate
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.spec.config import ModelConfig


class Attention(nn.Module):
    """Grouped-query attention layer of a transformer block, with `heads` query heads and `kv_heads` key-value heads on
    this rank (Ainslie et al. 2023, arXiv:2305.13245).

    N, K: query and key-value heads on this rank; D: head size; H: hidden size. Query, key and value projections are
    fused: `qkv.weight` is [(N + 2K) D, H], the rows of queries, then of keys, then of values. Queries and keys may be
    normalised before the rotary embedding, each head separately (QK norm: Henry et al. 2020, arXiv:2010.04245; Qwen3)
    or all heads together (OLMo 2: arXiv:2501.00656, section 3). `sinks` [N]: attention-sink score of each query head
    (gpt-oss); None: the model has no sinks.

    `config`: model configuration; `axes`: communication of the mesh axes; `options`: `device` and `dtype` of the
    parameters.
    """

    def __init__(self, config: ModelConfig, axes: AxisOperations, **options: Any) -> None:
        super().__init__()
        self.context = axes.context
        self.size = config.head_dim
        self.encoder = config.encoder
        self.heads = config.heads // axes.tensor.size
        self.kv_heads = max(1, config.kv_heads // axes.tensor.size)
        width = (self.heads + 2 * self.kv_heads) * self.size
        site = "attention.input"
        self.qkv = ColumnParallelLinear(config.hidden, width, config.qkv_bias, axes.tensor, site, **options)
        self.projection_norm = config.projection_norm
        self.interleaved = config.rotary_interleaved
        self.scores = ScoreSettings(config.score_scale, config.attention_softcap or 0.0)
        self.query_norm = self.key_norm = None
        if config.query_key_norm:
            build = partial(RMSNorm, epsilon=config.norm_epsilon, centre=float(config.zero_centred_norms), **options)
            counts, tensor = ((self.heads, self.kv_heads), axes.tensor) if config.projection_norm else ((1, 1), None)
            self.query_norm, self.key_norm = (build(size=count * self.size, tensor=tensor) for count in counts)
        self.rotated_norm = config.norm_epsilon if config.rotated_norm else None
        self.sinks = nn.Parameter(torch.empty(self.heads, **options)) if config.attention_sinks else None
        self.output = RowParallelLinear(
            self.heads * self.size, config.hidden, config.output_bias, axes.tensor, "attention.output", **options
        )

    def forward(self, x_BSH: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention output [B, S, H] for the hidden states `x_BSH`. With sequence parallelism, `x_BSH` and
        the output have only this rank's tokens. `inputs`: positions, mask and KV cache. The mask is from
        `make_attention_mask` in a decoder, from `make_bidirectional_mask` in an encoder."""
        heads_BSND = self.qkv(x_BSH).unflatten(-1, (-1, self.size))
        q, k, v = heads_BSND.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            normed = (self.query_norm, q), (self.key_norm, k)
            q, k = (norm(x.flatten(2) if self.projection_norm else x).view_as(x) for norm, x in normed)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if inputs.rotation is not None:
            cosine, sine = inputs.rotation
            if sine is None:
                q = (q * cosine).to(q.dtype)
            else:
                q, k = (rotate(x, cosine, sine, self.interleaved) for x in (q, k))
                if self.rotated_norm is not None:
                    q, k = (normalise(x, self.rotated_norm) for x in (q, k))
        if inputs.cache is not None:
            assert self.context.size == 1, "a KV cache needs unsharded sequences"
            out_BNSD = inputs.cache.attend(inputs.layer, q, k, v, self.sinks)
        elif self.encoder:
            mask: Any = inputs.visible  # never a `VarlenMask` in an encoder
            out_BNSD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out_BNSD = self.context.attend(q, k, v, inputs.visible, self.scores._replace(sinks=self.sinks))
        return self.output(out_BNSD.transpose(1, 2).flatten(2))

    def linear_layers(self) -> list[Linear]:
        """Return the layer's linear layers in forward order."""
        return [self.qkv, self.output]
