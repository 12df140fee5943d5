"""The operators of attention, in order, each with its cost."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, at_least
from meshwright.planner.cost.operators import (
    FLASH_BACKWARD,
    CollectiveCall,
    Linear,
    Operation,
    Operator,
    Phase,
    SavedTensor,
    linear,
    pointwise,
    scaled,
)
from meshwright.planner.cost.tensor_parallel import average_square, enter, leave, row_parallel
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.policy import ACCELERATOR_TILE
from meshwright.spec.work import keys_per_token

_ACTIVATIONS: tuple[tuple[Phase, int], ...] = (("forward", 1), ("input", 2))
"""Products of two activations have two input gradients, and no weight gradient."""


def attention(at: MicroBatch, kind: LayerKind) -> Iterator[Operator]:
    """Yield the operators of attention: projections, positions and softmax(q kᵀ) v. kind: of the layer."""
    config = at.config
    size = max(config.head_dim, config.value_dim)  # of queries, keys and values in the kernel
    tokens, window = (at.rows, at.tokens), kind.window
    rotated = kind.rotates or config.query_key_norm  # then queries and keys are copies of the product's
    repeated = at.repeats(window)
    fused = SavedTensor("attention.qkv.output", (*tokens, at.qkv_width), "x")
    # Views of the product's result that live on: queries, keys, values; or what is normalised in place of a copy.
    views = not at.ulysses and (not rotated or not repeated)
    read = views or (config.query_key_norm and not at.narrow)
    saved = (SavedTensor("attention.qkv.input", (*tokens, config.hidden), "x"), *([fused] if read else []))
    if config.latent is not None:
        yield from _latent_projections(at, config.latent)
    else:
        yield linear(
            at, "attention.qkv", Linear(at.all_tokens, at.qkv_width, config.hidden, bias=config.qkv_bias), saved=saved,
            kept=(fused,), collectives=tuple(enter(at, "attention.input")),
        )  # fmt: skip
    yield Operator("attention.join", pointwise(at, "attention.join", at.all_tokens * at.qkv_width, "join"))
    elements = at.all_tokens * (at.heads + at.kv_heads) * size
    if config.query_key_norm:
        yield Operator(
            "attention.norms", pointwise(at, "attention.norms", elements, "rmsnorm"),
            tuple(_query_key_norms(at)), kept=_mean_squares(at),
            collectives=tuple(average_square(at)) * 2 if config.projection_norm else (),
            parameters=(at.heads + at.kv_heads if config.projection_norm else 2) * size,
        )  # fmt: skip
    if kind.rotates:
        yield Operator("attention.rotary", pointwise(at, "attention.rotary", elements, "rotary"))
        if config.rotated_norm:
            name = "attention.rotated_norms"
            yield Operator(name, pointwise(at, name, elements, "rmsnorm"), tuple(_rotated_norms(at, size)))
    elif kind.tempered:
        queries = at.all_tokens * at.heads * size
        saved = () if at.ulysses else (SavedTensor("attention.query", (at.rows, at.heads, at.tokens, size), "x"),)
        yield Operator("attention.temper", pointwise(at, "attention.temper", queries, "scaled"), saved)
    if at.ulysses:
        yield from _all_to_all(at)
    elif rotated:
        query = SavedTensor("attention.query", (at.rows, at.heads, at.tokens, size), "x")
        key = SavedTensor("attention.key", (at.rows, at.kv_heads, at.tokens, size), "x")
        value = (SavedTensor("attention.value", key.shape, "x"),) if config.latent else ()  # padded
        yield Operator("attention.rotated", saved=((query,) if repeated else (query, key)) + value)
    if at.ring:
        yield Operator("attention.ring", collectives=tuple(_ring(at)))
    if at.kernel == "scores":
        yield from _unfused_core(at)
    elif at.kernel == "tiled":
        yield from _tiled_core(at, window)
    else:
        yield _core(at, window)
    if config.attention_sinks:
        yield Operator("attention.sinks", parameters=at.heads)
    inner = at.heads * config.value_dim
    yield linear(
        at, "attention.output", Linear(at.all_tokens, config.hidden, inner, bias=config.output_bias),
        saved=(SavedTensor("attention.output.input", (*tokens, inner), "x"),),
        kept=row_parallel(at, "attention.output"), collectives=tuple(leave(at, "attention.output")),
    )  # fmt: skip


def _latent_projections(at: MicroBatch, latent: LatentAttention) -> Iterator[Operator]:
    """Yield the products and norms before the scores of latent attention. latent: sizes of the latent vectors."""
    config, tokens = at.config, (at.rows, at.tokens)
    for name, (outputs, inputs) in latent.products(config.hidden, at.heads, config.head_dim).items():
        first = name == "qkv"
        output = SavedTensor(f"attention.{name}.output", (*tokens, outputs), "x")
        saved = SavedTensor(f"attention.{name}.input", (*tokens, inputs), "x")
        if not first:  # the input is normalised
            norm = name.replace("_up", "_norm")
            copies = (SavedTensor(f"attention.{norm}.input", saved.shape, "wide"),) if at.narrow else ()
            yield Operator(
                f"attention.{norm}", pointwise(at, f"attention.{norm}", at.all_tokens * inputs, "rmsnorm"),
                (*copies, *scaled(f"attention.{norm}", saved.shape, centred=False)), parameters=inputs,
            )  # fmt: skip
        # Latent vectors are views of the first product, which the norms of wide types keep.
        yield linear(
            at, f"attention.{name}", Linear(at.all_tokens, outputs, inputs),
            saved=(saved, output) if first and not at.narrow else (saved,), kept=(output,),
            collectives=tuple(enter(at, "attention.input")) if first else (),
        )  # fmt: skip


def _query_key_norms(at: MicroBatch) -> Iterator[SavedTensor]:
    """Yield the tensors that the norms of queries and keys save; a copy of the input only for narrow types."""
    for name, heads in (("attention.query_norm", at.heads), ("attention.key_norm", at.kv_heads)):
        size = at.config.head_dim
        one = (heads * size,) if at.config.projection_norm else (heads, size)
        shape = at.rows, at.tokens, *one
        if at.narrow:
            yield SavedTensor(f"{name}.input", shape, "wide")
        yield from scaled(name, shape, at.config.zero_centred_norms)


def _rotated_norms(at: MicroBatch, size: int) -> Iterator[SavedTensor]:
    """Yield the tensors that the norms of rotated queries and keys, of heads of `size`, save."""
    for name, heads in (("attention.query_rotated", at.heads), ("attention.key_rotated", at.kv_heads)):
        shape = at.rows, heads, at.tokens
        yield SavedTensor(f"{name}.input", (*shape, size), "wide")
        yield SavedTensor(f"{name}.scale", (*shape, 1), "wide")


def _mean_squares(at: MicroBatch) -> tuple[SavedTensor, ...]:
    """Return the all-reduced mean squares of queries and keys, which selective recompute keeps as it keeps the results
    of all collectives."""
    if not at.config.projection_norm or at.layout.tp == 1:
        return ()
    shape = at.rows, at.tokens, 1
    return tuple(SavedTensor(f"attention.{name}_norm.mean_square", shape, "wide") for name in ("query", "key"))


def _all_to_all(at: MicroBatch) -> Iterator[Operator]:
    """Yield the all-to-alls of Ulysses: each rank of cp gets all tokens of some heads before attention, and its tokens
    of all heads after it."""
    one = at.all_tokens * at.config.head_dim * at.itemsize
    again = at.layout.recompute != "none"
    sent = {"attention.heads": at.heads + 2 * at.kv_heads * at.key_value_copies, "attention.tokens": at.heads}
    calls = []
    for site, heads in sent.items():
        calls.append(CollectiveCall("context", "cp", "all-to-all", ((site, heads * one),), "forward", 1, again))
        calls.append(CollectiveCall("context", "cp", "all-to-all", ((f"{site}.backward", heads * one),), "input"))
    heads, kv_heads = _kernel_heads(at)
    shape = at.rows, heads + 2 * kv_heads, at.whole, at.config.head_dim
    exchanged = SavedTensor("attention.exchanged", shape, "x")
    yield Operator("attention.all_to_all", saved=(exchanged,), collectives=tuple(calls))


def _kernel_heads(at: MicroBatch) -> tuple[Number, Number]:
    """Return the (query, key-value) heads over which a rank attends, after the all-to-all of Ulysses if there is
    one."""
    if not at.ulysses:
        return at.heads, at.kv_heads
    return at.heads // at.cp, at.kv_heads * at.key_value_copies // at.cp


def _unfused_core(at: MicroBatch) -> Iterator[Operator]:
    """Yield softmax(q kᵀ) v whose scores are written to memory: two products of activations, softmax and dropout."""
    size, heads = at.config.head_dim, at.rows * at.heads
    queries, keys = at.tokens, at.whole
    flops = 2.0 * queries * keys * size
    moved = at.itemsize * (queries * keys + (queries + keys) * size)
    for name, shape in (("attention.scores", (queries, keys, size)), ("attention.values", (queries, size, keys))):
        both = [Operation(name, "product", phase, flops, moved, shape, heads * times) for phase, times in _ACTIVATIONS]
        yield Operator(name, tuple(both))
    scores = heads * queries * keys
    yield Operator("attention.softmax", pointwise(at, "attention.softmax", scores, "softmax"))
    if at.engine.dropout:
        yield Operator("attention.dropout", pointwise(at, "attention.dropout", scores, "scores_dropout"))


def _tiled_core(at: MicroBatch, window: int | None) -> Iterator[Operator]:
    """Yield softmax(c tanh(q kᵀ / c)) v of tiled attention (`model/tiled_attention.py`) on an accelerator, which writes
    a tile's scores to memory in float32: the products of scores in float32 and of the others in the model's type, and
    the passes over the scores. The backward computes the scores again. window: most tokens that a query attends to,
    None for all."""
    size = at.config.head_dim
    seen = max(1, round(at.whole / at.documents))
    tile = min(ACCELERATOR_TILE[0], seen)
    keys = keys_per_tile(seen, tile, window)
    lines = at.all_tokens * at.heads  # queries of all heads
    tiles = at_least(lines * keys // ACCELERATOR_TILE[1], -(-at.tokens // tile))
    scores = lines * keys
    shape, flops = (lines / tiles, keys, size), 2.0 * scores * size / tiles
    operands = (lines + at.all_tokens * at.kv_heads) * size
    wide = at.wide * (scores + operands) / tiles
    narrow = at.itemsize * (scores + operands) / tiles
    both: tuple[Phase, Phase] = ("forward", "input")
    products = [Operation("attention.scores", "float32 product", phase, flops, wide, shape, tiles) for phase in both]
    yield Operator("attention.scores", tuple(products))
    passes = pointwise(at, "attention.softmax", scores / tiles, "capped_softmax")
    yield Operator("attention.softmax", tuple(one._replace(count=one.count * tiles) for one in passes))
    value = Operation("attention.values", "product", "forward", flops, narrow, shape, tiles)
    # Of probabilities, values, queries and keys.
    gradients = Operation("attention.gradients", "product", "input", flops, narrow, shape, 4 * tiles)
    saved = _core(at, window)
    yield Operator("attention.values", (value, gradients), saved.saved, saved.kept)


def keys_per_tile(sequence: int, tile: int, window: int | None) -> float:
    """Return the mean number of keys that tiled attention computes for a query: all that any query of its tile attends
    to. sequence: tokens; tile: queries of a tile; window: most tokens that a query attends to, None for all."""
    total = 0
    for start in range(0, sequence, tile):
        stop = min(sequence, start + tile)
        oldest = 0 if window is None else max(0, start - window + 1)
        total += (stop - start) * (stop - oldest)
    return total / sequence


def _core(at: MicroBatch, window: int | None) -> Operator:
    """Return softmax(q kᵀ) v of a flash kernel for this rank's tokens and heads; under cp its share, which ring
    attention balances. window: most tokens that a query attends to, None for all."""
    config, size = at.config, at.config.head_dim
    # A decoder's kernel skips what is hidden, an encoder's goes through all keys with a mask.
    seen = at.whole if config.encoder else max(1, round(at.whole / at.documents))
    keys_seen = keys_per_token(seen, window, not config.encoder, config.window_chunks)
    # The engine `meshwright` pads the values of latent attention to the size of queries.
    columns = 2 * size if at.engine.name == "meshwright" else size + config.value_dim
    flops = 2.0 * keys_seen * at.heads * columns * at.all_tokens
    moved = at.itemsize * at.all_tokens * (at.qkv_width + at.heads * size)
    name = "attention.core.ring" if at.ring else "attention.core"
    shape = at.whole / (2 * at.cp) if at.ring else at.whole, keys_seen, size  # a rank has pieces of each sequence
    operations = (
        Operation(name, "attention", "forward", flops, moved, shape),
        Operation(name, "attention", "input", FLASH_BACKWARD * flops, 2 * moved, shape),
    )
    heads, _ = _kernel_heads(at)
    length = at.whole if at.ulysses else at.tokens
    log_sum = SavedTensor("attention.log_sum", (at.rows, heads, length), "wide")
    if at.ring:
        result = SavedTensor("attention.core", (at.rows, at.heads, at.tokens, size), "x")
        padded = (result,) if config.value_dim < size else ()  # of which the output's input is a copy
        return Operator("attention.core", operations, (log_sum, *padded), (result, log_sum))
    if at.device == "cuda" and not at.capped:
        return Operator("attention.core", operations, tuple(_cuda_kernel(at, heads, length, window)))
    return Operator("attention.core", operations, (log_sum,) if config.encoder else ())


def _ring(at: MicroBatch) -> Iterator[CollectiveCall]:
    """Yield the messages of ring attention, which overlap the attention of the KV block before: keys and values, in the
    backward with their gradients, of which the last go home."""
    one = 2 * at.kv_heads * at.all_tokens * at.config.head_dim
    blocks, gradients = one * at.itemsize, one * at.wide
    back = ("attention.ring.backward", blocks), ("attention.ring.gradients", gradients)
    sent, again = (("attention.ring", blocks),), at.layout.recompute == "full"
    yield CollectiveCall("context", "ring", "send", sent, "forward", at.cp - 1, again, "attention")
    yield CollectiveCall("context", "ring", "send", back, "input", at.cp - 1, overlaps="attention")
    yield CollectiveCall("context", "ring", "send", back[1:], "input")


def _cuda_kernel(at: MicroBatch, heads: Number, length: Number, window: int | None) -> Iterator[SavedTensor]:
    """Yield the tensors that PyTorch's CUDA attention kernels save in addition to queries, keys, values and result, by
    their sources (aten/src/ATen/native/transformers/cuda).

    heads, length: query heads and tokens over which the rank attends; window: most tokens that a query attends to, None
    for all. Flash attention saves the log-sum-exp and the state of its random numbers. The memory-efficient kernel, for
    masks and float32, has a copy of keys and values for every query head, an additive mask, and the log-sum-exp for a
    multiple of 32 queries.
    """
    limited, size = at.dense_mask(window), at.config.head_dim
    if at.repeats(window):
        for what in ("keys", "values"):
            yield SavedTensor(f"attention.{what}_repeated", (at.rows, heads, length, size), "x")
    # An encoder's additive mask is one for all layers.
    if limited and not at.config.encoder:
        yield SavedTensor("attention.mask", (at.rows if at.masked else 1, 1, length, length), "x")
    queries = -(-length // 32) * 32 if limited or not at.narrow else length
    yield SavedTensor("attention.log_sum", (at.rows, heads, queries), "wide")
    if not at.varlen(window):
        yield SavedTensor("attention.random_state", (2,), "index")
    if at.ulysses:  # the kernel's own result, before the all-to-all
        yield SavedTensor("attention.core", (at.rows, heads, length, size), "x")
