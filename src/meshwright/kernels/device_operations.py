"""Operations of a step on a GPU: launches of the Triton kernels. Import on CUDA only. Torch-free.

Shapes: T tokens of a step, H hidden, N query heads, K key-value heads, D head size, F width of an MLP, X and Y input
and output size of a product, E experts, C slots of the KV cache (those of a block follow each other), I tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton

from meshwright.kernels import triton_attention as attention
from meshwright.kernels import triton_kernels as kernels
from meshwright.kernels.device_attention import AttentionSettings, Pair, Tensor, Tiles
from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.spec.attention_tiles import SECTION

VERSION = f"triton {triton.__version__}"
_PROGRAMS = 512  # of `attend`, enough to fill a GPU; with fewer tiles, several programs share the sections of one
_LOGITS_SECTION = 4096  # logits that one program of `reduce_sections` reads
_GEMV_ELEMENTS = 4096  # of a weight that one program of `gemv` reads
_GEMV_WARPS = 4
_PRODUCT_ROWS = 64  # of a tile: M of Hopper's wgmma


def _supports_dependent_launch() -> bool:
    """Return True on a GPU with programmatic dependent launch (Hopper and later), False on others and without one, for
    the interpreter."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return False
    return target.backend == "cuda" and int(target.arch) >= 90


_PDL = _supports_dependent_launch()
_LAUNCH = {"launch_pdl": True} if _PDL else {}


def add_norm(x_TH: Tensor, delta_TH: Tensor | None, weight_H: Tensor, epsilon: float) -> Tensor:
    """Add the residual branch `delta_TH` (None: nothing) to the hidden states `x_TH` in place; return the RMSNorm of
    the sum times `weight_H`, [T, H] for T tokens of hidden size H. Without `delta_TH`, `x_TH` may be a strided view.
    epsilon: added to the mean square before the root."""
    x_TH = x_TH.contiguous()
    out_TH, size = x_TH.new_empty(x_TH.shape), x_TH.shape[1]
    delta = x_TH if delta_TH is None else delta_TH
    block = triton.next_power_of_2(size)
    kernels.add_norm[(len(x_TH),)](
        x_TH, delta, weight_H, out_TH, size, epsilon, delta_TH is not None, block, _PDL,
        num_warps=8 if block > 1024 else 4, **_LAUNCH,
    )  # fmt: skip
    return out_TH


def rotate_and_store(
    qkv: Tensor, cache: Sequence[Tensor], tiles: Tiles, rotation: Pair | None, norms: Pair | None,
    epsilon: float, queries_only: bool = False,
) -> None:  # fmt: skip
    """Apply QK norm and RoPE to the queries and keys of `qkv`, and write keys and values to the KV cache. The queries
    in `qkv` are overwritten. T tokens, N query heads, K key-value heads, head size D.

    qkv: [T, (N + 2K) D], queries first, then keys, then values. cache: (keys, values), each [C, K, D] for C slots.
    tiles: has the position and the cache slot of each token. rotation: (cosine, sine) by position, float32 [positions,
    D / 2] each; None: no RoPE. norms: RMSNorm weights [D] of (queries, keys); None: no QK norm. epsilon: added to the
    mean square in these norms. queries_only: True: the keys are not rotated.
    """
    keys, values = cache[0], cache[-1]
    kv_heads, size = keys.shape[1:]
    total = qkv.shape[1] // size
    cosine, sine = rotation or (keys, keys)
    query_norm, key_norm = norms or (keys, keys)
    attention.rotate_and_store[(len(qkv), total)](
        qkv, keys, values, tiles.positions, tiles.slots, cosine, sine, query_norm, key_norm, epsilon,
        total - 2 * kv_heads, kv_heads, size, triton.next_power_of_2(size // 2), rotation is not None,
        not queries_only, norms is not None, _PDL, num_warps=1, **_LAUNCH,
    )  # fmt: skip


def rotate_and_store_latent(
    parts: Tensor, q_TND: Tensor, wide_TNC: Tensor, cache: Tensor, tiles: Tiles, tables: Pair,
    norm: tuple[Tensor, float],
) -> None:  # fmt: skip
    """Write the normalised latent vector, of size R, and the rotated key, of E features, of each of T tokens to the KV
    cache of latent attention; write the last E features of the queries, rotated, to `wide_TNC`. N heads, C = R + E.

    parts: rows begin with latent vector and key. q_TND: queries, [T, N, D]; may be strided views of rows. wide_TNC:
    [T, N, C], contiguous, of which the last E elements are written. cache: [slots, 1, C]. tiles: has the position and
    the cache slot of each token. tables: (cosine, sine) by position, float32 [positions, E / 2] each. norm: (weight
    [R], epsilon) of the RMSNorm."""
    (tokens, heads, size), half, rank = q_TND.shape, tables[0].shape[1], len(norm[0])
    attention.rotate_and_store_latent[(tokens, 1 + heads)](
        parts, q_TND, wide_TNC, cache, tiles.positions, tiles.slots, *tables, *norm, parts.stride(0), q_TND.stride(0),
        heads, size, rank, half, triton.next_power_of_2(rank), triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip


def multiply_heads(x_TNX: Tensor, weight_NYX: Tensor, out_TNY: Tensor) -> None:
    """Write the products of each of N heads, x Wᵀ, to `out_TNY` [T, N, Y], for T tokens, X inputs and Y outputs of a
    head. The bits of a token do not depend on the other tokens. The tensors may be strided views; the last dimension of
    input and output is contiguous.

    x_TNX: input x, [T, N, X]. weight_NYX: W, [N, Y, X]."""
    (tokens, heads, inner), columns = x_TNX.shape, weight_NYX.shape[1]
    grid = triton.cdiv(tokens, _PRODUCT_ROWS), triton.cdiv(columns, 64), heads
    attention.multiply_heads[grid](
        x_TNX, weight_NYX, out_TNY, tokens, columns, inner, *x_TNX.stride()[:2], *weight_NYX.stride(),
        *out_TNY.stride()[:2], _PRODUCT_ROWS, 64, 64 if x_TNX.dtype.itemsize == 2 else 32, num_warps=4, num_stages=2,
    )  # fmt: skip


def attend(
    qkv: Tensor, cache: Sequence[Tensor], tiles: Tiles, settings: AttentionSettings, scratch: Tensor, arrivals: Tensor,
) -> Tensor:  # fmt: skip
    """Return the causal attention of a step's T tokens over the cached keys and values of their sequences, [T, N V]. N
    query heads, K key-value heads, size D of a key, size V of a value.

    Each context is split into sections of `SECTION` keys, counted from position 0. The sections are computed in
    parallel, and merged in order (Flash-Decoding). Tiles whose partial results exceed `scratch` take further launches;
    their number depends on the longest context of the step.

    qkv: [T, (N + 2K) D]; only its first N D columns, the queries, are read; V = D. cache: (keys, values), each [C, K,
    D] for C slots. Latent attention: qkv: [T, N D]. cache: (keys), [C, 1, D], whose first V elements are the values.
    tiles: tokens that are computed together. settings: scale, window and kind of the attention. scratch: float32 buffer
    for partial results, large enough for at least one tile. arrivals: int32 counters, one for each (tile, group of
    query heads that one program computes), zeros before and after the call.
    """
    keys, values, shared = cache[0], cache[-1], settings.key_only
    kv_heads, size = keys.shape[1], keys.shape[2] - shared
    heads = qkv.shape[1] // (size + shared) - (0 if shared else 2 * kv_heads)
    kv_heads = settings.groups or kv_heads
    group, count = heads // kv_heads, tiles.numbers.shape[1]
    out = qkv.new_empty(len(qkv), heads * size)
    sections = triton.cdiv(tiles.context, SECTION)
    padded, padded_shared = (max(16, triton.next_power_of_2(each)) for each in (size, shared))
    partial = tiles.tokens * heads * sections if sections > 1 else 0  # vectors of the partial results of one tile
    at_once = min(count, max(1, scratch.numel() // (partial * (size + 2)))) if partial else count
    assert at_once * partial * (size + 2) <= scratch.numel(), "scratch for one tile"
    assert at_once * kv_heads <= arrivals.numel()
    stats = scratch[at_once * partial * size :]
    step = (64 if keys.dtype.itemsize == 2 else 32) // (2 if shared else 1)
    softcap, sinks = settings.softcap, settings.sinks
    for begin in range(0, count, at_once):
        numbers = tiles.numbers[:, begin : begin + at_once]
        many = numbers.shape[1]
        programs = min(sections, max(1, _PROGRAMS // (many * kv_heads)))
        attention.attend[(many, kv_heads, programs)](
            qkv, keys, values, tiles.positions, numbers, tiles.tables, scratch, stats, arrivals, out,
            out if sinks is None else sinks, settings.scale, softcap, qkv.shape[1], tiles.tables.stride(0),
            numbers.stride(0), tiles.tokens, sections, settings.window or 0, settings.chunks, softcap != 0,
            sinks is not None, kv_heads, group, triton.next_power_of_2(group), tiles.rows, size, padded, shared,
            padded_shared, SECTION, step, BLOCK_TOKENS, _PDL, num_warps=4, num_stages=2, **_LAUNCH,
        )  # fmt: skip
    return out


def product(x_TX: Tensor, weight_YX: Tensor, bias_Y: Tensor | None = None, dtype: Any | None = None) -> Tensor:
    """Return the matrix product x Wᵀ + b, [T, Y], for T tokens, X inputs and Y outputs. The product is batch-invariant:
    the bits of each row do not depend on the number of rows T, because tile sizes and split-K depend on the weight's
    shape alone.

    x_TX: input x. weight_YX: weight W. bias_Y: bias b; None: no bias. dtype: dtype of the result; None: the dtype of x.
    """
    rows, (columns, inner) = len(x_TX), weight_YX.shape
    wide, splits = columns >= 16384 and x_TX.dtype.itemsize == 2, 1
    block = 128 if wide else 64
    while triton.cdiv(columns, block) * splits < 256 and inner >= 1024 * splits:
        splits *= 2
    out = x_TX.new_empty(rows, columns, dtype=dtype)
    target = out if splits == 1 else x_TX.new_empty(splits, rows, columns, dtype=x_TX.new_empty(0).float().dtype)
    grid = triton.cdiv(rows, _PRODUCT_ROWS), triton.cdiv(columns, block), splits
    bias = weight_YX if bias_Y is None else bias_Y
    has_bias = bias_Y is not None
    _launch_product(
        grid, x_TX, weight_YX, bias, target, (target, rows), (block, splits, False, has_bias and splits == 1)
    )
    if splits > 1:
        size = rows * columns
        kernels.add_splits[(triton.cdiv(size, 1024),)](target, bias, out, size, columns, splits, has_bias, 1024)
    return out


def gemv(
    x_1X: Tensor, weight: Tensor, bias_Y: Tensor | None = None, dtype: Any | None = None, *,
    norm: tuple[Tensor, float] | None = None, delta_1X: Tensor | None = None, gated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute a matrix-vector product for a single token. Return (v Wᵀ + b, [1, Y]; x + delta, [1, X]), for X inputs
    and Y outputs. v is the RMSNorm of x + delta, or x itself if `norm` is None.

    x_1X: row x. weight: W [Y, X], a parameter: it is read before the previous kernel has ended (programmatic dependent
    launch), so no queued kernel may write to it. bias_Y: b; None: no bias. dtype: dtype of the product; None: the dtype
    of x. norm: (weight [X], epsilon) of the RMSNorm. delta_1X: delta, a residual branch; None: 0 (required if `norm` is
    None). gated: True for SwiGLU: W is [2 Y, X], the first result is silu(first half of v Wᵀ) * second half, [1, Y],
    and there is no bias."""
    assert norm is not None or delta_1X is None, "only a norm adds"
    columns, inner = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    padded = triton.next_power_of_2(inner)
    block = max(1, _GEMV_ELEMENTS // padded // (2 if gated else 1))
    out = x_1X.new_empty(1, columns, dtype=dtype)
    sum_1X = x_1X if delta_1X is None else x_1X.new_empty(x_1X.shape)
    norm_X, epsilon = norm or (x_1X, 0.0)
    kernels.gemv[(triton.cdiv(columns, block),)](
        x_1X, x_1X if delta_1X is None else delta_1X, norm_X, weight, weight if bias_Y is None else bias_Y, out, sum_1X,
        columns, inner, epsilon, block, padded, norm is not None, delta_1X is not None, gated, bias_Y is not None, _PDL,
        num_warps=_GEMV_WARPS, **_LAUNCH,
    )  # fmt: skip
    return out, sum_1X


def grouped_product(x_NX: Tensor, weight_EYX: Tensor, ends_E: Tensor) -> Tensor:
    """Return the grouped GEMM of E experts, [N, Y]: each of the N rows of `x_NX` times the transposed weight of the
    row's expert, for X inputs and Y outputs. The rows are (token, expert) pairs sorted by expert.

    weight_EYX: weights of the experts. ends_E: int32, exclusive end of each expert's rows."""
    rows, (experts, columns, _) = len(x_NX), weight_EYX.shape
    out = x_NX.new_empty(rows, columns)
    grid = triton.cdiv(rows, _PRODUCT_ROWS), triton.cdiv(columns, 64), experts
    _launch_product(grid, x_NX, weight_EYX, weight_EYX, out, (ends_E, rows), (64, 1, True, False))
    return out


def _launch_product(grid: Any, x: Any, weight: Any, bias: Any, out: Any, rows: Any, chosen: Any) -> None:
    """Launch the Triton kernel `product`, which writes x Wᵀ + bias to `out`, or computes a grouped GEMM over experts.

    grid: (number of row tiles, number of column tiles, number of splits of the inner dimension or of experts). x:
    [rows, X] with X inputs. weight: W, [Y, X] or [experts, Y, X] with Y outputs. bias: [Y]; any tensor if no bias is
    added. rows: pair of the exclusive end of each expert's rows (any tensor if not grouped) and the number of rows of
    x. chosen: four values: columns of a tile, number of splits of the inner dimension, True to group by expert, True to
    add the bias."""
    *_, columns, inner = weight.shape
    halves = x.dtype.itemsize == 2
    kernels.product[grid](
        x, weight, bias, out, *rows, columns, inner, _PRODUCT_ROWS, chosen[0], 64 if halves else 32, *chosen[1:],
        num_warps=4, num_stages=4 if halves else 2,
    )  # fmt: skip


def swiglu(up_TF: Tensor) -> Tensor:
    """Return SwiGLU of the output of an MLP's gate and up projection, [T, F] for T tokens and intermediate size F:
    silu(first F columns of `up_TF`, the gate) * its last F columns. up_TF: [T, 2F]."""
    width = up_TF.shape[1] // 2
    out_TF = up_TF.new_empty(len(up_TF), width)
    kernels.swiglu[(len(up_TF), triton.cdiv(width, 1024))](up_TF, out_TF, width, 1024)
    return out_TF


def summarize_logits(logits_RV: Tensor, draws_3R: Tensor) -> Tensor:
    """Return seven figures of each of R rows of logits, float64 [R, 7]: 0: ID of the most likely token (the lowest
    among equals); 1: its logit (NaN if any is NaN); 2: sum over the vocabulary of exp(logit - highest); 3: sum of
    exp((logit - highest) / temperature); 4: ID of the drawn token; 5: its logit; 6: logit of the target token.

    logits_RV: float32 [R, V] for V vocabulary entries; rows may be strided. draws_3R: sampling inputs of each row,
    float64 [3, R], contiguous: temperature; quantile in [0, 1) at which a token is drawn, tokens ordered by ID; target
    token ID. If the temperature is 0, figure 3 is 0 and figure 4 the most likely token. The bits of a row do not depend
    on the other rows."""
    rows, size = logits_RV.shape
    count = triton.cdiv(size, _LOGITS_SECTION)
    sections = draws_3R.new_empty(rows, count, 4)
    kernels.reduce_sections[(rows, count)](
        logits_RV, draws_3R, sections, size, logits_RV.stride(0), _LOGITS_SECTION, num_warps=8
    )
    out = draws_3R.new_empty(rows, 7)
    kernels.merge_and_draw[(rows,)](
        logits_RV, draws_3R, sections, out, size, logits_RV.stride(0), count, _LOGITS_SECTION,
        triton.next_power_of_2(count), num_warps=8,
    )  # fmt: skip
    return out
