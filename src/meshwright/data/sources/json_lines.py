"""The lines of JSON Lines, whatever they hold."""

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


def json_lines(file: SourceFile, stream: Stream) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of each line that is not blank."""
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


def quick_json() -> Callable[[bytes], Any] | None:
    """orjson's parser, where it is installed: it refuses all that is not strictly JSON in UTF-8, and is right else."""
    try:
        loads: Callable[[bytes], Any] = import_module("orjson").loads
    except ImportError:
        return None
    return loads
