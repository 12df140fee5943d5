"""Context parallelism: the tokens of each sequence are split over ranks, and attention alone communicates.

Idea: ring attention keeps a rank's queries in place while KV blocks travel around the ring of ranks (Liu et al. 2023,
arXiv:2310.01889). Under a causal mask, ranks with contiguous slices would have unequal work: a sequence is cut into 2
cp chunks, and rank c holds c and 2 cp - 1 - c (zig-zag; as balanced as the stripes of Brandon et al. 2023,
arXiv:2311.09431). Ulysses trades tokens for heads instead: between two all-to-alls each rank attends over whole
sequences with N / cp of the heads (Jacobs et al. 2023, arXiv:2309.14509, section 3.1); ranks hold contiguous slices.
Mathematics of a ring step: `parallel/ring_spans.py`.
Communication: in each of cp - 1 ring steps a rank passes the KV block on; in backward the gradients of a block travel
with it and return to its rank after cp steps. Ulysses: two all-to-alls forward, two backward.
Overlap: a KV block is sent during the computation with the previous block, its gradient during that with the next.
Every other gradient is a sum over `data`, which is dp x cp.

Shapes: B sequences, C tokens of a sequence on this rank, S on all, N query heads, K key-value heads, G = N / K, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import collectives
from meshwright.comm.handle import DONE
from meshwright.comm.mesh import Axis, Mesh, find_axis
from meshwright.comm.operators import all_to_all, reduce_from
from meshwright.layout import Layout
from meshwright.model import attention_operator as attention_op
from meshwright.model.axis_operations import ContextOperations
from meshwright.model.documents import Documents, MicroBatch, move
from meshwright.model.precision import at_least_float32
from meshwright.model.scaled_dot_product import AttentionMask, MaskForm, attend
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.model.varlen_attention import VarlenMask, make_varlen_mask
from meshwright.parallel import ring_spans
from meshwright.parallel.ring_spans import FlashSpans, SpanKernel, TiledSpans, list_held_chunks

SITE = "attention.ring"


# --- idea: which tokens a rank holds, and how it attends


def list_local_positions(layout: Layout, rank: int, sequence: int) -> Tensor:
    """Return the positions in the unsharded sequence of the tokens that cp rank `rank` holds: int64 [sequence / cp],
    ascending. All sequences have equal positions.

    `layout`: gives cp and its method; `sequence`: number of tokens of an unsharded sequence, a multiple of cp (ring
    attention: of 2 cp)."""
    ring = layout.cp_method == "ring"
    count, held = (2 * layout.cp, list_held_chunks(rank, layout.cp)) if ring else (layout.cp, (rank,))
    assert sequence % count == 0, f"{sequence} tokens in {count} chunks"
    return torch.cat([chunk for index, chunk in enumerate(torch.arange(sequence).chunk(count)) if index in held])


def shard_sequences(tokens_BS: Tensor, targets_BS: Tensor, documents: Documents, mesh: Mesh) -> MicroBatch:
    """Return this cp rank's slices of the tokens `tokens_BS`, targets `targets_BS` and document boundaries of unsharded
    sequences. Tokens and targets are sliced from [B, S] to [B, S / cp], for B sequences of S tokens. Without context
    parallelism the slices are the arguments.

    `documents`: document boundaries in packed sequences; `mesh`: device mesh, whose layout gives the cp method and
    whose cp axis gives this rank."""
    if mesh.cp.trivial:
        return MicroBatch(tokens_BS, targets_BS, documents)
    indices_C = move(list_local_positions(mesh.layout, mesh.cp.rank, tokens_BS.shape[1]), tokens_BS.device)
    return MicroBatch(tokens_BS[:, indices_C], targets_BS[:, indices_C], documents.select_tokens(indices_C))


class ContextParallel(ContextOperations):
    """Base class of ring and Ulysses attention. `axis`: mesh axis cp, whose ranks each hold some tokens of every
    sequence."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.size = axis.size

    def reduce(self, x: Tensor, site: str) -> Tensor:
        """Return the sum of `x` (any shape) over the cp ranks; backward passes the gradient through unchanged. `site`:
        label of the call in traces."""
        return reduce_from(x, self.axis, site)


class RingAttention(ContextParallel):
    """Ring attention over the context-parallel `axis`. Each sequence is cut into 2 x cp chunks, and each of the cp
    ranks holds two of them. The ranks pass KV blocks (keys and values of a rank's tokens) around a ring."""

    def make_attention_mask(
        self, documents: Documents, tokens: int, window: int | None, device: torch.device, form: MaskForm = "boolean"
    ) -> VarlenMask | Tensor | None:
        """Return the attention mask for the argument `visible` of `attend`. With `form` "varlen" (flash attention) it
        is a `VarlenMask` of this rank's chunks. Otherwise it has for each of this rank's queries the index, in the
        unsharded sequence, of the first key that the query attends to: integers on the CPU, [sequences or 1, tokens];
        None if this index is 0 for all queries.

        `documents`: boundaries in packed sequences; `tokens`: tokens of each sequence on this rank; `window`: sliding
        window in tokens (None: none); `device`: device of a `VarlenMask`; `form`: mask format of the attention kernel.
        """
        chunks = 2 * self.size
        held = list_held_chunks(self.axis.rank, self.size)
        if form == "varlen":
            return make_varlen_mask(documents, window, device, held, chunks)
        first_BS = documents.on_host().first_visible_BS(self.size * tokens, window, torch.device("cpu"))
        return None if first_BS is None else first_BS.unflatten(1, (chunks, -1))[:, held].flatten(1)

    def attend(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: AttentionMask,
        scores: ScoreSettings | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the causal attention of this rank's queries to the keys and values of all cp ranks, [B, N, C, D]: B
        sequences, N query heads, C tokens of a sequence on this rank, head size D.

        `q_BNSD`: queries of this rank's tokens [B, N, C, D]; `k_BKSD`, `v_BKSD`: keys and values of these tokens [B, K,
        C, D], with K key-value heads. `visible`: attention mask from `make_attention_mask`; `scores`: scale and softcap
        of the attention scores; None: 1 / √D and no softcap."""
        scores = scores or ScoreSettings(q_BNSD.shape[-1] ** -0.5)
        if isinstance(visible, VarlenMask):
            assert not scores.softcap
            name = "flash_ring_attention"
            tensors = visible.tensors
            numbers = [float(visible.window), scores.scale]
        else:
            name = "ring_attention"
            tensors = [] if visible is None else [visible]
            numbers = [scores.scale, scores.softcap]
        operator = getattr(torch.ops.meshwright, name)
        return operator(q_BNSD, k_BKSD, v_BKSD, tensors, numbers, self.axis.key, scores.sinks)[0]


class UlyssesAttention(ContextParallel):
    """DeepSpeed-Ulysses attention over the context-parallel `axis`. Each rank holds a contiguous slice of the tokens
    with all heads; for attention, all-to-alls turn this into all tokens with 1 / cp of the heads."""

    def attend(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: AttentionMask,
        scores: ScoreSettings | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the causal attention of this rank's queries to the keys and values of all cp ranks, [B, N, C, D]: B
        sequences, N query heads, C tokens of a sequence on this rank, head size D. One all-to-all gives each rank
        unsharded sequences with N / cp heads; a second all-to-all restores the token slices. With more ranks than
        key-value heads, several ranks get copies of the same key-value head.

        `q_BNSD`: queries of this rank's tokens [B, N, C, D]; `k_BKSD`, `v_BKSD`: keys and values of these tokens [B, K,
        C, D], with K key-value heads. `visible`: attention mask from `make_attention_mask`; `scores`: scale and softcap
        of the attention scores; None: 1 / √D and no softcap."""
        axis = self.axis
        copies = max(1, self.size // k_BKSD.shape[1])
        three = q_BNSD, k_BKSD.repeat_interleave(copies, dim=1), v_BKSD.repeat_interleave(copies, dim=1)
        by_rank = torch.cat([x.unflatten(1, (axis.size, -1)) for x in three], dim=2).flatten(1, 2)
        mine = all_to_all(by_rank, axis, "attention.heads", split=1, join=2)
        q, k, v = mine.split([x.shape[1] // axis.size for x in three], dim=1)
        if scores is not None and scores.sinks is not None:
            scores = scores._replace(sinks=scores.sinks.unflatten(0, (axis.size, -1))[axis.rank])
        out = attend(q, k, v, visible, scores)
        return all_to_all(out.transpose(1, 2), axis, "attention.tokens", split=1, join=2).transpose(1, 2)


def make_context_operations(mesh: Mesh) -> ContextOperations:
    """Build the context-parallel operations that the layout of this rank's mesh selects: ring attention, Ulysses
    attention or, without context parallelism, operations that communicate nothing."""
    if mesh.cp.trivial:
        return ContextOperations()
    return (RingAttention if mesh.layout.cp_method == "ring" else UlyssesAttention)(mesh.cp)


# --- communication and overlap


def _pass_kv(k_BKCD: Tensor, v_BKCD: Tensor, axis: Axis, site: str) -> Iterator[tuple[int, Tensor]]:
    """Pass KV blocks around the ring of cp ranks (`axis`). Yield (owner rank, KV block) once for every rank, beginning
    with this rank's own block. The next block is received while the caller computes with the current block.

    `k_BKCD`, `v_BKCD`: this rank's keys and values: B sequences, K key-value heads, C tokens, head size D. A KV block
    stacks both, [2, B, K, C, D]. `site`: label of the calls in traces."""
    here = torch.stack([k_BKCD, v_BKCD])
    spare = [torch.empty_like(here) for _ in range(min(2, axis.size - 1))]
    for distance in range(axis.size):
        handle = DONE
        following = here
        if distance < axis.size - 1:
            following = spare[distance % 2]
            handle = collectives.rotate(following, here, axis, site, async_op=True)
        yield (axis.rank - distance) % axis.size, here
        handle.wait()
        here = following


def _compute_ring_attention(
    q_BNCD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, kernel: SpanKernel, key: str,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ring attention, without autograd, for this rank's tokens. Return (output [B, N, C, D], log-sum-exp of
    each query's scores [B, N, C]): B sequences, N query heads, C tokens of a sequence on this rank, head size D.

    `q_BNCD`, `k_BKCD`, `v_BKCD`: queries, keys and values of these tokens, with K key-value heads; `kernel`: computes
    the attention of a span (a slice of queries over a slice of keys); `key`: identifies the cp axis (`Axis.key`),
    because custom operators accept no objects; `sinks`: attention-sink score of each query head [N] (None: none),
    merged once, after all KV blocks."""
    axis = find_axis(key)
    wide = at_least_float32(q_BNCD.dtype)
    q = attention_op.group_by_kv_head(q_BNCD, k_BKCD)
    out = q.new_zeros(q.shape, dtype=wide)
    log_sum = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    for source, block in _pass_kv(k_BKCD, v_BKCD, axis, SITE):
        for span in ring_spans.list_spans(axis.rank, source, axis.size, block.shape[3]):
            for at, *more in kernel.attend(q, block, span):
                ring_spans.merge_attention(out[at], log_sum[at], *more)
    if sinks is not None:
        attention_op.add_sinks(out, log_sum, sinks.view(*q.shape[1:3], 1))
    return attention_op.empty_bsnd(q_BNCD).copy_(out.flatten(1, 2)), log_sum.flatten(1, 2)


def _compute_gradients(
    d_out_BNCD: Tensor, saved_tensors: list[Tensor], kernel: SpanKernel, key: str,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ring attention with respect to queries, keys, values and attention sinks, in this order
    and in their shapes. The gradient of the sinks covers only this rank's queries.

    `d_out_BNCD`: output gradient, for B sequences, N query heads, C tokens of a sequence on this rank, head size D;
    `saved_tensors`: queries, keys, values, output, log-sum-exps; `kernel`: computes and adds the gradients of a span (a
    slice of queries over a slice of keys); `key`: identifies the cp axis (`Axis.key`); `sinks`: attention-sink score of
    each query head [N]; None: no sinks."""
    q_BNCD, k_BKCD, v_BKCD, out_BNCD, log_sum_BNC = saved_tensors
    axis = find_axis(key)
    wide = log_sum_BNC.dtype
    inner_BNC = (d_out_BNCD.to(wide) * out_BNCD).sum(dim=-1)
    of_queries = q_BNCD, out_BNCD, d_out_BNCD, log_sum_BNC, inner_BNC
    saved = ring_spans.SavedQueries(*(attention_op.group_by_kv_head(x, k_BKCD) for x in of_queries))
    dq = torch.zeros_like(saved.q, dtype=wide)
    # Gradients travel with their KV block and are sent during the computation with the next block.
    arriving, leaving = (k_BKCD.new_zeros((2, *k_BKCD.shape), dtype=wide) for _ in range(2))
    handle = DONE
    for source, block in _pass_kv(k_BKCD, v_BKCD, axis, SITE + ".backward"):
        mine = torch.zeros_like(arriving)
        for span in ring_spans.list_spans(axis.rank, source, axis.size, block.shape[3]):
            kernel.add_gradients((dq, mine), saved, block, span)
        handle.wait()
        leaving, arriving = arriving.add_(mine), leaving
        handle = collectives.rotate(arriving, leaving, axis, SITE + ".gradients", async_op=True)
    handle.wait()
    dk, dv = (attention_op.empty_bsnd(k_BKCD).copy_(each) for each in arriving)
    d_sinks = attention_op.empty_gradient(q_BNCD, sinks)
    if sinks is not None:
        d_sinks = attention_op.compute_sink_gradients(sinks, log_sum_BNC, inner_BNC)
    return attention_op.empty_bsnd(q_BNCD).copy_(dq.flatten(1, 2)), dk, dv, d_sinks


def _empty_results(q_BNCD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialised results of ring attention: output [B, N, C, D] and log-sum-exps [B, N, C], for B sequences,
    N query heads, C tokens, head size D. Fake implementation of the custom operators, for torch.compile. `q_BNCD`:
    queries; `rest`: ignored."""
    return attention_op.empty_bsnd(q_BNCD), q_BNCD.new_empty(q_BNCD.shape[:-1], dtype=at_least_float32(q_BNCD.dtype))


Rebuild = Callable[[list[Tensor], list[float]], SpanKernel]
"""Function that rebuilds a kernel, which custom operators cannot take as an argument, from its tensors and numbers."""


def _register_ring_attention(name: str, rebuild: Rebuild) -> None:
    """Register ring attention with one kind of kernel as the differentiable custom operator meshwright::`name`.
    `rebuild`: function that makes the kernel from the operator's arguments."""

    def attend_ring(
        q_BNCD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, tensors: list[Tensor],
        numbers: list[float], key: str, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Forward of the operator. `tensors`, `numbers`: arguments of `rebuild`; the others and the result are those of
        `_compute_ring_attention`."""
        return _compute_ring_attention(q_BNCD, k_BKCD, v_BKCD, rebuild(tensors, numbers), key, sinks)

    def differentiate(
        d_out_BNCD: Tensor, saved: list[Tensor], tensors: list[Tensor], numbers: list[float],
        key: str, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Backward of the operator. `tensors`, `numbers`: arguments of `rebuild`; the others and the result are those
        of `_compute_gradients`."""
        return _compute_gradients(d_out_BNCD, saved, rebuild(tensors, numbers), key, sinks)

    attention_op.register_attention(name, attend_ring, differentiate, _empty_results)


_register_ring_attention(  # tensors: [`first_BC`], or [] if it is None; numbers: scale, softcap
    "ring_attention",
    lambda tensors, numbers: TiledSpans(tensors[0] if tensors else None, ScoreSettings(numbers[0], numbers[1])),
)
_register_ring_attention(  # tensors: those of the mask; numbers: its window, scale
    "flash_ring_attention",
    lambda tensors, numbers: FlashSpans(VarlenMask.from_tensors(tensors, int(numbers[0])), numbers[1]),
)
