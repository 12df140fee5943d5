"""The model.safetensors files, whose header and offsets every rank computes alike from the parameter table.

Each rank writes its own elements at these offsets; no rank gathers the model.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.checkpoint.files import to_json_bytes
from meshwright.parallel.flat_buffers import Columns
from meshwright.spec.parameters import ParameterEntry, ParameterTable

DTYPE_CODES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Planned safetensors file. name: file name in the checkpoint directory. header: the complete header, including its
    length prefix. size: size of the file in bytes."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Location:
    """Position of an exported parameter in the model files.

    file: file name. offset: byte of the file at which the parameter's elements begin. entry: the parameter's entry in
    the parameter table. Several experts may share one tensor in the file, in which their parameters are stacked.
    """

    file: str
    offset: int
    entry: ParameterEntry


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Plan of a model's safetensors files. files: one plan per file. places: {name of an exported tensor: position in
    these files}. index: content of `model.safetensors.index.json`; None if there is only one file.
    """

    files: tuple[ModelFile, ...]
    places: dict[str, Location]
    index: bytes | None

    @property
    def sizes(self) -> dict[str, int]:
        """File name -> size in bytes, for each of the model's safetensors files."""
        return {file.name: file.size for file in self.files}


def make_safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int], int]:
    """Build the header of a safetensors file. tensors: (name, dtype code, shape) of each tensor, in the order in the
    file.

    Returns (header, {tensor name: byte of the file at which it begins}, size of the file in bytes). Source: the
    format's description in huggingface/safetensors.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, code, shape in tensors:
        size = ITEM_BYTES[code] * math.prod(shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + size]}
        offsets[name] = end
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + end


def plan_model_files(
    table: ParameterTable, dtype: str, shard_bytes: int = SHARD_BYTES, stem: str = "model"
) -> ModelFiles:
    """Plan the safetensors files that hold the exported parameters of a model. table: the model's parameter table.

    dtype: dtype of trained parameters on disk ("float32", "bfloat16"); buffers and frozen parameters of a user's module
    keep their dtype. shard_bytes: maximum tensor bytes per file; a larger tensor gets a separate file. stem: name of
    the files without ".safetensors". Tensors are ordered by dtype, wider dtypes first (for alignment), then as in the
    table.
    """
    exported = [entry for entry in table.entries if entry.exported]
    codes = {entry.name: DTYPE_CODES[entry.kept or dtype] for entry in exported}
    in_order = sorted(exported, key=lambda entry: -ITEM_BYTES[codes[entry.name]])
    held: dict[str, list[ParameterEntry]] = {}  # by tensor: one entry, or those of all experts in order
    for entry in in_order:
        held.setdefault(entry.disk_name, []).append(entry)
    shards: list[list[str]] = [[]]
    filled = 0
    for tensor, entries in held.items():
        size = sum(entry.numel for entry in entries) * ITEM_BYTES[codes[entries[0].name]]
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    files, places = [], {}
    for number, tensors in enumerate(shards, 1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offsets, size = make_safetensors_header(
            (tensor, codes[held[tensor][0].name], held[tensor][0].disk_shape) for tensor in tensors
        )
        files.append(ModelFile(name, header, size))
        for tensor in tensors:
            item = ITEM_BYTES[codes[held[tensor][0].name]]
            for place, entry in enumerate(held[tensor]):
                offset = offsets[tensor] + place * entry.numel * item
                places[entry.name] = Location(name, offset, entry)
    index = None
    if len(shards) > 1:
        total = sum(entry.numel * ITEM_BYTES[codes[entry.name]] for entry in exported)
        weight_map = {tensor: places[held[tensor][0].name].file for tensor in sorted(held)}
        index = to_json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    return ModelFiles(tuple(files), places, index)


def split_disk_runs(
    entry: ParameterEntry, start: int, values: npt.NDArray[np.generic], columns: Columns | None = None
) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    """Split a slice of an exported tensor into runs of elements that are contiguous on disk; yield (index of the run's
    first element in the tensor on disk, values of the run).

    entry: parameter entry of the tensor. values: elements [start, start + len(values)) of the tensor, flattened
    row-major as [outputs, inputs]. columns: range of input columns; if given, only these columns are flattened. With
    all columns there is one run; with some columns, one per row. A matrix that is stored transposed on disk gives one
    run per input, or a single one if the slice has all elements.
    """
    stop = start + len(values)
    if not entry.transposed:
        if columns is None:
            yield start, values
            return
        for line in range(start // columns.width, -(-stop // columns.width)):
            low, high = max(start, line * columns.width), min(stop, (line + 1) * columns.width)
            yield line * (columns.total - columns.width) + columns.start + low, values[low - start : high - start]
        return
    outputs, inputs = entry.model_shape
    leftmost = 0
    if columns is not None:
        leftmost, inputs = columns.start, columns.width
    first, last = start // inputs, -(-stop // inputs)  # range of engine rows; the first and last may be partial
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
    location: Location,
    start: int,
    values: npt.NDArray[np.generic],
    write: Callable[[str, memoryview, int], None],
    columns: Columns | None = None,
) -> None:
    """Write a slice of an exported tensor to its model file: call `write(file name, bytes, byte offset)` for each run
    of elements that is contiguous on disk.

    location: position of the tensor in the model files. values: elements of the slice, in the dtype on disk. start:
    index of the first element in the tensor, flattened row-major as [outputs, inputs]. columns: range of input columns;
    if given, only these columns are flattened.
    """
    for first, run in split_disk_runs(location.entry, start, values, columns):
        write(location.file, run.view(np.uint8).data, location.offset + first * values.itemsize)
