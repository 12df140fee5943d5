"""Optuna's journal storage in one file, `journal.jsonl`, locked by flock, which ends with the process that holds it.
Free of torch."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError, error_reason
from meshwright.untrusted import parse_json

if TYPE_CHECKING:
    from optuna.storages import JournalStorage


def lock_file(path: Path, *, wait: bool) -> int | None:
    """Lock the file `path` by flock, and create it if it is missing. Return a file descriptor; closing it unlocks the
    file. wait: True: wait while another process holds the lock; False: return None in this case. Raises `UserError` if
    the file cannot be written or locked."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"study directory {path.parent} cannot be written: {error_reason(error)}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        reason = f"{error_reason(error)}; its file system has to support flock"
        raise UserError(f"study directory {path.parent} cannot be locked: {reason}") from None
    return descriptor


def open_journal(path: Path) -> JournalStorage:
    """Open Optuna's journal in the file `path`, which is created if it is missing.

    Each record is appended as a whole line. An incomplete last line, which a full disk or a killed host left, is
    removed first, and a failing write is undone. Raises `UserError` if the file cannot be read or written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Backend(JournalFileBackend):
        """Journal file whose appends are whole lines."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            """Append records, one line for each."""
            lock = lock_file(path.with_suffix(".lock"), wait=True)
            assert lock is not None
            try:
                with path.open("rb+") as file:
                    _repair_last_line(file, path)
                    size = file.seek(0, os.SEEK_END)
                    try:
                        file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())
                        file.flush()
                        os.fsync(file.fileno())
                    except OSError:
                        file.truncate(size)
                        raise
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error_reason(error)}") from None
            finally:
                os.close(lock)

    try:
        return JournalStorage(Backend(str(path)))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the journal of a study: {error}") from None


def _repair_last_line(file: Any, path: Path) -> None:
    """Remove the last line of the open binary `file` if it lacks its newline; the next record would be appended to it.
    path: the file's path, for the error. Raises `UserError`, and leaves the file as it is, if the last line that would
    remain is no record: Optuna skips it while it is the last, and could read no record appended after it."""
    end = file.seek(0, os.SEEK_END)
    start = max(0, end - (1 << 20))
    file.seek(start)
    tail = file.read()
    size = tail.rfind(b"\n") + 1
    _, newline, last = tail[: size - 1].rpartition(b"\n") if size else (b"", b"", b"{}")
    if newline or not start:  # else the line begins before `tail`
        try:
            valid = isinstance(parse_json(last), dict)
        except ValueError:
            valid = False
        if not valid:
            raise UserError(f"{path} is not the journal of a study: its last line is no record")
    if size < len(tail):
        file.truncate(start + size)
