"""Directory of a run: a lock for one run at a time, its files, and the process ids of its ranks. Free of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.checkpoint.directory_lock import LOCK, DirectoryLock
from meshwright.checkpoint.files import replace_file, to_json_bytes
from meshwright.errors import UserError, error_reason
from meshwright.untrusted import parse_json, read_json

RANKS = "ranks.json"
METRICS = "metrics.jsonl"
RECIPE = "recipe.resolved.toml"
RESULT = "result.json"
TRACKERS = "trackers.json"
LOST = "rank-lost.txt"
CHECKPOINTS = "checkpoints"


class RunDirectory:
    """Directory of one run: paths and content of its files, and its lock. path: the directory, which need not exist
    yet.

    Every process of a run creates one object; only one process locks the directory (the launcher, or rank 0 if
    torchrun, Kubernetes or SLURM started the ranks).
    """

    def __init__(self, path: Path | str) -> None:
        """Refer to the directory at `path`, which need not exist yet."""
        self.path = Path(path)
        self._is_new = False
        self._lock: DirectoryLock | None = None

    @property
    def metrics(self) -> Path:
        """Path of `metrics.jsonl`, one JSON object per line."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """Path of the directory that holds one directory for each checkpoint."""
        return self.path / CHECKPOINTS

    @property
    def lost(self) -> Path:
        """Path of the hang report that is written when a rank is lost."""
        return self.path / LOST

    def create(self) -> None:
        """Create the directory. `UserError` if the path is a file, or if the directory cannot be written."""
        try:
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            blocker = next(path for path in (self.path, *self.path.parents) if path.exists())
            raise UserError(f"run directory {self.path}: {blocker} is a file; give another run.directory") from None
        except OSError as error:
            raise UserError(f"run directory {self.path} cannot be made: {error_reason(error)}") from None
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise UserError(f"run directory {self.path}: {CHECKPOINTS} in it is a file; give another run.directory")

    def lock(self) -> int:
        """Lock the directory until `unlock` or the end of this process; return the lock's file descriptor.

        `UserError` if another run holds the lock. A child process that inherits the descriptor holds the lock too: no
        other run can begin while a rank is still alive.
        """
        self.create()
        self._lock = DirectoryLock(self.path, "run directory", "end it, or give another run.directory")
        return self._lock.descriptor

    @property
    def lock_descriptor(self) -> int:
        """File descriptor that holds the lock; valid only between `lock` and `unlock`."""
        assert self._lock is not None, "the run directory is not locked"
        return self._lock.descriptor

    def unlock(self) -> None:
        """Release the lock, so that another run can use the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        """Create and lock the directory."""
        self.lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unlock the directory, as `close` does."""
        self.close()

    def close(self) -> None:
        """Unlock the directory. If the directory contains nothing but `ranks.json`, the start has failed: remove this
        file, and the directory if this process created it."""
        if self._lock is not None:
            with suppress(OSError):
                if {path.name for path in self.path.iterdir()} <= {LOCK, RANKS}:
                    (self.path / RANKS).unlink(missing_ok=True)
            if self._is_new:
                self._lock.discard()
                self._lock = None
        self.unlock()

    def write_ranks(self, processes: Sequence[int]) -> None:
        """Write `ranks.json`: the process id of each rank, {"0": 4711, "1": 4712}. processes: ids in the order of
        ranks."""
        self._replace_file(
            RANKS, json.dumps({str(rank): process for rank, process in enumerate(processes)}).encode() + b"\n"
        )

    def write_recipe(self, text: str) -> None:
        """Write the resolved recipe (file, overrides and defaults together), given as TOML `text`."""
        self._replace_file(RECIPE, text.encode())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result document (JSON dict of figures and checkpoint paths) of a finished run to `result.json`."""
        self._replace_file(RESULT, to_json_bytes(result))

    def read_result(self) -> dict[str, Any] | None:
        """Return the result document (JSON dict of figures and checkpoint paths); None if no run has finished here or
        the file is invalid."""
        try:
            result = read_json(self.path / RESULT)
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def write_trackers(self, kept: Mapping[str, Mapping[str, str]]) -> None:
        """Store the strings that each tracker needs to resume, such as a run id. kept: {tracker name: {key:
        string}}."""
        self._replace_file(TRACKERS, to_json_bytes(kept))

    def read_trackers(self) -> dict[str, dict[str, str]]:
        """Return the strings that `write_trackers` wrote: {tracker name: {key: string}}; empty if the file is missing
        or invalid."""
        try:
            found: dict[str, dict[str, str]] = read_json(self.path / TRACKERS)
            return {name: {key: str(value) for key, value in kept.items()} for name, kept in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def read_last_step(self) -> int | None:
        """Return the number of the last step in `metrics.jsonl`; None if the file has no step. Events are skipped: they
        may follow the lines of later steps."""
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                lines = file.read().splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            try:
                values = parse_json(line)
                step = None if "event" in values else values.get("step")
            except (ValueError, TypeError, AttributeError):
                continue  # incomplete: the run was killed, or the read began inside the line
            if isinstance(step, int):
                return step
        return None

    def _replace_file(self, name: str, content: bytes) -> None:
        """Replace the content of the file `name` of the run directory by the bytes `content`, atomically. `UserError`
        if the file cannot be written."""
        try:
            replace_file(self.path / name, content, sync=False)
        except OSError as error:
            raise UserError(f"run directory {self.path}: {name} cannot be written: {error_reason(error)}") from None
