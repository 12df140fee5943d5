"""SHA-256 of the source files, which keys the cache of prepared data.

Hashes of large corpora are remembered by size, times and inode, to start quickly. Files in stores are identified by
URL, size and version instead: reading them would take as long as preparing them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.data.files import hash_file, read_json, to_canonical_json, try_write_json
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.stores import StoredFile, find_first_changed
from meshwright.errors import UserError

REMEMBER_FROM = 64 << 20  # bytes of corpus from which digests are cached: hashing less is fast
_SETTLED = 2.0  # seconds; a file that changed more recently may change again within one clock tick


class SourceDigests:
    """SHA-256 digests of the source files. They are part of the key of the data cache, and show whether a file was
    changed later.

    sha256: hex digest of each file. bytes: total size of the files.
    """

    def __init__(self, files: Sequence[SourceFile], cache: Path, log: Callable[[str], None]) -> None:
        """Hash the files, except large corpora whose digests are in the directory `cache` and whose files have not
        changed. log: receives a line before hashing takes long.
        """
        self.files = tuple(files)
        self._states = [_read_file_state(file) for file in files]
        self.bytes = sum(state[0] for state in self._states)
        names = [os.path.abspath(file.path) if isinstance(file.path, Path) else file.path.url for file in files]
        memory = cache / "contents" / f"{hashlib.sha256(to_canonical_json(names)).hexdigest()[:32]}.json"
        known = (read_json(memory) or {}) if self.bytes >= REMEMBER_FROM else {}
        self.sha256: list[str] = []
        remembered: dict[str, list[object]] = {}
        announced = False
        for file, name, state in zip(files, names, self._states, strict=True):
            if isinstance(file.path, StoredFile):
                self.sha256.append(hash_source(file))
                continue
            known_state, digest = known.get(name, (None, ""))
            if known_state != state:
                if self.bytes >= REMEMBER_FROM and not announced:
                    log(f"hashing {self.bytes / 1e9:,.1f} GB of sources, to look up prepared data")
                    announced = True
                if time.time() - max(state[1], state[2]) / 1e9 <= _SETTLED:
                    state = [-1]  # equals the state of no file: hashed again next time
                digest = hash_source(file)
            self.sha256.append(digest)
            remembered[name] = [state, digest]
        if announced:
            try_write_json(memory, remembered)

    def find_changed(self) -> SourceFile | None:
        """Return the first file that has changed or vanished since the object was created, or None."""
        for file, state in zip(self.files, self._states, strict=True):
            if isinstance(file.path, Path) and (not file.path.exists() or _read_file_state(file) != state):
                return file
        stored = [(file, file.path) for file in self.files if isinstance(file.path, StoredFile)]
        number = find_first_changed([path for _, path in stored])
        return None if number is None else stored[number][0]


def _read_file_state(file: SourceFile) -> list[int]:
    """Return the state of a file, which changes if it is written: [size in bytes, modification time in ns, change time
    in ns, inode]; for a file in a remote store only the size. Raises `UserError` if it cannot be read."""
    if isinstance(file.path, StoredFile):
        return [file.path.size or 0]
    try:
        status = file.path.stat()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def hash_source(file: SourceFile) -> str:
    """Return the hex SHA-256 of a local file's content, or of the URL, size and version of a file in a remote store.
    Raises `UserError` if it cannot be read.
    """
    if isinstance(file.path, StoredFile):
        return _hash_stored(file.path)
    try:
        return hash_file(file.path)
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None


def _hash_stored(file: StoredFile) -> str:
    """Return the hex SHA-256 of the URL, size and version of a file in a remote store; of its content if the store
    gives no version.
    """
    if file.version is not None:
        return hashlib.sha256(to_canonical_json([file.url, file.size, file.version])).hexdigest()
    with file.open() as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
