"""File lock for measurements of this machine: one process measures at a time, and others wait. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.errors import UserError
from meshwright.machine import profile_directory

LOCK_SECONDS = 120.0
"""Seconds to wait for another process that measures, which may have been stopped."""


@contextmanager
def measurement_lock(log: Callable[[str], None], seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold an exclusive file lock inside the context, so that only one process measures this machine at a time.

    log: function that is called with a line of text while waiting for another process. Raises `UserError` after
    `seconds` of waiting, `OSError` if the directory is not writable.
    """
    import fcntl

    path = profile_directory() / "measuring.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = None
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline is None:
                    deadline = time.monotonic() + seconds
                    log("waiting for another start that measures this machine")
                elif time.monotonic() > deadline:
                    raise UserError(f"another start still holds {path} after {seconds:.0f} s") from None
                time.sleep(0.1)
        yield
