"""Memory of a server, item by item, before it starts: what each rank allocates, by the lists of `ledger.toml`, and how
many KV blocks fit.

With the CPU kernels (`serving/lowering.py`), matrices are packed in pairs of panels of 16 output columns, and a tied
matrix has one copy. `torch_ledger.py` has the sizes of plain torch, `device_ledger.py` those of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.collectives.quantities import GIB, format_bytes
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import unknown
from meshwright.planner.cost.dimensions import Dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, layer_kind
from meshwright.planner.cost.tables import select
from meshwright.planner.serving.kernel_scratch import StepScratch, scratch_bytes
from meshwright.spec import block_tables
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameter_entries import ModelParameter
from meshwright.spec.parameters import parameter_table
from meshwright.spec.stages import LOOKED_UP, Stage, list_stage_units
from meshwright.toml import read_packaged_toml

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of a parameter and of a key or value, by dtype."""
KERNEL_DTYPES = ("float32", "bfloat16")
"""Dtypes of parameters that the CPU kernels support; others are computed in plain torch."""
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of dtypes, as layouts write precisions."""
FRONT_BYTES = 320 * 2**20
"""Measured with the tokenizer of a 32,000-token vocabulary: the front (HTTP, tokenization) and the process from which
ranks are forked, which has torch loaded."""
RANK_BYTES = 96 * 2**20
"""Measured: what a rank process adds to the one it is forked from, without the items of its ledger."""
TABLE = "planner/serving/ledger.toml"
_PANEL = 16  # output columns of a packed panel; matrices are padded to 2 panels


@dataclass(frozen=True, slots=True)
class ServingSizes:
    """Sizes for which a server allocates memory.

    Attributes:
        token_budget: Most tokens of a step over all sequences, by default 512 of prompts and one of each sequence.
        max_sequences: Most sequences of a step.
        max_length: Most tokens of a sequence; 0: not known yet.
        dtype: Type of parameters and KV cache, a key of `ITEM_BYTES` such as "bfloat16".
        threads: Kernel threads of a rank on a CPU.
        blocks: Number of KV blocks of each rank.
        scored_rows: Most rows of logits of a step that scores prompts.
        resident: True: the whole KV pool gets physical memory when it is allocated; False: page by page as it is used.
    """

    token_budget: int = 576
    max_sequences: int = 64
    max_length: int = 0
    dtype: str = "float32"
    threads: int = 1
    blocks: int = 0
    scored_rows: int = 256
    resident: bool = True

    @property
    def logit_rows(self) -> int:
        """Most tokens of a step for which logits are computed: more than one per sequence, as prompts may be scored."""
        return max(self.max_sequences, min(self.scored_rows, self.token_budget))


ITEMS = ("weights", "packed", "workspace", "logits", "communication", "slack")
"""Items of a rank's memory without KV blocks, fields of `RankLedger` and lists of `ledger.toml`."""


@dataclass(frozen=True, slots=True)
class RankLedger:
    """Memory of one serving rank in bytes.

    Attributes:
        weights: Embedding tables, norms, biases, tables of rotary positions.
        packed: Weight matrices in the packed layout of the kernels, padding included.
        workspace: Activation buffers for the token budget, shared by all layers.
        logits: Logits of a step.
        communication: Buffers of tensor-parallel reductions and of pipeline messages.
        slack: Memory of the process without tensors, and scratch memory of the kernels' threads. Added is the excess of
            the buffer from which a matrix is packed at loading over the matrices packed after it.
        kv_block: One KV block: keys and values of 16 tokens in the rank's layers that share a block table.
    """

    weights: int
    packed: int
    workspace: int
    logits: int
    communication: int
    slack: int
    kv_block: int

    @property
    def fixed(self) -> int:
        """Bytes of everything except the KV blocks."""
        return sum(getattr(self, name) for name in ITEMS)


@dataclass(frozen=True, slots=True)
class ServingLedger:
    """Memory of a server: one ledger for each pipeline stage, as its tensor-parallel ranks are equal.

    Attributes:
        layout: Layout of all ranks.
        sizes: Limits that memory is allocated for.
        stages: Ledger of a rank of each pipeline stage.
        tables: Block tables of the model.
        front: Bytes of the processes other than the ranks (HTTP, tokenization).
    """

    layout: Layout
    sizes: ServingSizes
    stages: tuple[RankLedger, ...]
    tables: block_tables.BlockTables
    front: int = FRONT_BYTES

    @property
    def fixed(self) -> int:
        """Bytes of all ranks and the front-end processes without KV blocks."""
        return self.front + self._copies * sum(stage.fixed for stage in self.stages)

    @property
    def kv_block(self) -> int:
        """Bytes of one KV block, summed over all ranks of all replicas."""
        return self._copies * sum(stage.kv_block for stage in self.stages)

    @property
    def total(self) -> int:
        """Bytes of all ranks and the front-end processes, KV blocks included."""
        return self.fixed + self.sizes.blocks * self.kv_block

    @property
    def blocks_of_longest(self) -> int:
        """Most KV blocks that a sequence of `max_length` tokens holds at once, over all its block tables."""
        return sum(block_tables.max_blocks_held(self.sizes.max_length, self.tables.windows, self.sizes.token_budget))

    @property
    def concurrency(self) -> float:
        """Number of sequences of `max_length` tokens whose KV blocks fit at once into the pool of one replica."""
        return self.sizes.blocks / self.blocks_of_longest

    def longest_within(self, blocks: int) -> int:
        """Return the most tokens of a sequence, up to `max_length`, that never holds more than `blocks` KV blocks."""
        windows, sizes = self.tables.windows, self.sizes
        return block_tables.max_sequence_tokens(blocks, windows, sizes.token_budget, sizes.max_length)

    @property
    def _copies(self) -> int:
        """Number of ranks that hold the same pipeline stage: dp x tp."""
        return self.layout.dp * self.layout.tp

    def items(self) -> dict[str, int]:
        """Return {item: bytes} summed over all ranks; items are the fields of `RankLedger`, "front" and "kv"."""
        found = {name: self._copies * sum(getattr(stage, name) for stage in self.stages) for name in ITEMS}
        return {**found, "front": self.front, "kv": self.sizes.blocks * self.kv_block}

    def to_json_dict(self) -> dict[str, Any]:
        """Return the ledger as a JSON object: memory of the server in GiB, and of each stage's rank in bytes."""
        names = ("token_budget", "max_sequences", "max_length", "dtype", "threads")
        return {
            "layout": str(self.layout.with_(tensor_sequence_parallel=True)),
            **{name: getattr(self.sizes, name) for name in names},
            "kv_blocks": self.sizes.blocks,
            "kv_bytes_per_token": self.kv_block * len(self.tables.windows) / self.layout.dp / block_tables.BLOCK_TOKENS,
            "concurrency": {"max_length": self.sizes.max_length, "sequences": self.concurrency * self.layout.dp},
            "memory_gib": {name: size / GIB for name, size in {**self.items(), "total": self.total}.items()},
            "ranks": [{"stage": number, **asdict(stage)} for number, stage in enumerate(self.stages)],
        }


def parse_dtype(name: str | None) -> str:
    """Return the full dtype name for a short or full name such as "bf16" or "bfloat16"; None: float32. Raises
    `UserError` for an unknown one."""
    name = name or "float32"
    if name not in ITEM_BYTES and name not in DTYPE_NAMES:
        raise UserError(unknown("dtype", name, [*DTYPE_NAMES, *ITEM_BYTES]))
    return DTYPE_NAMES.get(name, name)


@dataclass(frozen=True)
class ServingRank:
    """A rank of one pipeline stage of a server, and the sizes from which its memory follows.

    Attributes:
        config: Model.
        layout: Layout of one replica.
        stage: Pipeline stage.
        sizes: Limits that memory is allocated for.
    """

    config: ModelConfig
    layout: Layout
    stage: Stage
    sizes: ServingSizes

    @cached_property
    def step(self) -> MicroBatch:
        """Sizes of the largest step on the rank, as of one sequence of `token_budget` tokens."""
        return MicroBatch.of(self.config, self.layout, 1, self.sizes.token_budget, dtype=self.sizes.dtype)

    def predict(self, section: str, **more: int) -> RankLedger:
        """Return the memory of the rank by a section of `ledger.toml`, such as "torch". more: dimensions that the
        section names in addition to those of every section; "multiple" is that of `kv_block`."""
        config, stage, latent, tables = self.config, self.stage, self.config.latent, read_packaged_toml(TABLE)[section]
        kv_block = self.kv_block(more.get("multiple", 1))
        positions = len({config.layer_positions(layer) for layer in stage.layers} - {None})
        known = {
            "logit_rows": self.sizes.logit_rows, "max_length": self.sizes.max_length,
            # Cosines and sines of half the features each; temperatures of queries in place of cosines.
            "position_elements": positions * (config.rotary_dim if latent else config.head_dim), "kv_block": kv_block,
            "block_tables": len(block_tables.block_tables(config, self.layout.pp).windows),
            "cached": latent.cached_dim if latent else 2 * self.step.kv_heads * config.head_dim,
        }  # fmt: skip
        every = list(map(config.has_experts, range(config.layers)))
        flags = {
            "first": stage.first, "last": stage.last, "mixtures": any(every[layer] for layer in stage.layers),
            "any_dense": not all(every), "any_mixture": any(every), "plain_residual": config.plain_residual,
        }  # fmt: skip
        dimensions = Dimensions(self.step, layer_kind(config, 0), known | more, flags)

        def add(sizes: list[str]) -> int:
            """Return the sum of a list of sizes."""
            return sum(int(dimensions[size]) for size in select(sizes, dimensions.true, {}))

        dimensions["widest"] = max((add(sizes) for sizes in tables.get("widths", {}).values()), default=0)
        return RankLedger(**{name: add(tables[name]) for name in ITEMS}, kv_block=kv_block)

    @property
    def parameters(self) -> list[tuple[ModelParameter, int]]:
        """(model parameter, its elements on the rank), in forward order."""
        table = parameter_table(self.config)
        needed = dict.fromkeys(name for unit in list_stage_units(table, self.stage) for name in table.needed_by(unit))
        tensors = (tensor for unit in needed for tensor in table.unit_tensors(unit))
        return [(tensor, math.prod(tensor.local_shape(self.layout))) for tensor in tensors]

    def kv_block(self, multiple: int = 1) -> int:
        """Return the bytes of one KV block. multiple: number of elements to a multiple of which value vectors, or the
        cached vectors of latent attention, are padded."""
        config = self.config
        cached = max(1, config.kv_heads // self.layout.tp) * (config.head_dim + _round_up(config.head_dim, multiple))
        if config.latent is not None:
            cached = _round_up(config.latent.cached_dim, multiple)
        depth = block_tables.block_tables(config, self.layout.pp).depths[self.stage.index]
        return depth * block_tables.BLOCK_TOKENS * cached * ITEM_BYTES[self.sizes.dtype]


def build_ledger(
    config: ModelConfig, layout: Layout, sizes: ServingSizes, predict_rank: Callable[[ServingRank], RankLedger],
    front: int = FRONT_BYTES,
) -> ServingLedger:  # fmt: skip
    """Return the memory ledger of a server without KV blocks. layout: layout of the server, checked by
    `spec.refuse.serving_layout`; sizes: largest step and KV pool; predict_rank: function that returns the
    ledger of a rank; front: bytes of the processes other than the ranks."""
    stages = block_tables.serving_stages(config, layout.pp)
    ranks = tuple(predict_rank(ServingRank(config, layout.with_(dp=1), stage, sizes)) for stage in stages)
    return ServingLedger(layout, sizes, ranks, block_tables.block_tables(config, layout.pp), front)


def serving_ledger(config: ModelConfig, layout: Layout, sizes: ServingSizes) -> ServingLedger:
    """Return the memory ledger of a server with compiled CPU kernels, without KV blocks. layout: layout of the server,
    checked by `spec.refuse.serving_layout`; sizes: largest step and KV pool."""
    return build_ledger(config, layout, sizes, _rank_ledger)


def _rank_ledger(rank: ServingRank) -> RankLedger:
    """Return the memory ledger of a rank with compiled CPU kernels."""
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
            vectors += 4 * parts * (-(numel // parts) % _PANEL)
        matrices += _packed_bytes(config, layout, tensor, item) if as_matrix else 0
    wide = [(each.name, each.local_shape(layout)[-1]) for each, _ in rank.parameters if len(each.shape) > 1]
    rounded = (max((k for name, k in wide if part in name), default=0) for part in ("", ".experts."))
    scratch = StepScratch(sizes.token_budget, sizes.max_length, sizes.threads, *(rounded if item == 2 else (0, 0)))
    logits = sizes.logit_rows * rank.step.vocabulary if stage.last else 0
    mixed = set(map(config.has_experts, stage.layers))
    columns = {(config.shared_intermediate if each else config.intermediate) // layout.tp for each in mixed}
    return rank.predict(
        "kernels", multiple=_PANEL, vector_bytes=vectors, matrix_bytes=matrices, transit_bytes=transit,
        process_bytes=RANK_BYTES, reduced=max(sizes.token_budget * config.hidden, logits),
        scratch_bytes=scratch_bytes(config, rank.step.heads, rank.step.kv_heads, scratch),
        mlp_columns_here=sum(columns),
    )  # fmt: skip


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
    if config.latent and "latent_up" in tensor.name:  # for each head a matrix [R, P] of keys and one [V, R] of values
        heads, plain = config.heads // layout.tp, config.head_dim - config.latent.rotary_dim
        wide = [(columns, plain), (config.latent.value_dim, columns)]
        return sum(heads * _round_up(n) * (_round_up(k, 32) if item == 2 else k) * item for n, k in wide)
    count = _count_matrices(config, layout, tensor)
    item = 4 if "router" in tensor.name or "shared_gate" in tensor.name else item
    return count * _round_up(rows // count) * (_round_up(columns, 32) if item == 2 else columns) * item


def _round_up(count: int, multiple: int = 2 * _PANEL) -> int:
    """Return `count` rounded up to a multiple of `multiple`."""
    return -(-count // multiple) * multiple


def fill_memory(ledger: ServingLedger, budget: int, most_blocks: int | None = None) -> ServingLedger:
    """Return the ledger with as many KV blocks as fit into `budget` bytes, at most `most_blocks` (None: no limit).
    Raises `UserError` if not even one sequence of `max_length` tokens fits."""
    blocks = max(0, budget - ledger.fixed) // ledger.kv_block
    blocks = blocks if most_blocks is None else min(blocks, most_blocks)
    longest = ledger.blocks_of_longest
    if blocks < longest:
        needed = ledger.fixed + longest * ledger.kv_block
        shorter = f", or --max-length {fits}" if (fits := ledger.longest_within(blocks)) else ""
        ranks, size = ledger.layout.world_size, math.ceil(needed / GIB * 100) / 100
        enough = f"it needs --memory {size:.2f}GiB" if ranks == 1 else f"all {ranks} ranks need {size:.2f} GiB together"
        raise UserError(
            f"memory {format_bytes(budget)}: one request of {ledger.sizes.max_length} tokens does not fit: weights and "
            f"buffers take {format_bytes(ledger.fixed)}, its KV blocks {format_bytes(longest * ledger.kv_block)}; "
            f"{enough}{shorter}"
        )
    return replace(ledger, sizes=replace(ledger.sizes, blocks=blocks))


def bill_text(ledger: ServingLedger, measured: Sequence[dict[str, int]] = ()) -> list[str]:
    """Return the ledger as lines of text: size by item over all ranks, predicted and, if given, measured. measured:
    bytes by item of each rank."""
    found = {name: sum(rank.get(name, 0) for rank in measured) for name in ledger.items()} if measured else {}
    lines = []
    for name, size in {**ledger.items(), "total": ledger.total}.items():
        line = f"  {name:<14}{format_bytes(size):>12}"
        real = found.get(name)
        lines.append(line + (f"   measured {format_bytes(real)} ({size / real - 1:+.1%})" if real else ""))
    return lines
