"""Tiled causal attention for CPUs: each tile of queries is computed against all its visible keys, with its scores in
cache.

PyTorch's own CPU kernel spends its time outside matrix products; here a tile is two products around one softmax, and
keys that no query of a tile attends to (later ones, other documents, beyond the window) are never read. Backward
recomputes the probabilities as FlashAttention does (Dao et al. 2022, arXiv:2205.14135, section 3.1, algorithm 4), and
saves only queries, keys and values. Scores and sums are in float32 or float64.

Shapes: B sequences, S tokens of a sequence, N query heads, K key-value heads, G = N / K, D head size, V head size of
the values (usually D). In a tile: P pairs of a sequence and a key-value head, X = G x queries of the tile, L visible
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.model.attention_operator import empty_bsnd, empty_gradient, group_by_kv_head, register_attention
from meshwright.model.documents import move
from meshwright.model.precision import at_least_float32
from meshwright.spec.policy import ACCELERATOR_TILE, TILE_QUERIES, TILE_SCORES

HIDDEN = -1e30
"""Added to the score of a key that a query does not see. Finite: a query may see none of the keys of a tile."""


class Span(NamedTuple):
    """Attention of a range of queries to an equally long range of keys, on one device. `queries`, `keys`: slices of
    both ranges along the token dim of the tensors. `query_start`, `key_start`: index in the unsharded sequence of the
    first query and of the first key. Equal indices mean a causal mask; otherwise all keys precede all queries, without
    a mask.
    """

    queries: slice
    keys: slice
    query_start: int = 0
    key_start: int = 0


class Tile(NamedTuple):
    """Tile of attention scores that is computed at once: the scores of the queries in the slice `queries` and the keys
    in the slice `keys` of the token dim. mask: additive mask [..., queries, m] for the last m of these keys; earlier
    keys are visible to all queries. None: all keys are visible."""

    queries: slice
    keys: slice
    mask: Tensor | None


class ScoreSettings(NamedTuple):
    """Settings of attention scores. The score of a query q and a key k is scale q kᵀ, or with a softcap c, c tanh(scale
    q kᵀ / c) (Gemma 2: arXiv:2408.00118, section 2). softcap: c; 0: none. sinks: learned attention-sink scores of the N
    query heads, each one more term of the softmax's denominator (gpt-oss: arXiv:2508.10925, section 2.3); None: none.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def select_heads(self, q_BKGSD: Tensor, heads: slice) -> ScoreSettings:
        """Return a copy for the key-value heads in the slice `heads` only. The sinks [K x G] of all query heads become
        [k, G] for the k selected of K key-value heads, with G query heads each. `q_BKGSD`: queries, of which only the
        sizes K and G are read."""
        return self if self.sinks is None else self._replace(sinks=self.sinks.view(q_BKGSD.shape[1:3])[heads])


def tiled_attention(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSV: Tensor, first_BS: Tensor | None,
    scores: ScoreSettings | None = None,
) -> Tensor:  # fmt: skip
    """Return the causal attention softmax(q kᵀ / √D) v, [B, N, S, V], stored in memory as [B, S, N, V], of queries
    `q_BNSD` to keys `k_BKSD` and values `v_BKSV`. Each query attends to the keys from its index in `first_BS` (None:
    from 0) to its own index; query head n reads key-value head n // (N / K), for N query and K key-value heads.

    `scores`: scale (in place of 1 / √D), softcap and sinks of the scores; None: the defaults."""
    scores = scores or ScoreSettings(q_BNSD.shape[-1] ** -0.5)
    return torch.ops.meshwright.tiled_attention(q_BNSD, k_BKSD, v_BKSV, first_BS, *scores)


def _compute_attention(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSV: Tensor, first_BS: Tensor | None, scale: float,
    softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the causal attention softmax(scores) v, [B, N, S, V], of queries `q_BNSD` to keys `k_BKSD` and values
    `v_BKSV`, without autograd.

    `first_BS`: first visible key index of each query (None: 0). `scale`, `softcap`, `sinks`: factor of the scores,
    softcap (0: none) and attention-sink scores (None: none)."""
    settings = ScoreSettings(scale, softcap, sinks)
    q = group_by_kv_head(q_BNSD, k_BKSD)
    out = empty_bsnd(q_BNSD, v_BKSV)
    out_BKGSV = group_by_kv_head(out, k_BKSD)
    wide = at_least_float32(q.dtype)
    for rows, heads, tiles in cut_tiles(q, _make_full_span(q), first_BS):
        k_PSD, v_PSV = (flatten_heads(x[rows, heads]) for x in (k_BKSD, v_BKSV))
        wide_k_PSD = k_PSD.to(wide)
        for tile in tiles:
            part = q[rows, heads, :, tile.queries]
            selected = settings.select_heads(q, heads)
            p_PXL, *_ = _compute_probabilities(flatten_heads(part), wide_k_PSD, tile, part.shape, selected)
            o_PXV = torch.bmm(p_PXL, v_PSV[:, tile.keys])
            out_BKGSV[rows, heads, :, tile.queries] = o_PXV.view(*part.shape[:-1], -1)
    return out


def _compute_gradients(
    d_out_BNSV: Tensor, saved: list[Tensor], first_BS: Tensor | None, scale: float, softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values, in their shapes, and of the sinks. `saved`: queries, keys and
    values.

    `d_out_BNSV`: gradient of the attention output. `first_BS`: first visible key index of each query; None: 0. `scale`,
    `softcap`, `sinks`: factor of the scores, softcap (0: none) and attention-sink scores (None: none)."""
    q_BNSD, k_BKSD, v_BKSV = saved
    q, d_out = (group_by_kv_head(x, k_BKSD) for x in (q_BNSD, d_out_BNSV))
    dq, dk, dv = (empty_bsnd(x) for x in saved)
    dq_BKGSD = group_by_kv_head(dq, k_BKSD)
    wide = at_least_float32(q.dtype)
    settings = ScoreSettings(scale, softcap, sinks)
    d_sinks = empty_gradient(q, sinks).to(wide).zero_()
    for rows, heads, tiles in cut_tiles(q, _make_full_span(q), first_BS):
        k_PSD, v_PSV = (flatten_heads(x[rows, heads]) for x in (k_BKSD, v_BKSV))
        wide_k_PSD = k_PSD.to(wide)
        dk_PSD, dv_PSV = (torch.zeros_like(x, dtype=wide) for x in (k_PSD, v_PSV))
        for tile in tiles:
            part = q[rows, heads, :, tile.queries]
            q_PXD = flatten_heads(part)
            d_out_PXV = flatten_heads(d_out[rows, heads, :, tile.queries])
            selected = settings.select_heads(q, heads)
            p_PXL, slope_PXL, p_sinks = _compute_probabilities(q_PXD, wide_k_PSD, tile, part.shape, selected)
            dv_PSV[:, tile.keys] += torch.bmm(p_PXL.mT, d_out_PXV)
            dp_PXL = torch.bmm(d_out_PXV, v_PSV[:, tile.keys].mT)
            if p_sinks is not None:
                inner_PX = (p_PXL * dp_PXL).sum(dim=-1, dtype=wide)
                d_sinks.view(q.shape[1:3])[heads] -= (p_sinks * inner_PX.view(p_sinks.shape)).sum(dim=(0, 3))
            ds_PXL = torch.ops.aten._softmax_backward_data(dp_PXL, p_PXL, -1, q.dtype)  # sums in float32 at least
            if slope_PXL is not None:
                ds_PXL = (ds_PXL * slope_PXL).to(q.dtype)
            dq_PXD = torch.bmm(ds_PXL, k_PSD[:, tile.keys])
            torch.mul(dq_PXD.view(part.shape), scale, out=dq_BKGSD[rows, heads, :, tile.queries])
            dk_PSD[:, tile.keys] += torch.bmm(ds_PXL.mT, q_PXD)
        torch.mul(dk_PSD.view(dk[rows, heads].shape), scale, out=dk[rows, heads])
        dv[rows, heads] = dv_PSV.view(dv[rows, heads].shape)
    return dq, dk, dv, d_sinks.to(q.dtype)


def _compute_probabilities(
    q_PXD: Tensor, wide_k_PSD: Tensor, tile: Tile, shape: torch.Size, settings: ScoreSettings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return three tensors for the queries `q_PXD` and keys `wide_k_PSD` of a tile: the softmax of its scores [P, X,
    L], in the dtype of `q_PXD`; the derivative of the softcap at each score (None without softcap); the probabilities
    of the sinks [sequences, KV heads, G, queries] (None without sinks).

    G: query heads per KV head; P: sequences x KV heads; X: G x queries; S: keys, of which the tile has L; D: head size.
    `wide_k_PSD`: keys in the accumulation dtype (at least float32), which is also the dtype of the scores. `shape`:
    (sequences, KV heads, G, queries, D); `settings`: scale, softcap and sinks.
    """
    scores_PXL, slope_PXL = compute_scores(q_PXD, wide_k_PSD, tile, shape, settings)
    p_PXL = torch.softmax(scores_PXL, dim=-1)
    p_sinks = None
    if (sinks := settings.sinks) is not None:
        p_sinks = torch.sigmoid(sinks.to(p_PXL.dtype)[..., None] - log_sum_exp(scores_PXL, p_PXL).view(shape[:-1]))
        p_PXL *= (1 - p_sinks).view(*p_PXL.shape[:2], 1)
    del scores_PXL  # before a copy in another dtype
    return p_PXL.to(q_PXD.dtype), slope_PXL, p_sinks


def log_sum_exp(scores_PXL: Tensor, p_PXL: Tensor) -> Tensor:
    """Return the log-sum-exp [P, X] of the scores `scores_PXL` over the last dim. The result is computed from the
    scores' softmax `p_PXL` without another exp: the greatest score minus the logarithm of the greatest probability.
    """
    return scores_PXL.amax(dim=-1) - p_PXL.amax(dim=-1).log()


def compute_scores(
    q_PXD: Tensor, wide_k_PSD: Tensor, tile: Tile, shape: torch.Size, settings: ScoreSettings,
    subtract_PX1: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the attention scores of the queries `q_PXD` and keys `wide_k_PSD` of a tile. Return the scores with the
    tile's mask added, [P, X, L]; and the derivative of the softcap at each score (None without softcap).

    G: query heads per KV head; P: sequences x KV heads; X: G x queries; S: keys, of which the tile has L; D: head size.
    `wide_k_PSD`: keys in the accumulation dtype (at least float32), which is also the dtype of the scores. `shape`:
    (sequences, KV heads, G, queries, D), the shape of the queries before `flatten_heads`. `settings`: scale and
    softcap. `subtract_PX1`: value that is subtracted from each query's scores, such as its log-sum-exp; None: 0.
    """
    wide_q_PXD = q_PXD.to(wide_k_PSD.dtype) * settings.scale
    k_PDL = wide_k_PSD[:, tile.keys].mT
    slope_PXL = None
    if settings.softcap:
        ratio_PXL = torch.bmm(wide_q_PXD, k_PDL).div_(settings.softcap).tanh_()
        scores_PXL = ratio_PXL * settings.softcap
        slope_PXL = 1 - ratio_PXL.square()
        if subtract_PX1 is not None:
            scores_PXL -= subtract_PX1
    elif subtract_PX1 is None:
        scores_PXL = torch.bmm(wide_q_PXD, k_PDL)
    else:
        scores_PXL = torch.baddbmm(subtract_PX1, wide_q_PXD, k_PDL, beta=-1)
    if tile.mask is not None:
        rows, heads, group, queries, _ = shape
        scores_PXL.view(rows, heads * group, queries, -1)[..., -tile.mask.shape[-1] :].add_(tile.mask)
    return scores_PXL, slope_PXL


def cut_tiles(q_BKGSD: Tensor, span: Span, first_BS: Tensor | None) -> Iterator[tuple[slice, slice, list[Tile]]]:
    """Cut the attention of `span` (a range of queries over a range of keys) into tiles whose scores fit in cache. Yield
    (slice of sequences, slice of key-value heads, tiles to compute for these sequences and heads).

    `q_BKGSD`: queries of B sequences, G query heads for each of K key-value heads; `first_BS`: index of the first key
    to which each query attends; None: no lower limit.
    """
    rows, kv_heads, group = q_BKGSD.shape[:3]
    length = span.keys.stop - span.keys.start
    queries, most = (TILE_QUERIES, TILE_SCORES) if q_BKGSD.device.type == "cpu" else ACCELERATOR_TILE
    queries = min(queries, length)
    per_head = group * queries * length
    heads_at_once = max(1, min(kv_heads, most // per_head))
    rows_at_once = max(1, most // (per_head * kv_heads))
    wide = at_least_float32(q_BKGSD.dtype)
    triangle = torch.full((queries, queries), HIDDEN, dtype=wide, device=q_BKGSD.device).triu_(1)
    if first_BS is not None:
        first_BS = first_BS.expand(rows, -1)
    for row in range(0, rows, rows_at_once):
        chosen = slice(row, min(rows, row + rows_at_once))
        found = cut_span(span, triangle, None if first_BS is None else first_BS[chosen])
        for head in range(0, kv_heads, heads_at_once):
            yield chosen, slice(head, min(kv_heads, head + heads_at_once)), found


def cut_span(span: Span, triangle: Tensor, first_RS: Tensor | None) -> list[Tile]:
    """Cut the attention of `span` (a range of queries over a range of keys) into tiles of Q queries each (the last may
    have fewer); return them. A tile has only the keys to which any of its queries may attend; a tile without keys is
    left out.

    `triangle`: additive causal mask [Q, Q]; `first_RS`: index of the first key to which each query attends, for R
    sequences, on the CPU; None: no lower limit.
    """
    found = []
    at_once = len(triangle)
    length = span.keys.stop - span.keys.start
    diagonal = span.query_start == span.key_start
    for start in range(0, length, at_once):
        stop = min(length, start + at_once)
        queries = slice(span.queries.start + start, span.queries.start + stop)
        oldest = 0
        end = stop if diagonal else length
        mask = triangle[: stop - start, : stop - start] if diagonal else None
        if first_RS is not None:
            first_RQ = first_RS[:, queries] - span.key_start
            oldest, newest = (int(value) for value in first_RQ.aminmax())
            oldest = max(oldest, 0)
            if oldest >= end:
                continue
            if newest > oldest:  # some queries see less than others: the mask spans all keys of the tile
                moved_RQ1 = move(first_RQ, triangle.device)[..., None]
                hidden_RQL = torch.arange(oldest, end, device=triangle.device) < moved_RQ1
                wider = torch.zeros_like(hidden_RQL, dtype=triangle.dtype).masked_fill_(hidden_RQL, HIDDEN)
                if mask is not None:
                    wider[..., start - oldest :] += mask
                mask = wider[:, None]
        found.append(Tile(queries, slice(span.keys.start + oldest, span.keys.start + end), mask))
    return found


def _make_full_span(q_BKGSD: Tensor) -> Span:
    """Return the `Span` of causal attention on one device: all queries `q_BKGSD` [B, K, G, S, D] over as many keys,
    both from sequence index 0."""
    everything = slice(0, q_BKGSD.shape[3])
    return Span(everything, everything)


def flatten_heads(x: Tensor) -> Tensor:
    """Flatten a tensor [sequences, KV heads, G, X, D] (G query heads per KV head) to [P, G x X, D] for batched matrix
    products, P = sequences x KV heads. A tensor without the dim G becomes [P, X, D].
    """
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


register_attention("tiled_attention", _compute_attention, _compute_gradients, lambda q, k, v, *_: empty_bsnd(q, v))
