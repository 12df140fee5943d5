"""Block tables of the paged KV cache: layers with the same sliding window share a table, and all tables allocate from
one pool.

A KV block holds 16 tokens of the layers of one block table. All blocks have room for equally many layers, so one pool
serves every table, and a block that one table frees may be allocated by another. A sequence has one block for every 16
tokens in each table; blocks outside the window of a table are freed, independently of the other tables. A model whose
layers all have one window has one table.

If windows apply to unequal numbers of layers, each window gets several tables, such as 5 and 1 if 40 of 48 layers have
one. A table with fewer layers than a block has room for wastes memory; if that costs more than windows save, all layers
share one table. The choice is made for a sequence of the model's maximum length, not of the served length
(`--max-length`).

Users: the memory ledger (bytes of a block, blocks of a sequence), the scheduler (allocation, admission, prefix cache)
and the runners (block table of a layer, and its position within a block)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage, cut_into_stages

BLOCK_TOKENS = 16
"""Tokens of a KV block."""
MAX_TABLES = 8
"""Maximum number of block tables of a model: each costs the scheduler time in every step."""
_BALANCED_FOR = 2048  # sequence length for which pipeline stages are balanced


def find_cached_shape(config: ModelConfig, kv_heads: int) -> tuple[int, int, int]:
    """Return what the KV cache stores for a token and layer, (number of tensors, vectors, size of a vector): the keys
    and the values of `kv_heads` heads, or with latent attention one vector alone, which all heads share."""
    return (2, kv_heads, config.head_dim) if config.latent is None else (1, 1, config.latent.cached_dim)


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Assignment of a model's layers to block tables of the paged KV cache (like vLLM's KV cache groups). A block table
    lists, for each sequence, the KV blocks that hold the keys and values of the table's layers. A KV block holds 16
    tokens.

    Attributes:
        windows: For each block table, the largest sliding window of its layers in tokens; None: at least one layer has
            no window.
        layers: For each layer, (index of its block table, position of the layer within each block of that table). A
            block holds the keys and values of several layers.
        depths: For each pipeline stage, the number of layers whose keys and values each block holds.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, int], ...]
    depths: tuple[int, ...]


def serving_stages(config: ModelConfig, count: int) -> tuple[Stage, ...]:
    """Cut the model with configuration `config` into `count` pipeline stages for serving, balanced in FLOPs; return
    them in order.
    """
    return cut_into_stages(config, count, min(_BALANCED_FOR, config.max_positions))


def count_blocks(tokens: int) -> int:
    """Return the number of KV blocks (16 tokens each) that hold `tokens` tokens: tokens / 16, rounded up."""
    return -(-tokens // BLOCK_TOKENS)


def first_block_in_window(tokens: int, window: int | None) -> int:
    """Return the index (from 0) of the first KV block (16 tokens) that the next token of a sequence can attend to.
    tokens: number of tokens before the next token. window: sliding window in tokens; None: no window, which gives block
    0."""
    return 0 if window is None else max(0, tokens - window + 1) // BLOCK_TOKENS


def max_blocks_held(tokens: int, windows: Sequence[int | None], chunk: int) -> tuple[int, ...]:
    """Return the maximum number of KV blocks that a sequence of `tokens` tokens holds at once, one number per block
    table. With a sliding window, only the blocks of one step's tokens and of the window before them are held.

    windows: sliding window of each block table in tokens; None: no window. chunk: maximum number of tokens computed in
    a step."""
    blocks = count_blocks(tokens)
    return tuple(
        blocks if window is None else min(blocks, (window + chunk - 3) // BLOCK_TOKENS + 2) for window in windows
    )


def max_sequence_tokens(blocks: int, windows: Sequence[int | None], chunk: int, limit: int) -> int:
    """Return the length in tokens, at most `limit`, of the longest sequence whose blocks in all block tables together
    are at most `blocks` KV blocks.

    windows: sliding window of each block table in tokens; None: no window. chunk: maximum number of tokens computed in
    a step."""
    return bisect_right(range(1, limit + 1), blocks, key=lambda tokens: sum(max_blocks_held(tokens, windows, chunk)))


@lru_cache(maxsize=64)
def block_tables(config: ModelConfig, stages: int) -> BlockTables:
    """Assign a model's layers to block tables of the paged KV cache, for serving in `stages` pipeline stages. There are
    1 to 8 block tables: the number that takes the fewest KV-cache bytes for a sequence of maximum length (in a tie, the
    smallest number). config: configuration of the model."""
    counts = Counter(config.layer_window(layer) for layer in range(config.layers))
    longest = None if None in counts else max(window for window in counts if window is not None)
    shares = {tuple(-(-count // size) for count in counts.values()) for size in range(1, config.layers + 1)}
    choices = [dict(zip(counts, share, strict=True)) for share in sorted(shares) if sum(share) <= MAX_TABLES]
    cut = serving_stages(config, stages)
    return min(
        (_assign_layers(config, cut, choice) for choice in [{longest: 1}, *choices]),
        key=lambda each: (
            sum(each.depths) * sum(max_blocks_held(config.max_positions, each.windows, 1)), len(each.windows)
        ),
    )  # fmt: skip


def _assign_layers(config: ModelConfig, stages: Sequence[Stage], choice: dict[int | None, int]) -> BlockTables:
    """Distribute the layers of each pipeline stage evenly over block tables; return the assignment.

    config: configuration of the model. stages: its pipeline stages. choice: {sliding window in tokens (None: no
    window): number of block tables for the layers with this window}. If there is only one entry, its tables serve all
    layers, also layers with smaller windows."""
    windows = tuple(window for window, count in choice.items() for _ in range(count))
    layers, depths = list[tuple[int, int]](), list[int]()
    for stage in stages:
        own = [config.layer_window(layer) if len(choice) > 1 else windows[0] for layer in stage.layers]
        depths.append(max(-(-count // choice[window]) for window, count in Counter(own).items()))
        seen = Counter[int | None]()
        for window in own:
            table, place = divmod(seen[window], depths[-1])
            layers.append((windows.index(window) + table, place))
            seen[window] += 1
    return BlockTables(windows, tuple(layers), tuple(depths))
