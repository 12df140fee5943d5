"""Crash-safe files: written completely, flushed to disk, renamed into place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK_BYTES = 16 * 2**20
"""Bytes written between two calls of `keep_going`; below the 2 GiB limit of one system call."""


def write_at(descriptor: int, data: memoryview, offset: int, keep_going: Callable[[], None] = lambda: None) -> None:
    """Write all of `data` to the open file `descriptor` at byte offset `offset`, in chunks. keep_going: called between
    chunks; it stops the write by raising an exception."""
    written = 0
    while written < len(data):
        keep_going()
        written += os.pwrite(descriptor, data[written : written + CHUNK_BYTES], offset + written)


@contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """Context manager that opens the file `path` with the flags of `os.open` and yields its file descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to the file `path` (replacing its content) and flush it to disk."""
    with open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        write_at(descriptor, memoryview(data), 0)
        os.fsync(descriptor)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace the content of the file at `path` with `data` atomically: readers see either the old or the new content,
    even after a crash. sync: True: also flush the file to disk."""
    fresh = path.with_name(f".{path.name.lstrip('.')}.new-{os.getpid()}")
    try:
        with open_descriptor(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            write_at(descriptor, memoryview(data), 0)
            if sync:
                os.fsync(descriptor)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush the directory `path` to disk (fsync), so that created, removed and renamed entries survive a power
    failure."""
    with open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def to_json_bytes(value: Any) -> bytes:
    """Serialize `value` to indented JSON."""
    return (json.dumps(value, indent=1) + "\n").encode()
