"""Main texts of the web pages in WARC files, records of type "response".

Bodies are decoded here with limits: the extractor receives text, since it would decompress bytes without a bound.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Callable, Iterator

from meshwright.data.sources.page_process import Extraction
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream
from meshwright.data.sources.wet import iterate_warc_records
from meshwright.errors import UserError

LONGEST_PAGE = 1 << 23  # bytes of a decoded body; longer pages are dropped: a parsed one takes many times its size
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})[^\r\n]{0,200}\r?\n")
_META_BYTES = 4096  # in which a page's <meta charset> is looked for
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_NOT_OF_PAGES = (
    "idna",
    "punycode",
    "undefined",
    "unicode_escape",
    "raw_unicode_escape",
    "utf-7",
)  # no charset, or slow
_HTML = ("text/html", "application/xhtml+xml")


def iterate_warc_texts(
    file: SourceFile, stream: Stream, extract: Callable[[str], Extraction]
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (position and address, such as ":17 https://example.org/", main text, problem) for each HTML or plain-text
    page that a WARC file holds as a response with HTTP status 200. The text is "" if a page has no main text and None
    if its body cannot be decoded, or with a problem: why the extractor gives no text, as a clause. Records are numbered
    from 1; others are counted and skipped. stream: the file's decompressed bytes. extract: extracts the main text of a
    page, as `PageExtractor.extract_text` does.

    Raises `UserError` for a file that is not WARC, a truncated record, or a file without responses.
    """
    found, types = False, set()
    for number, headers, block in iterate_warc_records(file, stream):
        kind = headers.get("warc-type", "none")
        if kind != "response":
            types.add(kind)
            continue
        found = True
        head, _, body = block.replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")
        status, fields = _parse_http_head(head)
        content_type = fields.get("content-type", "text/html" if body.lstrip()[:1] == b"<" else "")
        media = content_type.partition(";")[0].strip().lower()
        if status != "200" or media not in (*_HTML, "text/plain"):
            continue
        where = f":{number} {headers.get('warc-target-uri', '').strip('<>')}".rstrip()
        plain = _decode_body(body, fields)
        if plain is None:
            yield where, None, None
            continue
        text = _decode_text(plain, content_type)
        if media == "text/plain":
            yield where, text, None
        else:
            yield where, *extract(text)
    if types - {"warcinfo"} and not found:
        raise UserError(
            f"{file.path} has no record of type response, only {', '.join(sorted(types))}: WARC files of whole pages "
            'are read here; for the text of pages, set data.format = "wet"'
        )


def _parse_http_head(head: bytes) -> tuple[str, dict[str, str]]:
    """Return the status code and {lower-case name: value} of an HTTP response's head, "" if it has no status."""
    first, *lines = head.decode("latin-1").splitlines() or [""]
    words = first.split()
    pairs = (line.partition(":") for line in lines)
    fields = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
    return words[1] if len(words) > 1 and words[0].startswith("HTTP/") else "", fields


def _decode_body(body: bytes, fields: dict[str, str]) -> bytes | None:
    """Undo the transfer and content encodings of an HTTP body (RFC 9112, section 7.1; RFC 9110, section 8.4.1). A body
    that a crawler has stored decoded under unchanged headers is returned as it is. None: truncated, an encoding other
    than gzip and deflate, or more than `LONGEST_PAGE` bytes.
    """
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = _join_chunks(body)
    coding = fields.get("content-encoding", "identity").strip().lower()
    if coding in ("gzip", "x-gzip", "deflate"):
        if body[:2] == b"\x1f\x8b" or (coding == "deflate" and body[:1] == b"\x78"):
            unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
            try:
                body = unpacker.decompress(body, LONGEST_PAGE + 1)
            except zlib.error:
                return None
            if not unpacker.eof:
                return None
    elif coding not in ("identity", "") and body.lstrip()[:1] != b"<":
        return None
    return body if len(body) <= LONGEST_PAGE else None


def _join_chunks(body: bytes) -> bytes:
    """Join the chunks of a chunked HTTP body; returns `body` itself if it is not chunked."""
    begin, pieces = 0, list[bytes]()
    while found := _CHUNK_HEAD.match(body, begin):
        length = int(found[1], 16)
        if length == 0:
            return b"".join(pieces)
        pieces.append(body[found.end() : found.end() + length])
        begin = found.end() + length
        begin += 2 if body[begin : begin + 2] == b"\r\n" else 1
    return b"".join(pieces) if pieces else body


def _decode_text(body: bytes, content_type: str) -> str:
    """Decode a page by its byte order mark, the charset of its Content-Type or of its <meta>, else as UTF-8, else as
    Windows-1252, the order of the HTML standard (WHATWG, 13.2.3.2). Invalid bytes become U+FFFD.
    """
    for mark, name in _MARKS.items():
        if body.startswith(mark):
            return body.decode(name, "replace")
    for place in (content_type.encode("latin-1", "replace"), body[:_META_BYTES]):
        if found := _CHARSET.search(place):
            try:
                name = codecs.lookup(found[1].decode()).name
                if name not in _NOT_OF_PAGES:
                    return body.decode("cp1252" if name in ("iso8859-1", "ascii") else name, "replace")
            except (LookupError, ValueError):  # no charset that Python knows
                continue
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")
