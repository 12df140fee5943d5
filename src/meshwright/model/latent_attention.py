"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437, section
2.1.1).

In training, keys and values of all heads are projected from the latent vectors. With a KV cache, the cache holds latent
vectors and rotary keys alone, and the projections are absorbed into those of the queries and of the output (section
2.1.2): attention of N heads over one key head.

Shapes: B sequences, S tokens of a sequence (on this rank), H hidden, N heads on this rank, D size of a head's query, P
its features without position, E those with rotary position, V size of a head's values, R size of the latent vector.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.attention_inputs import AttentionCache, AttentionInputs
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.layers import ColumnParallelLinear, Linear, RMSNorm, RowParallelLinear
from meshwright.model.rope import rotate
from meshwright.model.scaled_dot_product import AttentionMask
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.spec.config import ModelConfig

_NORM_EPSILON = 1e-6
"""Added to the mean square in the norms of latent vectors, which do not follow the model's epsilon."""


class LatentAttention(nn.Module):
    """Multi-head latent attention layer of a transformer block (DeepSeek-V2: arXiv:2405.04434, section 2.1).

    R: size of the latent vector of keys and values; E: size of the rotary key. The projections of the hidden state are
    fused. `qkv.weight` has the rows of the queries (or of their latent vector), then R rows for the latent vector of
    keys and values, then E rows for the rotary key. Every tp rank computes the latent vectors; heads are split over tp.

    `config`: model configuration; `axes`: communication of the mesh axes; `options`: `device` and `dtype` of the
    parameters.
    """

    def __init__(self, config: ModelConfig, axes: AxisOperations, **options: Any) -> None:
        super().__init__()
        assert config.latent is not None
        self.context = axes.context
        self.latent = config.latent
        self.heads = config.heads // axes.tensor.size
        self.size = config.head_dim
        self.plain = config.head_dim - config.latent.rotary_dim
        rank, query_rank = config.latent.rank, config.latent.query_rank
        query = self.heads * self.size
        outputs = (query_rank or query) + config.latent.cached_dim
        self.qkv = ColumnParallelLinear(config.hidden, outputs, False, axes.tensor, "attention.input", **options)
        self.query_norm = self.query_up = None
        if query_rank is not None:
            self.query_norm = RMSNorm(query_rank, _NORM_EPSILON, **options)
            self.query_up = Linear(query_rank, query, False, **options)
        self.latent_norm = RMSNorm(rank, _NORM_EPSILON, **options)
        self.latent_up = Linear(rank, self.heads * (self.plain + config.latent.value_dim), False, **options)
        inputs = self.heads * config.latent.value_dim
        self.output = RowParallelLinear(inputs, config.hidden, False, axes.tensor, "attention.output", **options)
        self.scores = ScoreSettings(config.score_scale)
        self.interleaved = config.rotary_interleaved

    def forward(self, x_BSH: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention output [B, S, H] for the hidden states `x_BSH`. With sequence parallelism, `x_BSH` and
        the output have only this rank's tokens. `inputs`: positions, mask and KV cache; the cache stores latent vectors
        and rotary keys."""
        assert inputs.rotation is not None
        cosine, sine = inputs.rotation
        assert sine is not None
        parts = self.qkv(x_BSH)
        rank, rotary = self.latent.rank, self.latent.rotary_dim
        q, latent_BSR, k_rotary_BSE = parts.split([parts.shape[-1] - rank - rotary, rank, rotary], dim=-1)
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q_BNSP, q_BNSE = q.unflatten(-1, (self.heads, self.size)).transpose(1, 2).split([self.plain, rotary], dim=-1)
        k_B1SE = k_rotary_BSE[:, None]
        q_BNSE, k_B1SE = (rotate(x, cosine, sine, self.interleaved) for x in (q_BNSE, k_B1SE))
        latent_BSR = self.latent_norm(latent_BSR)
        if inputs.cache is not None:
            assert self.context.size == 1, "a KV cache needs unsharded sequences"
            new_B1SC = torch.cat([latent_BSR[:, None], k_B1SE], dim=-1)
            out_BNSV = self._attend_latent(q_BNSP, q_BNSE, new_B1SC, inputs.cache, inputs.layer)
        else:
            k_BNSP, v_BNSV = self._decompress(latent_BSR)
            k_BNSE = k_B1SE.expand(-1, self.heads, -1, -1)
            q, k = (torch.cat(halves, dim=-1) for halves in ((q_BNSP, q_BNSE), (k_BNSP, k_BNSE)))
            out_BNSV = self._attend(q, k, v_BNSV, inputs.visible)
        return self.output(out_BNSV.transpose(1, 2).flatten(2))

    def linear_layers(self) -> list[Linear]:
        """Return the layer's linear layers in forward order."""
        return [self.qkv, *([] if self.query_up is None else [self.query_up]), self.latent_up, self.output]

    def _decompress(self, latent_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """Project the normalised latent vectors `latent_BSR` of size R. Return the keys without rotary position [B, N,
        S, P] and the values [B, N, S, V] of this rank's N heads, of P and V features per head.
        """
        both = self.latent_up(latent_BSR).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BNSP, v_BNSV = both.split([self.plain, self.latent.value_dim], dim=-1)
        return k_BNSP, v_BNSV

    def _attend(self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSV: Tensor, visible: AttentionMask) -> Tensor:
        """Return the causal attention output [B, N, S, V] of queries `q_BNSD`, keys `k_BNSD` and values `v_BNSV`. The
        head size V of the values may differ from D. Where the attention kernel needs equal sizes, the smaller one is
        padded with zeros. `visible`: attention mask; None: plain causal.
        """
        if self.context.size == 1 and q_BNSD.device.type == "cpu":
            return self.context.attend(q_BNSD, k_BNSD, v_BNSV.contiguous(), visible, self.scores)
        width = max(self.size, self.latent.value_dim)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q_BNSD, k_BNSD, v_BNSV))
        return self.context.attend(q, k, v, visible, self.scores)[..., : self.latent.value_dim]

    def _attend_latent(
        self, q_BNSP: Tensor, q_BNSE: Tensor, new_B1SC: Tensor, cache: AttentionCache, layer: int
    ) -> Tensor:
        """Store the latent vectors of new tokens in the KV cache of layer number `layer`. Return the attention output
        [B, N, S, V] of the new tokens over all cached latent vectors.

        `q_BNSP`, `q_BNSE`: features of the queries without and with rotary position; `new_B1SC`: for each new token its
        latent vector (R elements) and its rotary key (E elements), concatenated: C = R + E. Keys and values are never
        computed from the latent vectors: the key projection is applied to the queries instead, the value projection to
        the attention output.
        """
        up_NOR = self.latent_up.weight.unflatten(0, (self.heads, -1))
        key_NPR, value_NVR = up_NOR.split([self.plain, self.latent.value_dim], dim=1)
        q_BNSC = torch.cat([torch.matmul(q_BNSP, key_NPR), q_BNSE], dim=-1)
        return torch.matmul(cache.attend(layer, q_BNSC, new_B1SC, None)[..., : self.latent.rank], value_NVR.mT)
