"""Memory of a server in plain torch on a CPU, item by item: what `serving/torch_runner.py` allocates, without compiled
kernels.

Parameters lie as in the checkpoint, all in one dtype; a step is computed in tiles of `TILE_TOKENS` tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.layout import Layout
from meshwright.planner.serving.ledger import (
    ITEM_BYTES,
    RANK_BYTES,
    RankLedger,
    ServingLedger,
    ServingSizes,
    serving_ledger,
    stage_tensors,
    unpadded_kv_block,
)
from meshwright.spec.block_tables import BLOCK_TOKENS, block_tables, serving_stages
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage

TILE_TOKENS = 16
"""Tokens of every product on a CPU. torch chooses kernels by shape, so a fixed shape makes a token's result independent
of the number of tokens."""


def torch_ledger(config: ModelConfig, layout: Layout, sizes: ServingSizes) -> ServingLedger:
    """Return the memory ledger of a server whose ranks compute in plain torch on CPUs, without KV blocks. layout: as
    `spec.refuse.serving_layout` returns it; sizes: limits that memory is allocated for."""
    ledger = serving_ledger(config, layout, sizes)
    stages = zip(serving_stages(config, layout.pp), ledger.stages, strict=True)
    ranks = (_rank_ledger(config, layout.with_(dp=1), *pair, sizes) for pair in stages)
    return replace(ledger, stages=tuple(ranks))


def _rank_ledger(
    config: ModelConfig, layout: Layout, stage: Stage, compiled: RankLedger, sizes: ServingSizes
) -> RankLedger:
    """Return the memory ledger of a rank of one pipeline stage. layout: of one replica; compiled: ledger of the same
    rank with compiled kernels, whose KV-block size is reused; sizes: limits that memory is allocated for."""
    item, tp = ITEM_BYTES[sizes.dtype], layout.tp
    shards = [math.prod(tensor.local_shape(layout)) for tensor in stage_tensors(config, stage)]
    gathered = tp * TILE_TOKENS * max(config.hidden, config.vocabulary // tp if stage.last else 0) * item
    messages = sizes.token_budget * config.hidden * 4 * ((not stage.first) + (not stage.last))
    return RankLedger(
        weights=item * sum(shards),
        packed=0,
        workspace=_workspace_bytes(config, layout, stage, sizes),
        logits=4 * sizes.logit_rows * config.vocabulary if stage.last else 0,
        communication=(gathered if tp > 1 else 0) + messages,
        slack=RANK_BYTES + item * max(shards),  # a tensor is converted in a buffer before it is copied
        kv_block=unpadded_kv_block(config, compiled),
    )


def _workspace_bytes(config: ModelConfig, layout: Layout, stage: Stage, sizes: ServingSizes) -> int:
    """Return an upper bound of the bytes of a step's temporaries: hidden states of all tokens, and the layers' tensors
    of a tile of 16 tokens, with keys, values and scores of one token's context."""
    item, tp, longest = ITEM_BYTES[sizes.dtype], layout.tp, sizes.max_length
    wide = max(4, item)  # of attention and rotary positions: float32 at least
    heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
    states = sizes.token_budget * config.hidden * (2 * item + 4)  # of the tiles, together, as float32
    tables = len(block_tables(config, layout.pp).windows)
    slots = TILE_TOKENS * tables * 8 * (longest + BLOCK_TOKENS)
    cached, projected = 2 * kv_heads * config.head_dim, (heads + 2 * kv_heads) * config.head_dim
    if latent := config.latent:
        cached = latent.cached_dim
        projected = (latent.query_rank or 0) + cached + heads * (config.head_dim + 2 * cached + latent.value_dim)
    context = longest * (cached * (item + wide) + 3 * heads * wide + 8)
    # Cosines and sines of half the features; as much again while the table grows.
    rotation = 2 * len(config.rotations(stage.layers)) * (1 << (longest - 1).bit_length()) * config.rotary_dim * wide
    inner = max(config.intermediate, config.expert_intermediate, config.shared_intermediate)
    widths = 4 * config.hidden + projected + 3 * -(-inner // tp)
    scores = config.vocabulary * (item + 4) if stage.last else 0
    return states + slots + context + rotation + TILE_TOKENS * (widths * wide + scores)
