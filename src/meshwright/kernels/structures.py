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
    """`count` weight matrices of one shape [n, k] in panels of 16 columns (of n), as the kernels read them.

    `buffer`: the bytes; `bfloat16`: True if the elements are bfloat16, else float32.
    """

    buffer: npt.NDArray[np.uint8]
    n: int
    k: int
    count: int
    bfloat16: bool


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Matrix(ctypes.Structure):
    """`count` matrices [n, k] of one shape, in column panels, or one matrix row by row."""

    _fields_ = [
        ("data", _POINTER),
        ("n", _LONG),
        ("k", _LONG),
        ("count", _LONG),
        ("stride", _LONG),
        ("bfloat16", _INT),
        ("packed", _INT),
    ]


class Cache(ctypes.Structure):
    """KV cache of one layer."""

    _fields_ = [
        ("keys", _POINTER),
        ("values", _POINTER),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("bfloat16", _LONG),
    ]


class Routing(ctypes.Structure):
    """The experts of each token: their weights and indices, and the assignments sorted by expert."""

    _fields_ = [
        ("weights", _POINTER),
        ("experts", _POINTER),
        ("order", _POINTER),
        ("ends", _POINTER),
        ("top_k", _LONG),
        ("count", _LONG),
        ("first", _LONG),
        ("held", _LONG),
        ("scale", _FLOAT),
        ("normalise", _INT),
    ]


class Op(ctypes.Structure):
    """One operation of a step; each kind reads the fields it needs."""

    _fields_ = [
        ("kind", _INT),
        ("mode", _INT),
        ("rows", _INT),
        ("accumulate", _INT),
        ("gated", _INT),
        ("out", _POINTER),
        ("input", _POINTER),
        ("out_stride", _LONG),
        ("in_stride", _LONG),
        ("size", _LONG),
        ("first", _LONG),
        ("heads", _LONG),
        ("window", _LONG),
        ("rotated", _LONG),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("cosine", _POINTER),
        ("sine", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("epsilon", _FLOAT),
        ("scale", _FLOAT),
        ("matrix", Matrix),
        ("cache", Cache),
        ("routing", Routing),
    ]


class Step(ctypes.Structure):
    """The ragged batch of one step."""

    _fields_ = [
        ("tokens", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("starts", _POINTER),
        ("block_tables", _POINTER),
        ("output_rows", _POINTER),
        ("token_count", _LONG),
        ("sequences", _LONG),
        ("table_width", _LONG),
        ("outputs", _LONG),
    ]


def address(array: Array | None, dtype: npt.DTypeLike, size: int | None = None) -> int | None:
    """Return the address of a C-contiguous array of `dtype` with `size` elements (None: any number); None for None.

    Raises `ValueError` for another array.
    """
    if array is None:
        return None
    if array.dtype != dtype or not array.flags.c_contiguous or (size is not None and array.size != size):
        raise ValueError(
            f"expected a contiguous {np.dtype(dtype)} array of {size} elements, not {array.dtype}[{array.shape}]"
        )
    return array.ctypes.data


def rows_of(array: Float32) -> tuple[int, int]:
    """Return address and row stride (in elements) of a float32 matrix whose rows are contiguous; `ValueError` else."""
    if array.dtype != np.float32 or array.ndim != 2 or array.strides[1] != 4:
        raise ValueError(f"expected a float32 matrix with contiguous rows, not {array.dtype}{array.shape}")
    return array.ctypes.data, array.strides[0] // 4
