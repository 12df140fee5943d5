"""Scratch memory of the compiled CPU kernels, which their threads allocate while they compute steps."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.config import ModelConfig

# Those of kernels/product.h and attention.h:
_SUMS = 256 * 8 * 16  # float32 numbers of the sums of a work item of a product
_TILE_TOKENS, _SPAN_TOKENS = 16, 256  # of a tile of queries; of a span of the context that it attends to
_SHARED_PARTIALS = 2 << 20  # most float32 numbers of the results of spans that are work items
_LATENT_GROUP = 16  # most query heads of latent attention in a tile


class StepScratch(NamedTuple):
    """Sizes on which a rank's scratch memory depends.

    tokens: most tokens of a step. length: most tokens of a sequence. threads: kernel threads of the rank. rounded: most
    input features of any product whose rows are rounded to bfloat16; 0: none is. expert_rounded: most of a product of
    routed experts."""

    tokens: int
    length: int
    threads: int
    rounded: int
    expert_rounded: int = 0


def scratch_bytes(config: ModelConfig, heads: int, kv_heads: int, sizes: StepScratch) -> int:
    """Return an upper bound of the bytes that the kernels of a rank with `heads` query and `kv_heads` key-value heads
    allocate while they compute steps. For each thread: the sums of a product, or attention's scores of a tile of
    queries in a span (of latent attention by query and by token, and its queries), and results of two spans. Once: the
    rounded rows of a product (those of tokens, of assignments to experts, or of each head of latent attention), and
    results of the spans of long contexts, which are work items as long as they take at most `_SHARED_PARTIALS`."""
    group, size, scores = heads // kv_heads, config.head_dim, _SPAN_TOKENS  # scores: with copies, of a query
    inputs = [(1, sizes.rounded), (config.experts_per_token, sizes.expert_rounded)]  # rows of a token, their features
    if config.latent is not None:
        group, size = min(heads, _LATENT_GROUP), config.latent.cached_dim
        scores = 2 * _SPAN_TOKENS + size
        inputs.append((heads, max(config.latent.rank, config.head_dim - config.latent.rotary_dim)))
    rows, of_row = _TILE_TOKENS * group, scores + 2 * (32 + -(-size // 16) * 16)
    together = _SHARED_PARTIALS if sizes.length > _SPAN_TOKENS else 0  # more than short steps of small models take
    rounded = max((sizes.tokens * count + 31) * (-(-width // 32) * 32 + 32) for count, width in inputs)
    return 4 * (sizes.threads * max(_SUMS, rows * of_row) + together) + 2 * (rounded if sizes.rounded else 0)
