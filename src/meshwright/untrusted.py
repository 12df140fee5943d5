"""Reading of untrusted files, with limits on size and nesting; raises only the documented errors."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias

from meshwright.limits import get_limit

PairsHook: TypeAlias = Callable[[list[tuple[str, Any]]], Any]


def read_file(path: str | Path, limit: str = "json_bytes", *, pipe: bool = False) -> bytes:
    """Read the file `path` and return its content. limit: name in `limits.LIMITS` of the largest accepted size in
    bytes.

    pipe: True to accept a FIFO too, such as the shell's `<(...)`. Raises OSError if the file cannot be read, exceeds
    the limit, or is a device, which may be endless (or a FIFO, unless `pipe` is True).
    """
    largest = get_limit(limit)
    # O_NONBLOCK: opening a FIFO that nobody writes to must not wait.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipe else os.O_NONBLOCK))
    except ValueError as error:  # a null byte, or half a character
        raise OSError(errno.EINVAL, f"no file has such a name ({error})", str(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode) and not (pipe and stat.S_ISFIFO(found.st_mode)):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
        data = b"" if found.st_size > largest else _read_at_most(file, largest + 1)
        if max(found.st_size, len(data)) > largest:
            raise OSError(errno.EFBIG, f"it has more than {largest:,} bytes, the most that is read of such", str(path))
    return data


def _read_at_most(file: IO[bytes], count: int) -> bytes:
    """Read up to `count` bytes, 1 MiB at a time, since `file.read(count)` would allocate `count` bytes for a small file
    too."""
    parts: list[bytes] = []
    while count and (part := file.read(min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def parse_json(text: str | bytes | bytearray, object_pairs_hook: PairsHook | None = None) -> Any:
    """Parse JSON text (bytes: UTF-8). Raises ValueError, and nothing else, if the text is invalid or nested too deeply.

    object_pairs_hook: as in `json.loads` (None: objects become dicts); exceptions that the hook raises are passed on.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(decoded, object_pairs_hook=object_pairs_hook)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from None
    except json.JSONDecodeError:  # a ValueError with the position
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(describe_parse_error(error)) from None
    check_nesting(value)
    return value


def describe_parse_error(error: ValueError | RecursionError) -> str:
    """Describe `error`, which Python's parser of JSON or TOML raised, for the user who wrote the text."""
    if isinstance(error, RecursionError):
        return _format_nesting_error()
    digits = re.search(r"value has (\d+) digits", str(error))  # Python's limit, and advice for programmers
    return f"an integer of {int(digits[1]):,} digits is too large" if digits else str(error)


def read_json(path: str | Path, limit: str = "json_bytes", object_pairs_hook: PairsHook | None = None) -> Any:
    """Read and parse the JSON file `path`. limit: name in `limits.LIMITS` of the largest accepted size in bytes.
    object_pairs_hook: as in `json.loads` (None: objects become dicts). Raises OSError if the file cannot be read or is
    too large, ValueError if the JSON is invalid or nested too deeply."""
    return parse_json(read_file(path, limit), object_pairs_hook)


def check_nesting(value: Any) -> None:
    """Raise ValueError if lists and dictionaries in a parsed value are nested deeper than the limit "nesting"."""
    level = [value]
    for _ in range(get_limit("nesting")):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(_format_nesting_error())


def _format_nesting_error() -> str:
    """Return the error message for lists and objects that are nested too deeply."""
    return f"nested deeper than {get_limit('nesting')} levels"
