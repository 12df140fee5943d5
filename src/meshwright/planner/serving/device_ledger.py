"""Memory of a server on GPUs, item by item: what `serving/device_runner.py` allocates there.

Matrices lie as in the checkpoint, all parameters in one dtype.
"""

from __future__ import annotations

from meshwright.collectives.nccl_buffers import estimate_buffer_bytes
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import RankLedger, ServingLedger, ServingRank, ServingSizes, build_ledger
from meshwright.spec.attention_tiles import AttentionSizes
from meshwright.spec.block_tables import count_blocks
from meshwright.spec.config import ModelConfig

CONTEXT_BYTES = 2**30
"""Bytes of each GPU for CUDA context, loaded kernels, workspaces of cuBLAS and rounding by the allocator. Estimated;
the first two take 0.74 GiB on an H100 (`bench/results/gpu_serving.json`)."""
SCRATCH_BYTES = 64 * 2**20
"""Bytes of the partial results of one kernel launch, unless one tile needs more; more tiles take several launches."""
SPLIT_COLUMNS = 2 * 256 * 64
"""Most columns of float32 that the partial sums of one batch-invariant product have for each token."""


def device_ledger(config: ModelConfig, layout: Layout, sizes: ServingSizes) -> ServingLedger:
    """Return the memory ledger of a server whose ranks have one GPU each, without KV blocks and host memory. layout:
    layout of the server, checked by `spec.refuse.serving_layout`; sizes: largest step and KV pool."""
    return build_ledger(config, layout, sizes, _rank_ledger, front=0)


def _rank_ledger(rank: ServingRank) -> RankLedger:
    """Return the GPU memory ledger of one rank, in bytes by item."""
    sizes, layout, attention = rank.sizes, rank.layout, AttentionSizes.find(rank.config, rank.layout.tp)
    decoding = 1 << (sizes.max_sequences - 1).bit_length()  # the largest padded number of sequences
    return rank.predict(
        "cuda", parameters=sum(numel for _, numel in rank.parameters), decoding=decoding,
        indexed=max(sizes.token_budget, sizes.logit_rows, decoding), attention_groups=attention.groups,
        blocks_of_context=count_blocks(sizes.max_length), graphs=2 * decoding if layout.pp == 1 else 0,
        scratch=max(SCRATCH_BYTES // 4, attention.count_scratch(sizes.max_length)), split_columns=SPLIT_COLUMNS,
        # Only tp uses NCCL: pipeline stages exchange host tensors, and the outputs of experts are summed over tp.
        context_bytes=CONTEXT_BYTES, nccl_bytes=estimate_buffer_bytes(Layout(tp=layout.tp), layout.tp),
    )  # fmt: skip
