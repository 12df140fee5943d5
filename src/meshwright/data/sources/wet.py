"""Texts of WET files, in which Common Crawl gives the text of web pages: WARC records of type "conversion".

A record is a version line, headers, a blank line, as many bytes as its Content-Length says, and two line ends (ISO
28500:2017, section 4). Each is usually a separate gzip member. They are parsed here, not by a library, so that the
length of every record is checked and a truncated file is detected wherever it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream
from meshwright.errors import UserError

MAX_RECORD_BYTES = 1 << 28  # bytes; longer ones are refused, since a record is read whole
_MAX_LINE_BYTES = 1 << 16


def iterate_wet_texts(file: SourceFile, stream: Stream, encoding: str) -> Iterator[tuple[str, str, None]]:
    """Yield (position and address, such as ":17 https://example.org/", text, None) for each page of a WET file, a WARC
    record of type "conversion"; None means that the page has no problem. Records are numbered from 1; other types are
    counted and skipped. stream: the file's decompressed bytes. encoding: text encoding of the pages.

    Raises `UserError` for a file that is not WARC, a truncated record, or a file without conversion records.
    """
    found, types = False, set()
    for number, headers, block in iterate_warc_records(file, stream):
        kind = headers.get("warc-type", "none")
        if kind == "conversion":
            found = True
            uri = headers.get("warc-target-uri", "").strip("<>")
            yield f":{number} {uri}".rstrip(), block.decode(encoding, "surrogateescape"), None
        else:
            types.add(kind)
    if not found and types - {"warcinfo"}:
        raise UserError(
            f"{file.path} has no record of type conversion, only {', '.join(sorted(types))}: WET files are read, which "
            'hold the text of pages; for whole pages, set data.format = "warc"'
        )


def iterate_warc_records(file: SourceFile, stream: Stream) -> Iterator[tuple[int, dict[str, str], bytes]]:
    """Yield (number from 1, {lower-case name of a header: value}, block) for each record of a WARC file. stream: the
    file's decompressed bytes. Raises `UserError` for a file that is not WARC, or a truncated or too long record.
    """
    number = 0
    while headers := _read_headers(file, stream, number + 1):
        number += 1
        where = f"{file.path}: record {number}"
        try:
            length = int(headers["content-length"])
        except (KeyError, ValueError):
            raise UserError(f"{where} has no Content-Length: not a WARC file, or a damaged one") from None
        if not 0 <= length <= MAX_RECORD_BYTES:
            raise UserError(f"{where} has a Content-Length of {length:,} bytes; at most {MAX_RECORD_BYTES:,} are read")
        block = stream.read(length)
        if len(block) < length:
            raise UserError(
                f"{where} is cut short: {len(block):,} of its {length:,} bytes are there; fetch or write the file again"
            )
        yield number, headers, block


def _read_headers(file: SourceFile, stream: Stream, number: int) -> dict[str, str]:
    """Read the headers of the next WARC record; returns {lower-case name: value}, empty at the end of the file. number:
    index of the record, from 1, for errors. stream: the file's decompressed bytes. Raises `UserError` if the record is
    no WARC record or is truncated.
    """
    line = stream.readline(_MAX_LINE_BYTES)
    while line in (b"\r\n", b"\n"):
        line = stream.readline(_MAX_LINE_BYTES)
    if not line:
        return {}
    if not line.startswith(b"WARC/"):
        raise UserError(
            f"{file.path}: record {number} does not begin with WARC/1.0 or the like: not a WARC or WET file"
        )
    headers: dict[str, str] = {"": ""}
    name = ""
    while (line := stream.readline(_MAX_LINE_BYTES)) not in (b"\r\n", b"\n"):
        if not line.endswith(b"\n"):
            raise UserError(f"{file.path}: record {number} is cut short in its headers; fetch or write the file again")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text[:1] in (" ", "\t"):  # continues the previous line
            headers[name] += f" {text.strip()}"
        else:
            name, _, value = text.partition(":")
            name = name.strip().lower()
            headers[name] = value.strip()
    return headers
