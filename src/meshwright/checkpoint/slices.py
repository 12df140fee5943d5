"""Slices of training/: fp32 master weights and optimizer state with global offsets, one file per rank, and their index.

A slice is a range of a flattened parameter entry as the model stores it, or of some of its columns (the shard of a
row-parallel matrix under tensor parallelism). Any layout reads just the intersections that it needs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import to_json_bytes
from meshwright.checkpoint.manifest import DamagedCheckpoint
from meshwright.checkpoint.model_files import ITEM_BYTES
from meshwright.parallel.flat_buffers import Columns
from meshwright.spec.parameters import ParameterTable
from meshwright.untrusted import read_json

INDEX = "training/index.json"


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Location on disk of a slice of the training state: elements [start, stop) of the flattened tensor `name`. A
    matrix is flattened row-major as [outputs, inputs]; with `columns`, a range of inputs, only these columns are
    flattened.

    kind: "master" (fp32 master weights), "exp_avg", "exp_avg_sq" or "momentum". file: file name. offset: byte of the
    file at which the elements begin. code: safetensors dtype of the elements, such as "F32".
    """

    kind: str
    name: str
    start: int
    stop: int
    code: str
    file: str
    offset: int
    columns: Columns | None = None


@dataclass(frozen=True, slots=True)
class MatrixRange:
    """Range of elements of a matrix: elements [start, stop) of its columns [first, first + width), flattened row-major.
    All indices count from 0.
    """

    start: int
    stop: int
    first: int
    width: int

    def to_rectangles(self) -> list[tuple[int, int, int, int]]:
        """Decompose the range into at most three rectangles of the matrix: the end of its first row, full rows, and the
        start of its last row. Return (first row, end row, first column, end column) of each rectangle, with exclusive
        ends."""
        begin, head = divmod(self.start, self.width)
        end, tail = divmod(self.stop, self.width)
        if begin == end:
            found = [(begin, begin + 1, head, tail)]
        else:
            found = [(begin, begin + 1, head, self.width)] if head else []
            found += [(begin + bool(head), end, 0, self.width), (end, end + 1, 0, tail)]
        return [
            (top, bottom, self.first + left, self.first + right)
            for top, bottom, left, right in found
            if top < bottom and left < right
        ]

    def index_of(self, row: int, column: int) -> int:
        """Return the index within this range of the matrix element at (row, column); 0 for the range's first
        element."""
        return row * self.width + column - self.first - self.start


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """Planned read of consecutive elements of a checkpoint file, from which one slice is filled completely or in part.

    offset: byte of the file at which the read begins. code: safetensors dtype of the elements, such as "F32".
    destination: index of the slice to fill. source: elements of the matrix that the read covers. wanted: elements of
    the matrix that the slice holds. Elements that are in both ranges are copied.
    """

    offset: int
    code: str
    destination: int
    source: MatrixRange
    wanted: MatrixRange

    @property
    def count(self) -> int:
        """Number of elements that this read takes from the file."""
        return self.source.stop - self.source.start

    def subrange(self, first: int, count: int) -> MatrixRange:
        """Return the range of the matrix that a part of this read covers: `count` elements, beginning with element
        number `first` (from 0) of the read."""
        start = self.source.start + first
        return MatrixRange(start, start + count, self.source.first, self.source.width)


def format_slice_file_name(rank: int, ranks: int) -> str:
    """Return the name of the file with the slices of the training state that rank `rank` of `ranks` saves, such as
    "training/rank-00001-of-00004.safetensors"."""
    return f"training/rank-{rank:05d}-of-{ranks:05d}.safetensors"


def format_slice_tensor_name(kind: str, name: str, start: int, stop: int, columns: Columns | None = None) -> str:
    """Return the name of a slice as a tensor in a safetensors file: "exp_avg:model.norm.weight[0:64]", or with columns
    "exp_avg:NAME[:, 8:16][0:64]".

    kind: "master" or an optimizer state such as "exp_avg". name: name of the exported tensor. start, stop: range of its
    flattened elements. columns: range of input columns; if given, only these columns of the matrix are flattened.
    """
    of = "" if columns is None else f"[:, {columns.start}:{columns.stop}]"
    return f"{kind}:{name}{of}[{start}:{stop}]"


def serialize_index(slices: Iterable[StoredSlice]) -> bytes:
    """Serialize to JSON the index of a checkpoint's training state, which lists where each slice is stored. slices:
    locations of all ranks' slices."""
    files: dict[str, list[Any]] = {}
    for part in slices:
        entry = [part.kind, part.name, part.start, part.stop, part.code, part.offset, *(part.columns or ())]
        files.setdefault(part.file, []).append(entry)
    entries = ["kind", "name", "start", "stop", "dtype", "offset", "first column", "end column", "of columns"]
    return to_json_bytes({"format": 1, "columns": entries, "files": files})


def read_index(path: Path) -> list[StoredSlice]:
    """Load the index of the training state in the checkpoint directory `path`, which lists where each slice is stored;
    return the locations of all slices. Raises `DamagedCheckpoint`."""
    try:
        files = read_json(path / INDEX, "checkpoint_bytes")["files"]
        return [_parse_slice(file, *row) for file, rows in files.items() for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{INDEX} cannot be read: {error}") from None


def _parse_slice(
    file: str, kind: str, name: str, start: int, stop: int, code: str, offset: int, *columns: int
) -> StoredSlice:
    """Build a `StoredSlice` from one entry of the JSON index that lists where each slice is stored.

    columns: empty, or (first column, end column (exclusive), number of columns of the matrix); all other arguments are
    the fields of `StoredSlice` with the same names. Raises `ValueError` for invalid values.
    """
    part = StoredSlice(kind, name, start, stop, code, file, offset, Columns(*columns) if columns else None)
    first, end, of = part.columns or (0, 1, 1)
    texts, numbers = (kind, name, code), (start, stop, offset, first, end, of)
    if not all(isinstance(each, str) for each in texts) or not all(type(each) is int for each in numbers):
        raise ValueError(f"an entry of {file[:80]} has wrong types")
    if code not in ITEM_BYTES:
        raise ValueError(f'an entry of {file[:80]} has dtype "{code[:20]}"; known: {", ".join(ITEM_BYTES)}')
    if not (0 <= start <= stop and 0 <= first < end <= of and offset >= 0 and offset % ITEM_BYTES[code] == 0):
        raise ValueError(f"an entry of {file[:80]} has an invalid range or offset")
    return part


def check_bounds(slices: Iterable[StoredSlice], sizes: Mapping[str, int]) -> None:
    """Raise `DamagedCheckpoint` if one of `slices` ends beyond the end of its file. sizes: bytes by file name."""
    for part in slices:
        if part.file not in sizes:
            raise DamagedCheckpoint(f"{part.file[:80]} is not in the manifest")
        if part.offset + (part.stop - part.start) * ITEM_BYTES[part.code] > sizes[part.file]:
            raise DamagedCheckpoint(f"{INDEX} has a slice beyond the {sizes[part.file]} bytes of {part.file}")


def check_coverage(table: ParameterTable, slices: Iterable[StoredSlice]) -> None:
    """Raise `AssertionError` unless, for each kind of state (master weights, and each optimizer state such as
    "exp_avg"), the slices cover every element of every tensor of `table` exactly once. Buffers and frozen parameters
    need slices of the kind "master" only."""
    parts: dict[str, dict[str, list[StoredSlice]]] = {"master": {}}
    for part in slices:
        parts.setdefault(part.kind, {}).setdefault(part.name, []).append(part)
    for kind, by_name in parts.items():
        unknown = by_name.keys() - {entry.name for entry in table.entries}
        assert not unknown, f"{kind}: no such entries in the table: {sorted(unknown)}"
        for entry in table.entries:
            if kind != "master" and entry.kept is not None:
                continue  # frozen
            found = by_name.get(entry.name, [])
            width = next((part.columns.total for part in found if part.columns), entry.numel)
            column = 0  # column ranges are adjacent, and within each the element ranges are
            for columns in sorted({part.columns or Columns(0, width, width) for part in found}):
                assert columns.start == column, f"{kind} of {entry.name}: columns {column} to {columns.start}"
                column, reached = columns.stop, 0
                for part in sorted(found, key=lambda part: part.start):
                    if (part.columns or Columns(0, width, width)) == columns:
                        low, high = sorted((part.start, reached))
                        assert low == high, f"{kind} of {entry.name}: {low} to {high}"
                        reached = part.stop
                size = entry.numel // width * columns.width
                assert reached == size, f"{kind} of {entry.name}: {reached} of {size} elements"
            assert column == width, f"{kind} of {entry.name}: {column} of {width} columns"


def plan_reads(
    slices: Sequence[StoredSlice], wanted: Sequence[tuple[str, str, int, int, Columns | None]]
) -> dict[str, list[PlannedRead]]:
    """Plan the reads that load slices of the training state from a checkpoint's files; return file name -> reads.

    slices: locations of the stored slices. wanted: each slice to load, as (kind, name, start, stop, columns), with the
    same meaning as the fields of `StoredSlice`. Raises `DamagedCheckpoint` if a wanted element is in no file.
    """
    by_entry: dict[tuple[str, str], dict[Columns | None, list[StoredSlice]]] = {}
    for part in sorted(slices, key=lambda part: part.start):
        by_entry.setdefault((part.kind, part.name), {}).setdefault(part.columns, []).append(part)
    reads: dict[str, list[PlannedRead]] = {}
    for number, (kind, name, start, stop, columns) in enumerate(wanted):
        found = 0
        for others, parts in by_entry.get((kind, name), {}).items():
            source, target = _align_columns(others, columns)
            destination = MatrixRange(start, stop, *target)
            # Matrix rows of the destination as element range of the stored slices; exact if both have the same columns.
            begin, end = start // target[1] * source[1], -(-stop // target[1]) * source[1]
            index = max(0, bisect.bisect_right(parts, begin, key=lambda part: part.start) - 1)
            while index < len(parts) and parts[index].start < end:
                part = parts[index]
                index += 1
                low, high = max(begin, part.start), min(end, part.stop)
                if low < high:
                    offset = part.offset + (low - part.start) * ITEM_BYTES[part.code]
                    read = PlannedRead(offset, part.code, number, MatrixRange(low, high, *source), destination)
                    boxes = intersect_ranges(read.source, destination)
                    common = sum((bottom - top) * (right - left) for top, bottom, left, right in boxes)
                    if common:
                        found += common
                        reads.setdefault(part.file, []).append(read)
        if found != stop - start:
            raise DamagedCheckpoint(
                f"it holds {found} of the {stop - start} elements of {kind} of {name} from {start} to {stop}"
            )
    return reads


def intersect_ranges(a: MatrixRange, b: MatrixRange) -> list[tuple[int, int, int, int]]:
    """Intersect two ranges, `a` and `b`, of the elements of one matrix; return the common elements as rectangles (first
    row, end row, first column, end column) with exclusive ends."""
    found = []
    for top, bottom, left, right in a.to_rectangles():
        for above, below, from_, to in b.to_rectangles():
            box = max(top, above), min(bottom, below), max(left, from_), min(right, to)
            if box[0] < box[1] and box[2] < box[3]:
                found.append(box)
    return found


def _align_columns(a: Columns | None, b: Columns | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first column, width), the arguments of `MatrixRange`, for each of the column ranges `a` and `b` of one
    matrix (None: all columns). If the two ranges are equal, return (0, 1) twice: the elements of both can then be
    compared by flattened index, as if the matrix had one column.
    """
    if a == b:
        return (0, 1), (0, 1)
    total = (a or b or Columns(0, 1, 1)).total
    (first_a, end_a, _), (first_b, end_b, _) = a or (0, total, total), b or (0, total, total)
    return (first_a, end_a - first_a), (first_b, end_b - first_b)


def list_kinds(slices: Iterable[StoredSlice]) -> set[str]:
    """Return the kinds of training state in the slices, such as {"master", "exp_avg"}."""
    return {part.kind for part in slices}


def split_reads(
    reads: Iterable[PlannedRead], block_bytes: int
) -> Mapping[int, list[tuple[PlannedRead, int, int, int]]]:
    """Split the reads of one file at the boundaries of its blocks of `block_bytes` bytes. Return {block number: list of
    tuples}, one tuple for each part of a read: (read, index in the read of the part's first element, number of
    elements, byte in the block at which the part begins).
    """
    cut: dict[int, list[tuple[PlannedRead, int, int, int]]] = {}
    for read in reads:
        item, done = ITEM_BYTES[read.code], 0
        while done < read.count:
            block, inside = divmod(read.offset + done * item, block_bytes)
            count = min(read.count - done, (block_bytes - inside) // item)
            assert count, "an element spans two blocks"  # data are aligned to 8 bytes, widest dtypes first
            cut.setdefault(block, []).append((read, done, count, inside))
            done += count
    return cut
