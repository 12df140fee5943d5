"""Ring attention: each rank of cp keeps its queries, and keys and values go round (Liu et al. 2023, arXiv:2310.01889).

A row is cut into 2 cp pieces, of which a rank has one from the front and one from the back, c and 2 cp - 1 - c: every
rank then sees equally much in every round. What a round adds is merged by the log of its sum of exponentials; the
backward pass forms the probabilities again from the whole row's (Dao 2023, arXiv:2307.08691, algorithms 1 and 2).

Shapes: B rows, C tokens of a row on this rank, N query heads, K key-value heads, G = N / K, D head size. In a tile: P
pairs of a row and a key-value head, X = G x queries of the tile, L keys that the tile sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshwright.comm import collectives
from meshwright.comm.custom_operator import custom_operator
from meshwright.comm.handle import DONE
from meshwright.comm.mesh import Axis, axis_of
from meshwright.model.precision import at_least_float32
from meshwright.model.tiled_attention import Span, by_kv_head, groups, like_queries, pairs, scores

SITE = "attention.ring"
aten = torch.ops.aten


def ring_attention(
    q_BNCD: torch.Tensor, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, first_BC: torch.Tensor | None, axis: Axis
) -> torch.Tensor:
    """softmax(q kᵀ / √D) v over the keys of all ranks of `axis`, from the place `first_BC` of the row (None: 0) to the
    query's own. Result [B, N, C, D], laid out in memory as [B, C, N, D]."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _attend(q_BNCD, k_BKCD, v_BKCD, first_BC, axis.key)[0]  # an operator's first call loads the compiler
    return torch.ops.meshwright.ring_attention(q_BNCD, k_BKCD, v_BKCD, first_BC, axis.key)[0]


def held_pieces(rank: int, ranks: int) -> tuple[int, int]:
    """Which two of the 2 x `ranks` pieces of a row a rank has."""
    return rank, 2 * ranks - 1 - rank


def spans(rank: int, source: int, ranks: int, tokens: int) -> list[Span]:
    """What the queries of `rank` see of the keys of `source`, if each has `tokens` of a row."""
    piece = tokens // 2
    halves = (slice(0, piece), slice(piece, tokens))
    return [
        Span(queries, keys, mine * piece, theirs * piece)
        for queries, mine in zip(halves, held_pieces(rank, ranks), strict=True)
        for keys, theirs in zip(halves, held_pieces(source, ranks), strict=True)
        if theirs <= mine
    ]


def _attend(
    q_BNCD: torch.Tensor, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, first_BC: torch.Tensor | None, key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the log of each query's sum of exponentials, [B, N, C]."""
    axis, wide = axis_of(key), at_least_float32(q_BNCD.dtype)
    q = by_kv_head(q_BNCD, k_BKCD)
    out = q.new_zeros(q.shape, dtype=wide)
    log_sum = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    for source, (k, v) in _round(k_BKCD, v_BKCD, axis, SITE):
        for span in spans(axis.rank, source, axis.size, k.shape[2]):
            if _fused(q, first_BC):
                _add_span_fused(out, log_sum, q, k, v, span)
            else:
                _add_span(out, log_sum, q, k, v, first_BC, span)
    return like_queries(q_BNCD).copy_(out.flatten(1, 2)), log_sum.flatten(1, 2)


_forward = custom_operator("meshwright::ring_attention")(_attend)


@custom_operator("meshwright::ring_attention_backward")
def _backward(
    d_out_BNCD: torch.Tensor,
    q_BNCD: torch.Tensor,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    out_BNCD: torch.Tensor,
    log_sum_BNC: torch.Tensor,
    first_BC: torch.Tensor | None,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    axis, wide = axis_of(key), log_sum_BNC.dtype
    inner_BNC = (d_out_BNCD.to(wide) * out_BNCD).sum(dim=-1)
    of_queries = q_BNCD, out_BNCD, d_out_BNCD, log_sum_BNC, inner_BNC
    q, out, d_out, log_sum, inner = (by_kv_head(x, k_BKCD) for x in of_queries)
    known = _Known(q, out, d_out, log_sum, inner, first_BC)
    add = _add_span_gradients_fused if _fused(q_BNCD, first_BC) else _add_span_gradients
    dq = torch.zeros_like(q, dtype=wide)
    # The gradients follow their keys and values: what a rank adds goes on while it works on the next ones.
    arriving, leaving = (k_BKCD.new_zeros((2, *k_BKCD.shape), dtype=wide) for _ in range(2))
    handle = DONE
    for source, (k, v) in _round(k_BKCD, v_BKCD, axis, SITE + ".backward"):
        mine = torch.zeros_like(arriving)
        for span in spans(axis.rank, source, axis.size, k.shape[2]):
            add(dq, mine, known, k, v, span)
        handle.wait()
        leaving, arriving = arriving.add_(mine), leaving
        handle = collectives.rotate(arriving, leaving, axis, SITE + ".gradients", async_op=True)
    handle.wait()
    dk, dv = (like_queries(k_BKCD).copy_(each) for each in arriving)
    return like_queries(q_BNCD).copy_(dq.flatten(1, 2)), dk, dv


def _round(k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, axis: Axis, site: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's keys and values [2, B, K, C, D], this rank's first, with the rank they came from. The next ones are
    on their way while the caller works."""
    here = torch.stack([k_BKCD, v_BKCD])
    spare = [torch.empty_like(here) for _ in range(min(2, axis.size - 1))]
    for distance in range(axis.size):
        handle, following = DONE, here
        if distance < axis.size - 1:
            following = spare[distance % 2]
            handle = collectives.rotate(following, here, axis, site, async_op=True)
        yield (axis.rank - distance) % axis.size, here
        handle.wait()
        here = following


def _add_span(
    out_BKGCD: torch.Tensor,
    log_sum_BKGC: torch.Tensor,
    q_BKGCD: torch.Tensor,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    first_BC: torch.Tensor | None,
    span: Span,
) -> None:
    """Merge what a span's queries find in its keys into the result, in place."""
    for rows, heads, tiles in groups(q_BKGCD, span, first_BC):
        k_PCD, v_PCD = pairs(k_BKCD[rows, heads]), pairs(v_BKCD[rows, heads])
        wide_k_PCD = k_PCD.to(out_BKGCD.dtype)
        for tile in tiles:
            at = (rows, heads, slice(None), tile.queries)
            part = q_BKGCD[at]
            scores_PXL = scores(pairs(part), wide_k_PCD, tile, part.shape)
            p_PXL = torch.softmax(scores_PXL, dim=-1)
            # The greatest probability is exp(greatest score - log sum).
            here = (scores_PXL.amax(dim=-1) - p_PXL.amax(dim=-1).log()).view(part.shape[:-1])
            o_PXD = torch.bmm(p_PXL.to(q_BKGCD.dtype), v_PCD[:, tile.keys])
            _merge(out_BKGCD[at], log_sum_BKGC[at], o_PXD.view(part.shape), here)


def _add_span_fused(
    out_BKGCD: torch.Tensor,
    log_sum_BKGC: torch.Tensor,
    q_BKGCD: torch.Tensor,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """The same by PyTorch's flash attention."""
    part = q_BKGCD[..., span.queries, :]
    q, k, v = part.flatten(1, 2), k_BKCD[:, :, span.keys], v_BKCD[:, :, span.keys]
    o, here = _flash(q.device)(q, k, v, 0.0, span.query_place == span.key_place)[:2]
    into = out_BKGCD[..., span.queries, :], log_sum_BKGC[..., span.queries]
    _merge(*into, o.view(part.shape), here.view(part.shape[:-1]))


def _merge(out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_sum_more: torch.Tensor) -> None:
    """Results over some keys, in place into those over others; each comes with the log of its sum of exponentials."""
    both = torch.logaddexp(log_sum, log_sum_more)
    out.mul_((log_sum - both).exp_()[..., None])
    out.addcmul_(more.to(out.dtype), (log_sum_more - both).exp_()[..., None])
    log_sum.copy_(both)


class _Known(NamedTuple):
    """What the backward pass knows of this rank's queries. `inner_BKGC`: the result times its gradient, summed over D;
    `first_BC`: the first place that each sees."""

    q: torch.Tensor
    out: torch.Tensor
    d_out: torch.Tensor
    log_sum_BKGC: torch.Tensor
    inner_BKGC: torch.Tensor
    first_BC: torch.Tensor | None


def _add_span_gradients(
    dq_BKGCD: torch.Tensor,
    d_keys_values: torch.Tensor,
    known: _Known,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """Add a span's part of the gradients, in place."""
    dtype, scale = known.q.dtype, 1.0 / math.sqrt(known.q.shape[-1])
    for rows, heads, tiles in groups(known.q, span, known.first_BC):
        k_PCD, v_PCD = pairs(k_BKCD[rows, heads]), pairs(v_BKCD[rows, heads])
        dk_PCD, dv_PCD = (each[rows, heads].view(k_PCD.shape) for each in d_keys_values)
        wide_k_PCD = k_PCD.to(dq_BKGCD.dtype)
        for tile in tiles:
            at = (rows, heads, slice(None), tile.queries)
            part = known.q[at]
            q_PXD, d_out_PXD = pairs(part), pairs(known.d_out[at])
            p_PXL = scores(q_PXD, wide_k_PCD, tile, part.shape, _column(known.log_sum_BKGC[at])).exp_()
            dv_PCD[:, tile.keys] += torch.bmm(p_PXL.to(dtype).mT, d_out_PXD)
            less_PX1, v_PDL = _column(known.inner_BKGC[at]), v_PCD[:, tile.keys].mT
            if dtype == less_PX1.dtype:
                dp_PXL = torch.baddbmm(less_PX1, d_out_PXD, v_PDL, beta=-1)
            else:
                dp_PXL = torch.bmm(d_out_PXD, v_PDL) - less_PX1
            ds_PXL = p_PXL.mul_(dp_PXL).to(dtype)
            dq_PXD = torch.bmm(ds_PXL, k_PCD[:, tile.keys])
            dq_BKGCD[at].add_(dq_PXD.view(part.shape), alpha=scale)
            dk_PCD[:, tile.keys].add_(torch.bmm(ds_PXL.mT, q_PXD), alpha=scale)


def _add_span_gradients_fused(
    dq_BKGCD: torch.Tensor,
    d_keys_values: torch.Tensor,
    known: _Known,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """The same by PyTorch's flash attention: given the whole row's result and log of sums, its gradients are the
    span's part."""
    q, out, d_out = (x[..., span.queries, :].flatten(1, 2) for x in (known.q, known.out, known.d_out))
    log_sum = known.log_sum_BKGC[..., span.queries].flatten(1, 2).contiguous()
    k, v = k_BKCD[:, :, span.keys], v_BKCD[:, :, span.keys]
    tokens, causal = q.shape[2], span.query_place == span.key_place
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
        between = None, None, tokens, tokens, 0.0, causal, seed, seed
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(d_out, q, k, v, out, log_sum, *between)
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(d_out, q, k, v, out, log_sum, 0.0, causal)
    dq_BKGCD[..., span.queries, :] += by_kv_head(dq, k_BKCD)
    d_keys_values[0, :, :, span.keys] += dk
    d_keys_values[1, :, :, span.keys] += dv


def _fused(q: torch.Tensor, first_BC: torch.Tensor | None) -> bool:
    """Whether PyTorch's flash attention serves: it takes no mask and no head over 256; on a CPU tiles are quicker."""
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and first_BC is None and narrow and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _flash(device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    on_cuda = device.type == "cuda"
    return aten._scaled_dot_product_flash_attention if on_cuda else aten._scaled_dot_product_flash_attention_for_cpu


def _column(x: torch.Tensor) -> torch.Tensor:
    """[P, X, 1] of [rows, heads, G, X]."""
    return pairs(x[..., None])


@_forward.register_fake
def _(
    q_BNCD: torch.Tensor, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, first_BC: torch.Tensor | None, key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return like_queries(q_BNCD), q_BNCD.new_empty(q_BNCD.shape[:-1], dtype=at_least_float32(q_BNCD.dtype))


@_backward.register_fake
def _(
    d_out_BNCD: torch.Tensor,
    q_BNCD: torch.Tensor,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    out_BNCD: torch.Tensor,
    log_sum_BNC: torch.Tensor,
    first_BC: torch.Tensor | None,
    key: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return like_queries(q_BNCD), like_queries(k_BKCD), like_queries(v_BKCD)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q_BNCD, k_BKCD, v_BKCD, ctx.first_BC, ctx.key = inputs
    ctx.save_for_backward(q_BNCD, k_BKCD, v_BKCD, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out_BNCD: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    operator = torch.ops.meshwright.ring_attention_backward
    return (*operator(d_out_BNCD, *ctx.saved_tensors, ctx.first_BC, ctx.key), None, None)


_forward.register_autograd(_differentiate, setup_context=_remember)
