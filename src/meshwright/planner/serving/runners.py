"""Memory of a serving rank under each of the runners that compute steps, by the lists of `ledger.toml`: compiled CPU
kernels, plain torch on CPUs, and GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from meshwright.collectives.nccl_buffers import estimate_buffer_bytes
from meshwright.layout import Layout
from meshwright.planner.cost.dimensions import Dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, layer_kind
from meshwright.planner.cost.tables import select
from meshwright.planner.serving.kernel_scratch import scratch_bytes
from meshwright.planner.serving.ledger import FRONT_BYTES, ITEMS, RankLedger, ServingLedger, ServingSizes
from meshwright.spec import block_tables
from meshwright.spec.attention_tiles import AttentionSizes
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameter_entries import ModelParameter
from meshwright.spec.parameters import parameter_table
from meshwright.spec.stages import LOOKED_UP, Stage, list_stage_units
from meshwright.toml import read_packaged_toml

TABLE = "planner/serving/ledger.toml"
PANEL = 16
"""Output columns of a packed panel of the CPU kernels (`serving/lowering.py`); matrices are padded to two panels."""
TILE_TOKENS = 16
"""Tokens of every product of plain torch on a CPU. torch chooses kernels by shape, so a fixed shape makes a token's
result independent of the number of tokens."""
RANK_BYTES = 96 * 2**20
"""Measured: what a rank process adds to the one it is forked from, without the items of its ledger."""
CONTEXT_BYTES = 2**30
"""Bytes of each GPU for CUDA context, loaded kernels, workspaces of cuBLAS and rounding by the allocator. Estimated;
the first two take 0.74 GiB on an H100 (`bench/results/gpu_serving.json`)."""
SCRATCH_BYTES = 64 * 2**20
"""Bytes of the partial results of one kernel launch, unless one tile needs more; more tiles take several launches."""
SPLIT_COLUMNS = 2 * 256 * 64
"""Most columns of float32 that the partial sums of one batch-invariant product have for each token."""


@dataclass(frozen=True)
class ServingRank:
    """A rank of one pipeline stage of a server, and the sizes from which its memory follows.

    Attributes:
        config: Model.
        layout: Layout of one replica.
        stage: Pipeline stage.
        sizes: Limits that memory is allocated for.
        runner: Runner that computes its steps, a key of `RUNNERS`.
    """

    config: ModelConfig
    layout: Layout
    stage: Stage
    sizes: ServingSizes
    runner: str

    @cached_property
    def step(self) -> MicroBatch:
        """Sizes of the largest step on the rank, as of one sequence of `token_budget` tokens."""
        return MicroBatch.of(self.config, self.layout, 1, self.sizes.token_budget, dtype=self.sizes.dtype)

    @cached_property
    def parameters(self) -> list[tuple[ModelParameter, int]]:
        """(model parameter, its elements on the rank), in forward order."""
        table = parameter_table(self.config)
        needed = dict.fromkeys(name for unit in list_stage_units(table, self.stage) for name in table.needed_by(unit))
        tensors = (tensor for unit in needed for tensor in table.unit_tensors(unit))
        return [(tensor, math.prod(tensor.local_shape(self.layout))) for tensor in tensors]

    @property
    def kv_block(self) -> int:
        """Bytes of one KV block. The CPU kernels pad value vectors, or the cached vectors of latent attention."""
        config, multiple = self.config, PANEL if self.runner == "kernels" else 1
        cached = self.step.kv_heads * (config.head_dim + _round_up(config.head_dim, multiple))
        if config.latent is not None:
            cached = _round_up(config.latent.cached_dim, multiple)
        depth = block_tables.block_tables(config, self.layout.pp).depths[self.stage.index]
        return int(depth * block_tables.BLOCK_TOKENS * cached * self.step.itemsize)

    def predict(self) -> RankLedger:
        """Return the memory of the rank by the runner's section of `ledger.toml`."""
        config, stage, latent, tables = self.config, self.stage, self.config.latent, read_packaged_toml(TABLE)
        positions = len({config.layer_positions(layer) for layer in stage.layers} - {None})
        known = {
            "logit_rows": self.sizes.logit_rows, "max_length": self.sizes.max_length,
            # Cosines and sines of half the features each; temperatures of queries in place of cosines.
            "position_elements": positions * (config.rotary_dim if latent else config.head_dim),
            "kv_block": self.kv_block,
            "block_tables": len(block_tables.block_tables(config, self.layout.pp).windows),
            "cached": latent.cached_dim if latent else 2 * self.step.kv_heads * config.head_dim,
        }  # fmt: skip
        every = list(map(config.has_experts, range(config.layers)))
        flags = {
            "first": stage.first, "last": stage.last, "mixtures": any(every[layer] for layer in stage.layers),
            "any_dense": not all(every), "any_mixture": any(every), "plain_residual": config.plain_residual,
        }  # fmt: skip
        dimensions = Dimensions(self.step, layer_kind(config, 0), known | RUNNERS[self.runner](self), flags)

        def add(sizes: list[str]) -> int:
            """Return the sum of a list of sizes."""
            return sum(int(dimensions[size]) for size in select(sizes, dimensions.true, {}))

        items = tables[self.runner]
        dimensions["widest"] = max((add(sizes) for sizes in items.get("widths", {}).values()), default=0)
        return RankLedger(**{name: add(items[name]) for name in ITEMS}, kv_block=self.kv_block)


def serving_ledger(config: ModelConfig, layout: Layout, sizes: ServingSizes, runner: str = "kernels") -> ServingLedger:
    """Return the memory ledger of a server without KV blocks; on GPUs without the host's memory. layout: layout of the
    server, checked by `spec.refuse.serving_layout`; sizes: largest step and KV pool; runner: what computes the steps,
    "kernels" (compiled CPU kernels), "torch" (plain torch on CPUs) or "cuda" (one GPU for each rank)."""
    stages = block_tables.serving_stages(config, layout.pp)
    ranks = (ServingRank(config, layout.with_(dp=1), stage, sizes, runner).predict() for stage in stages)
    front = 0 if runner == "cuda" else FRONT_BYTES
    return ServingLedger(layout, sizes, tuple(ranks), block_tables.block_tables(config, layout.pp), front)


def _list_kernel_sizes(rank: ServingRank) -> dict[str, int]:
    """Return the dimensions that the section "kernels" of `ledger.toml` adds: {name: value}."""
    config, layout, stage, sizes, item = rank.config, rank.layout, rank.stage, rank.sizes, rank.step.itemsize
    vectors = matrices = transit = 0
    # From the tensor that is loaded last: `matrices` is then what those after it take.
    for tensor, numel in reversed(rank.parameters):
        as_table, as_matrix = _forms(config, tensor, stage)
        transit = max(transit, numel * item - matrices)
        if as_table:  # norms and biases are float32, those of experts' down projections at full width on every rank
            full = tensor.name.endswith(".experts.down.bias") and not layout.expert_parallel
            vectors += numel * (layout.tp if full else 1) * (item if tensor.unit in LOOKED_UP else 4)
        if tensor.name.endswith(".up.bias") and config.gated:  # those of gate and up are padded to panels
            parts = 2 * _count_matrices(config, layout, tensor)
            vectors += 4 * parts * (-(numel // parts) % PANEL)
        matrices += _packed_bytes(config, layout, tensor, item) if as_matrix else 0
    wide = [(each.name, each.local_shape(layout)[-1]) for each, _ in rank.parameters if len(each.shape) > 1]
    of_any, of_experts = (max((k for name, k in wide if part in name), default=0) for part in ("", ".experts."))
    logits = sizes.logit_rows * rank.step.vocabulary if stage.last else 0
    mixed = set(map(config.has_experts, stage.layers))
    columns = {(config.shared_intermediate if each else config.intermediate) // layout.tp for each in mixed}
    return {
        "vector_bytes": vectors, "matrix_bytes": matrices, "transit_bytes": transit, "process_bytes": RANK_BYTES,
        "reduced": max(sizes.token_budget * config.hidden, logits), "mlp_columns_here": sum(columns),
        "scratch_bytes": scratch_bytes(
            config, (rank.step.heads, rank.step.kv_heads), sizes, (of_any, of_experts) if item == 2 else (0, 0)
        ),
    }  # fmt: skip


def _forms(config: ModelConfig, tensor: ModelParameter, stage: Stage) -> tuple[bool, bool]:
    """Return (True if a rank of the stage holds the model parameter `tensor` as table or vector, True if as packed
    matrix)."""
    if tensor.name == "embedding.weight":
        shared = config.tied and stage.last  # the head's matrix, from which the first stage looks up, too
        return stage.first and not shared, shared
    matrix = len(tensor.shape) > 1 and tensor.unit != "positions"
    return not matrix, matrix


def _count_matrices(config: ModelConfig, layout: Layout, tensor: ModelParameter) -> int:
    """Return the number of matrices, one or one for each expert of a rank, to which a model parameter belongs."""
    return config.experts // layout.ep if ".experts." in tensor.name else 1


def _packed_bytes(config: ModelConfig, layout: Layout, tensor: ModelParameter, item: int) -> int:
    """Return the bytes of the packed matrices of a model parameter (`tensor`) on a rank: output features padded to
    panels, inputs to tiles if elements have 2 bytes; float32 for routers and gates. item: bytes of an element."""
    rows, columns = tensor.local_shape(layout)
    count, tile, size = _count_matrices(config, layout, tensor), 32 if item == 2 else 1, item
    shapes = [(rows // count, columns)]
    if config.latent and "latent_up" in tensor.name:  # for each head a matrix [R, P] of keys and one [V, R] of values
        count, plain = config.heads // layout.tp, config.head_dim - config.latent.rotary_dim
        shapes = [(columns, plain), (config.latent.value_dim, columns)]
    elif "router" in tensor.name or "shared_gate" in tensor.name:
        size = 4
    return count * size * sum(_round_up(outputs, 2 * PANEL) * _round_up(inputs, tile) for outputs, inputs in shapes)


def _round_up(count: int, multiple: int) -> int:
    """Return `count` rounded up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def _list_torch_sizes(rank: ServingRank) -> dict[str, int]:
    """Return the dimensions that the section "torch" of `ledger.toml` adds: {name: value}."""
    config, tp, longest = rank.config, rank.layout.tp, rank.sizes.max_length
    shards = [numel for _, numel in rank.parameters]
    inner = max(config.intermediate, config.expert_intermediate, config.shared_intermediate)
    return {
        "tile": TILE_TOKENS, "block_tokens": block_tables.BLOCK_TOKENS, "columns": -(-inner // tp),
        "parameters": sum(shards), "position_rows": 1 << (longest - 1).bit_length(), "process_bytes": RANK_BYTES,
        "gathered": max(config.hidden, config.vocabulary // tp if rank.stage.last else 0),
        "largest_parameter": max(shards),  # a tensor is converted in a buffer before it is copied
    }  # fmt: skip


def _list_device_sizes(rank: ServingRank) -> dict[str, int]:
    """Return the dimensions that the section "cuda" of `ledger.toml` adds: {name: value}."""
    sizes, layout, attention = rank.sizes, rank.layout, AttentionSizes.find(rank.config, rank.layout.tp)
    decoding = 1 << (sizes.max_sequences - 1).bit_length()  # the largest padded number of sequences
    return {
        "parameters": sum(numel for _, numel in rank.parameters), "decoding": decoding,
        "indexed": max(sizes.token_budget, sizes.logit_rows, decoding), "attention_groups": attention.groups,
        "blocks_of_context": block_tables.count_blocks(sizes.max_length),
        "graphs": 2 * decoding if layout.pp == 1 else 0,
        "scratch": max(SCRATCH_BYTES // 4, attention.count_scratch(sizes.max_length)), "split_columns": SPLIT_COLUMNS,
        # Only tp uses NCCL: pipeline stages exchange host tensors, and the outputs of experts are summed over tp.
        "context_bytes": CONTEXT_BYTES, "nccl_bytes": estimate_buffer_bytes(Layout(tp=layout.tp), layout.tp),
    }  # fmt: skip


RUNNERS: dict[str, Callable[[ServingRank], dict[str, int]]] = {
    "kernels": _list_kernel_sizes,
    "torch": _list_torch_sizes,
    "cuda": _list_device_sizes,
}
"""{section of `ledger.toml`: function that returns the dimensions that it adds to those of every section}."""
