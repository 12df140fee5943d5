"""Temporary directories for the file-store rendezvous of local ranks; those of killed launchers are removed. Free of
torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "meshwright-rendezvous-"
UNLOCKED_PREFIX = "meshwright-new-rendezvous-"
"""Name prefix of a directory between its creation and its lock, which take far less than `UNLOCKED_SECONDS`."""
UNLOCKED_SECONDS = 60.0


@contextmanager
def create_rendezvous_directory() -> Iterator[Path]:
    """Context manager that creates a locked temporary directory for the file through which the ranks of this machine
    find each other, and yields its path; removed on exit, or by the next launcher if this one is killed."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    fresh = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX))
    lock = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # It is locked before it has its name.
    place = fresh.rename(fresh.with_name(PREFIX + fresh.name.removeprefix(UNLOCKED_PREFIX)))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's rendezvous directories in `parent` that no process has locked."""
    for place in [*parent.glob(f"{PREFIX}*"), *parent.glob(f"{UNLOCKED_PREFIX}*")]:
        with suppress(OSError):  # owned by another user, or removed by another launcher
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(lock)
                unfinished = place.name.startswith(UNLOCKED_PREFIX) and time.time() - found.st_mtime < UNLOCKED_SECONDS
                if found.st_uid == os.getuid() and not unfinished:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)
