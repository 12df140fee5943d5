"""Records of a file, one at a time in memory: JSON Lines, one JSON list, or rows of Parquet."""

from __future__ import annotations

import codecs
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

from meshwright.data.sources.parquet import bound_batch_rows, find_leaves, open_parquet
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream
from meshwright.errors import UserError
from meshwright.untrusted import describe_parse_error

MAX_LINE_BYTES = 1 << 28  # bytes of a line, which is read whole; longer ones are refused
_CHUNK = 1 << 20  # bytes read of a JSON list at a time
_ROWS = 256  # of a Parquet file at a time


ParsedRecord: TypeAlias = tuple[str, Any, str | None]
"""A record of a file: (its position, such as ":17" or ":row 17"; its JSON value; a clause such as "is not JSON (...)"
if it cannot be parsed, else None). A plain tuple, since one is made for each line of a corpus."""


def format_position(file: SourceFile, position: str) -> str:
    """Return file and position of a record for errors, such as "a.jsonl:17" or "a.parquet: row 17". position: position
    in the file, such as ":17" or ":row 17".
    """
    place = position.removeprefix(":")
    return f"{file.path}:{place}" if place.isdecimal() else f"{file.path}: {place}"


def iterate_file_records(
    file: SourceFile,
    stream: Stream,
    columns: Sequence[str] | None,
    encoding: str,
    errors: str = "surrogateescape",
    quick: bool = True,
) -> Iterator[ParsedRecord]:
    """Yield (position, value, problem) of each record of a JSON, JSON Lines or Parquet file in order. problem: why a
    line of JSON Lines could not be decoded or parsed, as a clause; else None.

    stream: the file's decompressed bytes. columns: the columns of a Parquet file to read (None: all). encoding, errors:
    how to decode JSON text, as in `bytes.decode`; by default bytes that do not decode become lone surrogates. quick:
    True: parse JSON Lines with orjson if it is installed, which rounds integers of more than 64 bits. Raises
    `UserError` for a truncated or damaged file, or Parquet that has none of `columns`.
    """
    match file.format:
        case "jsonl":
            return _iterate_lines(file, stream, encoding, errors, quick)
        case "json":
            return _iterate_list(file, _ListBuffer(file, stream, encoding, errors))
        case "parquet":
            return _iterate_rows(file, stream, columns)
    raise UserError(
        f"{file.path}: records must be JSON Lines (.jsonl, .ndjson), a JSON list (.json) or Parquet (.parquet), "
        "recognized by suffix or data.format"
    )


def _iterate_lines(file: SourceFile, stream: Stream, encoding: str, errors: str, quick: bool) -> Iterator[ParsedRecord]:
    """Yield (position such as ":17", value, problem) for each line of a JSON Lines file that is not blank. problem: why
    the line could not be decoded or parsed, as a clause; else None.

    stream: the file's decompressed bytes. encoding, errors: as in `bytes.decode`. quick: True: parse with orjson if it
    is installed. Raises `UserError` for a line of 256 MiB (`MAX_LINE_BYTES`) or more.
    """
    if codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):  # a line feed is several bytes
        yield from _iterate_wide_lines(file, stream, encoding)
        return
    parse_quickly = _find_orjson_parser() if quick and encoding.lower().replace("_", "-") == "utf-8" else None
    for number, line in enumerate(iter(partial(stream.readline, MAX_LINE_BYTES), b""), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line or line.isspace():
            continue
        place = f":{number}"
        if len(line) == MAX_LINE_BYTES:
            raise UserError(
                f"{file.path}{place}: a line of {MAX_LINE_BYTES:,} bytes or more; JSON Lines has one record a line"
            )
        if parse_quickly is not None:
            try:
                yield place, parse_quickly(line), None
                continue
            except ValueError:  # the slower parser reports the error, if there is one
                pass
        try:
            yield place, json.loads(line.rstrip(b"\r\n").decode(encoding, errors)), None
        except json.JSONDecodeError as error:
            yield place, None, f"is not JSON ({error.msg} at column {error.colno})"
        except UnicodeDecodeError as error:
            yield place, None, f"is not {encoding.upper()} (byte {error.start})"
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or too deep
            yield place, None, f"is not JSON ({describe_parse_error(error)})"


def _iterate_wide_lines(file: SourceFile, stream: Stream, encoding: str) -> Iterator[ParsedRecord]:
    """Yield (position such as ":17", value, problem) for each line of a JSON Lines file in UTF-16 or UTF-32
    (`encoding`). problem: why the line could not be decoded or parsed, as a clause; else None. Text after bytes that do
    not decode cannot be split into lines and is reported as a single problem. stream: the file's decompressed bytes."""
    text = io.TextIOWrapper(stream, encoding, newline="\n")
    try:
        for number in itertools.count(1):
            place = f":{number}"
            try:
                line = text.readline(MAX_LINE_BYTES)
            except UnicodeError as error:
                yield place, None, f"is not {encoding.upper()} ({str(error)[:80]})"
                return
            if not line:
                return
            if len(line) == MAX_LINE_BYTES:
                raise UserError(
                    f"{file.path}{place}: a line of {MAX_LINE_BYTES:,} characters; JSON Lines has one record a line"
                )
            if not line.isspace():
                try:
                    yield place, json.loads(line.removeprefix("\ufeff")), None
                except (ValueError, RecursionError) as error:
                    yield place, None, f"is not JSON ({describe_parse_error(error)})"
    finally:
        text.detach()


def _find_orjson_parser() -> Callable[[bytes], Any] | None:
    """Return orjson's parser, a function of UTF-8 JSON bytes, or None where orjson is not installed."""
    try:
        loads: Callable[[bytes], Any] = import_module("orjson").loads
    except ImportError:
        return None
    return loads


def _iterate_list(file: SourceFile, buffer: _ListBuffer) -> Iterator[ParsedRecord]:
    """Yield each element of the JSON list that `buffer` reads as a record (position such as ":record 17", value, None),
    one at a time; the list may be larger than memory. file: names the file in errors. Raises `UserError` if the file is
    no valid JSON list.
    """
    if buffer.peek_character() != "[":
        raise UserError(
            f"{file.path}: not a JSON list: it should begin with [; if it holds one object a line, it is JSON Lines: "
            'rename it to .jsonl or set data.format = "jsonl"'
        )
    buffer.at += 1
    number = 0
    while buffer.peek_character() != "]":
        if number:
            if buffer.peek_character() != ",":
                raise buffer.broken_record_error(number, "a comma or ] should follow it")
            buffer.at += 1
            buffer.peek_character()
        number += 1
        yield f":record {number}", buffer.parse_value(number), None
    buffer.at += 1
    if buffer.peek_character(at_end=True):
        raise buffer.broken_record_error(number, "there is more after the end of the list")


class _ListBuffer:
    """Incremental parser of a JSON list that may be larger than memory; it reads the file as values are parsed.

    text: the part of the file in memory. at: index in `text` of the next character to be parsed.
    """

    def __init__(self, file: SourceFile, stream: Stream, encoding: str, errors: str) -> None:
        """Read the beginning of the file. stream: its decompressed bytes. encoding, errors: as in `bytes.decode`."""
        self.file, self._stream = file, stream
        self._decoder = codecs.getincrementaldecoder(encoding)(errors)
        self._parser = json.JSONDecoder()
        self.text, self.at, self._ended = "", 0, False
        while not self.text and not self._ended:
            self._read_more()
        self.text = self.text.removeprefix("\ufeff")

    def _read_more(self) -> None:
        """Drop the parsed text and read more of the file: as many bytes as there are unparsed characters, at least 1
        MiB."""
        rest = self.text[self.at :]
        # Doubling bounds the number of attempts to parse a long record by its logarithm.
        data = self._stream.read(max(_CHUNK, len(rest)))
        self._ended = not data
        try:
            self.text, self.at = rest + self._decoder.decode(data, final=self._ended), 0
        except UnicodeError as error:
            raise UserError(f"{self.file.path}: does not decode ({error})") from None

    def peek_character(self, at_end: bool = False) -> str:
        """Skip white space and return the next character without consuming it. At the end of the file return "" if
        `at_end` is set, else raise `UserError`."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self._ended:
                if at_end:
                    return ""
                raise UserError(f"{self.file.path}: the JSON list is cut short, its end is missing; fetch it again")
            self._read_more()

    def parse_value(self, number: int) -> Any:
        """Parse and consume the next JSON value. number: position of the value in the list, from 1, for the `UserError`
        that an invalid value raises.
        """
        while True:
            try:
                value, self.at = self._parser.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                unfinished = error.pos >= len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if not unfinished:
                    raise self.broken_record_error(number, error.msg) from None
                if self._ended:
                    raise UserError(
                        f"{self.file.path}: record {number} is cut short, and the list has no end; fetch the file again"
                    ) from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, or too deep
                raise self.broken_record_error(number, describe_parse_error(error)) from None
            else:
                return value
            if len(self.text) - self.at >= MAX_LINE_BYTES:
                raise self.broken_record_error(number, f"it is longer than {MAX_LINE_BYTES:,} characters")
            self._read_more()

    def broken_record_error(self, number: int, reason: str) -> UserError:
        """Build the error for an invalid record. number: position of the record in the list, from 1. reason: the
        parser's message.
        """
        return UserError(f"{self.file.path}: record {number}: not JSON ({reason})")


def count_unread_columns(file: SourceFile, stream: Stream, columns: Sequence[str]) -> dict[str, int]:
    """Return {name: number of rows} for the columns of a Parquet file that are not read if only `columns` are. stream:
    the file's bytes, used if it is not on a local disk. Raises `UserError` if the file is damaged.
    """
    with open_parquet(file, stream) as table:
        names = table.schema_arrow.names
        read = _select_columns(names, columns)
        return {name: table.metadata.num_rows for name in names if name not in read and table.metadata.num_rows}


def _select_columns(held: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return those of the Parquet columns `held` that contain the keys `wanted`, once each. The key "a.b" is in column
    a, unless there is a column "a.b"."""
    there = (name if name in held else name.partition(".")[0] for name in wanted)
    return [name for name in dict.fromkeys(there) if name in held]


def _iterate_rows(file: SourceFile, stream: Stream, columns: Sequence[str] | None) -> Iterator[ParsedRecord]:
    """Yield (position such as ":row 17", value, None) for each row of a Parquet file. The value is a dict by column
    name. Null fields of structs are left out, since Parquet stores every field of the schema for each struct.

    columns: names of the columns to read (None: all). stream: the file's bytes, used if it is not on a local disk.
    Raises `UserError` if the file has none of `columns` or is damaged.
    """
    number = 0
    with open_parquet(file, stream) as table:
        held = table.schema_arrow.names
        there = held if columns is None else _select_columns(held, columns)
        if columns is not None and not there:
            wanted, names = ", ".join(dict.fromkeys(columns)), ", ".join(held[:8]) or "none"
            raise UserError(f"{file.path}: none of the columns {wanted} (it has {names}); set data.record_keys")
        try:
            for group in range(table.num_row_groups):
                rows = min(_ROWS, bound_batch_rows(file, stream, table, group, find_leaves(file, table, group, there)))
                for batch in table.iter_batches(rows, row_groups=[group], columns=there, use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield f":row {number}", {name: _drop_null_fields(value) for name, value in row.items()}, None
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path}: text after row {number} is not UTF-8 ({error.reason})") from None


def _drop_null_fields(value: Any) -> Any:
    """Return a copy of a Parquet value without the null fields of its structs, at every level."""
    if isinstance(value, dict):
        return {key: _drop_null_fields(one) for key, one in value.items() if one is not None}
    return [_drop_null_fields(one) for one in value] if isinstance(value, list) else value
