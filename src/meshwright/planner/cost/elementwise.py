"""What elementwise work moves through a device's memory: how often each kernel reads or writes a value.

Counted kernel by kernel from how each is written: in eager PyTorch every operation reads and writes its operands, a
fused kernel reads its inputs and writes its outputs once, a compiled block joins neighbours. Values are "narrow" (of
the activations' type) or "wide" (4 bytes). These counts are of the code; how fast memory is, `rates` says.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.cost.engines import Fusion

WIDE = 4


class Passes(NamedTuple):
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

    forward: Passes
    backward: Passes


_NONE = Passes(0, 0)

# A layer norm is one kernel everywhere; a root-mean-square norm in eager PyTorch is a chain in float32 (layers.py:
# convert, square, mean, reciprocal root, two products, convert; back the same with the gradients of both factors).
_FUSED_NORM = Traffic(Passes(1, 2), Passes(2, 3))
_NORM: dict[tuple[str, Fusion], Traffic] = {
    ("layernorm", "eager"): _FUSED_NORM,
    ("layernorm", "kernels"): _FUSED_NORM,
    ("layernorm", "compiled"): Traffic(Passes(1, 2), Passes(2, 3)),
    ("rmsnorm", "eager"): Traffic(Passes(7, 2, 9), Passes(14, 2, 21)),
    ("rmsnorm", "kernels"): _FUSED_NORM,
    ("rmsnorm", "compiled"): Traffic(Passes(1, 2), Passes(2, 3)),
}

# x + y: read both, write one; back, the two gradients that meet are added. Compiled, both join the norm's kernels.
_RESIDUAL: dict[Fusion, Traffic] = {
    "eager": Traffic(Passes(1, 3), Passes(1, 3)),
    "kernels": Traffic(Passes(1, 3), Passes(1, 3)),
    "compiled": Traffic(Passes(0, 2), Passes(0, 1)),
}

# One byte of mask for each element, half of a narrow value; the product itself is part of the residual's kernel.
RESIDUAL_DROPOUT = Traffic(Passes(0, 0.5), Passes(1, 2.5))
SCORES_DROPOUT = Traffic(Passes(1, 2.5), Passes(1, 2.5))

# Four products of halves, two sums, joined, in float32 (rope.py, `rotate`).
_ROTARY: dict[Fusion, Traffic] = {
    "eager": Traffic(Passes(9, 2, 11), Passes(12, 2, 14)),
    "kernels": Traffic(Passes(1, 2), Passes(1, 2)),
    "compiled": Traffic(Passes(1, 2), Passes(1, 2)),
}

_ACTIVATION = Traffic(Passes(1, 2), Passes(1, 3))
# activation(gate), its product with up; back: two products, the activation's own, and the halves joined.
_GATED: dict[Fusion, Traffic] = {
    "eager": Traffic(Passes(2, 5), Passes(4, 13)),
    "kernels": Traffic(Passes(1, 3), Passes(1, 5)),
    "compiled": Traffic(Passes(1, 3), Passes(1, 5)),
}

_SOFTMAX: dict[Fusion, Traffic] = {
    "eager": Traffic(Passes(4, 8), Passes(3, 7)),  # scale, mask, softmax
    "kernels": Traffic(Passes(1, 2), Passes(1, 3)),
    "compiled": Traffic(Passes(1, 2), Passes(1, 3)),
}

# An operand of a product in fp8: its largest value is looked for (scales of the same step, as NVIDIA's recipes and
# torchao have them), and it is written twice, since the products of the way back need it turned; a fused kernel does
# both at once.
_CAST: dict[Fusion, Passes] = {"eager": Passes(3, 4), "kernels": Passes(2, 3), "compiled": Passes(2, 3)}

# Gradients of query, key and value are joined into one.
JOINED = Traffic(_NONE, Passes(1, 2))

# A copy of a token on its way to an expert and back: sorted there, sorted back, weighed, summed; back likewise.
COPIES = Traffic(Passes(4, 7), Passes(6, 10))
EXCHANGED = Traffic(Passes(2, 4), Passes(2, 4))  # where experts are spread, arrivals are sorted once more

# A router's scores: softmax, the highest, the load of each expert.
ROUTED = Traffic(Passes(12, 2, 12), Passes(10, 2, 12))


def norm(kind: str, fusion: Fusion) -> Traffic:
    """Return the memory traffic of a norm per input element. kind: "layernorm" or "rmsnorm"; fusion: "eager" (one
    kernel per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _NORM[kind, fusion]


def residual(fusion: Fusion) -> Traffic:
    """Return the memory traffic of a residual addition per element. fusion: "eager" (one kernel per operation),
    "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _RESIDUAL[fusion]


def rotary(fusion: Fusion) -> Traffic:
    """Return the memory traffic of rotary positions per element of queries and keys. fusion: "eager" (one kernel per
    operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _ROTARY[fusion]


def activation(gated: bool, fusion: Fusion) -> Traffic:
    """Return the memory traffic of an MLP's activation per element of the second product's input. gated: as SwiGLU;
    fusion: "eager" (one kernel per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _GATED[fusion] if gated else _ACTIVATION


def cast(fusion: Fusion) -> Passes:
    """Return the memory traffic of casting a matrix product's operand to fp8, per element. fusion: "eager" (one kernel
    per operation), "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _CAST[fusion]


def softmax(fusion: Fusion) -> Traffic:
    """Return the memory traffic of the softmax per attention score. fusion: "eager" (one kernel per operation),
    "kernels" (hand-fused) or "compiled" (torch.compile)."""
    return _SOFTMAX[fusion]
