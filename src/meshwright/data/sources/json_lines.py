"""Lines of JSON Lines files, unparsed, and the fast JSON parser for them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream
from meshwright.errors import UserError

LONGEST_LINE = 1 << 30  # bytes of a line, which is read whole; longer ones are refused


def iterate_json_lines(file: SourceFile, stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line as bytes) for each line that is not blank. stream: the file's decompressed bytes.
    Raises `UserError` for a line of 1 GiB or more.
    """
    for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line or line.isspace():
            continue
        if len(line) == LONGEST_LINE:
            raise UserError(
                f"{file.path}:{number}: a line of {LONGEST_LINE:,} bytes or more; JSON Lines has one record a line"
            )
        yield number, line


def find_fast_json_parser() -> Callable[[bytes], Any] | None:
    """Return orjson's parser, a function of UTF-8 JSON bytes, or None where orjson is not installed."""
    try:
        loads: Callable[[bytes], Any] = import_module("orjson").loads
    except ImportError:
        return None
    return loads
