"""The compiled library: packed matrices, memory in huge pages, the thread pool. Torch-free."""

from __future__ import annotations

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.kernels import structures
from meshwright.kernels.memory_pages import map_huge_pages
from meshwright.kernels.op_list import OpList
from meshwright.kernels.structures import BFLOAT16, Array, PackedMatrix

_CHUNK = 64 << 20  # bytes of a block from which small arrays are allocated
_PACKED_ELEMENTS = 1 << 19  # that a thread packs per task, of at most 256 rows


class Kernels:
    """Compiled CPU library for one instruction set, with its thread pool: packs weights and executes lists of
    operations.

    instruction_set: "amx", "avx512_bf16", "avx512" or "avx2". version: start of the SHA-256 of sources, compiler and
    flags; equal versions give equal bits on equal processors.
    """

    def __init__(self, library: ctypes.CDLL, instruction_set: str, version: str) -> None:
        self.instruction_set, self.version = instruction_set, version[:16]
        self._library = library
        self._pool: Any = None
        self._packers: ThreadPoolExecutor | None = None
        self._chunk = np.zeros(0, np.uint8)
        self.set_threads(1)

    def set_threads(self, count: int) -> None:
        """Set the number of threads that execute operations, the calling thread included (initially 1). The thread pool
        is not inherited by forked processes, which have to call this method again. Raises ValueError if `count` is less
        than 1."""
        if count < 1:
            raise ValueError(f"threads must be at least 1, not {count}")
        if self._pool is not None:
            self._pool()
        self._threads, self._handle = count, self._library.kernels_new_pool(count)
        self.end_packing()
        self._pool = weakref.finalize(self, self._library.kernels_delete_pool, self._handle)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array of zeros of the given shape and dtype, aligned to 64 bytes, in huge pages where the system
        has them. A page takes physical memory when it is first written."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        rounded = -(-size // 64) * 64
        if rounded > len(self._chunk):
            chunk = map_huge_pages(max(rounded, _CHUNK))
            if rounded >= _CHUNK:
                return chunk[:size].view(dtype).reshape(shape)
            self._chunk = chunk
        bytes_, self._chunk = self._chunk[:size], self._chunk[rounded:]
        return bytes_.view(dtype).reshape(shape)

    def pack(self, weight: Array, dtype: str, order: Array | None = None) -> PackedMatrix:
        """Return weight matrices packed in the memory layout that the kernels read.

        weight: one matrix [n, k] or several [count, n, k], float32 or uint16 (bits of bfloat16). dtype: element type of
        the result, "float32" or "bfloat16" (rounded to nearest even). order: index of the row of each matrix that is
        packed at each position; None: the rows keep their order.
        """
        matrices = weight if weight.ndim == 3 else weight[None]
        count, n, k = matrices.shape if order is None else (len(matrices), len(order), matrices.shape[2])
        row_bytes = -(-k // 32) * 32 * 2 if dtype == "bfloat16" else k * 4
        buffer = self.allocate((count * -(-n // 32) * 32 * row_bytes,), np.uint8)
        packed = PackedMatrix(buffer, n, k, count, dtype == "bfloat16")
        words = packed.words
        at_once = max(32, _PACKED_ELEMENTS // max(k, 2048) // 32 * 32)  # rows
        tasks = [(index, row) for index in range(count) for row in range(0, n, at_once)]

        def pack_rows(number: int) -> None:
            """Pack this thread's share of the weight; `number`: index of the thread. Of the tasks (some rows of
            one matrix each), thread i of n packs tasks i, i + n, i + 2n ..."""
            for index, row in tasks[number :: self._threads]:
                matrix, block = matrices[index], slice(row, row + at_once)
                rows = matrix[block if order is None else order[block]]
                out = words[index, row // 32 : -(-(row + len(rows)) // 32)]
                same = packed.bfloat16 == (rows.dtype == BFLOAT16) and rows.flags.c_contiguous
                if same and rows.nbytes == out.nbytes:
                    padded = rows.view(np.uint32)
                else:
                    padded = self._make_padded(number, (32 * len(out), out.shape[1]))
                    if packed.bfloat16:
                        padded.view(BFLOAT16)[: len(rows), :k] = _round_to_bfloat16(rows)
                    elif rows.dtype == BFLOAT16:  # the upper half of a float32
                        padded.view(BFLOAT16)[: len(rows), 1 : 2 * k : 2] = rows
                    else:
                        padded.view(np.float32)[: len(rows), :k] = rows
                out[...] = padded.reshape(len(out), 2, 16, -1).transpose(0, 3, 1, 2)

        self._packers = self._packers or ThreadPoolExecutor(self._threads, "packing")
        list(self._packers.map(pack_rows, range(self._threads)))
        return packed

    def end_packing(self) -> None:
        """Free the threads and buffers that `pack` uses. Call it when all weights are packed; a later `pack` creates
        them again.
        """
        if self._packers is not None:
            self._packers.shutdown()
        self._packers, self._padded = None, [np.empty(0, np.uint32)] * self._threads

    def _make_padded(self, number: int, shape: tuple[int, int]) -> npt.NDArray[np.uint32]:
        """Return a temporary array of zeros, uint32 of `shape` (rows, columns). `pack` copies rows of a weight into it,
        so that they fill whole panels. number: index of the packing thread; the next call for this thread reuses the
        memory."""
        size = shape[0] * shape[1]
        if len(self._padded[number]) < size:
            self._padded[number] = np.empty(size, np.uint32)
        padded = self._padded[number][:size].reshape(shape)
        padded[...] = 0
        return padded

    def create_op_list(self) -> OpList:
        """Return a new empty list of operations, which this library executes when `OpList.run` is called."""
        return OpList(self.execute)

    def execute(self, ops: ctypes.Array[structures.Op], begin: int, end: int, step: structures.Step) -> None:
        """Execute operations on the batch of a forward step; return when they are done. Called by `OpList.run`.

        ops: ctypes array of operations. begin, end: the operations with the indices `begin` to `end` (exclusive) are
        executed. step: ctypes struct with the addresses and sizes of the batch's arrays."""
        first = ctypes.byref(ops, begin * ctypes.sizeof(structures.Op))
        self._library.kernels_run(self._handle, first, end - begin, ctypes.byref(step))


def _round_to_bfloat16(values: Array) -> Array:
    """Round float32 values to bfloat16 (to nearest even); return the bits as uint16. An array of bfloat16 bits is
    returned unchanged."""
    if values.dtype == BFLOAT16:
        return values
    bits = values.view(np.uint32)
    return np.where(np.isnan(values), 0x7FC0, (bits + (0x7FFF + (bits >> 16 & 1))) >> 16)
