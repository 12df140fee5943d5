"""Grouped-query attention, and what each token of a batch may see.

With context parallelism a rank has some tokens of each row. Either keys and values go round (model/ring_attention.py),
or ranks trade tokens for heads and each computes some heads of whole rows (Ulysses).

Shapes: B rows, S tokens in a row (on this rank), H hidden, N query heads, K key-value heads, D head size, C tokens in a
cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.mesh import Axes, Axis
from meshwright.comm.operators import all_to_all
from meshwright.model.cache import KeyValueCache
from meshwright.model.documents import Documents
from meshwright.model.layers import Linear, RMSNorm, RowParallelLinear, enter_tensor_parallel
from meshwright.model.ring_attention import ring_attention
from meshwright.model.rope import rotate
from meshwright.model.tiled_attention import tiled_attention
from meshwright.spec.config import ModelConfig


def visibility(
    documents: Documents, sequence: int, window: int | None, device: torch.device, cached: int = 0, ring: bool = False
) -> torch.Tensor | None:
    """What attention needs to know of documents, window and `cached` earlier tokens; None: everything before a token.

    Made once per batch and shared by all layers with the same window. Without a cache on a CPU it is the first visible
    place of each of the `sequence` tokens of whole rows, [B or 1, S]; else a mask [B or 1, 1, S, C] that is true where
    a token may look. For the `ring` it is the first visible place of each token that is here.
    """
    if cached == 0:
        first_BS = documents.first_visible_BS(sequence, window, device)
        if ring and first_BS is not None:
            assert documents.places_C is not None
            return first_BS[:, documents.places_C]
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
    groups = q_BNSD.shape[1] // k_BKCD.shape[1]
    if groups > 1 and q_BNSD.device.type == "cuda" and not takes_groups(q_BNSD.dtype, visible is not None):
        k_BKCD, v_BKCD = k_BKCD.repeat_interleave(groups, dim=1), v_BKCD.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKCD, v_BKCD, attn_mask=visible, is_causal=causal, enable_gqa=q_BNSD.shape[1] != k_BKCD.shape[1]
    )


def takes_groups(dtype: torch.dtype, masked: bool) -> bool:
    """Whether a fused kernel of PyTorch on CUDA takes fewer key-value heads than query heads: flash attention does,
    which has neither wide types nor masks. Without such a kernel all scores of a row would be there at once
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    return dtype in (torch.bfloat16, torch.float16) and not masked


def attend_both_ways(
    q_BNSD: torch.Tensor, k_BNSD: torch.Tensor, v_BNSD: torch.Tensor, added: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q kᵀ / √D + added) v over all tokens of a row; [B, N, S, D]. `added` [B or 1, 1, S or 1, S] hides keys
    (`both_ways`); None: every token sees every other."""
    return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, attn_mask=added)


def both_ways(documents: Documents, attention_mask_BS: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores of an encoder: nothing where a token may look, the lowest number there is elsewhere
    (finite: a row may be padding from end to end). A token sees those of its document whose `attention_mask_BS` is not
    0. Made once per batch and shared by all layers; None where nothing is hidden."""
    starts_BS, visible = documents.starts_BS, None
    if starts_BS is not None:
        visible = (starts_BS[:, :, None] == starts_BS[:, None, :])[:, None]
    if attention_mask_BS is not None:
        real = (attention_mask_BS != 0)[:, None, None]
        visible = real if visible is None else visible & real
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def ulysses_attention(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, visible: torch.Tensor | None, axis: Axis
) -> torch.Tensor:
    """The same over the rows whose tokens the ranks of `axis` have in their order, `visible` said of whole rows: each
    rank computes N / cp heads (Jacobs et al. 2023, arXiv:2309.14509, section 3.1). Where there are more ranks than
    key-value heads, neighbours get the same one."""
    copies = max(1, axis.size // k_BKSD.shape[1])
    three = q_BNSD, k_BKSD.repeat_interleave(copies, dim=1), v_BKSD.repeat_interleave(copies, dim=1)
    by_rank = torch.cat([x.unflatten(1, (axis.size, -1)) for x in three], dim=2).flatten(1, 2)
    mine = all_to_all(by_rank, axis, "attention.heads", split=1, join=2)
    q, k, v = mine.split([x.shape[1] // axis.size for x in three], dim=1)
    out = attend(q, k, v, visible)
    return all_to_all(out.transpose(1, 2), axis, "attention.tokens", split=1, join=2).transpose(1, 2)


class Attention(nn.Module):
    """Attention of `heads` query heads over `kv_heads` key-value heads (Ainslie et al. 2023, arXiv:2305.13245).

    Query, key and value are one product: `qkv.weight` is [(N + 2K) D, H], queries first. A query head and its keys may
    be normed before they are turned (Henry et al. 2020, arXiv:2010.04245; Qwen3).
    """

    def __init__(self, config: ModelConfig, axes: Axes, **options: Any) -> None:
        super().__init__()
        self.axes, self.size, self.encoder = axes, config.head_dim, config.encoder
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
        if cache is not None:
            assert self.axes.cp.size == 1, "a cache holds whole rows"
            k, v = cache.append(layer, k, v)
        if self.encoder:
            out_BNSD = attend_both_ways(q, k, v, visible)
        elif self.axes.cp.trivial:
            out_BNSD = attend(q, k, v, visible)
        elif self.axes.layout.cp_method == "ring":
            out_BNSD = ring_attention(q, k, v, visible, self.axes.cp)
        else:
            out_BNSD = ulysses_attention(q, k, v, visible, self.axes.cp)
        return self.output(out_BNSD.transpose(1, 2).flatten(2))
