"""The SHA-256 of source files; of large corpora remembered by size, times and inode, so the next start is quick."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.data.files import canonical_json, read_json, sha256_of_file, write_whole
from meshwright.data.sources import SourceFile
from meshwright.errors import UserError

REMEMBER_FROM = 64 << 20  # bytes of corpus; less is hashed sooner than it is worth writing down
_SETTLED = 2.0  # seconds; a file changed later than that before it is hashed may change again within one clock tick


class Contents:
    """What each of `files` contained when this was made."""

    def __init__(self, files: Sequence[SourceFile], cache: Path, log: Callable[[str], None]) -> None:
        self.files = tuple(files)
        self._states = [_state(file) for file in files]
        self.bytes = sum(state[0] for state in self._states)
        names = [os.path.abspath(file.path) for file in files]
        memory = cache / "contents" / f"{hashlib.sha256(canonical_json(names)).hexdigest()[:32]}.json"
        known = (read_json(memory) or {}) if self.bytes >= REMEMBER_FROM else {}
        self.sha256: list[str] = []
        remembered: dict[str, list[object]] = {}
        said = False
        for file, name, state in zip(files, names, self._states, strict=True):
            entry = known.get(name)
            if entry is not None and entry[0] == state:
                digest = entry[1]
            else:
                if self.bytes >= REMEMBER_FROM and not said:
                    log(f"checking whether {self.bytes / 1e9:,.1f} GB of sources are those of an earlier time")
                    said = True
                settled = time.time() - max(state[1], state[2]) / 1e9 > _SETTLED
                digest = _digest(file)
                if not settled:
                    state = [-1]
            self.sha256.append(digest)
            remembered[name] = [state, digest]
        if said:
            try:
                memory.parent.mkdir(parents=True, exist_ok=True)
                write_whole(memory, canonical_json(remembered))
            except OSError:  # a cache that cannot be written is complained about when it must be
                pass

    def changed(self) -> SourceFile | None:
        """The first file that is not as it was."""
        for file, state in zip(self.files, self._states, strict=True):
            if not file.path.exists() or _state(file) != state:
                return file
        return None


def _state(file: SourceFile) -> list[int]:
    """Size, modification time, change time and inode: a file's content does not change without one of them changing."""
    try:
        status = file.path.stat()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest(file: SourceFile) -> str:
    try:
        return sha256_of_file(file.path)
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None
