"""The compiled library: packed matrices, memory in huge pages, the thread pool. Torch-free.

`load_kernels()` compiles it or finds it in the cache (`build.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.kernels.operations import OpList
from meshwright.kernels.structures import Array, Float32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`count` weight matrices of one shape [n, k] in panels of 16 columns (of n), as the kernels read them.

    `buffer`: the bytes; `bfloat16`: True if the elements are bfloat16, else float32.
    """

    buffer: npt.NDArray[np.uint8]
    n: int
    k: int
    count: int
    bfloat16: bool


class Kernels:
    """The library for one instruction set. `instruction_set`: "amx", "avx512_bf16", "avx512" or "avx2"; `version`:
    start of the sha256 of sources, compiler and flags: equal versions give equal bits on equal processors."""

    instruction_set: str
    version: str

    def set_threads(self, count: int) -> None:
        """Set the number of threads that execute operations, the calling one included (at first 1)."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a zeroed array in memory of its own, aligned to 64 bytes, in huge pages where the system has them.
        Pages become resident when they are first written (`touch` does it)."""
        raise NotImplementedError

    def pack(self, weight: Array, dtype: str) -> PackedMatrix:
        """Pack `weight` [n, k] or [count, n, k], float32 or bfloat16 bits (uint16), as `dtype` "float32" or "bfloat16"
        (rounded to nearest even)."""
        raise NotImplementedError

    @staticmethod
    def packed_bytes(n: int, k: int, dtype: str, count: int = 1) -> int:
        """Return the size of a packed matrix in bytes."""
        raise NotImplementedError

    def linear(self, x: Float32, weight: PackedMatrix, bias: Float32 | None = None) -> Float32:
        """Return x Wᵀ + bias, float32 [T, n], of `x` float32 [T, k]."""
        raise NotImplementedError

    def op_list(self) -> OpList:
        """Return an empty list of operations."""
        return OpList(self)


def load_kernels(instruction_set: str | None = None) -> Kernels | None:
    """Return the library for `instruction_set` (None: the fastest that this processor runs); None without a compiler
    (g++ or what CXX names) or on another architecture than x86-64 with AVX2. `ValueError` for an instruction set that
    the processor lacks."""
    raise NotImplementedError
