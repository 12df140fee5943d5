"""Grouped-query attention, and what each token of a batch may see.

Shapes: B rows, S tokens in a row, H hidden, N query heads, K key-value heads, D head size, C tokens in a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.mesh import Axes
from meshwright.comm.operators import gather_from
from meshwright.model.cache import KeyValueCache
from meshwright.model.config import ModelConfig
from meshwright.model.documents import Documents
from meshwright.model.layers import Linear, RMSNorm, RowParallelLinear, enter_tensor_parallel
from meshwright.model.rope import rotate
from meshwright.model.tiled_attention import tiled_attention


def visibility(
    documents: Documents, sequence: int, window: int | None, device: torch.device, cached: int = 0
) -> torch.Tensor | None:
    """What `attend` needs to know of documents, window and `cached` earlier tokens; None: everything before a token.

    Made once per batch and shared by all layers with the same window. Without a cache on a CPU it is the first visible
    place of each token, [B or 1, S]; else a mask [B or 1, 1, S, C] that is true where a token may look.
    """
    if cached == 0:
        first_BS = documents.first_visible_BS(sequence, window, device)
        if first_BS is None or device.type == "cpu":
            return first_BS
        places_S = torch.arange(sequence, device=device)
        return ((places_S >= first_BS[..., None]) & (places_S <= places_S[:, None]))[:, None]
    assert documents.starts_BS is None, "a cache holds one document per row"
    if sequence == 1:
        return None  # the cache hands out exactly what a single token may see
    places_C = torch.arange(cached + sequence, device=device)
    now_S1 = places_C[cached:, None]
    mask_SC = places_C <= now_S1
    if window is not None:
        mask_SC &= places_C > now_S1 - window
    return mask_SC[None, None]


def attend(
    q_BNSD: torch.Tensor, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q kᵀ / √D) v of the last S of C tokens, over what `visibility` allows; [B, N, S, D]."""
    same_length = q_BNSD.shape[2] == k_BKCD.shape[2]
    if same_length and q_BNSD.device.type == "cpu":
        return tiled_attention(q_BNSD, k_BKCD, v_BKCD, visible)
    causal = same_length and visible is None
    if visible is not None and q_BNSD.device.type == "cuda":  # its fused kernels take a mask or grouped heads, not both
        groups = q_BNSD.shape[1] // k_BKCD.shape[1]
        k_BKCD, v_BKCD = k_BKCD.repeat_interleave(groups, dim=1), v_BKCD.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKCD, v_BKCD, attn_mask=visible, is_causal=causal, enable_gqa=q_BNSD.shape[1] != k_BKCD.shape[1]
    )


class Attention(nn.Module):
    """Attention of `heads` query heads over `kv_heads` key-value heads (Ainslie et al. 2023, arXiv:2305.13245).

    Query, key and value are one product: `qkv.weight` is [(N + 2K) D, H], queries first. A query head and its keys may
    be normed before they are turned (Henry et al. 2020, arXiv:2010.04245; Qwen3).
    """

    def __init__(self, config: ModelConfig, axes: Axes, **options: Any) -> None:
        super().__init__()
        self.axes, self.size = axes, config.head_dim
        self.heads = config.heads // axes.tp.size
        self.kv_heads = max(1, config.kv_heads // axes.tp.size)
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = Linear(config.hidden, width, config.qkv_bias, **options)
        self.query_norm = RMSNorm(self.size, config.norm_epsilon, **options) if config.query_key_norm else None
        self.key_norm = RMSNorm(self.size, config.norm_epsilon, **options) if config.query_key_norm else None
        self.output = RowParallelLinear(
            self.heads * self.size, config.hidden, config.output_bias, axes, "attention.output", **options
        )

    def forward(
        self,
        x_BSH: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        visible: torch.Tensor | None,
        cache: KeyValueCache | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """`rotation`: cosine and sine of each token's position, None where positions are learned."""
        x_BSH = enter_tensor_parallel(x_BSH, self.axes, "attention.input")
        heads_BSND = self.qkv(x_BSH).unflatten(-1, (-1, self.size))
        q, k, v = heads_BSND.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        k = gather_from(k, self.axes.cp, "attention.keys", dim=2)
        v = gather_from(v, self.axes.cp, "attention.values", dim=2)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        out_BNSD = attend(q, k, v, visible)
        return self.output(out_BNSD.transpose(1, 2).flatten(2))
