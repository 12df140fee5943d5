"""Which files a recipe's sources mean: the standard library, files, globs, directories, URLs, in a fixed order."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.sources.listings import listed
from meshwright.data.sources.stores import StoredFile, is_url, local_path
from meshwright.errors import UserError
from meshwright.names import CORPORA, nearest
from meshwright.recipe import SourceRecipe

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}  # by suffix, after that of the format
RECORD_SUFFIXES = {".json": "json"}  # where records are no text: else a .json file is text as any other is
FORMAT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".wet": "wet"}
KEYED_FORMATS = ("jsonl", "json", "parquet")  # whose records have their text under a key
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read.

    `name`: its path under what the recipe names, the same wherever the corpus lies. `format`: "text", "jsonl", "json",
    "parquet" or "wet". `named`: by the recipe itself; a file that a glob or a directory brought along may be unusable
    without that being an error. `source`: the number of the source that it is of. `text_key`: that source's own.
    `counted_as`: what reports count it under.
    """

    name: str
    path: Path | StoredFile
    format: str
    named: bool
    source: int = 0
    text_key: str | None = None
    counted_as: str = ""

    @property
    def key_setting(self) -> str:
        """The recipe's key that says where the text of a record is."""
        return "data.text_key" if self.text_key is None else f'text_key of "{self.counted_as}" in data.sources'


class SourceChanged(UserError):
    """A file is no longer what it was when its preparation began."""

    def __init__(self, file: SourceFile) -> None:
        super().__init__(f"{file.path} changed while it was being prepared; run the command again when it is finished")


def find_files(
    sources: Sequence[str | SourceRecipe],
    format: str = "auto",
    cache: Path | None = None,
    key: str = "data.source",
    log: Callable[[str], None] = lambda line: None,
    *,
    records: bool = False,
) -> list[SourceFile]:
    """All files of `sources`, source after source, inside one sorted by name.

    A source is "stdlib" (this Python's standard library: its sources without tests and installed packages), a path or
    URL of a file, a directory (every file below it, hidden ones left out) or a glob (`**` for any depth). `format`
    "auto" takes `.jsonl` and `.ndjson` as JSON Lines, `.parquet` and `.wet` as what they are, all else as text; a
    suffix of `COMPRESSIONS` may follow. With `records` `.json` is a JSON list. What was prepared into `cache` is no
    source; what a store that does not answer held when it last did is remembered there, and `log` hears of it. Files
    are counted under their source where there are several or it has a table of its own, else under the first directory
    of their names. `UserError`, which begins with `key`, when a source names nothing.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        if isinstance(source, str):
            source = SourceRecipe(path=source)
        wanted = format if source.format == "auto" else source.format
        found = [
            SourceFile(
                name,
                path,
                _format_of(path.name, wanted, records),
                named,
                number,
                source.text_key,
                source.name or source.path if len(sources) > 1 or key == "data.sources" else _first_directory(name),
            )
            for name, path, named in sorted(_expand(source.path, key, cache, log), key=lambda one: one[0])
            if cache is None or not isinstance(path, Path) or not _is_cached(path, cache)
        ]
        if not found:
            raise UserError(f'{key}: there is no file in "{source.path}"')
        files += found
    return files


def _first_directory(name: str) -> str:
    first, separator, _ = name.partition("/")
    return first + separator


def _format_of(name: str, format: str, records: bool) -> str:
    if format != "auto":
        return format
    name = name.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    suffixes = FORMAT_SUFFIXES | RECORD_SUFFIXES if records else FORMAT_SUFFIXES
    return next((known for suffix, known in suffixes.items() if name.endswith(suffix)), "text")


def _is_cached(path: Path, cache: Path) -> bool:
    """Whether `path` is something that `prepare` wrote into `cache`, and not a corpus that lies there too."""
    try:
        parts = path.absolute().relative_to(cache.absolute()).parts
    except ValueError:
        return False
    return len(parts) > 1 and re.fullmatch(r"[0-9a-f]{32}|contents|listings", parts[0]) is not None


def _expand(
    source: str, key: str, cache: Path | None, log: Callable[[str], None]
) -> Iterator[tuple[str, Path | StoredFile, bool]]:
    """(name, path, named) of each file that `source` means."""
    if source == "stdlib":
        yield from ((name, path, False) for name, path in _standard_library(key))
        return
    if is_url(source) and local_path(source) is None:
        yield from listed(source, key, cache, log)
        return
    path = local_path(source) or Path(source).expanduser()
    if path.is_dir():
        yield from ((file.relative_to(path).as_posix(), file, False) for file in _files_below(path))
    elif path.is_file():
        yield path.name, path, True
    elif path.exists():
        raise UserError(f'{key}: "{source}" is neither a file nor a directory')
    elif glob.has_magic(str(path)):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match)]
        if not matches:
            raise UserError(f'{key}: "{source}" matches no file{_what_is_there(path)}')
        root = _fixed_part(path)
        yield from ((match.relative_to(root).as_posix(), match, False) for match in matches)
    else:
        raise UserError(f'{key}: "{source}" does not exist{_what_is_there(path)}')


def _standard_library(key: str) -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = False
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_SOURCES and not name.startswith(("config-", "."))]
        for name in files:
            # _sysconfigdata_* is written by the build of this very Python, not by a person.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                found = True
                path = Path(directory, name)
                yield f"stdlib/{path.relative_to(root).as_posix()}", path
    if not found:
        raise UserError(
            f'{key}: "stdlib" needs the sources of the standard library, and this Python has none under {root}; '
            "name text files instead"
        )


def _files_below(root: Path) -> Iterator[Path]:
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".") and name != "__pycache__"]
        for name in files:
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _fixed_part(pattern: Path) -> Path:
    """The directory that a glob starts from."""
    fixed = Path()
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _what_is_there(path: Path) -> str:
    """The nearest name to one that does not exist, or what the deepest existing directory on its way holds."""
    there, missing = Path(), path.parts[0]
    for part in path.parts:
        missing = part
        if glob.has_magic(part) or not (there / part).is_dir():
            break
        there /= part
    names = sorted(name for name in os.listdir(there) if not name.startswith("."))
    known = [*names, *CORPORA] if len(path.parts) == 1 else names
    close = nearest(missing, known)
    if close:
        return f'; did you mean "{there / close}"?'
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    held = f"holds {', '.join(names[:4])}{more}" if names else "is empty"
    return f"; {'this directory' if there == Path() else there} {held}"
