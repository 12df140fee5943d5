"""Write and read bandwidth of the disk that holds a directory."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_PIECE = 2**22


def measure_disk(directory: Path, size: int) -> tuple[float, float] | None:
    """Measure the disk's bandwidth on a temporary file of `size` bytes in `directory`; return (write, read) in bytes
    per second, None if the file cannot be created or written.

    Writing includes fsync; before reading, the kernel is asked to drop the file from the page cache.
    """
    piece = os.urandom(min(_PIECE, size))
    pieces = max(1, size // len(piece))
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            begun = time.perf_counter()
            for _ in range(pieces):
                file.write(piece)
            os.fsync(file.fileno())
            written = time.perf_counter() - begun
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begun = time.perf_counter()
            while file.read(_PIECE):
                pass
            read = time.perf_counter() - begun
    except OSError:
        return None
    total = pieces * len(piece)
    return total / written, total / read
