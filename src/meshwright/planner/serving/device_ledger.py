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
    kv_block, tp = rank.kv_block(), rank.layout.tp
    # Only tp uses NCCL: pipeline stages exchange host tensors, and the outputs of experts are summed over tp.
    return RankLedger(
        weights=rank.item * sum(numel for _, numel in rank.parameters), packed=0,
        workspace=_workspace_bytes(rank) + kv_block,  # the last block is the padding's
        logits=_logits_bytes(rank) if rank.stage.last else 0,
        communication=tp * rank.sizes.token_budget * rank.config.hidden * rank.item if tp > 1 else 0,
        slack=CONTEXT_BYTES + _activation_bytes(rank) + estimate_buffer_bytes(Layout(tp=tp), tp), kv_block=kv_block,
    )  # fmt: skip


def _workspace_bytes(rank: ServingRank) -> int:
    """Return the bytes of a rank's permanent GPU buffers: token indices and block tables of a step, tables of rotary
    positions, partial results of attention, random draws of sampling."""
    sizes, many, attention = rank.sizes, rank.block_tables, AttentionSizes.find(rank.config, rank.layout.tp)
    decoding = 1 << (sizes.max_sequences - 1).bit_length()  # the largest padded number of sequences
    numbers = (6 + many + attention.groups) * max(sizes.token_budget, sizes.logit_rows, decoding)
    tables = decoding * many * count_blocks(sizes.max_length)
    rotation = rank.position_elements * sizes.max_length
    scratch = max(SCRATCH_BYTES // 4, attention.count_scratch(sizes.max_length))
    draws = 2 * 3 * sizes.logit_rows  # float64
    return 4 * (numbers + tables + rotation + scratch + draws)


def _logits_bytes(rank: ServingRank) -> int:
    """Return the bytes of float32 logits on a GPU. With tp > 1 they are this rank's slice, the gathered slices of all
    ranks, and the concatenation of the slices. With tp = 1 they are the logits of a step, and those of each CUDA graph
    of decoding."""
    sizes, layout = rank.sizes, rank.layout
    if layout.tp > 1:  # the slice, the ranks' slices, and these joined
        return 4 * sizes.logit_rows * 3 * layout.tp * rank.vocabulary
    graphs = 2 << (sizes.max_sequences - 1).bit_length() if layout.pp == 1 else 0
    return 4 * (sizes.logit_rows + graphs) * rank.vocabulary


def _activation_bytes(rank: ServingRank) -> int:
    """Return an upper bound of the bytes of activations allocated at once in a step of `sizes.token_budget` tokens on a
    GPU: hidden states, and the inputs and outputs of attention or of an MLP."""
    config, tp, item, hidden = rank.config, rank.layout.tp, rank.item, rank.config.hidden
    widths = [(2 * rank.heads + 2 * rank.kv_heads) * config.head_dim]
    if latent := config.latent:
        of_head = config.head_dim + latent.cached_dim + latent.rank + latent.value_dim
        widths = [2 * (latent.query_rank or 0) + latent.cached_dim + rank.heads * of_head]
    for mixed in {config.has_experts(layer) for layer in range(config.layers)}:
        if mixed:  # of each chosen expert: input, up and gate, their product, output in both orders and float32
            width = -(-config.expert_intermediate // (1 if rank.layout.expert_parallel else tp))
            chosen = config.experts_per_token * (hidden + 3 * width + (2 + 4 // item) * hidden)
            sums = 3 * (4 // item) * hidden  # of the experts' outputs, in float32
            widths.append(chosen + 3 * config.shared_intermediate // tp + sums)
        else:
            widths.append((3 if config.gated else 2) * config.intermediate // tp)
    return rank.sizes.token_budget * (item * (4 * hidden + max(widths)) + 4 * SPLIT_COLUMNS)
