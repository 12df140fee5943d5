"""Memory of a server, item by item, before it starts: the sum of its ranks' ledgers (`runners.py`), and how many KV
blocks fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.collectives.quantities import GIB, format_bytes
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import unknown
from meshwright.spec import block_tables

KERNEL_DTYPES = ("float32", "bfloat16")
"""Dtypes of parameters that the CPU kernels support; others are computed in plain torch."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES |= {name: name for name in ("float32", "bfloat16", "float16", "float64")}
"""{name that a user may write, short as that of a precision or torch's: torch's name}."""
FRONT_BYTES = 320 * 2**20
"""Measured with the tokenizer of a 32,000-token vocabulary: the front (HTTP, tokenization) and the process from which
ranks are forked, which has torch loaded."""


@dataclass(frozen=True, slots=True)
class ServingSizes:
    """Sizes for which a server allocates memory.

    Attributes:
        token_budget: Most tokens of a step over all sequences, by default 512 of prompts and one of each sequence.
        max_sequences: Most sequences of a step.
        max_length: Most tokens of a sequence; 0: not known yet.
        dtype: Type of parameters and KV cache, torch's name, such as "bfloat16".
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
    if name not in DTYPES:
        raise UserError(unknown("dtype", name, DTYPES))
    return DTYPES[name]


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
