"""model.safetensors as the parameter table fixes it: every rank computes the same header and the same offsets, and
writes its own slices there; nobody gathers the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.checkpoint.files import json_bytes
from meshwright.parallel.flat_buffers import Columns
from meshwright.spec.parameters import ParameterTable, Row

DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One safetensors file: its whole header (length included) and its size in bytes."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row lies: the file and the byte at which its elements begin."""

    file: str
    offset: int
    row: Row


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """All files of the model's weights. `index` is the text of the index file when there are several files."""

    files: tuple[ModelFile, ...]
    places: dict[str, Place]
    index: bytes | None

    @property
    def sizes(self) -> dict[str, int]:
        return {file.name: file.size for file in self.files}


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int], int]:
    """The header of a safetensors file of (name, dtype code, shape) in this order; the byte in the file at which each
    tensor begins; the file's size. Source: the format's description in huggingface/safetensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, code, shape in tensors:
        size = ITEM_BYTES[code] * _numel(shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + size]}
        offsets[name] = end
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8 bytes
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + end


def model_files(table: ParameterTable, dtype: str, shard_bytes: int = SHARD_BYTES) -> ModelFiles:
    """The files that hold the rows of `table` in `dtype` ("float32", "bfloat16"; a row that is `kept` in its own), each
    of at most `shard_bytes` of tensors (a larger tensor has a file of its own). Rows stay in the table's order, wider
    dtypes first, so that every element lies at a multiple of its size."""
    codes = {row.name: DTYPE_CODES[row.kept or dtype] for row in table.rows}
    in_order = sorted(table.rows, key=lambda row: -ITEM_BYTES[codes[row.name]])
    shards: list[list[Row]] = [[]]
    filled = 0
    for row in in_order:
        size = row.numel * ITEM_BYTES[codes[row.name]]
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += size
    files, places = [], {}
    for number, rows in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offsets, size = safetensors_header((row.name, codes[row.name], row.shape) for row in rows)
        files.append(ModelFile(name, header, size))
        places.update({row.name: Place(name, offsets[row.name], row) for row in rows})
    index = None
    if len(shards) > 1:
        total = sum(row.numel * ITEM_BYTES[codes[row.name]] for row in table.rows)
        weight_map = {name: place.file for name, place in sorted(places.items())}
        index = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    return ModelFiles(tuple(files), places, index)


def disk_runs(
    row: Row, start: int, values: npt.NDArray[np.generic], columns: Columns | None = None
) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    """Where elements [start, start + len(values)) of a row, or of its `columns`, flat in engine orientation, lie on
    disk: contiguous runs (first element on disk, values).

    A row that is not transposed is one run; of some columns it is a run for each row of the matrix. In a transposed
    one the elements of disk row i are those with flat index o * inputs + i in the engine's [outputs, inputs]: for a
    range of flat indices one run of consecutive o.
    """
    stop = start + len(values)
    if not row.transposed:
        if columns is None:
            yield start, values
            return
        for line in range(start // columns.width, -(-stop // columns.width)):
            low, high = max(start, line * columns.width), min(stop, (line + 1) * columns.width)
            yield line * (columns.of - columns.width) + columns.start + low, values[low - start : high - start]
        return
    outputs, inputs = row.engine_shape
    leftmost = 0
    if columns is not None:
        leftmost, inputs = columns.start, columns.width
    first, last = start // inputs, -(-stop // inputs)  # engine rows touched, the outer two perhaps in part
    padded = np.zeros((last - first) * inputs, dtype=values.dtype)
    padded[start - first * inputs : stop - first * inputs] = values
    turned = np.ascontiguousarray(padded.reshape(last - first, inputs).T)
    if first == 0 and last == outputs and start == 0 and stop == outputs * inputs:
        yield leftmost * outputs, turned.reshape(-1)
        return
    lows = first + (np.arange(inputs) < start - first * inputs)
    highs = last - (np.arange(inputs) >= stop - (last - 1) * inputs)
    for column, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        if low < high:
            yield (leftmost + column) * outputs + low, turned[column, low - first : high - first]


def write_slice(
    place: Place,
    start: int,
    values: npt.NDArray[np.generic],
    write: Callable[[str, memoryview, int], None],
    columns: Columns | None = None,
) -> None:
    """Write a slice of a row or of its `columns` (flat, engine orientation, from element `start`) in the disk's dtype
    at its place; `write(file, bytes, offset)` does it."""
    for first, run in disk_runs(place.row, start, values, columns):
        write(place.file, run.view(np.uint8).data, place.offset + first * values.itemsize)


def _numel(shape: Iterable[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
