"""PyTorch's CUDA operators of flash attention by their definition, for CPUs: documents, windows, behaviour at their
edges (aten/src/ATen/native/transformers/cuda/flash_attn: flash_api.cpp, flash_fwd_kernel.h, mask.h)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from meshwright.model import varlen_attention


def visible_pairs(queries: int, keys: int, longest: tuple[int, int], causal: bool, left: int | None) -> torch.Tensor:
    """Pairs of a query and a key that the kernels compute, [queries, keys]. longest: greatest numbers of queries and
    keys of a call. Masks are aligned to the last query and the last key."""
    right = -1
    before = -1 if left is None or left >= longest[1] else left
    if causal and longest[0] != 1:
        right = 0
    if before < 0 and right >= 0:
        before = longest[1]
    if before >= 0 and right < 0:
        right = longest[1]
    at = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    every = torch.ones(queries, keys, dtype=torch.bool)
    return every if right < 0 else (key >= at - before) & (key <= at + right)


def _documents(q: Any, cu_q: Any, cu_k: Any) -> Iterator[tuple[Any, Any]]:
    """Index of the queries and of the keys of each document, in [B, S, N, D] or [T, N, D]."""
    if cu_q is None:
        yield from (((row, slice(None)), (row, slice(None))) for row in range(len(q)))
        return
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_contiguous() and cu_k.is_contiguous()
    pairs = (itertools.pairwise(each.tolist()) for each in (cu_q, cu_k))
    yield from (((slice(*of_q),), (slice(*of_k),)) for of_q, of_k in zip(*pairs, strict=True))


def _check(q: Any, k: Any, v: Any, cu_q: Any, longest: tuple[int, int], call: tuple[Any, ...]) -> None:
    assert len({each.dtype for each in (q, k, v)}) == 1 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.dim() == (4 if cu_q is None else 3) and call[0] == 0.0, "no dropout"
    if cu_q is None:
        assert longest == (q.shape[1], k.shape[1])
    else:
        assert max(cu_q.diff().tolist()) <= longest[0]
        assert longest[0] > 1 or len(q) == len(cu_q) - 1, "then query heads of a group become queries"


def _scores(q: Any, k: Any, shown: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one document [N, queries, keys] in float64, and its keys for each query head."""
    q, k = q.transpose(0, 1).double(), k.transpose(0, 1).double()
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    return (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~shown, float("-inf")), k


def _log_sum_of(log_sum: torch.Tensor, at: tuple[Any, ...]) -> torch.Tensor:
    """Log-sum-exps [N, queries] of a document in [B, N, S] or [N, T]."""
    return log_sum[at[0]] if len(at) == 2 else log_sum[:, at[0]]


def forward(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any, window_size_left: int | None,
    scale: float | None,
) -> Any:  # fmt: skip
    """`aten._flash_attention_forward`. What no document covers is not written; a query that sees no key has the output
    0 and the log-sum-exp infinity."""
    _check(q, k, v, cu_q, (max_q, max_k), rest)
    assert rest[2] is False, "no debug mask"
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.full_like(q, float("nan"))
    shape = (len(q), q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], len(q))
    log_sum = q.new_full(shape, float("nan"), dtype=wide)
    for of_q, of_k in _documents(q, cu_q, cu_k):
        queries, keys = len(q[of_q]), len(k[of_k])
        shown = visible_pairs(queries, keys, (max_q, max_k), rest[1], window_size_left)
        scores, _ = _scores(q[of_q], k[of_k], shown, scale)
        values = v[of_k].transpose(0, 1).double().repeat_interleave(q.shape[-2] // v.shape[-2], dim=0)
        out[of_q] = (scores.softmax(dim=-1).nan_to_num(0.0) @ values).transpose(0, 1).to(q.dtype)
        sums = scores.logsumexp(dim=-1)
        _log_sum_of(log_sum, of_q).copy_(sums.masked_fill(sums == float("-inf"), float("inf")))
    return out, log_sum, None, None, None


def backward(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
    *rest: Any, window_size_left: int | None, scale: float | None,
) -> Any:  # fmt: skip
    """`aten._flash_attention_backward`: the derivative of softmax written out, from log-sum-exps that may be over more
    keys than those of the call."""
    _check(q, k, v, cu_q, (max_q, max_k), rest)
    assert log_sum.is_contiguous()
    dq, dk, dv = (torch.full_like(each, float("nan")) for each in (q, k, v))
    groups, scale = q.shape[-2] // k.shape[-2], scale or q.shape[-1] ** -0.5
    for of_q, of_k in _documents(q, cu_q, cu_k):
        queries, keys = len(q[of_q]), len(k[of_k])
        shown = visible_pairs(queries, keys, (max_q, max_k), rest[1], window_size_left)
        scores, wide_k = _scores(q[of_q], k[of_k], shown, scale)
        p = (scores - _log_sum_of(log_sum, of_q).double()[..., None]).exp()
        d_o, o, wide_q = (x[of_q].transpose(0, 1).double() for x in (d_out, out, q))
        values = v[of_k].transpose(0, 1).double().repeat_interleave(groups, dim=0)
        ds = p * (d_o @ values.mT - (d_o * o).sum(dim=-1, keepdim=True)) * scale
        dq[of_q] = (ds @ wide_k).transpose(0, 1).to(q.dtype)
        for into, gradient in ((dk, ds.mT @ wide_q), (dv, p.mT @ d_o)):
            into[of_k] = gradient.unflatten(0, (-1, groups)).sum(dim=1).transpose(0, 1).to(q.dtype)
    return dq, dk, dv


@contextmanager
def flash_kernels_on_cpu() -> Iterator[list[dict[str, Any]]]:
    """Replace the CUDA kernels by their definition; list what each forward is called with."""
    found: list[dict[str, Any]] = []

    def noted(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *rest: Any, **window: Any) -> Any:
        bounds = None if cu_q is None else cu_q.tolist()
        found.append({"cu_seqlens": bounds, "longest": rest[:2], "causal": rest[3], "left": window["window_size_left"]})
        return forward(q, k, v, cu_q, cu_k, *rest, **window)

    with mock.patch.multiple(varlen_attention, _flash_forward=noted, _flash_backward=backward):
        yield found
