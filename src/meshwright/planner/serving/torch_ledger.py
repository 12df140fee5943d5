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
    config, tp, longest = rank.config, rank.layout.tp, rank.sizes.max_length
    shards = [numel for _, numel in rank.parameters]
    inner = max(config.intermediate, config.expert_intermediate, config.shared_intermediate)
    return rank.predict(
        "torch", tile=TILE_TOKENS, block_tokens=BLOCK_TOKENS, columns=-(-inner // tp), parameters=sum(shards),
        position_rows=1 << (longest - 1).bit_length(), process_bytes=ledger.RANK_BYTES,
        gathered=max(config.hidden, config.vocabulary // tp if rank.stage.last else 0),
        largest_parameter=max(shards),  # a tensor is converted in a buffer before it is copied
    )  # fmt: skip
