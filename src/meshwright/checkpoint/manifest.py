"""The manifest of a checkpoint: sizes and hashes of its files, written last, so that it marks a checkpoint as complete.

Every 64 MiB block has a separate hash, so that a rank verifies just what it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from meshwright.checkpoint.files import open_descriptor
from meshwright.limits import shorten_repr
from meshwright.untrusted import read_json

FORMAT = 1
BLOCK_BYTES = 64 * 2**20
MANIFEST = "manifest.json"
_READ_BYTES = 4 * 2**20


class DamagedCheckpoint(Exception):
    """Error: a checkpoint cannot be used because a file is missing or altered; the message names the file and the
    reason."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Expected size and hashes of a checkpoint file. size: in bytes. sha256: hex digest of the whole file. blocks: hex
    SHA-256 digest of each block of `BLOCK_BYTES` (64 MiB), in order.
    """

    size: int
    sha256: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """List of a checkpoint's files, with hashes. step: optimizer steps done. validation_loss: nats per token at this
    step, None if not measured. files: file name -> expected size and hashes."""

    step: int
    validation_loss: float | None
    files: Mapping[str, FileRecord]

    def to_json(self) -> bytes:
        """Serialize the manifest to JSON, including a SHA-256 of its own content."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "validation_loss": self.validation_loss,
            "block_bytes": BLOCK_BYTES,
            "files": {
                name: {"size": record.size, "sha256": record.sha256, "blocks": list(record.blocks)}
                for name, record in sorted(self.files.items())
            },
        }
        return json.dumps(content | {"manifest_sha256": _hash_content(content)}, indent=1).encode()


def read_manifest(path: Path) -> Manifest:
    """Load the manifest of the checkpoint directory `path`. Raises `DamagedCheckpoint` if it is missing or invalid, or
    if its content does not match the SHA-256 stored in it."""
    try:
        content = read_json(path / MANIFEST, "checkpoint_bytes")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{MANIFEST} is not a JSON object")
    own = content.pop("manifest_sha256", None)
    if content.get("format") != FORMAT:
        found = shorten_repr(content.get("format"))
        raise DamagedCheckpoint(f"{MANIFEST} has format {found}; this version reads format {FORMAT}")
    if own != _hash_content(content) or content.get("block_bytes") != BLOCK_BYTES:
        raise DamagedCheckpoint(f"{MANIFEST} was altered: it does not match its own hash")
    try:
        files = {name: _parse_record(name, record) for name, record in content["files"].items()}
        step, loss = content["step"], content["validation_loss"]
        if type(step) is not int or step < 0 or type(loss) not in (int, float, NoneType):
            raise TypeError("step or validation_loss is not a number")
        return Manifest(step, loss, files)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} does not conform to format {FORMAT}: {error}") from None


def _parse_record(name: str, found: Any) -> FileRecord:
    """Parse the manifest's JSON record (`found`) of the file `name`. Raises `KeyError` for a missing key and
    `TypeError` for an invalid value."""
    size, sha256, blocks = found["size"], found["sha256"], found["blocks"]
    if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
        raise TypeError(f"{name[:80]!r} is not the name of a checkpoint file")
    hashes = [sha256, *blocks] if isinstance(blocks, list) else [None]
    if type(size) is not int or size < 0 or not all(isinstance(each, str) for each in hashes):
        raise TypeError(f"{name[:80]} has no size and hashes")
    if len(blocks) != count_blocks(size):
        raise TypeError(f"{name[:80]} of {size} bytes has {len(blocks)} blocks")
    return FileRecord(size, sha256, tuple(blocks))


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Check the files of the checkpoint directory `path` against its manifest: the size of every file, and the SHA-256
    of every file that is not a tensor file (.safetensors). Raises `DamagedCheckpoint` for a missing file or a
    difference."""
    for name, record in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise DamagedCheckpoint(f"{name} is missing") from None
        if size != record.size:
            raise DamagedCheckpoint(f"{name} has {size} bytes instead of {record.size}")
        if not name.endswith(".safetensors") and _hash_whole(path / name) != record.sha256:
            raise DamagedCheckpoint(f"{name} was altered: its sha256 does not match the manifest")


def check_contents(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Verify the hashes of the files `names` of the checkpoint directory `path` against its manifest, reading every
    byte. Raises `DamagedCheckpoint` for the first file that differs."""
    for name in names:
        if (problem := _find_damage(path, name, manifest.files[name], whole=False)) is not None:
            raise DamagedCheckpoint(problem)


def verify_checkpoint(path: Path | str) -> list[str]:
    """Verify every byte of the checkpoint directory `path` by its hashes; return one line for each problem, an empty
    list if the checkpoint is intact."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as damage:
        return [str(damage)]
    found = (_find_damage(path, name, record, whole=True) for name, record in sorted(manifest.files.items()))
    return [problem for problem in found if problem is not None]


def _find_damage(path: Path, name: str, record: FileRecord, *, whole: bool) -> str | None:
    """Compare the file `name` in the checkpoint directory `path` with `record`, its expected size and block hashes.
    Return the first difference as one line of text; None if there is none.

    whole: True to compare the hash of the whole file too."""
    try:
        if (size := (path / name).stat().st_size) != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
        sha256, found = hash_blocks(path / name, whole, range(len(record.blocks)))
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    wrong = next((index for index, expected in enumerate(record.blocks) if found[index] != expected), None)
    if wrong is not None:
        return f"{name} was altered {_format_block_range(wrong, record.size)}"
    return f"{name} does not match its sha256" if whole and sha256 != record.sha256 else None


def count_blocks(size: int) -> int:
    """Return the number of blocks of `BLOCK_BYTES` (64 MiB) in a file of `size` bytes. The last may be shorter."""
    return -(-size // BLOCK_BYTES)


def hash_file(path: Path, keep_going: Callable[[], None] = lambda: None) -> FileRecord:
    """Compute the size of the file `path`, its SHA-256, and the SHA-256 of each of its blocks, in one pass. keep_going:
    called between reads; it stops the hashing by raising an exception."""
    size = path.stat().st_size
    whole, blocks = hash_blocks(path, True, range(count_blocks(size)), keep_going)
    assert whole is not None
    return FileRecord(size, whole, tuple(blocks[index] for index in range(count_blocks(size))))


def hash_blocks(
    path: Path, whole: bool, blocks: range | list[int], keep_going: Callable[[], None] = lambda: None
) -> tuple[str | None, dict[int, str]]:
    """Compute the hash of the file `path` and of some of its blocks, reading no more of it than needed. Return (hex
    SHA-256 of the whole file, or None unless `whole`; {block number: hex SHA-256} for the block numbers `blocks`).

    keep_going: called between reads; it stops the hashing by raising an exception.
    """
    size = path.stat().st_size
    everything = hashlib.sha256() if whole else None
    wanted = set(blocks)
    found = {}
    with open_descriptor(path, os.O_RDONLY) as descriptor:
        for index in range(count_blocks(size)) if whole else sorted(wanted):
            block = hashlib.sha256()
            for part in _read_chunks(descriptor, index * BLOCK_BYTES, min(size, (index + 1) * BLOCK_BYTES)):
                keep_going()
                if everything is not None and size > BLOCK_BYTES:
                    everything.update(part)
                if index in wanted or size <= BLOCK_BYTES:
                    block.update(part)
            if index in wanted:
                found[index] = block.hexdigest()
            if everything is not None and size <= BLOCK_BYTES:
                return block.hexdigest(), found  # the only block is the whole file
    return (everything.hexdigest() if everything is not None else None), found


def distribute_hashing(sizes: Mapping[str, int], ranks: int) -> list[dict[str, tuple[bool, list[int]]]]:
    """Distribute the hashing of files over `ranks` ranks. Return for each rank {file name: (True if the rank hashes the
    whole file, numbers of the blocks that it hashes)}. sizes: file name -> bytes.

    The hash of a whole file is computed by one rank; the hashes of its blocks may be computed by different ranks. Tasks
    are assigned largest first, each to the rank with the fewest bytes so far.
    """
    tasks: list[tuple[int, str, int]] = []  # bytes, file, block (-1: the whole)
    for name, size in sizes.items():
        tasks.append((size, name, -1))
        if size > BLOCK_BYTES:
            tasks += [(min(BLOCK_BYTES, size - n * BLOCK_BYTES), name, n) for n in range(count_blocks(size))]
    busy = [0] * ranks
    plan: list[dict[str, tuple[bool, list[int]]]] = [{} for _ in range(ranks)]
    for size, name, block in sorted(tasks, key=lambda task: (-task[0], task[1], task[2])):
        rank = busy.index(min(busy))
        busy[rank] += size
        whole, blocks = plan[rank].get(name, (False, []))
        if block < 0:
            plan[rank][name] = (True, blocks if sizes[name] > BLOCK_BYTES else list(range(count_blocks(sizes[name]))))
        else:
            plan[rank][name] = (whole, [*blocks, block])
    return plan


def _read_chunks(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of an open file (`descriptor`) in reads of at most `_READ_BYTES`."""
    while start < stop:
        part = os.pread(descriptor, min(_READ_BYTES, stop - start), start)
        if not part:
            return  # truncated during the read: the hash will not match
        start += len(part)
        yield part


def _format_block_range(block: int, size: int) -> str:
    """Return the byte range of block number `block` (from 0) in a file of `size` bytes as text for messages."""
    return f"between bytes {block * BLOCK_BYTES} and {min((block + 1) * BLOCK_BYTES, size)}"


def _hash_whole(path: Path) -> str:
    """Return the hex SHA-256 of the whole file `path`. Raises `DamagedCheckpoint` if it cannot be read."""
    try:
        return hash_blocks(path, True, [])[0] or ""
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror}") from None


def _hash_content(content: Any) -> str:
    """Return the hex SHA-256 of the content of a manifest (list of a checkpoint's files): a JSON value, without the key
    under which this hash is stored."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
