"""Settings of a parameter-efficient adapter (LoRA and its kin) as data, part of a model's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

AdapterKind = Literal["lora", "rslora", "dora"]
ALL_LINEAR = "all-linear"
BLOCK = 64
"""Elements of a block of packed weights."""
GROUP = 256
"""Blocks whose scales are quantized together under double quantization."""
RECORD_BYTES = {"nf4": BLOCK // 2 + 4, "nf4-double": BLOCK // 2 + 1, "int8": BLOCK + 4}
"""Bytes of a packed block: its codes and a scale, float32 or (double quantization) one byte."""


def count_groups(elements: int) -> int:
    """Return the number of groups of block scales that double quantization (QLoRA) forms for a matrix of `elements`
    weights. A group is 256 blocks of 64 weights; the last group may be incomplete.
    """
    return -(-elements // (BLOCK * GROUP))


def count_scale_bytes(elements: int) -> int:
    """Return the bytes of second-level scales that double quantization (QLoRA) stores for a matrix of `elements`
    weights: a float32 number for each group of 256 block scales, and one float32 number, the mean of all block scales.
    """
    return 4 * (1 + count_groups(elements))


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Adapter on a model's linear layers: W x becomes W x + s B A x with A [rank, inputs] and B [outputs, rank] (Hu et
    al. 2021, arXiv:2106.09685, eq. 3). Only A and B are trained.

    Attributes:
        rank: Number of rows of A and of columns of B.
        alpha: Numerator of the scale s.
        kind: "lora": s = alpha / rank. "rslora": s = alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732, eq. 8).
            "dora": s = alpha / rank, and a trained magnitude for each output (Liu et al. 2024, arXiv:2402.09353, eq.
            5).
        targets: Names of linear layers, as in PEFT: a full Hugging Face module name, its last parts ("q_proj"), a
            pattern with * ? or [], or "all-linear".
        base: Directory or hub name of the base model, as an `adapter_config.json` records it.
        random_constants: Tensors that start with equal elements (B, frozen norms and biases) get random values, so that
            every gradient of the first step differs from 0 and no exchange of elements goes unnoticed; for
            verification.
        packed: Format in which the weights of the frozen linear layers are kept in memory (QLoRA, Dettmers et al. 2023,
            arXiv:2305.14314), "nf4-double" with quantized scales; None: the dtype of the parameters.
        dropout: Dropout probability, in training, of the elements of an adapted layer's input to the adapter."""

    kind: AdapterKind = "lora"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    base: str = ""
    random_constants: bool = False
    packed: Literal["nf4", "nf4-double", "int8"] | None = None
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Factor s by which the product B A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)
