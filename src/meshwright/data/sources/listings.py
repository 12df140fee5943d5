"""File listings of remote stores, cached so that prepared data stay usable while their store is unreachable."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from meshwright.data.files import read_json, try_write_json
from meshwright.data.sources.stores import StoredFile, StoreUnreached, query_stored_files

_FORMAT = 1


@dataclass(frozen=True)
class _UnreachableFilesystem:
    """Stand-in for the fsspec file system of an unreachable store: every access raises the error `problem`."""

    problem: StoreUnreached

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error `problem` for any attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.problem


def list_stored_files(
    url: str, key: str, cache: Path | None, log: Callable[[str], None]
) -> Iterator[tuple[str, StoredFile, bool]]:
    """List the files behind `url` (a file, glob or directory in a remote store). Yields (name relative to the URL,
    file, True if the URL names this single file).

    cache: directory in which the listing is stored (None: not stored). If the store is unreachable, the stored listing
    is used and `log` receives a line; prepared data can then be found, but the files cannot be read. key: recipe key
    that error messages name. Raises `UserError` if there is no such file, or the store is unreachable and no listing is
    stored.
    """
    memory = None if cache is None else cache / "listings" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    try:
        found = list(query_stored_files(url, key))
    except StoreUnreached as problem:
        known = None if memory is None else read_json(memory)
        if not isinstance(known, dict) or known.get("format") != _FORMAT or known.get("url") != url:
            raise
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(known["time"]))
        log(f"{problem}; using its listing of {day}, when it last answered")
        for name, fields, named in known["files"]:
            yield name, StoredFile(**fields, filesystem=_UnreachableFilesystem(problem)), named
        return
    if memory is not None:
        files = [
            [name, {"url": file.url, "place": file.place, "size": file.size, "version": file.version}, named]
            for name, file, named in found
        ]
        try_write_json(memory, {"format": _FORMAT, "url": url, "time": time.time(), "files": files})
    yield from found
