"""training/: float32 masters and optimizer state as slices with global offsets. Every rank writes a file of its own;
one index says what lies where, so that any layout reads just the intersections it needs."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.model.parameters import ParameterTable
from meshwright.train.checkpoint.files import json_bytes
from meshwright.train.checkpoint.manifest import Damaged
from meshwright.train.checkpoint.model_files import ITEM_BYTES

INDEX = "training/index.json"


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of the row `name`, flat in engine orientation, of one kind ("master", "exp_avg" ...).

    They lie in `file` from byte `offset` on, as safetensors dtype `code`.
    """

    kind: str
    name: str
    start: int
    stop: int
    code: str
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Read:
    """Elements to read: bytes [offset, offset + count * item) of a file go to element `start` of piece `piece`."""

    offset: int
    count: int
    code: str
    piece: int
    start: int


def slice_file(rank: int, ranks: int) -> str:
    """The file that a rank writes."""
    return f"training/rank-{rank:05d}-of-{ranks:05d}.safetensors"


def tensor_name(kind: str, name: str, start: int, stop: int) -> str:
    """The name of a slice inside its safetensors file."""
    return f"{kind}:{name}[{start}:{stop}]"


def write_index(slices: Iterable[Slice]) -> bytes:
    """The index of all ranks' slices as text."""
    files: dict[str, list[Any]] = {}
    for part in slices:
        files.setdefault(part.file, []).append([part.kind, part.name, part.start, part.stop, part.code, part.offset])
    return json_bytes({"format": 1, "columns": ["kind", "name", "start", "stop", "dtype", "offset"], "files": files})


def read_index(path: Path) -> list[Slice]:
    """The slices of the checkpoint directory `path`. Raises `Damaged`."""
    try:
        files = json.loads((path / INDEX).read_bytes())["files"]
        return [
            Slice(kind, name, start, stop, code, file, offset)
            for file, rows in files.items()
            for kind, name, start, stop, code, offset in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{INDEX} cannot be read: {error}") from None


def check_coverage(table: ParameterTable, slices: Iterable[Slice]) -> None:
    """Every kind of state holds every element of every row once: a hole is a fault of ours, found before it counts."""
    parts: dict[str, dict[str, list[tuple[int, int]]]] = {"master": {}}
    for part in slices:
        parts.setdefault(part.kind, {}).setdefault(part.name, []).append((part.start, part.stop))
    for kind, by_name in parts.items():
        unknown = by_name.keys() - {row.name for row in table.rows}
        assert not unknown, f"{kind}: no such rows in the table: {sorted(unknown)}"
        for row in table.rows:
            reached = 0
            for start, stop in sorted(by_name.get(row.name, [])):
                assert start == reached, f"{kind} of {row.name}: {min(start, reached)} to {max(start, reached)}"
                reached = stop
            assert reached == row.numel, f"{kind} of {row.name}: {reached} of {row.numel} elements"


def plan_reads(slices: Sequence[Slice], wanted: Sequence[tuple[str, str, int, int]]) -> dict[str, list[Read]]:
    """What to read from which file for the wanted (kind, name, start, stop). Raises `Damaged` when something is in no
    file."""
    by_row: dict[tuple[str, str], list[Slice]] = {}
    for part in sorted(slices, key=lambda part: part.start):
        by_row.setdefault((part.kind, part.name), []).append(part)
    reads: dict[str, list[Read]] = {}
    for number, (kind, name, start, stop) in enumerate(wanted):
        parts = by_row.get((kind, name), [])
        reached = start
        index = max(0, bisect.bisect_right(parts, start, key=lambda part: part.start) - 1)
        while reached < stop and index < len(parts):
            part = parts[index]
            low, high = max(reached, part.start), min(stop, part.stop)
            if low > reached:
                break
            if low < high:
                offset = part.offset + (low - part.start) * ITEM_BYTES[part.code]
                reads.setdefault(part.file, []).append(Read(offset, high - low, part.code, number, low - start))
                reached = high
            index += 1
        if reached < stop:
            raise Damaged(f"it holds no {kind} of {name} from element {reached} to {stop}")
    return reads


def kinds(slices: Iterable[Slice]) -> set[str]:
    """The kinds of state there are."""
    return {part.kind for part in slices}


def blocks_of(reads: Iterable[Read], block_bytes: int) -> Mapping[int, list[tuple[Read, int, int, int]]]:
    """The reads cut at block boundaries: block -> (read, first element of the read, elements, byte in the block)."""
    cut: dict[int, list[tuple[Read, int, int, int]]] = {}
    for read in reads:
        item, done = ITEM_BYTES[read.code], 0
        while done < read.count:
            block, inside = divmod(read.offset + done * item, block_bytes)
            count = min(read.count - done, (block_bytes - inside) // item)
            assert count, "an element lies across two blocks"  # data begin at multiples of 8 bytes, largest items first
            cut.setdefault(block, []).append((read, done, count, inside))
            done += count
    return cut
