"""What source files contain: their SHA-256, of large corpora remembered by size, times and inode, so the next start is
quick; of a file in a store its URL, size and version, since to read it all would take as long as to prepare it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.data.files import canonical_json, read_json, sha256_of_file, write_whole
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.stores import StoredFile, first_changed
from meshwright.errors import UserError

REMEMBER_FROM = 64 << 20  # bytes of corpus; less is hashed sooner than it is worth writing down
_SETTLED = 2.0  # seconds; a file changed later than that before it is hashed may change again within one clock tick


class Contents:
    """What each of `files` contained when this was made."""

    def __init__(self, files: Sequence[SourceFile], cache: Path, log: Callable[[str], None]) -> None:
        self.files = tuple(files)
        self._states = [_state(file) for file in files]
        self.bytes = sum(state[0] for state in self._states)
        names = [os.path.abspath(file.path) if isinstance(file.path, Path) else file.path.url for file in files]
        memory = cache / "contents" / f"{hashlib.sha256(canonical_json(names)).hexdigest()[:32]}.json"
        known = (read_json(memory) or {}) if self.bytes >= REMEMBER_FROM else {}
        self.sha256: list[str] = []
        remembered: dict[str, list[object]] = {}
        said = False
        for file, name, state in zip(files, names, self._states, strict=True):
            if isinstance(file.path, StoredFile):
                self.sha256.append(digest_of(file))
                continue
            entry = known.get(name)
            if entry is not None and entry[0] == state:
                digest = entry[1]
            else:
                if self.bytes >= REMEMBER_FROM and not said:
                    log(f"checking whether {self.bytes / 1e9:,.1f} GB of sources are those of an earlier time")
                    said = True
                settled = time.time() - max(state[1], state[2]) / 1e9 > _SETTLED
                digest = digest_of(file)
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
            if isinstance(file.path, Path) and (not file.path.exists() or _state(file) != state):
                return file
        stored = [(file, file.path) for file in self.files if isinstance(file.path, StoredFile)]
        number = first_changed([path for _, path in stored])
        return None if number is None else stored[number][0]


def _state(file: SourceFile) -> list[int]:
    """Size, modification time, change time and inode: a file's content does not change without one of them changing."""
    if isinstance(file.path, StoredFile):
        return [file.path.size or 0]
    try:
        status = file.path.stat()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def digest_of(file: SourceFile) -> str:
    """The SHA-256 of a file's content, or of what its store says of it. `UserError`: it cannot be read."""
    if isinstance(file.path, StoredFile):
        return _digest_of_stored(file.path)
    try:
        return sha256_of_file(file.path)
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def _digest_of_stored(file: StoredFile) -> str:
    """Of what the store says of this state of the file; of its bytes where a store says nothing that would change."""
    if file.version is not None:
        return hashlib.sha256(canonical_json([file.url, file.size, file.version])).hexdigest()
    with file.open() as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
