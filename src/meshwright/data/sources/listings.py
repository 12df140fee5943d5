"""What stores hold, remembered in the cache: data that are prepared are used where their store is not reached."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from meshwright.data.files import canonical_json, read_json, write_whole
from meshwright.data.sources.stores import StoredFile, StoreUnreached, find_stored

_FORMAT = 1


@dataclass(frozen=True)
class _Unreached:
    """Stands for the file system of a store that does not answer: whoever wants to read from it hears why."""

    problem: StoreUnreached

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.problem


def listed(
    url: str, key: str, cache: Path | None, log: Callable[[str], None]
) -> Iterator[tuple[str, StoredFile, bool]]:
    """(name, file, named) of each file that `url` means (`find_stored`). Where its store does not answer, those that it
    held when it last did, if `cache` remembers: their versions say whether what is prepared is of them, and nothing can
    be read. `UserError`: no such file, or a store that is not reached and was not before."""
    memory = None if cache is None else cache / "listings" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    try:
        found = list(find_stored(url, key))
    except StoreUnreached as problem:
        known = None if memory is None else read_json(memory)
        if not isinstance(known, dict) or known.get("format") != _FORMAT or known.get("url") != url:
            raise
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(known["time"]))
        log(f"{problem}; taken as it was on {day}, when it last answered")
        for name, said, named in known["files"]:
            yield name, StoredFile(**said, filesystem=_Unreached(problem)), named
        return
    if memory is not None:
        _remember(memory, url, found)
    yield from found


def _remember(memory: Path, url: str, found: list[tuple[str, StoredFile, bool]]) -> None:
    files: list[Any] = [
        [name, {"url": file.url, "place": file.place, "size": file.size, "version": file.version}, named]
        for name, file, named in found
    ]
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(memory, canonical_json({"format": _FORMAT, "url": url, "time": time.time(), "files": files}))
    except OSError:  # a cache that cannot be written is complained about when it must be
        pass
