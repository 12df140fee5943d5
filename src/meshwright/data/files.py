"""Atomic file writes (temporary name, fsync, rename), checks of recorded files, and lock files."""

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

PARTIAL = ".partial-"  # prefix of unfinished files, which the next preparation removes
_BLOCK = 1 << 20


def to_canonical_json(value: Any) -> bytes:
    """Serialize a JSON value to canonical bytes for hashing: sorted keys, no spaces, ASCII. Equal values give equal
    bytes.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def hash_file(path: Path) -> str:
    """Return the hex SHA-256 of the contents of the file `path`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Fsync `directory`, so that renames inside it survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicFile:
    """Context manager that writes a file atomically: under a temporary name in the same directory, until `finish`
    renames it to `path`. Without `finish` the temporary file is deleted when the context exits."""

    def __init__(self, path: Path) -> None:
        """Open a temporary file next to `path`, the final name."""
        self.path = path
        self._partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
        self._file = self._partial.open("wb", buffering=_BLOCK)
        self._digest = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> Self:
        """Return the file, open for writing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close and delete the temporary file unless `finish` was called."""
        if not self._file.closed:
            with suppress(OSError):  # a full disk, which the failed write has reported
                self._file.close()
            self._partial.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data` to the file and to its running SHA-256."""
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> dict[str, Any]:
        """Fsync the file and rename it to its final name; returns {"bytes": size, "sha256": hex digest}."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def write_atomic(path: Path, data: bytes) -> dict[str, Any]:
    """Write `data` to the file `path` atomically (temporary name, fsync, rename); returns {"bytes": size, "sha256": hex
    digest}.
    """
    with AtomicFile(path) as file:
        file.write(data)
        return file.finish()


def try_write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to the cache file `path` atomically, creating its directory. An `OSError`, such as a full
    disk, is ignored: the file only saves time, and nothing depends on it.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_canonical_json(value))


def write_array(file: AtomicFile, array: NDArray[Any]) -> None:
    """Write a 1-D array to `file` in .npy format, one block at a time, so that a memory-mapped array may be larger than
    main memory. The caller then calls `file.finish`.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    file.write(header.getvalue())
    for begin in range(0, len(array), _BLOCK):
        file.write(array[begin : begin + _BLOCK].tobytes())


def read_json(path: Path) -> Any | None:
    """Load the JSON file `path`; returns the parsed value, or None if the file does not exist or is not valid JSON."""
    try:
        return untrusted.read_json(path, "checkpoint_bytes")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def find_damage(path: Path, recorded: dict[str, Any], contents: bool) -> str | None:
    """Compare the file `path` with the size and digest recorded when it was written; returns the difference as a clause
    (such as "is missing"), or None if size and digest are as recorded.

    recorded: {"bytes": size, "sha256": hex digest}. contents: True: compare the SHA-256 too, which reads the whole
    file; False: compare the size alone.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    if size != recorded["bytes"]:
        return f"has {size:,} bytes instead of {recorded['bytes']:,}"
    if contents and hash_file(path) != recorded["sha256"]:
        return "is damaged (its sha256 differs)"
    return None


@contextmanager
def hold_lock(path: Path, log: Callable[[str], None], doing: str) -> Iterator[None]:
    """Context manager that holds an exclusive lock (flock) on the file `path`, which is created if needed. If another
    process holds the lock, one line is passed to `log`, and the call waits.

    doing: activity of the lock's holder, for that line, such as "preparing the same data". The kernel releases the lock
    of a process that dies.
    """
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
