"""Initial values of parameters, drawn by element: element i of a tensor is a function of (seed, the tensor's name on
disk, i), so that a rank draws its slices alone. Torch-free.

Bits come from the counter-based generator Philox4x64-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
SC 2011), keyed by seed and name. A normal value is the normal quantile of 32 of these bits, by linear interpolation
between 64 nodes in each power of two of the probability (error below 1e-4 of a standard deviation). Only integer
operations and single float32 operations are used, so that the values have the same bits on every processor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

INITIAL_VALUES_VERSION = 2
"""Version of the initial values, recorded in the run directory: 1 drew whole tensors by torch's CPU generator."""

_NODES = 64  # of the quantile in each power of two
_FRACTION_BITS = 17  # of a float32's 23, the first 6 of which number the node
_VALUES_OF_COUNTER = 8  # 32-bit values of one Philox counter
_MAX = 2**64 - 1
_FIRST_NODE = int(np.float32(0.5).view(np.uint32)) >> _FRACTION_BITS  # exponent and 6 fraction bits of 0.5
_CHUNK = 1 << 18  # values drawn at a time by a thread
_BLOCK = 1 << 15  # values computed at a time: their temporaries stay in the cache
_LONG = 1 << 14  # 64-bit integers above which a call that releases the GIL pays for its overhead


def draw_normal_values(
    seed: int, name: str, start: int, stop: int, columns: tuple[int, int, int] | None = None, threads: int = 1
) -> NDArray[np.float32]:
    """Return standard normal values [stop - start] for the elements [start, stop) of a tensor; each value depends only
    on `seed`, `name` and the element's index.

    seed: seed of the model's initial values. name: the tensor's name on disk. columns: None: start and stop count the
    elements of the flattened tensor. (first, end, width): they count only the elements in the columns [first, end) of a
    matrix of `width` columns. threads: number of threads that draw.
    """
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "<u8")
    values = np.empty(stop - start, np.float32)

    def draw(begin: int) -> None:
        """Draw up to `_CHUNK` values, those from index `begin` of `values` on, and write them there."""
        part = values[begin : begin + _CHUNK]
        bits = _draw_bits(key, _list_spans(start + begin, start + begin + len(part), columns))
        scratch = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int64)
        for block in range(0, len(part), _BLOCK):
            _compute_quantiles(bits[block : block + _BLOCK], part[block : block + _BLOCK], scratch)

    chunks = range(0, len(values), _CHUNK)
    if threads == 1 or len(chunks) == 1:
        for begin in chunks:
            draw(begin)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, chunks))
    return values


def _list_spans(start: int, stop: int, columns: tuple[int, int, int] | None) -> Iterator[tuple[int, int]]:
    """Yield the index ranges (begin, end) of a flattened tensor that together hold the elements [start, stop) of
    `columns`.

    columns: None: all columns of the tensor; a single range is yielded. (first, end, width): the columns [first, end)
    of a matrix of `width` columns, whose elements are counted row by row; one range per row is yielded."""
    if columns is None:
        yield start, stop
        return
    first, end, width = columns
    while start < stop:
        row, column = divmod(start, end - first)
        size = min(stop - start, end - first - column)
        begin = row * width + first + column
        yield begin, begin + size
        start += size


def _draw_bits(key: NDArray[np.uint64], spans: Iterable[tuple[int, int]]) -> NDArray[np.uint32]:
    """Return a random 32-bit integer for each element in `spans`, uint32 [elements]. spans: ascending index ranges
    (start, stop) of a tensor. key: key for this tensor of the counter-based generator Philox.
    """
    philox, position, drawn = np.random.Philox(key=key), 0, []
    generator = np.random.Generator(philox)
    for start, stop in spans:
        first, end = start // _VALUES_OF_COUNTER, -(-stop // _VALUES_OF_COUNTER)
        philox.advance(first - position)
        size = (end - first) * _VALUES_OF_COUNTER // 2
        # `random_raw` holds the GIL.
        raw = philox.random_raw(size) if size < _LONG else generator.integers(0, _MAX, size, np.uint64, endpoint=True)
        offset, position = first * _VALUES_OF_COUNTER, end
        drawn.append(raw.astype("<u8", copy=False).view("<u4")[start - offset : stop - offset])
    return np.concatenate(drawn)


def _compute_quantiles(bits: NDArray[np.uint32], values: NDArray[np.float32], scratch: tuple[Any, Any, Any]) -> None:
    """Convert random 32-bit integers `bits` [n] to standard normal values, written to `values` [n]: the lowest bit is
    the sign, the number i in the upper 31 bits gives the normal quantile of the probability (i + 1/2) / 2^32. scratch:
    uint32, float32 and int64 arrays of at least n elements, which are overwritten.
    """
    nodes, differences = _tabulate_quantile()
    integer, number, node = (each[: len(bits)] for each in scratch)
    np.right_shift(bits, np.uint32(1), out=integer)
    number[:] = integer
    number += np.float32(0.5)  # the middle of the interval
    code = number.view(np.uint32)
    np.right_shift(code, np.uint32(_FRACTION_BITS), out=integer)
    node[:] = integer
    node -= _FIRST_NODE
    np.bitwise_and(code, np.uint32((1 << _FRACTION_BITS) - 1), out=integer)
    number[:] = integer  # the fraction
    np.take(differences, node, out=values, mode="clip")
    values *= number
    np.take(nodes, node, out=number, mode="clip")
    values += number
    np.left_shift(bits, np.uint32(31), out=integer)
    values.view(np.uint32)[:] ^= integer


@cache
def _tabulate_quantile() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a table of the standard normal quantile for linear interpolation, two float32 arrays [nodes]: the quantile
    at each node, and the slope up to the next node, in units of float32 steps (2^17 between two nodes).

    The nodes are the numbers x = 2^e (1 + k / 64), e = -1 ... 30, k = 0 ... 63, and 2^31; the value at x is the
    quantile of the probability x / 2^32. The low 17 bits of a float32 number's fraction are its distance from a node.
    """
    normal = NormalDist()
    intervals = [2.0**e * (1 + k / _NODES) for e in range(-1, 31) for k in range(_NODES)]
    nodes = np.array([*(normal.inv_cdf(interval * 2.0**-32) for interval in intervals), 0.0, 0.0], np.float32)
    return nodes[:-1], np.diff(nodes) * np.float32(2.0**-_FRACTION_BITS)
