"""Resolution of a recipe's sources to files in a fixed order: the standard library, files, globs, directories, URLs."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.sources.listings import list_stored_files
from meshwright.data.sources.stores import StoredFile, is_url, parse_file_url
from meshwright.errors import UserError
from meshwright.names import CORPORA, nearest
from meshwright.recipe import SourceRecipe

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}  # by suffix, which follows that of the format
RECORD_SUFFIXES = {".json": "json"}  # for sources of records only; else a .json file is plain text
FORMAT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".wet": "wet", ".warc": "warc"}
KEYED_FORMATS = ("jsonl", "json", "parquet")  # formats whose records have their text under a key
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file to read.

    name: path relative to the source, the same wherever the corpus is stored. path: local path, or file in a remote
    store. format: one of `DATA_FORMATS`, not "auto". named: True if the recipe names this file itself; unusable content
    is then an error. False if a glob or directory found it. source: index of its source in the recipe. text_key: key of
    a record's text; None: the key that the recipe sets for all sources. counted_as: label under which reports count it.
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
        """Recipe key that sets which field of a record is its text, for error messages: "data.text_key", or `text_key`
        of this file's source."""
        return "data.text_key" if self.text_key is None else f'text_key of "{self.counted_as}" in data.sources'


class SourceChanged(UserError):
    """Error: a source file changed while it was being prepared."""

    def __init__(self, file: SourceFile) -> None:
        """Create the error for a source file that changed."""
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
    """Return all files of `sources`, source after source, sorted by name within each. Raises `UserError` for a source
    without files, or with a directory that cannot be read.

    A source is "stdlib" (this Python's standard library without tests and installed packages), the path or URL of a
    file, a directory (all files below it that are not hidden) or a glob (`**` for any depth).

    format: one of `DATA_FORMATS`. "auto" determines it by suffix: `.jsonl` and `.ndjson` are JSON Lines, `.parquet`,
    `.wet` and `.warc` are these formats, all others text; `.gz` or `.zst` (compressed) may follow. records: True:
    `.json` is a JSON list. cache: directory of prepared data, which are excluded, and of stored listings of remote
    stores. log: receives a line when a stored listing is used. key: recipe key that error messages name.

    A file's label in reports (`counted_as`) is its source if there are several sources or `key` is "data.sources", else
    its first directory.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        if isinstance(source, str):
            source = SourceRecipe(path=source)
        wanted = format if source.format == "auto" else source.format
        try:
            expanded = sorted(_expand_source(source.path, key, cache, log), key=lambda one: one[0])
        except OSError as error:
            raise UserError(
                f'{key}: "{source.path}": {error.filename} cannot be read: {error.strerror or error}'
            ) from None
        found = [
            SourceFile(
                name,
                path,
                _detect_format(path.name, wanted, records),
                named,
                number,
                source.text_key,
                source.name or source.path if len(sources) > 1 or key == "data.sources" else _get_first_directory(name),
            )
            for name, path, named in expanded
            if cache is None or not isinstance(path, Path) or not _is_cached(path, cache)
        ]
        if not found:
            raise UserError(f'{key}: no files in "{source.path}"')
        files += found
    return files


def _get_first_directory(name: str) -> str:
    """Return the first directory of the relative path `name` with its slash ("a/" of "a/b.txt"), or all of `name` if it
    has no directory.
    """
    first, separator, _ = name.partition("/")
    return first + separator


def _detect_format(name: str, format: str, records: bool) -> str:
    """Return the format of a file, one of `DATA_FORMATS`: `format` unless that is "auto", else by the suffix of
    `name`. records: `.json` is a JSON list, not text."""
    if format != "auto":
        return format
    name = name.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    suffixes = FORMAT_SUFFIXES | RECORD_SUFFIXES if records else FORMAT_SUFFIXES
    return next((known for suffix, known in suffixes.items() if name.endswith(suffix)), "text")


def _is_cached(path: Path, cache: Path) -> bool:
    """Return True if the data cache in the directory `cache` wrote the file `path` (prepared data, digests, listings);
    False for a corpus that is stored in the same directory.
    """
    try:
        parts = path.absolute().relative_to(cache.absolute()).parts
    except ValueError:
        return False
    return len(parts) > 1 and re.fullmatch(r"[0-9a-f]{32}|contents|listings", parts[0]) is not None


def _expand_source(
    source: str, key: str, cache: Path | None, log: Callable[[str], None]
) -> Iterator[tuple[str, Path | StoredFile, bool]]:
    """Yield (name relative to the source, path, True if the source names this single file) for each file of one source:
    a path, glob, directory, URL or "stdlib".

    key: recipe key that error messages name. cache: directory that stores file listings of remote stores; log: receives
    a line when a stored listing is used.
    """
    if source == "stdlib":
        yield from ((name, path, False) for name, path in _iterate_standard_library(key))
        return
    if is_url(source) and parse_file_url(source) is None:
        yield from list_stored_files(source, key, cache, log)
        return
    path = parse_file_url(source) or Path(source).expanduser()
    if path.is_dir():
        yield from ((file.relative_to(path).as_posix(), file, False) for file in _iterate_files(path))
    elif path.is_file():
        yield path.name, path, True
    elif path.exists():
        raise UserError(f'{key}: "{source}" is neither a file nor a directory')
    elif glob.has_magic(str(path)):
        root = _find_glob_root(path)
        matches = list(_iterate_glob(path, root))
        if not matches:
            raise UserError(f'{key}: "{source}" matches no file{_suggest_name(path)}')
        yield from ((match.relative_to(root).as_posix(), match, False) for match in matches)
    else:
        raise UserError(f'{key}: "{source}" does not exist{_suggest_name(path)}')


def _iterate_standard_library(key: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) for each Python file of the standard library. Raises a `UserError` that begins with the recipe
    key `key` if this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = False
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_SOURCES and not name.startswith(("config-", "."))]
        for name in files:
            # _sysconfigdata_* is generated by the build of this Python.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                found = True
                path = Path(directory, name)
                yield f"stdlib/{path.relative_to(root).as_posix()}", path
    if not found:
        raise UserError(
            f'{key}: "stdlib" needs the sources of the standard library, and this Python has none under {root}; '
            "name text files instead"
        )


def _iterate_files(root: Path) -> Iterator[Path]:
    """Yield the paths of all files below the directory `root` that are not hidden, at any depth. Each real directory is
    read once, however many symbolic links lead to it.
    """
    for directory in _iterate_directories([root], {"__pycache__"}):
        for name in os.listdir(directory):
            path = directory / name
            if not name.startswith(".") and path.is_file():
                yield path


def _iterate_directories(roots: Sequence[Path], skipped: Collection[str] = ()) -> Iterator[Path]:
    """Yield the directories `roots` and all directories below them, except hidden ones and those with a name in
    `skipped`. The order depends on names alone. Each real directory is yielded once: symbolic links are followed last,
    so that cycles of links end, and no link takes the place of a real path."""
    seen: set[tuple[int, int]] = set()
    links = deque(sorted(roots, key=lambda root: (root.is_symlink(), root)))  # and roots
    while links:
        waiting = [links.popleft()]
        while waiting:
            directory = waiting.pop()
            try:
                status, entries = directory.stat(), sorted(os.scandir(directory), key=lambda entry: entry.name)
            except FileNotFoundError:  # a link that leads nowhere, or a directory that was just removed
                continue
            if (identity := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(identity)
            yield directory
            below = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in skipped]
            links += [directory / entry.name for entry in below if entry.is_symlink() and os.path.isdir(entry)]
            waiting += [directory / entry.name for entry in reversed(below) if entry.is_dir(follow_symlinks=False)]


def _iterate_glob(pattern: Path, root: Path) -> Iterator[Path]:
    """Yield the paths of the files that match the glob `pattern`. A file that symbolic links give several paths is
    yielded once, under the path with the fewest links. root: the directory before the first wildcard."""
    found = {match for match in _iterate_matches(pattern.parts) if match.is_file()}
    parents: dict[Path, tuple[int, os.stat_result]] = {}
    for parent in {match.parent for match in found}:
        above = [place for place in (parent, *parent.parents) if root in place.parents]
        parents[parent] = sum(place.is_symlink() for place in above), parent.stat()
    taken: set[tuple[int, int, str]] = set()
    for match in sorted(found, key=lambda match: (parents[match.parent][0], match)):
        status = parents[match.parent][1]
        if (identity := (status.st_dev, status.st_ino, match.name)) not in taken:
            taken.add(identity)
            yield match


def _iterate_matches(components: tuple[str, ...]) -> Iterator[Path]:
    """Yield the paths that match a glob, given as its path components; "**" matches any number of directories. Cycles
    of symbolic links under "**" are not followed: Python's `glob` follows them, and with two links in a directory
    yields 2^40 paths."""
    if "**" not in components:
        yield from map(Path, glob.glob(os.path.join(*components)))
        return
    at = components.index("**")
    after = components[at + 1 :] or ("*",)
    heads = [head for head in map(Path, glob.glob(os.path.join(*components[:at]))) if head.is_dir()] if at else [Path()]
    for directory in _iterate_directories(heads):
        yield from _iterate_matches((*map(glob.escape, directory.parts), *after))


def _find_glob_root(pattern: Path) -> Path:
    """Return the directory before the first wildcard of the glob `pattern`: "a/b" of "a/b/*/c.txt"."""
    fixed = Path()
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _suggest_name(path: Path) -> str:
    """Return a hint to append to the error for a missing path: the most similar existing name, or the contents of the
    deepest existing directory.
    """
    existing, missing = Path(), path.parts[0]
    for part in path.parts:
        missing = part
        if glob.has_magic(part) or not (existing / part).is_dir():
            break
        existing /= part
    names = sorted(name for name in os.listdir(existing) if not name.startswith("."))
    known = [*names, *CORPORA] if len(path.parts) == 1 else names
    close = nearest(missing, known)
    if close:
        return f'; did you mean "{existing / close}"?'
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    held = f"holds {', '.join(names[:4])}{more}" if names else "is empty"
    return f"; {'this directory' if existing == Path() else existing} {held}"
