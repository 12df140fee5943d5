"""Lock of a directory that one run writes at a time: the file `.lock` in it, held by flock. Free of torch."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import UserError, error_reason
from meshwright.untrusted import parse_json

LOCK = ".lock"
PATIENCE_SECONDS = 1.0
"""Time limit of a start for ranks that were just killed to exit."""
ORPHAN_SECONDS = 10.0
"""Time limit for the children of a killed holder to exit: `DataLoader` workers check for their parent every 5 s."""
RESTART_SECONDS = 120.0
"""Time limit of a restart: a network file system keeps the lock of a lost host for its lease time, often 90 s."""
RESTART_COUNTERS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Environment variables in which torchrun and SLURM count the restarts of a run."""


class DirectoryLock:
    """Exclusive lock of a directory. It is held until `release`, or until this process and all children that inherited
    it have ended; the kernel (or the server of a network file system) then releases it.

    path: an existing directory. what: name of the directory in errors, such as "run directory". advice: what the user
    can do instead of waiting, for the error. Raises `UserError` if another process holds the lock or the directory is
    not writable.

    The lock is an flock on a file in the directory, which stays there unless `discard` removes it. The content of this
    file, the process id, is used in error messages only.
    """

    def __init__(self, path: Path, what: str, advice: str) -> None:
        self.path, self.what, self.advice = path, what, advice
        self.descriptor = self._take()
        while os.fstat(self.descriptor).st_nlink == 0:  # `discard` removed the file while this process waited for it
            os.close(self.descriptor)
            self.descriptor = self._take()

    def _take(self) -> int:
        """Create, open and lock the lock file; return its file descriptor. Raises `UserError`."""
        path, what = self.path, self.what
        try:
            path.mkdir(exist_ok=True)
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(f"{what} {path} cannot be written: {error_reason(error)}") from None
        failed = "locked"
        try:
            if not _try_lock(descriptor):
                user = _read_holder(descriptor)
                raise UserError(f"{what} {path} is in use by {user}; wait until that run has ended, {self.advice}")
            failed = "written"  # fails on a full disk
            holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            advice = "; its file system has to support flock" if failed == "locked" else ""
            raise UserError(f"{what} {path} cannot be {failed}: {error_reason(error)}{advice}") from None
        except UserError:
            os.close(descriptor)
            raise
        return descriptor

    def release(self) -> None:
        """Release the lock, so that another run can use the directory. Must be called only once."""
        os.close(self.descriptor)

    def discard(self) -> None:
        """Remove the directory if it holds nothing but the lock file, and release the lock. Must be called only once,
        instead of `release`."""
        with suppress(OSError):
            if os.listdir(self.path) == [LOCK]:
                os.unlink(self.path / LOCK)
                os.rmdir(self.path)
        self.release()


def _try_lock(descriptor: int) -> bool:
    """Try repeatedly to take an exclusive flock on the open file `descriptor`; return True on success, False on
    timeout.

    The time limit is `RESTART_SECONDS` if torchrun or SLURM has restarted this run; else `ORPHAN_SECONDS` if the
    process named in the lock file has ended (its children may still hold the lock); else `PATIENCE_SECONDS`.
    """
    restarted = any(os.environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTERS)
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            limit = ORPHAN_SECONDS if _has_holder_ended(descriptor) else PATIENCE_SECONDS
            if time.monotonic() - begun > (RESTART_SECONDS if restarted else limit):
                return False
            time.sleep(0.02)


def _has_holder_ended(descriptor: int) -> bool:
    """Return True if the lock file open as `descriptor` names a process of this host that has ended."""
    try:
        holder: Any = parse_json(os.pread(descriptor, 4096, 0))
        if holder["host"] == socket.gethostname():
            os.kill(holder["process"], 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        pass  # another user's process, or an unreadable lock file
    return False


def _read_holder(descriptor: int) -> str:
    """Describe the process that holds the lock (id, host, since when), as written in the lock file open as
    `descriptor`."""
    try:
        holder: Any = parse_json(os.pread(descriptor, 4096, 0))
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another run"
