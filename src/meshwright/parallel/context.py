"""Context parallelism: the tokens of each sequence are split over ranks, and attention alone communicates.

Idea: ring attention keeps a rank's queries in place while KV blocks travel around the ring of ranks (Liu et al. 2023,
arXiv:2310.01889). Under a causal mask, ranks with contiguous slices would have unequal work: a sequence is cut into 2
cp chunks, and rank c holds c and 2 cp - 1 - c (zig-zag; as balanced as the stripes of Brandon et al. 2023,
arXiv:2311.09431). Ulysses trades tokens for heads instead: between two all-to-alls each rank attends over whole
sequences with N / cp of the heads (Jacobs et al. 2023, arXiv:2309.14509, section 3.1); ranks hold contiguous slices.
Mathematics: partial results over some keys are merged by their log-sum-exps; backward recomputes probabilities from the
log-sum-exp over all keys (Dao 2023, arXiv:2307.08691, algorithms 1 and 2).
Communication: in each of cp - 1 ring steps a rank passes the KV block on; in backward the gradients of a block travel
with it and return to its rank after cp steps. Ulysses: two all-to-alls forward, two backward.
Overlap: a KV block is sent during the computation with the previous block, its gradient during that with the next.
Every other gradient is a sum over `data`, which is dp x cp.

Shapes: B sequences, C tokens of a sequence on this rank, S on all, N query heads, K key-value heads, G = N / K, D head
size. In a tile: P pairs of a sequence and a key-value head, X = G x queries of the tile, L keys that the tile sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshwright.comm import collectives
from meshwright.comm.custom_operator import custom_operator
from meshwright.comm.handle import DONE
from meshwright.comm.mesh import Axis, Mesh, find_axis
from meshwright.comm.operators import all_to_all, reduce_from
from meshwright.layout import Layout
from meshwright.model.axis_operations import ContextOperations
from meshwright.model.documents import Documents
from meshwright.model.precision import at_least_float32
from meshwright.model.scaled_dot_product import Visible, attend, visibility
from meshwright.model.tiled_attention import Span, by_kv_head, compute_scores, cut_tiles, empty_bsnd, flatten_heads
from meshwright.model.varlen_attention import VarlenMask, supports_flash_attention

SITE = "attention.ring"
aten = torch.ops.aten


# --- idea: which tokens a rank holds, and how it attends


def local_positions(layout: Layout, rank: int, sequence: int) -> torch.Tensor:
    """Return the sequence indices of the tokens that cp rank `rank` holds of an unsharded sequence: ascending, int64
    [S / cp]. `layout`: gives cp and its method; `sequence`: S in tokens, a multiple of cp (ring attention: of 2 cp)."""
    ring = layout.cp_method == "ring"
    count, held = (2 * layout.cp, held_chunks(rank, layout.cp)) if ring else (layout.cp, (rank,))
    assert sequence % count == 0, f"{sequence} tokens in {count} chunks"
    return torch.cat([chunk for index, chunk in enumerate(torch.arange(sequence).chunk(count)) if index in held])


def shard_sequences(
    tokens_BS: torch.Tensor, targets_BS: torch.Tensor, documents: Documents, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Return this cp rank's slices of unsharded tokens and targets, [B, S] -> [B, S / cp] each, and of `documents`
    (document boundaries in packed sequences). Without context parallelism the arguments are returned unchanged."""
    if mesh.cp.trivial:
        return tokens_BS, targets_BS, documents
    indices_C = local_positions(mesh.layout, mesh.cp.rank, tokens_BS.shape[1]).to(tokens_BS.device)
    return tokens_BS[:, indices_C], targets_BS[:, indices_C], documents.select_tokens(indices_C)


def held_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks that cp rank `rank` holds of a sequence cut into 2 x `ranks` chunks: chunk
    `rank` and its mirror image (zig-zag)."""
    return rank, 2 * ranks - 1 - rank


class ContextParallel(ContextOperations):
    """Base class of ring and Ulysses attention. `axis`: mesh axis cp, whose ranks each hold a part of each sequence."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.size = axis, axis.size

    def reduce(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Return the sum of `x` (any shape) over the cp ranks; backward passes the gradient through unchanged. `site`:
        label of the call in traces."""
        return reduce_from(x, self.axis, site)


class RingAttention(ContextParallel):
    """Ring attention over the context-parallel `axis`: each sequence is cut into 2 cp chunks, of which each of the cp
    ranks holds two, and the ranks pass KV blocks around a ring."""

    def visibility(
        self, documents: Documents, tokens: int, window: int | None, device: torch.device, flash: bool = False
    ) -> torch.Tensor | None:
        """Return the attention mask for `attend`: the sequence index of the first key that each query on this rank
        attends to, [B or 1, C]; None for plain causal attention. `documents`: boundaries in packed sequences; `tokens`:
        C, tokens of each sequence on this rank; `window`: sliding window in tokens (None: none); `flash`: ignored."""
        assert documents.indices_C is not None
        first_BS = documents.first_visible_BS(self.size * tokens, window, device)
        return None if first_BS is None else first_BS[:, documents.indices_C]

    def attend(
        self, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, visible: Visible
    ) -> torch.Tensor:
        """Return the causal attention [B, N, C, D] of this rank's queries over the keys of all cp ranks; each rank
        passes its C tokens of every sequence. `visible`: mask that `visibility` returned."""
        assert not isinstance(visible, VarlenMask)
        arguments = q_BNSD, k_BKSD, v_BKSD, visible, self.axis.key
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _compute_ring_attention(*arguments)[0]  # a custom operator's first call loads the compiler
        return torch.ops.meshwright.ring_attention(*arguments)[0]


class UlyssesAttention(ContextParallel):
    """DeepSpeed-Ulysses attention over the context-parallel `axis`: each rank holds a contiguous slice of the tokens;
    for attention, all-to-alls give it unsharded sequences of 1 / cp of the heads instead."""

    def visibility(
        self, documents: Documents, tokens: int, window: int | None, device: torch.device, flash: bool = False
    ) -> Visible:
        """Return the attention mask of the unsharded sequences, as `visibility` in `model/scaled_dot_product.py` does.
        `documents`: boundaries in packed sequences; `tokens`: S / cp; `window`: sliding window in tokens; `flash`:
        flash attention supports the queries."""
        return visibility(documents, self.size * tokens, window, device, flash)

    def attend(
        self, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, visible: Visible
    ) -> torch.Tensor:
        """Return the causal attention [B, N, C, D] of this rank's C queries over the keys of all cp ranks. One
        all-to-all gives each rank unsharded sequences of N / cp heads, a second one restores token slices. With more
        ranks than key-value heads, several ranks get copies of a head. `visible`: mask that `visibility` returned."""
        axis, copies = self.axis, max(1, self.size // k_BKSD.shape[1])
        three = q_BNSD, k_BKSD.repeat_interleave(copies, dim=1), v_BKSD.repeat_interleave(copies, dim=1)
        by_rank = torch.cat([x.unflatten(1, (axis.size, -1)) for x in three], dim=2).flatten(1, 2)
        mine = all_to_all(by_rank, axis, "attention.heads", split=1, join=2)
        q, k, v = mine.split([x.shape[1] // axis.size for x in three], dim=1)
        out = attend(q, k, v, visible)
        return all_to_all(out.transpose(1, 2), axis, "attention.tokens", split=1, join=2).transpose(1, 2)


def context_operations(mesh: Mesh) -> ContextOperations:
    """Build the context-parallel operations that the layout of this rank's mesh selects: ring attention, Ulysses
    attention or, without context parallelism, operations that communicate nothing."""
    if mesh.cp.trivial:
        return ContextOperations()
    return (RingAttention if mesh.layout.cp_method == "ring" else UlyssesAttention)(mesh.cp)


# --- mathematics: attention over some keys, merged


def list_spans(rank: int, source: int, ranks: int, tokens: int) -> list[Span]:
    """List the blocks of causal attention between the queries of cp rank `rank` and the KV block of rank `source`: one
    `Span` (slice of queries, slice of keys) for each pair of a query chunk and a key chunk, of two each, that the
    causal mask does not hide. `ranks`: size of cp; `tokens`: number of tokens of a sequence on each rank."""
    chunk = tokens // 2
    halves = (slice(0, chunk), slice(chunk, tokens))
    return [
        Span(queries, keys, mine * chunk, theirs * chunk)
        for queries, mine in zip(halves, held_chunks(rank, ranks), strict=True)
        for keys, theirs in zip(halves, held_chunks(source, ranks), strict=True)
        if theirs <= mine
    ]


def _add_span(
    out_BKGCD: torch.Tensor,
    log_sum_BKGC: torch.Tensor,
    q_BKGCD: torch.Tensor,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    first_BC: torch.Tensor | None,
    span: Span,
) -> None:
    """Compute the attention of `span` (a slice of queries over a slice of keys) and merge it, in place, into the output
    `out_BKGCD` and the log-sum-exp `log_sum_BKGC`, which hold the result over the keys of earlier spans. `first_BC`:
    index of the first key that each query attends to; None: 0. Dims: K key-value heads, G query heads of each, C tokens
    on this rank, D head size."""
    for rows, heads, tiles in cut_tiles(q_BKGCD, span, first_BC):
        k_PCD, v_PCD = flatten_heads(k_BKCD[rows, heads]), flatten_heads(v_BKCD[rows, heads])
        wide_k_PCD = k_PCD.to(out_BKGCD.dtype)
        for tile in tiles:
            at = (rows, heads, slice(None), tile.queries)
            part = q_BKGCD[at]
            scores_PXL = compute_scores(flatten_heads(part), wide_k_PCD, tile, part.shape)
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
    """Compute the attention of `span` (a slice of queries over a slice of keys) with PyTorch's flash attention and
    merge it, in place, into the output `out_BKGCD` and the log-sum-exp `log_sum_BKGC`. Counterpart of `_add_span` for
    plain causal attention: flash attention supports no document or window mask."""
    part = q_BKGCD[..., span.queries, :]
    q, k, v = part.flatten(1, 2), k_BKCD[:, :, span.keys], v_BKCD[:, :, span.keys]
    o, here = _flash_operator(q.device)(q, k, v, 0.0, span.query_start == span.key_start)[:2]
    into = out_BKGCD[..., span.queries, :], log_sum_BKGC[..., span.queries]
    _merge(*into, o.view(part.shape), here.view(part.shape[:-1]))


def _merge(out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_sum_more: torch.Tensor) -> None:
    """Merge two attention results of the same queries over different keys, in place into the first: `out`, `log_sum`
    (output and log-sum-exp). `more`, `log_sum_more`: the second result. The merged output is the mean of both outputs,
    weighted by the exponentials of their log-sum-exps."""
    both = torch.logaddexp(log_sum, log_sum_more)
    out.mul_((log_sum - both).exp_()[..., None])
    out.addcmul_(more.to(out.dtype), (log_sum_more - both).exp_()[..., None])
    log_sum.copy_(both)


class _SavedQueries(NamedTuple):
    """Tensors of this rank's queries that ring attention's backward reads. `q`, `out`, `d_out`: queries, output and its
    gradient, each [B, K, G, C, D] (K key-value heads, G query heads of each, C tokens); `log_sum_BKGC`: log-sum-exps
    over all keys; `inner_BKGC`: sum over D of `out` times `d_out`; `first_BC`: index of the first key that each query
    attends to (None: 0)."""

    q: torch.Tensor
    out: torch.Tensor
    d_out: torch.Tensor
    log_sum_BKGC: torch.Tensor
    inner_BKGC: torch.Tensor
    first_BC: torch.Tensor | None


def _add_span_gradients(
    dq_BKGCD: torch.Tensor,
    d_keys_values: torch.Tensor,
    saved: _SavedQueries,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """Compute the gradients of the attention of `span` (a slice of queries over a slice of keys) and add them in place:
    those of the queries to `dq_BKGCD`, those of the keys and values to `d_keys_values` [2, B, K, C, D]. `saved`: this
    rank's queries, outputs and output gradients."""
    dtype, scale = saved.q.dtype, 1.0 / math.sqrt(saved.q.shape[-1])
    for rows, heads, tiles in cut_tiles(saved.q, span, saved.first_BC):
        k_PCD, v_PCD = flatten_heads(k_BKCD[rows, heads]), flatten_heads(v_BKCD[rows, heads])
        dk_PCD, dv_PCD = (each[rows, heads].view(k_PCD.shape) for each in d_keys_values)
        wide_k_PCD = k_PCD.to(dq_BKGCD.dtype)
        for tile in tiles:
            at = (rows, heads, slice(None), tile.queries)
            part = saved.q[at]
            q_PXD, d_out_PXD = flatten_heads(part), flatten_heads(saved.d_out[at])
            p_PXL = compute_scores(q_PXD, wide_k_PCD, tile, part.shape, _to_column(saved.log_sum_BKGC[at])).exp_()
            dv_PCD[:, tile.keys] += torch.bmm(p_PXL.to(dtype).mT, d_out_PXD)
            less_PX1, v_PDL = _to_column(saved.inner_BKGC[at]), v_PCD[:, tile.keys].mT
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
    saved: _SavedQueries,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """Compute the gradients of the attention of `span` with PyTorch's flash attention and add them in place to
    `dq_BKGCD` and `d_keys_values` [2, B, K, C, D]: the counterpart of `_add_span_gradients` for plain causal attention.
    `span`: a slice of queries over a slice of keys; `saved`: this rank's queries, outputs and output gradients."""
    q, out, d_out = (x[..., span.queries, :].flatten(1, 2) for x in (saved.q, saved.out, saved.d_out))
    log_sum = saved.log_sum_BKGC[..., span.queries].flatten(1, 2).contiguous()
    k, v = k_BKCD[:, :, span.keys], v_BKCD[:, :, span.keys]
    tokens, causal = q.shape[2], span.query_start == span.key_start
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: no dropout
        between = None, None, tokens, tokens, 0.0, causal, seed, seed
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(d_out, q, k, v, out, log_sum, *between)
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(d_out, q, k, v, out, log_sum, 0.0, causal)
    dq_BKGCD[..., span.queries, :] += by_kv_head(dq, k_BKCD)
    d_keys_values[0, :, :, span.keys] += dk
    d_keys_values[1, :, :, span.keys] += dv


def _uses_flash_attention(q: torch.Tensor, first_BC: torch.Tensor | None) -> bool:
    """Return True if PyTorch's flash attention computes the spans: it supports the queries, and nothing is masked."""
    return first_BC is None and supports_flash_attention(q.device, q.dtype, q.shape[-1])


def _flash_operator(device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return PyTorch's operator of the flash-attention forward for `device` (CUDA or CPU)."""
    on_cuda = device.type == "cuda"
    return aten._scaled_dot_product_flash_attention if on_cuda else aten._scaled_dot_product_flash_attention_for_cpu


def _to_column(x: torch.Tensor) -> torch.Tensor:
    """Reshape a per-query tensor [sequences, heads, G, X] to [sequences x heads, G x X, 1], the order of
    `flatten_heads`. G: query heads per key-value head; X: queries."""
    return flatten_heads(x[..., None])


# --- communication and overlap


def _kv_blocks(k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, axis: Axis, site: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Pass KV blocks around the ring of cp ranks; yield (owner rank, block [2, B, K, C, D]) for every rank, this rank's
    own first. The next block is received while the caller computes with the current one. `site`: label in traces."""
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


def _compute_ring_attention(
    q_BNCD: torch.Tensor, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, first_BC: torch.Tensor | None, key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ring attention without autograd. Return the output [B, N, C, D] and each query's log-sum-exp [B, N, C]
    for the C tokens on this rank. `first_BC`: index of the first key that each query attends to (None: 0). `key`:
    string that identifies the cp axis (`Axis.key`), because custom operators accept no objects."""
    axis, wide = find_axis(key), at_least_float32(q_BNCD.dtype)
    q = by_kv_head(q_BNCD, k_BKCD)
    out = q.new_zeros(q.shape, dtype=wide)
    log_sum = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    for source, (k, v) in _kv_blocks(k_BKCD, v_BKCD, axis, SITE):
        for span in list_spans(axis.rank, source, axis.size, k.shape[2]):
            if _uses_flash_attention(q, first_BC):
                _add_span_fused(out, log_sum, q, k, v, span)
            else:
                _add_span(out, log_sum, q, k, v, first_BC, span)
    return empty_bsnd(q_BNCD).copy_(out.flatten(1, 2)), log_sum.flatten(1, 2)


_forward = custom_operator("meshwright::ring_attention")(_compute_ring_attention)


@custom_operator("meshwright::ring_attention_backward")
def _backward(
    d_out_BNCD: torch.Tensor, saved_tensors: list[torch.Tensor], first_BC: torch.Tensor | None, key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ring attention's queries, keys and values, in their shapes, given the output gradient
    `d_out_BNCD`. `saved_tensors`: queries, keys, values, output, log-sum-exps; `first_BC`: index of the first key that
    each query attends to (None: 0); `key`: string that identifies the cp axis (`Axis.key`)."""
    q_BNCD, k_BKCD, v_BKCD, out_BNCD, log_sum_BNC = saved_tensors
    axis, wide = find_axis(key), log_sum_BNC.dtype
    inner_BNC = (d_out_BNCD.to(wide) * out_BNCD).sum(dim=-1)
    of_queries = q_BNCD, out_BNCD, d_out_BNCD, log_sum_BNC, inner_BNC
    q, out, d_out, log_sum, inner = (by_kv_head(x, k_BKCD) for x in of_queries)
    saved = _SavedQueries(q, out, d_out, log_sum, inner, first_BC)
    add = _add_span_gradients_fused if _uses_flash_attention(q_BNCD, first_BC) else _add_span_gradients
    dq = torch.zeros_like(q, dtype=wide)
    # Gradients travel with their KV block and are sent during the computation with the next block.
    arriving, leaving = (k_BKCD.new_zeros((2, *k_BKCD.shape), dtype=wide) for _ in range(2))
    handle = DONE
    for source, (k, v) in _kv_blocks(k_BKCD, v_BKCD, axis, SITE + ".backward"):
        mine = torch.zeros_like(arriving)
        for span in list_spans(axis.rank, source, axis.size, k.shape[2]):
            add(dq, mine, saved, k, v, span)
        handle.wait()
        leaving, arriving = arriving.add_(mine), leaving
        handle = collectives.rotate(arriving, leaving, axis, SITE + ".gradients", async_op=True)
    handle.wait()
    dk, dv = (empty_bsnd(k_BKCD).copy_(each) for each in arriving)
    return empty_bsnd(q_BNCD).copy_(dq.flatten(1, 2)), dk, dv


_forward.register_fake(
    lambda q, k, v, first, key: (empty_bsnd(q), q.new_empty(q.shape[:-1], dtype=at_least_float32(q.dtype)))
)
_backward.register_fake(lambda d_out, saved, *_: tuple(empty_bsnd(each) for each in saved[:3]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save the inputs (queries, keys, values, first visible keys, key of the cp axis) and outputs of ring attention for
    backward: the `setup_context` function of torch.library.register_autograd."""
    q_BNCD, k_BKCD, v_BKCD, ctx.first_BC, ctx.key = inputs
    ctx.save_for_backward(q_BNCD, k_BKCD, v_BKCD, *output)
    ctx.set_materialize_grads(False)


def _backward_formula(ctx: Any, d_out_BNCD: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ring attention's five inputs, None for the last two (mask, axis key), given the output's
    gradient: the `backward` function of torch.library.register_autograd."""
    operator = torch.ops.meshwright.ring_attention_backward
    return (*operator(d_out_BNCD, list(ctx.saved_tensors), ctx.first_BC, ctx.key), None, None)


_forward.register_autograd(_backward_formula, setup_context=_save_for_backward)
