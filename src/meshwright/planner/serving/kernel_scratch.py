"""Scratch memory of the compiled CPU kernels, which their threads allocate while they compute steps."""

from __future__ import annotations

from meshwright.planner.serving.ledger import ServingSizes
from meshwright.spec.config import ModelConfig

# Those of kernels/product.h and attention.h:
_SUMS = 256 * 8 * 16  # float32 numbers of the sums of a work item of a product
_TILE_TOKENS, _SPAN_TOKENS = 16, 256  # of a tile of queries; of a span of the context that it attends to
_SHARED_PARTIALS = 2 << 20  # most float32 numbers of the results of spans that are work items
_LATENT_GROUP = 16  # most query heads of latent attention in a tile


def scratch_bytes(config: ModelConfig, heads: tuple[int, int], sizes: ServingSizes, rounded: tuple[int, int]) -> int:
    """Return an upper bound of the bytes that the kernels of a rank allocate while they compute steps. For each
    thread: the sums of a product, or attention's scores of a tile of queries in a span (of latent attention by query
    and by token, and its queries), and results of two spans. Once: the rounded rows of a product (those of tokens, of
    assignments to experts, or of each head of latent attention), and results of the spans of long contexts, which are
    work items as long as they take at most `_SHARED_PARTIALS`.

    heads: numbers of query and of key-value heads; sizes: largest step, longest sequence and threads of the rank;
    rounded: most input features of any product whose rows are rounded to bfloat16, and of one of routed experts; 0:
    none is."""
    group, size, scores = heads[0] // heads[1], config.head_dim, _SPAN_TOKENS  # scores: with copies, of a query
    inputs = list(zip((1, config.experts_per_token), rounded, strict=True))  # rows of a token, their features
    if config.latent is not None:
        group, size = min(heads[0], _LATENT_GROUP), config.latent.cached_dim
        scores = 2 * _SPAN_TOKENS + size
        inputs.append((heads[0], max(config.latent.rank, config.head_dim - config.latent.rotary_dim)))
    rows, of_row = _TILE_TOKENS * group, scores + 2 * (32 + -(-size // 16) * 16)
    together = _SHARED_PARTIALS if sizes.max_length > _SPAN_TOKENS else 0  # more than short steps of small models take
    copies = max((sizes.token_budget * count + 31) * (-(-width // 32) * 32 + 32) for count, width in inputs)
    return 4 * (sizes.threads * max(_SUMS, rows * of_row) + together) + 2 * (copies if rounded[0] else 0)
