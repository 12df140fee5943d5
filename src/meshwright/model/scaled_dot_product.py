"""Scaled dot-product attention of one device, and which tokens of a batch each token may attend to.

Shapes: B sequences, S tokens of a sequence, N query heads, K key-value heads, D head size, C tokens in a cache.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.documents import Documents
from meshwright.model.tiled_attention import ScoreSettings, tiled_attention
from meshwright.model.varlen_attention import VarlenMask, make_varlen_mask, supports_flash_attention, varlen_attention

AttentionMask = Tensor | VarlenMask | None
"""Attention mask of a batch, as `make_attention_mask` returns it."""

MaskForm = Literal["first", "varlen", "boolean"]
"""Form of an attention mask: the first visible key of each token (tiled attention), document boundaries (flash
attention), or one entry for each pair of tokens."""


def choose_mask_form(
    device: torch.device, dtype: torch.dtype, head_size: int, capped: bool, sinks: bool = False
) -> MaskForm:
    """Return the mask format of the attention kernel that is used for queries of `dtype` and `head_size` on `device`.
    "first": index of the first visible key of each query; "varlen": document boundaries, as in flash attention;
    "boolean": one entry for each query and key.

    `capped`: True if the scores have a softcap, which only tiled attention computes; `sinks`: True if heads have
    attention sinks. Among PyTorch's kernels, only flash attention supports sinks.
    """
    if capped or device.type == "cpu":
        return "first"
    if supports_flash_attention(device, dtype, head_size):
        return "varlen"
    return "first" if sinks else "boolean"


def make_attention_mask(
    documents: Documents, sequence: int, window: int | None, device: torch.device, form: MaskForm = "boolean"
) -> AttentionMask:
    """Return the attention mask of a batch for `attend`: causal, within documents, and within a sliding window; None
    for plain causal attention.

    `documents`: document boundaries in packed sequences; `sequence`: number of tokens of a sequence; `window`: sliding
    window in tokens (None: none); `device`: device of the mask; `form`: mask format, from `choose_mask_form`.

    Format "first", which also replaces "boolean" on a CPU: index of the first key to which each token may attend, [B or
    1, S], on the CPU. "varlen": a `VarlenMask`. "boolean": [B or 1, 1, S, S], True where a token may attend. One mask
    serves all layers with the same window.
    """
    if form == "first" or (form == "boolean" and device.type == "cpu"):  # the host reads it
        return documents.on_host().first_visible_BS(sequence, window, torch.device("cpu"))
    first_BS = documents.first_visible_BS(sequence, window, device)
    if first_BS is None:
        return None
    if form == "varlen":
        return make_varlen_mask(documents, window, device)
    places_S = torch.arange(sequence, device=device)
    return ((places_S >= first_BS[..., None]) & (places_S <= places_S[:, None]))[:, None]


def attend(
    q_BNSD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, visible: AttentionMask,
    scores: ScoreSettings | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention output softmax(q kᵀ / √D) v, [B, N, S, D]. `k_BKCD`, `v_BKCD`: keys and values of C tokens;
    `q_BNSD`: queries of the last S of these tokens.

    `visible`: attention mask from `make_attention_mask` or a KV cache; None: causal if S = C, all keys visible if S <
    C. `scores`: scale (in place of 1 / √D), softcap and sinks of the scores; None: the defaults.
    """
    scores = scores or ScoreSettings(q_BNSD.shape[-1] ** -0.5)
    same_length = q_BNSD.shape[2] == k_BKCD.shape[2]
    sinks = scores.sinks is not None
    flash = supports_flash_attention(q_BNSD.device, q_BNSD.dtype, q_BNSD.shape[-1])
    if flash and sinks and same_length and visible is None and not scores.softcap:
        visible = VarlenMask(None, None)
    if isinstance(visible, VarlenMask):
        return varlen_attention(q_BNSD, k_BKCD, v_BKCD, visible, scores.scale, scores.sinks)
    if same_length and (q_BNSD.device.type == "cpu" or scores.softcap or sinks):
        return tiled_attention(q_BNSD, k_BKCD, v_BKCD, visible, scores)
    assert not scores.softcap and not sinks, "new tokens over a KV cache"
    causal = same_length and visible is None
    groups = q_BNSD.shape[1] // k_BKCD.shape[1]
    if groups > 1 and q_BNSD.device.type == "cuda" and not supports_grouped_query(q_BNSD.dtype, visible is not None):
        k_BKCD, v_BKCD = (x.repeat_interleave(groups, dim=1) for x in (k_BKCD, v_BKCD))
    options: dict[str, Any] = {"scale": scores.scale, "enable_gqa": q_BNSD.shape[1] != k_BKCD.shape[1]}
    return F.scaled_dot_product_attention(q_BNSD, k_BKCD, v_BKCD, visible, is_causal=causal, **options)


def supports_grouped_query(dtype: torch.dtype, masked: bool) -> bool:
    """Return True if a fused CUDA kernel of PyTorch supports grouped-query attention in `dtype`.

    `masked`: True if there is an attention mask. Only flash attention supports grouped queries: in 16-bit dtypes,
    without a mask. Other kernels would materialise all scores (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return dtype in (torch.bfloat16, torch.float16) and not masked


def make_bidirectional_mask(
    documents: Documents, attention_mask_BS: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return the additive attention mask of an encoder, [B, 1, S or 1, S]: 0 where a token may attend, else the lowest
    finite number of `dtype`; None if nothing is masked. A token attends to tokens of its document (`documents`:
    boundaries in packed sequences) whose `attention_mask_BS` is not 0. Built once per batch."""
    visible = None
    if (starts_BS := documents.starts_BS) is not None:
        visible = (starts_BS[:, :, None] == starts_BS[:, None, :])[:, None]
    if attention_mask_BS is not None:
        real = (attention_mask_BS != 0)[:, None, None]
        visible = real if visible is None else visible & real
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
