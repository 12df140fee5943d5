"""Attention between the queries of one rank and the KV block of another, for ring attention: by tiles or by PyTorch's
flash kernels, merged over KV blocks.

Mathematics: partial results over some keys are merged by their log-sum-exps; backward recomputes probabilities from the
log-sum-exp over all keys (Dao 2023, arXiv:2307.08691, algorithms 1 and 2).
Flash kernels compute a span of one chunk of queries and the same keys in one call, causal, with the variable lengths of
the pieces of documents in it. Of the queries and keys of two chunks, only those of one document per sequence see each
other: the document of the first query, if it begins before the last key. All bounds are known on the host.

Shapes: B sequences, S tokens of a sequence, C of them on this rank, N query heads, K key-value heads, G = N / K, D head
size. In a tile: P pairs of a sequence and a key-value head, X = G x queries of the tile, L keys that the tile sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.model.attention_operator import group_by_kv_head
from meshwright.model.precision import at_least_float32
from meshwright.model.tiled_attention import ScoreSettings, Span, compute_scores, cut_tiles, flatten_heads, log_sum_exp
from meshwright.model.varlen_attention import FlashCall, VarlenMask, flash_backward, flash_forward


def list_held_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks that cp rank `rank` holds of a sequence cut into 2 x `ranks` chunks: chunk
    `rank` and its mirror image (zig-zag)."""
    return rank, 2 * ranks - 1 - rank


def list_spans(rank: int, source: int, ranks: int, tokens: int) -> list[Span]:
    """List the spans of causal attention between the queries of cp rank `rank` and the KV block of rank `source`. A
    span is a slice of queries over a slice of keys. Each rank holds two chunks of a sequence; there is one span for
    each pair of a query chunk and a key chunk, except pairs that the causal mask hides completely.

    `ranks`: size of cp; `tokens`: number of tokens of a sequence on each rank."""
    chunk = tokens // 2
    halves = (slice(0, chunk), slice(chunk, tokens))
    return [
        Span(queries, keys, mine * chunk, theirs * chunk)
        for queries, mine in zip(halves, list_held_chunks(rank, ranks), strict=True)
        for keys, theirs in zip(halves, list_held_chunks(source, ranks), strict=True)
        if theirs <= mine
    ]


Result = tuple[Any, Tensor, Tensor]
"""Attention of some queries over some keys: index of the queries in [B, K, G, C], output [..., D], log-sum-exp."""
Gradients = tuple[Tensor, Tensor]
"""Gradients of the queries, [B, K, G, C, D], and of the keys and values, [2, B, K, C, D]."""


class SavedQueries(NamedTuple):
    """Tensors of this rank's queries that ring attention's backward reads.

    `q`, `out`, `d_out`: queries, output and its gradient, each [B, K, G, C, D] (K key-value heads, G query heads of
    each, C tokens); `log_sum_BKGC`: log-sum-exps over all keys; `inner_BKGC`: sum over D of `out` times `d_out`."""

    q: Tensor
    out: Tensor
    d_out: Tensor
    log_sum_BKGC: Tensor
    inner_BKGC: Tensor


def merge_attention(out: Tensor, log_sum: Tensor, more: Tensor, log_sum_more: Tensor) -> None:
    """Merge two attention results of the same queries over different keys, in place: the merged result overwrites `out`
    and `log_sum`. The output becomes the mean of both outputs, weighted by the exponentials of their log-sum-exps.

    `out`, `log_sum`: output [..., D] and log-sum-exp [...] of the first result, with head size D; `more`,
    `log_sum_more`: output and log-sum-exp of the second result."""
    both = torch.logaddexp(log_sum, log_sum_more)
    out.mul_((log_sum - both).exp_()[..., None])
    out.addcmul_(more.to(out.dtype), (log_sum_more - both).exp_()[..., None])
    log_sum.copy_(both)


# --- tiles


class TiledSpans(NamedTuple):
    """Kernel that computes the attention of spans (slices of queries over slices of keys) in tiles with PyTorch
    operations.

    `first_BC`: index of the first key to which each query attends (None: 0), on the CPU; `settings`: scale and softcap
    of the scores."""

    first_BC: Tensor | None
    settings: ScoreSettings

    def attend(self, q_BKGCD: Tensor, block: Tensor, span: Span) -> Iterator[Result]:
        """Compute the attention of `span`, a slice of queries over a slice of keys; yield partial results, which
        `merge_attention` can merge.

        `q_BKGCD`: this rank's queries: B sequences, K key-value heads, G query heads of each, C tokens, head size D;
        `block`: keys and values, [2, B, K, C, D]."""
        k_BKCD, v_BKCD = block
        for rows, heads, tiles in cut_tiles(q_BKGCD, span, self.first_BC):
            k_PCD, v_PCD = (flatten_heads(x[rows, heads]) for x in (k_BKCD, v_BKCD))
            wide_k_PCD = k_PCD.to(at_least_float32(q_BKGCD.dtype))
            for tile in tiles:
                at = (rows, heads, slice(None), tile.queries)
                part = q_BKGCD[at]
                scores_PXL, _ = compute_scores(flatten_heads(part), wide_k_PCD, tile, part.shape, self.settings)
                p_PXL = torch.softmax(scores_PXL, dim=-1)
                here = log_sum_exp(scores_PXL, p_PXL).view(part.shape[:-1])
                o_PXD = torch.bmm(p_PXL.to(q_BKGCD.dtype), v_PCD[:, tile.keys])
                yield at, o_PXD.view(part.shape), here

    def add_gradients(self, gradients: Gradients, saved: SavedQueries, block: Tensor, span: Span) -> None:
        """Compute the gradients of the attention of `span`, a slice of queries over a slice of keys, and add them in
        place to `gradients`.

        `saved`: this rank's queries, outputs and output gradients; `block`: keys and values, [2, B, K, C, D]."""
        dq_BKGCD, d_block = gradients
        dtype = saved.q.dtype
        scale = self.settings.scale
        for rows, heads, tiles in cut_tiles(saved.q, span, self.first_BC):
            k_PCD, v_PCD = (flatten_heads(x[rows, heads]) for x in block)
            dk_PCD, dv_PCD = (x[rows, heads].view(k_PCD.shape) for x in d_block)
            wide_k_PCD = k_PCD.to(dq_BKGCD.dtype)
            for tile in tiles:
                at = (rows, heads, slice(None), tile.queries)
                part = saved.q[at]
                q_PXD, d_out_PXD = (flatten_heads(x[at]) for x in (saved.q, saved.d_out))
                log_sum_PX1 = _to_column(saved.log_sum_BKGC[at])
                scores_PXL, slope_PXL = compute_scores(q_PXD, wide_k_PCD, tile, part.shape, self.settings, log_sum_PX1)
                p_PXL = scores_PXL.exp_()
                dv_PCD[:, tile.keys] += torch.bmm(p_PXL.to(dtype).mT, d_out_PXD)
                inner_PX1 = _to_column(saved.inner_BKGC[at])
                v_PDL = v_PCD[:, tile.keys].mT
                if dtype == inner_PX1.dtype:
                    dp_PXL = torch.baddbmm(inner_PX1, d_out_PXD, v_PDL, beta=-1)
                else:
                    dp_PXL = torch.bmm(d_out_PXD, v_PDL) - inner_PX1
                ds_PXL = p_PXL.mul_(dp_PXL).mul_(1 if slope_PXL is None else slope_PXL).to(dtype)
                dq_PXD = torch.bmm(ds_PXL, k_PCD[:, tile.keys])
                dq_BKGCD[at].add_(dq_PXD.view(part.shape), alpha=scale)
                dk_PCD[:, tile.keys].add_(torch.bmm(ds_PXL.mT, q_PXD), alpha=scale)


def _to_column(x: Tensor) -> Tensor:
    """Reshape a tensor with one number per query for broadcasting against a tile's scores: [sequences, KV heads, G, X]
    to [sequences x KV heads, G x X, 1]. G: query heads per KV head; X: queries.
    """
    return flatten_heads(x[..., None])


# --- flash kernels


KernelCall = tuple[Any, Any, FlashCall]
"""Block of attention that one call of the flash kernels computes: index of the queries in [B, K, G, C], index of the
keys in [B, K, C], arguments of the call."""


def list_kernel_calls(mask: VarlenMask, span: Span, rows: int, scale: float | None = None) -> Iterator[KernelCall]:
    """Yield the flash-kernel calls that compute the attention of `span` (a slice of queries over a slice of keys), each
    as (index of its queries, index of its keys, call arguments). Pairs of query and key that `mask` (document
    boundaries, sliding window) hides are left out.

    `rows`: number of sequences; `scale`: factor of the scores (None: 1 / √D).
    """
    every = slice(None)
    chunk = span.keys.stop - span.keys.start
    window = mask.window
    half = int(span.queries.start > 0)
    lengths = [chunk, *[0, chunk] * 2 * rows] if mask.lengths is None else mask.lengths.tolist()
    if span.query_start == span.key_start:
        cu_seqlens = None if mask.cu_seqlens is None else mask.cu_seqlens[half]
        call = FlashCall(cu_seqlens, lengths[0], True, window - 1 if window else None, scale)
        yield (every, every, every, span.queries), (every, every, span.keys), call
        return
    queries_at = span.queries.start - span.query_start
    keys_at = span.keys.start - span.key_start
    leading = list(zip(lengths[1 + 2 * half :: 4], lengths[2 + 2 * half :: 4], strict=True))
    end = span.key_start + chunk
    for (start, tokens), group in groupby(range(rows), key=leading.__getitem__):
        first = max(start, span.key_start)
        stop = span.query_start + tokens
        row, *more = group
        same = slice(row, row + 1 + len(more))
        # Queries before `sees_all` see all keys of the document, each later one sees one key less at the start.
        sees_all = max(span.query_start, min(stop, first + window)) if window else stop
        for begin, until in ((span.query_start, sees_all), (sees_all, min(stop, end + window - 1))):
            if first < end and begin < until:
                limited = begin == sees_all
                oldest = max(first, begin - window + 1) if limited else first
                queries = slice(queries_at + begin, queries_at + until)
                keys = slice(keys_at + oldest, span.keys.stop)
                call = FlashCall(left=window - 1 - (until - end) if limited else None, scale=scale)
                yield (same, every, every, queries), (same, every, keys), call


class FlashSpans(NamedTuple):
    """Kernel that computes the attention of spans (slices of queries over slices of keys) with PyTorch's flash
    attention. `mask`: document boundaries and sliding window; `scale`: factor of the scores."""

    mask: VarlenMask
    scale: float

    def attend(self, q_BKGCD: Tensor, block: Tensor, span: Span) -> Iterator[Result]:
        """Compute the attention of `span` by flash kernels; see `TiledSpans.attend`."""
        for at, there, call in list_kernel_calls(self.mask, span, len(q_BKGCD), self.scale):
            out, log_sum = flash_forward(q_BKGCD[at].flatten(1, 2), block[0][there], block[1][there], call)
            yield at, group_by_kv_head(out, block[0]), group_by_kv_head(log_sum, block[0])

    def add_gradients(self, gradients: Gradients, saved: SavedQueries, block: Tensor, span: Span) -> None:
        """Add the gradients of `span` by flash kernels; see `TiledSpans.add_gradients`."""
        for at, there, call in list_kernel_calls(self.mask, span, len(saved.q), self.scale):
            q, out, d_out, log_sum = (x[at].flatten(1, 2) for x in saved[:4])
            dq, dk, dv = flash_backward(d_out, (q, block[0][there], block[1][there], out, log_sum), call)
            gradients[0][at] += group_by_kv_head(dq, block[0])
            gradients[1][0][there] += dk
            gradients[1][1][there] += dv


SpanKernel = TiledSpans | FlashSpans
"""Kernel that computes the attention of spans, slices of queries over slices of keys."""
