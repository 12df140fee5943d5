"""Files that survive a crash: written whole, flushed to the disk, renamed into place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK_BYTES = 16 * 2**20
"""Bytes written between two looks at whether to go on; also below the 2 GiB that one system call takes."""


def write_at(descriptor: int, data: memoryview, offset: int, keep_going: Callable[[], None] = lambda: None) -> None:
    """Write all of `data` (bytes) at `offset`; `keep_going` is called between chunks and may raise."""
    written = 0
    while written < len(data):
        keep_going()
        written += os.pwrite(descriptor, data[written : written + CHUNK_BYTES], offset + written)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor that is closed at the end."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        write_at(descriptor, memoryview(data), 0)
        os.fsync(descriptor)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Put `data` at `path` so that a reader sees the old file or the new one, never a part; a crash as well."""
    fresh = path.with_name(f".{path.name.lstrip('.')}.new-{os.getpid()}")
    try:
        with opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
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
    """Flush a directory, so that names made, removed or changed in it survive a crash of the machine."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def json_bytes(value: Any) -> bytes:
    """`value` as readable JSON."""
    return (json.dumps(value, indent=1) + "\n").encode()


def in_units(size: float) -> str:
    """Bytes for a person: `12.3 MiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
