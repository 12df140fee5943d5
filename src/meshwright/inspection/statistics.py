"""Statistics of a tensor in one pass over blocks; memory is that of one block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.inspection.dtypes import ELEMENT_TYPES

BLOCK = 1 << 20  # elements


def read_first_values(raw: NDArray[np.uint8], dtype: str, count: int) -> list[float | int | bool] | None:
    """Return the first `count` values of a tensor; None if values of its type cannot be read. raw: the tensor's bytes,
    uint8 [bytes]. dtype: safetensors name, such as "BF16"."""
    kind = ELEMENT_TYPES[dtype]
    if kind.read is None:
        return None
    values: list[float | int | bool] = kind.read(np.asarray(raw[: count * kind.bits // 8])).tolist()
    return values


def compute_statistics(raw: NDArray[np.uint8], dtype: str) -> dict[str, Any] | None:
    """Compute statistics of a tensor: "mean", "std" (population), "min" and "max" of its finite values (None if it has
    none), and the number of "zeros", "nan" and "infinite" values. Returns None for types whose values are not read.

    raw: the tensor's bytes, uint8 [bytes]. dtype: safetensors name, such as "BF16". Means and squares of blocks are
    combined as by Chan, Golub and LeVeque 1979, which avoids cancellation.
    """
    kind = ELEMENT_TYPES[dtype]
    if kind.read is None:
        return None
    count, mean, squares = 0, 0.0, 0.0
    low: Any = None
    high: Any = None
    zeros = nan = infinite = 0
    step = BLOCK * kind.bits // 8
    for begin in range(0, len(raw), step):
        values = kind.read(np.asarray(raw[begin : begin + step]))
        zeros += len(values) - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                unread = int(np.isnan(values).sum())
                nan, infinite = nan + unread, infinite + len(values) - int(finite.sum()) - unread
                values = values[finite]
        if not len(values):
            continue
        least, most = values.min().item(), values.max().item()
        low, high = least if low is None else min(low, least), most if high is None else max(high, most)
        wide = values.astype(np.float64)
        middle = float(wide.mean())
        wide -= middle
        with np.errstate(over="ignore"):
            own = float(wide @ wide)
        total, apart = count + len(values), middle - mean
        squares += own + (apart * apart * count * len(values) / total if count else 0.0)
        mean, count = mean + apart * len(values) / total, total
    return {
        "mean": mean if count else None,
        "std": math.sqrt(squares / count) if count else None,
        "min": low,
        "max": high,
        "zeros": zeros,
        "nan": nan,
        "infinite": infinite,
    }
