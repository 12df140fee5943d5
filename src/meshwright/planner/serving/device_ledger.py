"""Memory of a server on GPUs, item by item: what `serving/device_runner.py` allocates there.

Matrices lie as in the checkpoint, all parameters in one dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.layout import Layout
from meshwright.planner.serving.ledger import (
    ITEM_BYTES,
    RankLedger,
    ServingLedger,
    ServingSizes,
    serving_ledger,
    stage_tensors,
    unpadded_kv_block,
)
from meshwright.spec.block_tables import block_tables, count_blocks, serving_stages
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage

CONTEXT_BYTES = 2**30
"""Bytes of each GPU for CUDA context, loaded kernels, workspaces of cuBLAS and NCCL and rounding by the allocator.
Estimated; the first two take 0.74 GiB on an H100 (`bench/results/gpu_serving.json`)."""
SECTION = 256
"""Keys of a section of the context; attention computes one partial result per section."""
SCRATCH_BYTES = 64 * 2**20
"""Bytes of the partial results of one kernel launch, unless one tile needs more; more tiles take several launches."""
DECODE_ROWS, PREFILL_ROWS = 16, 64
"""Query rows of a tile of attention in decoding and in prefill; batch-invariant answers use those of decoding
throughout."""
SPLIT_COLUMNS = 2 * 256 * 64
"""Most columns of float32 that the partial sums of one batch-invariant product have for each token."""


def device_ledger(config: ModelConfig, layout: Layout, sizes: ServingSizes) -> ServingLedger:
    """Return the memory ledger of a server whose ranks have a GPU each, without KV blocks and host memory. layout: as
    `spec.refuse.serving_layout` returns it; sizes: token budget and limits that memory is allocated for."""
    ledger = serving_ledger(config, layout, sizes)
    stages = zip(serving_stages(config, layout.pp), ledger.stages, strict=True)
    ranks = (_rank_ledger(config, layout.with_(dp=1), *pair, sizes) for pair in stages)
    return replace(ledger, stages=tuple(ranks), front=0)


def _rank_ledger(
    config: ModelConfig, layout: Layout, stage: Stage, on_host: RankLedger, sizes: ServingSizes
) -> RankLedger:
    """Return the GPU memory ledger of a rank of one pipeline stage. layout: of one replica; on_host: ledger of the same
    rank on a CPU, whose KV-block size is reused; sizes: limits that memory is allocated for."""
    item, kv_block = ITEM_BYTES[sizes.dtype], unpadded_kv_block(config, on_host)
    gathered = layout.tp * sizes.token_budget * config.hidden * item if layout.tp > 1 else 0
    return RankLedger(
        weights=item * sum(math.prod(tensor.local_shape(layout)) for tensor in stage_tensors(config, stage)),
        packed=0,
        workspace=_workspace_bytes(config, layout, stage, sizes) + kv_block,  # the last block is the padding's
        logits=_logits_bytes(config, layout, sizes) if stage.last else 0,
        communication=gathered,
        slack=CONTEXT_BYTES + _activation_bytes(config, layout, sizes, item),
        kv_block=kv_block,
    )


def _workspace_bytes(config: ModelConfig, layout: Layout, stage: Stage, sizes: ServingSizes) -> int:
    """Return the bytes of a rank's permanent GPU buffers: token indices and block tables of a step, tables of rotary
    positions, partial results of attention, random draws of sampling."""
    decoding = 1 << (sizes.max_sequences - 1).bit_length()  # the largest padded number of sequences
    many = len(block_tables(config, layout.pp).windows)
    width = max(sizes.token_budget, sizes.logit_rows, decoding)
    numbers = (6 + many + max(1, config.kv_heads // layout.tp)) * width
    tables = decoding * many * count_blocks(sizes.max_length)
    positions = 1 << (sizes.max_length - 1).bit_length()
    rotation = len(config.rotations(stage.layers)) * positions * config.head_dim
    scratch = max(SCRATCH_BYTES // 4, tile_scratch(config, layout.tp, sizes.max_length))
    draws = 2 * 3 * sizes.logit_rows  # float64
    return 4 * (numbers + tables + rotation + scratch + draws)


def tile_scratch(config: ModelConfig, tp: int, max_length: int) -> int:
    """Return the number of float32 elements for the partial results of one tile of attention: for each token of the
    tile, query head of a rank and section of the context, one vector of a head's size and two sums. tp: ranks that
    share the heads; max_length: most tokens of a sequence."""
    heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
    group = 1 << (heads // kv_heads - 1).bit_length()
    tokens = max(PREFILL_ROWS, group) // group
    return tokens * heads * (config.head_dim + 2) * -(-max_length // SECTION)


def _logits_bytes(config: ModelConfig, layout: Layout, sizes: ServingSizes) -> int:
    """Return the bytes of float32 logits of a step on a GPU: with tp > 1, this rank's slice, all gathered slices and
    their concatenation; else those of the step and of each CUDA graph of decoding, which has its own."""
    local = -(-config.vocabulary // layout.tp)
    if layout.tp > 1:  # the slice, the ranks' slices, and these joined
        return 4 * sizes.logit_rows * 3 * layout.tp * local
    graphs = 2 << (sizes.max_sequences - 1).bit_length() if layout.pp == 1 else 0
    return 4 * (sizes.logit_rows + graphs) * local


def _activation_bytes(config: ModelConfig, layout: Layout, sizes: ServingSizes, item: int) -> int:
    """Return an upper bound of the bytes of activations that are allocated at once in a step of `sizes.token_budget`
    tokens on a GPU: hidden states, and the inputs and outputs of attention or of an MLP. item: bytes of an element."""
    tokens, tp, hidden = sizes.token_budget, layout.tp, config.hidden
    heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
    widths = [(2 * heads + 2 * kv_heads) * config.head_dim]
    for layer in range(config.layers):
        if config.has_experts(layer):
            inner = -(-config.expert_intermediate // tp)
            # Of each chosen expert: input, up and gate, their product, output in both orders and float32.
            chosen = config.experts_per_token * (hidden + 3 * inner + (2 + 4 // item) * hidden)
            widths.append(chosen + 3 * config.shared_intermediate // tp)
        else:
            widths.append((3 if config.gated else 2) * config.intermediate // tp)
    return tokens * (item * (4 * hidden + max(widths)) + 4 * SPLIT_COLUMNS)
