"""The compiled library: packed matrices, memory in huge pages, the thread pool. Torch-free.

`load_kernels()` compiles it or finds it in the cache (`build.py`).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.kernels import build, structures
from meshwright.kernels.op_list import KIND, OpList, packed_matrix
from meshwright.kernels.operations import Linear
from meshwright.kernels.structures import BFLOAT16, Array, Float32, PackedMatrix

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20  # bytes that small arrays are cut from


class Kernels:
    """The library for one instruction set. `instruction_set`: "amx", "avx512_bf16", "avx512" or "avx2"; `version`:
    start of the sha256 of sources, compiler and flags: equal versions give equal bits on equal processors."""

    def __init__(self, library: ctypes.CDLL, instruction_set: str, version: str) -> None:
        self.instruction_set, self.version = instruction_set, version[:16]
        self._library = library
        self._pool: Any = None
        self._chunk = np.zeros(0, np.uint8)
        self.set_threads(1)

    def set_threads(self, count: int) -> None:
        """Set the number of threads that execute operations, the calling one included (at first 1). The threads belong
        to this process: one that it forks has to set its own."""
        if count < 1:
            raise ValueError(f"threads must be at least 1, not {count}")
        if self._pool is not None:
            self._pool()
        pool = self._library.kernels_new_pool(count)
        self._handle = pool
        self._pool = weakref.finalize(self, self._library.kernels_delete_pool, pool)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a zeroed array, aligned to 64 bytes, in huge pages where the system has them. Its pages become
        resident when they are first written."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        rounded = -(-size // 64) * 64
        if rounded > len(self._chunk):
            chunk = _map_huge_pages(max(rounded, _CHUNK))
            if rounded >= _CHUNK:
                return chunk[:size].view(dtype).reshape(shape)
            self._chunk = chunk
        bytes_, self._chunk = self._chunk[:size], self._chunk[rounded:]
        return bytes_.view(dtype).reshape(shape)

    def pack(self, weight: Array, dtype: str) -> PackedMatrix:
        """Pack `weight` [n, k] or [count, n, k], C-contiguous float32 or bfloat16 bits (uint16), as `dtype` "float32"
        or "bfloat16" (rounded to nearest even), on the thread pool."""
        count, n, k = weight.shape if weight.ndim == 3 else (1, *weight.shape)
        buffer = self.empty((self.packed_bytes(n, k, dtype, count),), np.uint8)
        packed = PackedMatrix(buffer, n, k, count, dtype == "bfloat16")
        op = structures.Op(kind=KIND["pack"], mode=weight.dtype == BFLOAT16, matrix=packed_matrix(packed))
        op.input = structures.address(weight, BFLOAT16 if weight.dtype == BFLOAT16 else np.float32)
        self.execute((structures.Op * 1)(op), 0, 1, structures.Step())
        return packed

    @staticmethod
    def packed_bytes(n: int, k: int, dtype: str, count: int = 1) -> int:
        """Return the size in bytes of `count` packed matrices [n, k]."""
        columns = -(-n // 16) * 16
        return count * columns * (-(-k // 32) * 32 * 2 if dtype == "bfloat16" else k * 4)

    def linear(self, x: Float32, weight: PackedMatrix, bias: Float32 | None = None) -> Float32:
        """Return x Wᵀ + bias, float32 [T, n], of `x` float32 [T, k]."""
        out = np.empty((len(x), weight.n), np.float32)
        ops = self.op_list()
        ops.append(Linear(out, x, weight, bias))
        self.execute(ops.array, 0, 1, structures.Step(token_count=len(x)))
        return out

    def op_list(self) -> OpList:
        """Return an empty list of operations."""
        return OpList(self.execute)

    def execute(self, ops: ctypes.Array[structures.Op], begin: int, end: int, step: structures.Step) -> None:
        """Execute the entries `begin` to `end` of a ctypes array of operations; what `OpList.run` calls."""
        first = ctypes.byref(ops, begin * ctypes.sizeof(structures.Op))
        self._library.kernels_run(self._handle, first, end - begin, ctypes.byref(step))


def _map_huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory of `size` bytes, aligned to a huge page."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE
    return whole[begin : begin + size]


def load_kernels(instruction_set: str | None = None) -> Kernels | None:
    """Return the library for `instruction_set` (None: the fastest that this processor runs); None without a compiler
    (g++ or what CXX names) or on another architecture than x86-64 with AVX2. `ValueError` for an instruction set that
    the processor lacks."""
    supported = build.supported_instruction_sets()
    if instruction_set is not None and instruction_set not in supported:
        raise ValueError(f"this processor runs {', '.join(supported) or 'none of the kernels'}, not {instruction_set}")
    for name in supported if instruction_set is None else (instruction_set,):
        built = build.build(name)
        if built is None:
            continue
        path, version = built
        library = ctypes.CDLL(str(path))
        library.kernels_new_pool.restype = ctypes.c_void_p
        library.kernels_new_pool.argtypes = [ctypes.c_long]
        library.kernels_delete_pool.argtypes = [ctypes.c_void_p]
        library.kernels_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p]
        library.kernels_size_of.restype = ctypes.c_long
        for which, structure in enumerate((structures.Op, structures.Step)):
            assert library.kernels_size_of(which) == ctypes.sizeof(structure), structure
        if library.kernels_prepare():
            return Kernels(library, name, version)
    return None
