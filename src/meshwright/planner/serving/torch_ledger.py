"""Memory of a server in plain torch on a CPU, item by item: what `serving/torch_runner.py` allocates, without compiled
kernels.

Parameters lie as in the checkpoint, all in one dtype; a step is computed in tiles of `TILE_TOKENS` tokens.
"""

from __future__ import annotations

from meshwright.layout import Layout
from meshwright.planner.serving import ledger
from meshwright.spec.block_tables import BLOCK_TOKENS
from meshwright.spec.config import ModelConfig

TILE_TOKENS = 16
"""Tokens of every product on a CPU. torch chooses kernels by shape, so a fixed shape makes a token's result independent
of the number of tokens."""


def torch_ledger(config: ModelConfig, layout: Layout, sizes: ledger.ServingSizes) -> ledger.ServingLedger:
    """Return the memory ledger of a server whose ranks compute in plain torch on CPUs, without KV blocks. layout:
    layout of the server, checked by `spec.refuse.serving_layout`; sizes: largest step and KV pool."""
    return ledger.build_ledger(config, layout, sizes, _rank_ledger)


def _rank_ledger(rank: ledger.ServingRank) -> ledger.RankLedger:
    """Return the memory ledger of a rank that computes in plain torch."""
    config, stage, sizes, tp = rank.config, rank.stage, rank.sizes, rank.layout.tp
    shards = [numel for _, numel in rank.parameters]
    gathered = tp * TILE_TOKENS * max(config.hidden, config.vocabulary // tp if stage.last else 0) * rank.item
    messages = sizes.token_budget * config.hidden * 4 * ((not stage.first) + (not stage.last))
    return ledger.RankLedger(
        weights=rank.item * sum(shards), packed=0, workspace=_workspace_bytes(rank),
        logits=4 * sizes.logit_rows * config.vocabulary if stage.last else 0,
        communication=(gathered if tp > 1 else 0) + messages,
        slack=ledger.RANK_BYTES + rank.item * max(shards),  # a tensor is converted in a buffer before it is copied
        kv_block=rank.kv_block(),
    )  # fmt: skip


def _workspace_bytes(rank: ledger.ServingRank) -> int:
    """Return an upper bound of the bytes of a step's temporaries: hidden states of all tokens, and the tensors of a
    layer for a tile of 16 tokens, with keys, values and scores for the context of one token."""
    config, item, longest = rank.config, rank.item, rank.sizes.max_length
    wide = max(4, item)  # of attention and rotary positions: float32 at least
    states = rank.sizes.token_budget * config.hidden * (2 * item + 4)  # of the tiles, together, as float32
    slots = TILE_TOKENS * rank.block_tables * 8 * (longest + BLOCK_TOKENS)
    cached = 2 * rank.kv_heads * config.head_dim
    projected = rank.heads * config.head_dim + cached
    if latent := config.latent:
        cached = latent.cached_dim
        projected = (latent.query_rank or 0) + cached + rank.heads * (config.head_dim + 2 * cached + latent.value_dim)
    context = longest * (cached * (item + wide) + 3 * rank.heads * wide + 8)
    rotation = 2 * (1 << (longest - 1).bit_length()) * rank.position_elements * wide  # twice while a table grows
    inner = max(config.intermediate, config.expert_intermediate, config.shared_intermediate)
    widths = 4 * config.hidden + projected + 3 * -(-inner // rank.layout.tp)
    scores = config.vocabulary * (item + 4) if rank.stage.last else 0
    return states + slots + context + rotation + TILE_TOKENS * (widths * wide + scores)
