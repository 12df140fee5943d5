"""Temporary directories for the file-store rendezvous of local ranks; those of killed launchers are removed. Free of
torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "meshwright-rendezvous-"


@contextmanager
def rendezvous_directory() -> Iterator[Path]:
    """Create a locked temporary directory for the file-store rendezvous; removed on exit, or by the next launcher
    if this one is killed."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    fresh = Path(tempfile.mkdtemp(prefix="meshwright-"))
    lock = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    place = fresh.rename(
        fresh.with_name(PREFIX + fresh.name.removeprefix("meshwright-"))
    )  # locked before it has its name
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the rendezvous directories of this user that no process has locked."""
    for place in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, or removed by another launcher
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)
