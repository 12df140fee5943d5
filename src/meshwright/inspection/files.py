"""Tensors of a model path: a safetensors file, shards with an index, or torch's `.bin`, read without executing its
pickle. Only headers are read; every error in them is one line that names the file."""

from __future__ import annotations

import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.inspection.dtypes import ELEMENT_TYPES
from meshwright.names import list_other_steps, nearest
from meshwright.untrusted import parse_json, read_json

LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
MAX_DIMENSIONS = 64  # of a tensor, as in NumPy
INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a model file. name: name of the tensor. file: path of the model file. dtype: safetensors name, such
    as "BF16". shape: number of elements in each dimension. offset: position of the tensor's first byte in the file; in
    `.bin` files, in the tensor's storage. bytes: size of its values in bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TensorFiles:
    """List of all tensors of a model, found at `path`: a model file, an index of shards, or a directory with either.

    files: paths of the model files. entries: tensors, ordered by file name and offset. unindexed: names of tensors that
    the shards contain but the index does not list.
    """

    def __init__(self, path: Path) -> None:
        """Find the files of `path` and read their headers. Raises `UserError` for missing or damaged files, and for
        tensors that are in two files or in none."""
        self.path = path
        self.directory = path if path.is_dir() else path.parent
        self.files, indexed = _find_model_files(path)
        self._pickled: dict[Path, dict[str, Any]] = {}
        self.entries: list[TensorEntry] = []
        for file in self.files:
            self.entries += self._read_torch_file(file) if file.suffix == ".bin" else read_header(file)
        self.unindexed: list[str] = []
        seen: dict[str, Path] = {}
        for entry in self.entries:
            if (other := seen.get(entry.name)) is not None:
                raise UserError(f"{entry.file}: tensor {entry.name} is in {other.name} as well")
            seen[entry.name] = entry.file
        if indexed is not None:
            for name, place in indexed.items():
                if seen.get(name) != place:
                    raise UserError(f"{place}: tensor {name} is missing, though the index lists it there")
            self.unindexed = [name for name in seen if name not in indexed]

    def map_bytes(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, uint8 [bytes], normally as a view of the memory-mapped file, whose pages are
        read on access. entry: one of `entries`."""
        if not entry.bytes:
            return np.zeros(0, dtype=np.uint8)
        if entry.file in self._pickled:
            import torch

            tensor = self._pickled[entry.file][entry.name].detach().contiguous().reshape(-1)
            return np.asarray(tensor.view(torch.uint8).numpy())
        return np.memmap(entry.file, dtype=np.uint8, mode="r", offset=entry.offset, shape=(entry.bytes,))

    def _read_torch_file(self, file: Path) -> Iterator[TensorEntry]:
        """Yield the tensors of a file written by `torch.save`, loaded with `weights_only`, so that no code in the
        pickle is run. Raises `UserError` if the file is damaged, or holds anything but dense tensors."""
        import torch

        try:
            records = _check_zip_records(file) if zipfile.is_zipfile(file) else {}
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # pickle, zip and torch's reader raise many types
            reason = " ".join(str(error).split())
            if "weights_only" in reason.lower() or "unsupported" in reason.lower():
                reason = "it has more than tensors, and reading that could run code"
            elif "mmap can only be used" in reason:
                reason = "it is in the format of torch before 1.6, which cannot be mapped"
            else:
                reason = f"the file is truncated or damaged ({reason[:120]})"
            raise UserError(f"{file}: cannot be read: {reason}; save the model as safetensors") from None
        tensors = dict(_iterate_tensors(loaded))
        if not tensors:
            raise UserError(f"{file}: holds no tensors")
        self._pickled[file] = tensors
        for name, tensor in tensors.items():
            if tensor.is_sparse or tensor.is_quantized or tensor.dtype not in _map_torch_dtypes():
                raise UserError(f"{file}: tensor {name} is of an unsupported kind ({tensor.dtype})")
        storages = {(each.data_ptr(), each.nbytes()) for each in (one.untyped_storage() for one in tensors.values())}
        if not _are_records({each for each in storages if each[1]}, records):
            damage = "the file is truncated or damaged (the sizes of tensors are not those of the records)"
            raise UserError(f"{file}: cannot be read: {damage}; save the model as safetensors")
        for name, tensor in tensors.items():
            kind = _map_torch_dtypes()[tensor.dtype]
            offset = tensor.storage_offset() * tensor.itemsize
            yield TensorEntry(name, file, kind, tuple(tensor.shape), offset, tensor.numel() * tensor.itemsize)


def _are_records(storages: Set[tuple[int, int]], records: Mapping[int, int]) -> bool:
    """Return True if each memory block that `torch.load` has mapped is exactly one record (stored member) of a zip
    file, or if there are no blocks.

    storages: (address, size in bytes) of each block. records: {offset in the file: size in bytes} of the zip file's
    records. The address at which the file is mapped is unknown. Every address is tried that makes some block coincide
    with a record of its size.
    """
    if not storages:
        return True
    first, size = next(iter(storages))
    starts = (first - offset for offset, length in records.items() if length == size)
    return any(
        all(records.get(address - start) == length for address, length in storages)
        for start in starts
        if start % mmap.PAGESIZE == 0
    )


def _check_zip_records(file: Path) -> dict[int, int]:
    """Check the records (stored members) of a zip file written by `torch.save`: they must be uncompressed, one after
    another, and at the places that the zip directory names. torch maps records without this check and could return
    other bytes. Return {offset of a record's data in the file: its size in bytes}. Raises `ValueError` or `BadZipFile`
    if the check fails.
    """
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        found: dict[int, int] = {}
        ends = [*(record.header_offset for record in records[1:]), archive.start_dir]
        for record, end in zip(records, ends, strict=True):
            stream.seek(record.header_offset)
            signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", stream.read(30).ljust(30))
            name = stream.read(name_bytes).decode("utf-8" if record.flag_bits & 0x800 else "cp437")
            offset = record.header_offset + 30 + name_bytes + extra_bytes
            found[offset], after = record.file_size, end - offset - record.file_size
            right = signature == b"PK\3\4" and name == record.orig_filename and record.compress_type == 0
            if not right or after not in (0, 16, 24):  # bytes of the descriptor that may follow a record
                raise ValueError(f"record {record.filename!r} is not where the zip directory says")
    return found


def read_header(file: Path) -> list[TensorEntry]:
    """Read the header of a safetensors file; returns its tensors sorted by offset. Raises `UserError` for a damaged
    file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > LONGEST_HEADER:
                raise UserError(f"{file}: not a safetensors file")
            if 8 + length > size:
                raise UserError(f"{file}: cut short: its header alone has {length:,} bytes, the file {size:,}")
            text = stream.read(length)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    try:
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError("no object")
        header.pop("__metadata__", None)
        entries = [_parse_entry(file, name, entry, 8 + length) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: not a safetensors file: its header is not a JSON object of tensors") from None
    entries.sort(key=lambda entry: (entry.offset, entry.name))
    last = max(entries, key=lambda entry: entry.offset + entry.bytes, default=None)
    if last is not None and last.offset + last.bytes > size:
        missing = next(entry for entry in entries if entry.offset + entry.bytes > size)
        raise UserError(
            f"{file}: cut short: it has {size:,} of {last.offset + last.bytes:,} bytes; the first incomplete tensor is "
            f"{missing.name}"
        )
    return entries


def _parse_entry(file: Path, name: str, entry: dict[str, Any], begin: int) -> TensorEntry:
    """Parse the header entry of one tensor of a safetensors file. Raises `UserError` or `ValueError` if it is invalid.

    file: path of the file. name: name of the tensor. entry: {"dtype", "shape", "data_offsets"}. begin: byte offset in
    the file of the first tensor's data, from which data_offsets count.
    """
    dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(
        isinstance(number, int) and 0 <= number < 2**63 for number in (*shape, first, end)
    ):
        raise ValueError("not a type, a shape and two offsets")
    if len(shape) > MAX_DIMENSIONS:  # the product of a longer one takes time that grows with the square of its length
        raise UserError(f"{file}: tensor {name} has {len(shape):,} dimensions: at most {MAX_DIMENSIONS} are read")
    if dtype not in ELEMENT_TYPES:
        close = nearest(dtype, ELEMENT_TYPES)
        hint = f'; did you mean "{close}"?' if close else ""
        known = ", ".join(ELEMENT_TYPES)
        raise UserError(f'{file}: tensor {name} has the unknown type "{dtype}"{hint} (known: {known})')
    bits = math.prod(shape) * ELEMENT_TYPES[dtype].bits
    if bits != 8 * (end - first):
        raise UserError(
            f"{file}: tensor {name} of shape {list(shape)} and type {dtype} needs {-(-bits // 8):,} bytes, its offsets "
            f"span {end - first:,}"
        )
    return TensorEntry(name, file, dtype, shape, begin + first, end - first)


def _find_model_files(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Find the model files at a path: a model file, an index of shards, or a directory with either; return (files,
    {tensor name: its file} of the index, None without an index). Raises `UserError` if there are none."""
    if path.is_file():
        if path.name.endswith(INDEX_SUFFIXES):
            return _read_index(path)
        if path.suffix not in (".safetensors", ".bin"):
            raise UserError(f"{path}: not a model file; .safetensors, .bin, an index or a directory of these is needed")
        return [path], None
    if not path.is_dir():
        raise UserError(f"{path}: no such file or directory{list_other_steps(path)}")
    names = sorted(os.listdir(path))
    for suffix, pattern in zip(INDEX_SUFFIXES, (".safetensors", ".bin"), strict=True):
        indexes = [path / name for name in names if name.endswith(suffix)]
        if indexes:
            return _read_index(indexes[0])
        found = [path / name for name in names if name.endswith(pattern) and (path / name).is_file()]
        if pattern == ".bin":
            found = [file for file in found if file.name.startswith(("pytorch_model", "adapter_model"))]
        if found:
            return found, None
    raise UserError(f"{path}: has no model: no .safetensors file and no pytorch_model.bin")


def _read_index(index: Path) -> tuple[list[Path], dict[str, Path]]:
    """Read an index of shards (model.safetensors.index.json); return (shard files, {tensor name: its file}). Raises
    `UserError` if it is invalid or a shard is missing."""
    try:
        weight_map = read_json(index)["weight_map"]
        places = {str(name): index.parent / file for name, file in weight_map.items()}
    except OSError as error:
        raise UserError(f"{index}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f'{index}: not an index: one JSON object with a "weight_map" is needed') from None
    files = sorted(set(places.values()))
    held = set(os.listdir(index.parent))
    missing = [file for file in files if file.parent != index.parent or file.name not in held or not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{index}: {missing[0].name[:200]}{more} of its {len(files)} shards is not in the directory")
    return files, places


def _iterate_tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) for each tensor in nested dictionaries; the name consists of the keys on the path to it,
    joined by dots. value: dictionary or tensor. prefix: text before each name."""
    import torch

    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _iterate_tensors(inner, f"{prefix}.{key}" if prefix else str(key))


def _map_torch_dtypes() -> dict[Any, str]:
    """Return {torch dtype: its name in safetensors}, such as "BF16"."""
    import torch

    return {
        torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
        torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    }  # fmt: skip
