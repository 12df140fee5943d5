"""Packed matrices, the structures of `structures.h` as ctypes sees them, and addresses of numpy arrays. Torch-free."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
BFLOAT16 = np.dtype(np.uint16)  # numpy has no bfloat16: its bits


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`count` weight matrices [n, k] (output x input size) in the memory layout that the kernels read.

    The n outputs, padded to a multiple of 32, are divided into panels of 16. A line of 64 bytes holds one float32, or
    two bfloat16 of consecutive k, of each output of a panel. The lines of two panels alternate in memory, so that the
    reads of a tile are one stream.

    buffer: the bytes of all matrices. n: outputs, those included that the order of `pack` repeats. bfloat16: True if
    the elements are bfloat16, else float32.
    """

    buffer: npt.NDArray[np.uint8]
    n: int
    k: int
    count: int
    bfloat16: bool

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        """View of the buffer, [count, pairs of panels, lines of a panel, 2 panels, 16 outputs]: a word is one float32,
        or two bfloat16 of consecutive k, of one output."""
        return self.buffer.view(np.uint32).reshape(self.count, -(-self.n // 32), -1, 2, 16)


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _make_typed_fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return the entries (field name, `kind`) of a ctypes `_fields_` list for several fields of one type. kind: ctypes
    type. names: field names, separated by spaces."""
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    """ctypes struct `Matrix` of structures.h: `count` weight matrices of one shape [n, k].

    packed: True if the rows are stored in panels of 16 rows, False if row-major. stride: bytes from one matrix to the
    next. bfloat16: True if the elements are bfloat16, else float32.
    """

    _fields_ = [
        *_make_typed_fields(_POINTER, "data"),
        *_make_typed_fields(_LONG, "n k count stride"),
        *_make_typed_fields(_INT, "bfloat16 packed"),
    ]


class Cache(ctypes.Structure):
    """ctypes struct `Cache` of structures.h: KV cache of one layer.

    keys, values: addresses of arrays with the shapes of `operations.LayerCache`. bfloat16: True if the elements are
    bfloat16, else float32. table: number of the layer's block table. For latent attention `keys` is null, and
    `kv_heads` is the number of groups into which the query heads are divided for parallel computation."""

    _fields_ = [
        *_make_typed_fields(_POINTER, "keys values"),
        *_make_typed_fields(_LONG, "kv_heads head_dim bfloat16 table"),
    ]


class Routing(ctypes.Structure):
    """ctypes struct `Routing` of structures.h: assignment of a step's tokens to experts. The weights and expert indices
    of each token are computed first, then its assignments are sorted by expert.

    weights, experts: addresses of float32 weights and int32 expert indices, [tokens, top_k]. count: number of all
    experts. first, held: first expert of this rank and number of its experts. order: address of this rank's assignments
    (token * top_k + k), sorted by expert. ends: address of the exclusive end in `order` of each of this rank's experts.
    groups: number of groups into which the experts are divided (group-limited routing). kept: number of groups from
    which a token's experts are chosen. scale: factor on the weights. normalise: 1 if the weights of a token are divided
    by their sum."""

    _fields_ = [
        *_make_typed_fields(_POINTER, "weights experts order ends"),
        *_make_typed_fields(_LONG, "top_k count first held groups kept"),
        *_make_typed_fields(_FLOAT, "scale"),
        *_make_typed_fields(_INT, "normalise"),
    ]


class Op(ctypes.Structure):
    """ctypes struct `Op` of structures.h: one operation of a forward step, such as a linear layer, for the compiled
    library.

    kind: number of the operation in `op_list.KIND`; each kind reads only the fields that it needs. mode: its variant,
    such as RMSNorm or LayerNorm. outputs: True if it computes a row per token whose logits are needed, False: per
    token of the step. activation: number of the activation of a product's results, 0: none. out, input: addresses
    of float32 rows, `out_stride` and `in_stride` elements apart. out_step, in_step: column strides of `out` and
    `input` in elements, from one matrix (or head) to the next. size: number of elements that it writes to a row of
    `out`. rotated: number of rotated features of a head. matrix: weight or embedding table. routing: assignment to
    experts. Of a product with an activation, `softcap` and `scale` are the activation's `limit` and `alpha`, and
    `weight` is the address of a factor for each assignment to experts. Other fields have the name and meaning that they
    have in the dataclasses of `operations`."""

    _fields_ = [
        *_make_typed_fields(_INT, "kind mode outputs accumulate activation gated"),
        *_make_typed_fields(_POINTER, "out input"),
        *_make_typed_fields(_LONG, "out_stride in_stride out_step in_step size first heads window rotated"),
        *_make_typed_fields(_POINTER, "weight bias cosine sine query_norm key_norm"),
        *_make_typed_fields(_FLOAT, "epsilon scale softcap"),
        *_make_typed_fields(Matrix, "matrix"),
        *_make_typed_fields(Cache, "cache"),
        *_make_typed_fields(Routing, "routing"),
    ]


class Step(ctypes.Structure):
    """ctypes struct `Step` of structures.h: the ragged batch of one forward step.

    Fields are the addresses of the int32 arrays of `operations.StepArrays` and their sizes. token_count, sequences:
    numbers of tokens and of sequences. table_width: entries in a row of `block_tables`. outputs: length of
    `output_rows`."""

    _fields_ = [
        *_make_typed_fields(_POINTER, "tokens positions slots starts block_tables output_rows"),
        *_make_typed_fields(_LONG, "token_count sequences table_width outputs"),
    ]


def get_address(array: Array | None, dtype: npt.DTypeLike, size: int | None = None) -> int | None:
    """Return the memory address of a C-contiguous array; None (a null pointer) if `array` is None.

    dtype, size: required element type and number of elements (size None: any number). Raises `ValueError` for an array
    of another type, size or memory layout.
    """
    if array is None:
        return None
    if array.dtype != dtype or not array.flags.c_contiguous or (size is not None and array.size != size):
        raise ValueError(
            f"expected a contiguous {np.dtype(dtype)} array of {size} elements, not {array.dtype}[{array.shape}]"
        )
    return int(array.__array_interface__["data"][0])  # `array.ctypes.data` takes four times as long


def get_row_layout(array: Float32) -> tuple[int, int]:
    """Return (memory address, row stride in elements) of a float32 matrix whose rows are contiguous. Raises
    `ValueError` for any other array.
    """
    if array.dtype != np.float32 or array.ndim != 2 or array.strides[1] != 4:
        raise ValueError(f"expected a float32 matrix with contiguous rows, not {array.dtype}{array.shape}")
    return array.ctypes.data, array.strides[0] // 4
