"""Files that are whole or not there: written beside their place, synced, renamed. Locks that die with their owner."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from meshwright import untrusted

PARTIAL = ".partial-"  # a name that starts so does not count, and is removed by whoever prepares next
_BLOCK = 1 << 20


def canonical_json(value: Any) -> bytes:
    """The one text of a JSON value: sorted keys, no spaces, plain ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WholeFile:
    """A file that appears under its name, complete and on disk, by `finish`. Left before that, it never was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
        self._file = self._partial.open("wb", buffering=_BLOCK)
        self._digest = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            with suppress(OSError):  # of a full disk, said already by the write that failed
                self._file.close()
            self._partial.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> dict[str, Any]:
        """Sync and rename; returns `{"bytes", "sha256"}`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def write_whole(path: Path, data: bytes) -> dict[str, Any]:
    """Write `data` to `path` whole or not at all; returns `{"bytes", "sha256"}`."""
    with WholeFile(path) as file:
        file.write(data)
        return file.finish()


def write_array(file: WholeFile, array: NDArray[Any]) -> None:
    """Write an array of one axis as .npy, a block at a time: it may be larger than memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    file.write(header.getvalue())
    for begin in range(0, len(array), _BLOCK):
        file.write(array[begin : begin + _BLOCK].tobytes())


def read_json(path: Path) -> Any | None:
    """What the JSON file holds, or None when there is no such file or it is damaged."""
    try:
        return untrusted.read_json(path, "checkpoint_bytes")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def damage(path: Path, said: dict[str, Any], contents: bool) -> str | None:
    """What is wrong with a file of which `said` = `{"bytes", "sha256"}` was noted, or None. `contents`: reads it."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    if size != said["bytes"]:
        return f"holds {size:,} bytes instead of {said['bytes']:,}"
    if contents and sha256_of_file(path) != said["sha256"]:
        return "is damaged (its sha256 differs)"
    return None


@contextmanager
def only_process(path: Path, log: Callable[[str], None], doing: str) -> Iterator[None]:
    """Hold the lock file at `path`; while another process does, say so and wait. The kernel frees a dead one's."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            log(f"waiting for process {holder}, which is {doing}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
