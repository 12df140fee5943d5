"""Bodies of HTTP responses as text: transfer and content encodings are undone, with limits, and the charset found."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Mapping

MAX_PAGE_BYTES = 1 << 23  # bytes of a decoded body; longer pages are dropped: a parsed one takes many times its size
DECODING_VERSION = 2  # part of the cache key: increase it when the text of a body changes
_MAX_CODINGS = 4  # of one body; more are refused
_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]{0,200})?\r\n")
_HEADER_BYTES = 1445  # in which bytes of binary data are looked for, as by WHATWG's MIME Sniffing, sections 5.2 and 7.2
_TAG = re.compile(rb"\s*<[!?A-Za-z]")
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

_META_BYTES = 4096  # in which a page's <meta charset> is looked for
_CHARSET = rb"""charset\s{0,20}=\s{0,20}["']?\s{0,20}([A-Za-z0-9_.:-]{1,40})"""
_IN_HEADER = re.compile(_CHARSET, re.IGNORECASE)
_IN_PAGE = re.compile(
    rb"<meta[\s/][^>]{0,400}?" + _CHARSET + rb"""|^<\?xml[^>]{0,200}?encoding\s?=\s?["']([A-Za-z0-9_.:-]{1,40})""",
    re.IGNORECASE,
)
_COMMENT = re.compile(rb"<!--.*?(?:-->|$)", re.DOTALL)
# Names that Python lacks, from WHATWG's Encoding Standard, section 4.2; Python's own names of its other encodings; and
# encodings that the standard takes for a subset of another. An encoding that is none of these is no charset of a page.
_OTHER_NAMES = {
    "csgb2312": "gbk",
    "gb_2312": "gbk",
    "gb_2312-80": "gbk",
    "windows-31j": "cp932",
    "windows-949": "cp949",
    "windows-874": "cp874",
    "dos-874": "cp874",
    "iso-8859-8-i": "iso8859-8",
    "unicode-1-1-utf-8": "utf-8",
}
_SAME = (
    "utf-8 utf-16-le utf-16-be cp866 iso8859-2 iso8859-3 iso8859-4 iso8859-5 iso8859-6 iso8859-7 iso8859-8 iso8859-10 "
    "iso8859-13 iso8859-14 iso8859-15 iso8859-16 koi8-r koi8-u mac-roman mac-cyrillic cp874 cp1250 cp1251 cp1252 "
    "cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 gb18030 big5hkscs euc_jp iso2022_jp cp932 cp949"
)
_DECODERS = {name: name for name in _SAME.split()} | {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "utf-16": "utf-16-le",
}


def decode_body(body: bytes, fields: Mapping[str, str]) -> bytes | None:
    """Undo the transfer and content encodings of an HTTP body (RFC 9112, section 7; RFC 9110, section 8.4.1). A body
    that the crawler has already decoded, though the headers name an encoding, is returned unchanged. fields: HTTP
    headers by lower-case name.

    Returns None for a truncated or damaged body, an encoding other than chunked, gzip and deflate, or more than
    `MAX_PAGE_BYTES` bytes.
    """
    names = ("content-encoding", "transfer-encoding")  # in the order in which they were applied
    codings = [coding.strip().lower() for name in names for coding in fields.get(name, "").split(",")]
    if len(codings) > _MAX_CODINGS or len(body) > 2 * MAX_PAGE_BYTES:
        return None
    found: bytes | None = body
    for coding in reversed(codings):
        if found is None or coding in ("", "identity"):
            continue
        if coding == "chunked":
            found = _join_chunks(found)
        elif not _is_text(found):
            found = _decompress(found, coding)
    return found if found is not None and len(found) <= MAX_PAGE_BYTES else None


def _is_text(body: bytes) -> bool:
    """Return True if `body` begins like a page or text, not like compressed data."""
    return (
        body.startswith(tuple(_MARKS)) or _TAG.match(body) is not None or _BINARY.search(body[:_HEADER_BYTES]) is None
    )


def _decompress(body: bytes, coding: str) -> bytes | None:
    """Decompress a body; return at most `MAX_PAGE_BYTES` + 1 bytes, None if it is truncated or damaged or `coding` is
    unknown. coding: "gzip" or "deflate"; servers use "deflate" for zlib's format, raw data and, by mistake, gzip."""
    if coding in ("gzip", "x-gzip", "deflate") and body[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:  # of one or several members
                return file.read(MAX_PAGE_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            return None
    for bits in (zlib.MAX_WBITS, -zlib.MAX_WBITS) if coding == "deflate" else ():
        unpacker = zlib.decompressobj(bits)
        try:
            found = unpacker.decompress(body, MAX_PAGE_BYTES + 1)
        except zlib.error:
            continue
        if unpacker.eof or len(found) > MAX_PAGE_BYTES:
            return found
    return None


def _join_chunks(body: bytes) -> bytes | None:
    """Join the chunks of a chunked HTTP body. Returns `body` itself if it does not begin with a chunk, None if a chunk
    is truncated or damaged."""
    begin, pieces = 0, list[bytes]()
    while head := _CHUNK_HEAD.match(body, begin):
        length = int(head[1], 16)
        if length == 0:
            return b"".join(pieces) if pieces or not body[head.end() :].strip() else body
        end = head.end() + length
        if end >= len(body):
            return None
        if body[end : end + 2] != b"\r\n":
            return None if pieces else body
        pieces.append(body[head.end() : end])
        begin = end + 2
    return None if pieces else body


def decode_text(body: bytes, content_type: str, html: bool) -> str:
    """Decode the body of a page to text; invalid bytes become U+FFFD.

    The encoding is the first of these (HTML standard, WHATWG, 13.2.3.2): byte order mark; charset of `content_type`
    (the HTTP header); charset of the <meta> or XML declaration, if `html` is True; UTF-8; Windows-1252.
    """
    for mark, name in _MARKS.items():
        if body.startswith(mark):
            return body.decode(name, "replace")
    found = _IN_HEADER.search(content_type.encode("latin-1", "replace"))
    decoder = None if found is None else _find_decoder(found[1])
    if decoder is None and html and (found := _IN_PAGE.search(_COMMENT.sub(b"", body[:_META_BYTES]).lstrip())):
        decoder = _find_decoder(found[1] or found[2])
        if decoder is not None and decoder.startswith("utf-16"):  # which could not have been read as ASCII
            decoder = "utf-8"
    if decoder is not None:
        return body.decode(decoder, "replace")
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")


def _find_decoder(charset: bytes) -> str | None:
    """Return the name in Python of the encoding that WHATWG's Encoding Standard assigns to a charset; None if no page
    may use this charset."""
    label = charset.decode().lower()
    label = _OTHER_NAMES.get(label, label)
    for name in (label, label.removeprefix("x-")):
        try:
            return _DECODERS.get(codecs.lookup(name).name)
        except (LookupError, ValueError):  # no encoding that Python knows
            continue
    return None
