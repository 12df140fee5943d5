"""Bytes that elementwise operations read and write per element, kernel by kernel.

Counted kernel by kernel from how each is written: in eager PyTorch every operation reads and writes its operands, a
fused kernel reads its inputs and writes its outputs once, a compiled block joins neighbours. Values are "narrow" (of
the activations' type) or "wide" (4 bytes). These counts are of the code; how fast memory is, `rates` says.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.cost.engines import Fusion

WIDE = 4


class MemoryAccess(NamedTuple):
    """Memory traffic of an elementwise operation, per element.

    kernels: number of kernels; narrow: number of reads and writes of values in the model's type; wide: number of those
    in float32.
    """

    kernels: float
    narrow: float
    wide: float = 0.0

    def bytes(self, itemsize: int) -> float:
        """Return the bytes read and written per element. itemsize: bytes of a value in the model's type."""
        return self.narrow * itemsize + self.wide * WIDE


class Traffic(NamedTuple):
    """Memory traffic of an elementwise operation, per element, in its forward and in its backward."""

    forward: MemoryAccess
    backward: MemoryAccess


_NONE = MemoryAccess(0, 0)

# A layer norm is one kernel everywhere; a root-mean-square norm in eager PyTorch is a chain in float32 (layers.py:
# convert, square, mean, reciprocal root, two products, convert; back the same with the gradients of both factors).
_FUSED_NORM = Traffic(MemoryAccess(1, 2), MemoryAccess(2, 3))
_NORM: dict[tuple[str, Fusion], Traffic] = {
    ("layernorm", "eager"): _FUSED_NORM,
    ("layernorm", "kernels"): _FUSED_NORM,
    ("layernorm", "compiled"): Traffic(MemoryAccess(1, 2), MemoryAccess(2, 3)),
    ("rmsnorm", "eager"): Traffic(MemoryAccess(7, 2, 9), MemoryAccess(14, 2, 21)),
    ("rmsnorm", "kernels"): _FUSED_NORM,
    ("rmsnorm", "compiled"): Traffic(MemoryAccess(1, 2), MemoryAccess(2, 3)),
}

# x + y: read both, write one; back, the two gradients that meet are added. Compiled, both join the norm's kernels.
_RESIDUAL: dict[Fusion, Traffic] = {
    "eager": Traffic(MemoryAccess(1, 3), MemoryAccess(1, 3)),
    "kernels": Traffic(MemoryAccess(1, 3), MemoryAccess(1, 3)),
    "compiled": Traffic(MemoryAccess(0, 2), MemoryAccess(0, 1)),
}

# x times a constant; compiled, a factor of the residual addition.
SCALED = Traffic(MemoryAccess(1, 2), MemoryAccess(1, 2))

# Of an adapted layer's output: the parts of its matrices joined, and added (low_rank.py); back, two gradients of the
# input are added. DoRA multiplies outputs by their factors; back, also the factors' gradient.
ADAPTED = Traffic(MemoryAccess(2, 5), MemoryAccess(1, 3))
SCALED_BY_VECTOR = Traffic(MemoryAccess(1, 2), MemoryAccess(2, 5))

# Of an element of a packed weight (packing.py): codes cast, looked up, multiplied by the scale, cast. The first number
# of each is of kernels, the last of accesses of 4 bytes.
UNPACKED = {"nf4": MemoryAccess(4, 1, 5.125), "int8": MemoryAccess(4, 1, 6.75)}

# One byte of mask for each element, half of a narrow value; the product itself is part of the residual's kernel.
RESIDUAL_DROPOUT = Traffic(MemoryAccess(0, 0.5), MemoryAccess(1, 2.5))
SCORES_DROPOUT = Traffic(MemoryAccess(1, 2.5), MemoryAccess(1, 2.5))

# Four products of halves, two sums, joined, in float32 (rope.py, `rotate`).
_ROTARY: dict[Fusion, Traffic] = {
    "eager": Traffic(MemoryAccess(9, 2, 11), MemoryAccess(12, 2, 14)),
    "kernels": Traffic(MemoryAccess(1, 2), MemoryAccess(1, 2)),
    "compiled": Traffic(MemoryAccess(1, 2), MemoryAccess(1, 2)),
}

_ACTIVATION = Traffic(MemoryAccess(1, 2), MemoryAccess(1, 3))
# activation(gate), its product with up; back: two products, the activation's own, and the halves joined.
_GATED: dict[Fusion, Traffic] = {
    "eager": Traffic(MemoryAccess(2, 5), MemoryAccess(4, 13)),
    "kernels": Traffic(MemoryAccess(1, 3), MemoryAccess(1, 5)),
    "compiled": Traffic(MemoryAccess(1, 3), MemoryAccess(1, 5)),
}

# gpt-oss's gate and up projections (experts.py, `ClampedSwiGLU`), operation by operation.
_CLAMPED_SWIGLU: dict[Fusion, Traffic] = {**_GATED, "eager": Traffic(MemoryAccess(7, 16), MemoryAccess(19, 44))}

# Biases of experts, repeated for each token copy and added; back, summed.
GROUPED_BIAS = Traffic(MemoryAccess(2, 4), MemoryAccess(1, 1))

_SOFTMAX: dict[Fusion, Traffic] = {
    "eager": Traffic(MemoryAccess(4, 8), MemoryAccess(3, 7)),  # scale, mask, softmax
    "kernels": Traffic(MemoryAccess(1, 2), MemoryAccess(1, 3)),
    "compiled": Traffic(MemoryAccess(1, 2), MemoryAccess(1, 3)),
}

# Of a tile's scores in float32 (tiled_attention.py): cap, its derivative, softmax, cast; the backward has them again,
# then the softmax's derivative, its product with the cap's, and a cast. Masks, of the tile's last keys, are left out.
CAPPED_SOFTMAX = Traffic(MemoryAccess(7, 1, 13), MemoryAccess(10, 6, 16))

# Of logits (loss.py): cap; its derivative, and the product with it, which join the gradient's kernel when compiled.
_CAPPED_LOGITS: dict[Fusion, Traffic] = {
    "eager": Traffic(MemoryAccess(3, 6), MemoryAccess(5, 3, 8)),
    "kernels": Traffic(MemoryAccess(3, 6), MemoryAccess(5, 3, 8)),
    "compiled": Traffic(MemoryAccess(3, 6), _NONE),
}

# An operand of a product in fp8: its largest value is looked for (scales of the same step, as NVIDIA's recipes and
# torchao have them), and it is written twice, since the products of the backward need it
# transposed; a fused kernel does both at once.
_CAST: dict[Fusion, MemoryAccess] = {
    "eager": MemoryAccess(3, 4),
    "kernels": MemoryAccess(2, 3),
    "compiled": MemoryAccess(2, 3),
}

# Gradients of query, key and value are joined into one.
JOINED = Traffic(_NONE, MemoryAccess(1, 2))

# A token's copy for an expert: sorted, sorted back, weighted, summed; the same in the backward.
COPIES = Traffic(MemoryAccess(4, 7), MemoryAccess(6, 10))
EXCHANGED = Traffic(MemoryAccess(2, 4), MemoryAccess(2, 4))  # where experts are spread, arrivals are sorted once more

# A router's scores: softmax, the highest, the load of each expert.
ROUTED = Traffic(MemoryAccess(12, 2, 12), MemoryAccess(10, 2, 12))


def norm(kind: str, fusion: Fusion) -> Traffic:
    """Return the memory traffic of a norm per input element. kind: "layernorm" or "rmsnorm"; fusion: "eager" (one
    kernel per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _NORM[kind, fusion]


def residual(fusion: Fusion) -> Traffic:
    """Return the memory traffic of a residual addition per element. fusion: "eager" (one kernel per operation),
    "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _RESIDUAL[fusion]


def scaled_residual(fusion: Fusion) -> Traffic:
    """Return the memory traffic per element of multiplying a sublayer's output before it is added. fusion: "eager" (one
    kernel per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return Traffic(_NONE, _NONE) if fusion == "compiled" else SCALED


def rotary(fusion: Fusion) -> Traffic:
    """Return the memory traffic of rotary positions per element of queries and keys. fusion: "eager" (one kernel per
    operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _ROTARY[fusion]


def activation(gated: bool, fusion: Fusion) -> Traffic:
    """Return the memory traffic of an MLP's activation per element of the second product's input. gated: as SwiGLU;
    fusion: "eager" (one kernel per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _GATED[fusion] if gated else _ACTIVATION


def clamped_swiglu(fusion: Fusion) -> Traffic:
    """Return the memory traffic of gpt-oss's activation per element of the second product's input. fusion: "eager" (one
    kernel per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _CLAMPED_SWIGLU[fusion]


def cast(fusion: Fusion) -> MemoryAccess:
    """Return the memory traffic of casting a matrix product's operand to fp8, per element. fusion: "eager" (one kernel
    per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _CAST[fusion]


def softmax(fusion: Fusion) -> Traffic:
    """Return the memory traffic of the softmax per attention score. fusion: "eager" (one kernel per operation),
    "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _SOFTMAX[fusion]


def capped_logits(fusion: Fusion) -> Traffic:
    """Return the memory traffic of the softcap of logits per logit. fusion: "eager" (one kernel per operation),
    "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _CAPPED_LOGITS[fusion]
