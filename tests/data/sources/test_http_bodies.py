"""HTTP bodies: each encoding is undone or the body is dropped, and the charset is the one that a browser takes."""

from __future__ import annotations

import gzip
import zlib
from functools import partial

import pytest

from meshwright.data.sources import http_bodies
from meshwright.data.sources.http_bodies import decode_body, decode_text

compress = partial(gzip.compress, mtime=0)  # without the time, which would be in the names of the tests

TEXT = "Die Fähre legt früh ab. ".encode() * 40
PAGE = b"<html><head>" + TEXT + b"</head></html>"


def chunk(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def decode(body: bytes, transfer: str = "", content: str = "") -> bytes | None:
    return decode_body(body, {"transfer-encoding": transfer, "content-encoding": content})


END = b"0\r\n\r\n"


@pytest.mark.parametrize(
    "body, expected",
    [
        (chunk(TEXT, PAGE) + END, TEXT + PAGE),
        (b"5;name=value\r\nhello\r\n0\r\nTrailer: x\r\n\r\n", b"hello"),
        (END, b""),
        (b"Because it rains\r\nwe stay.", b"Because it rains\r\nwe stay."),  # stored decoded; "Beca" are hex digits
        (b"2\r\nlines follow here", b"2\r\nlines follow here"),
        (b"0\r\nis where it begins", b"0\r\nis where it begins"),
        (chunk(TEXT, PAGE), None),  # the last chunk is missing
        ((chunk(TEXT, PAGE) + END)[:-20], None),
        (chunk(TEXT)[:-30], None),
        (chunk(TEXT) + b"garbage" + END, None),
        (chunk(TEXT) + chunk(PAGE)[:-2] + b"__" + END, None),
    ],
)
def test_chunks_are_joined_and_truncated_or_garbled_ones_dropped(body: bytes, expected: bytes | None):
    assert decode(body, "chunked") == expected


def deflate_raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    "coding, body, expected",
    [
        ("gzip", compress(TEXT), TEXT),
        ("x-gzip", compress(TEXT) + compress(PAGE), TEXT + PAGE),  # two members
        ("gzip, gzip", compress(compress(TEXT)), TEXT),
        ("deflate, gzip", compress(zlib.compress(TEXT)), TEXT),
        ("deflate", zlib.compress(TEXT), TEXT),
        ("deflate", deflate_raw(TEXT), TEXT),
        ("deflate", compress(TEXT), TEXT),
        *((coding, body, body) for coding in ("gzip", "deflate", "br", "zstd") for body in (TEXT, PAGE)),  # decoded
        ("gzip", compress(TEXT)[:-9], None),
        ("gzip", compress(TEXT) + compress(PAGE)[:-9], None),
        ("gzip", zlib.compress(TEXT), None),
        ("deflate", zlib.compress(TEXT)[:-5], None),
        ("deflate", deflate_raw(bytes(range(256)) * 9)[:-5], None),
        ("br", b"\x0b\x02\x80plain < text\x03", None),
        ("gzip, " * 5, compress(TEXT), None),
    ],
)
def test_compressed_bodies_are_decompressed_or_dropped(coding: str, body: bytes, expected: bytes | None):
    assert decode(body, content=coding) == expected


def test_transfer_codings_are_undone_before_those_of_the_content():
    assert decode(chunk(compress(zlib.compress(TEXT))) + END, "gzip, chunked", "deflate") == TEXT


@pytest.mark.parametrize("packed", [compress, zlib.compress, deflate_raw])
def test_bodies_are_not_decompressed_beyond_the_limit(packed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_bodies, "MAX_PAGE_BYTES", 10_000)
    assert decode(packed(bytes(10_000)), content="deflate") == bytes(10_000)
    assert decode(packed(bytes(10_001)), content="deflate") is None


# Expected: what the labels mean in WHATWG's Encoding Standard.
LABELS = {
    "latin1": ("‚Grüße’", "cp1252"),
    "us-ascii": ("‚Grüße’", "cp1252"),
    "iso-8859-9": ("“ışık”", "cp1254"),
    "windows-1251": ("Паром", "cp1251"),
    "x-cp1251": ("Паром", "cp1251"),
    "gb2312": ("鎔基㐂", "gb18030"),
    "gb_2312-80": ("鎔基", "gb18030"),
    "x-gbk": ("鎔基", "gb18030"),
    "shift_jis": ("①髙橋～", "cp932"),
    "x-sjis": ("①髙橋", "cp932"),
    "windows-31j": ("①髙橋", "cp932"),
    "ks_c_5601-1987": ("똠방각하", "cp949"),
    "windows-949": ("똠방각하", "cp949"),
    "big5": ("渡輪嘅", "big5hkscs"),
    "tis-620": ("“เรือ”", "cp874"),
    "x-euc-jp": ("渡し船", "euc_jp"),
}


@pytest.mark.parametrize("label", LABELS)
def test_charsets_decode_as_in_browsers(label: str):
    text, encoding = LABELS[label]
    for tag in (f"<meta charset='{label}'>", f"<meta http-equiv=x content='text/html; charset={label.upper()}'>"):
        page = tag + text
        assert decode_text(page.encode(encoding), "text/html", True) == page
    assert decode_text(text.encode(encoding), f"text/plain; charset={label}", False) == text


@pytest.mark.parametrize(
    "page, content_type",
    [
        ('<meta charset="utf-16">Grüße', "text/html"),  # a <meta> that is read as ASCII
        ('<meta charset="utf-16be">Grüße', "text/html"),
        ("<!-- <meta charset=koi8-r> -->Grüße", "text/html"),
        ("<p>charset=koi8-r</p>Grüße", "text/html"),
        ("charset=koi8-r, <meta charset=koi8-r>: Grüße", "text/plain"),
        ("<meta charset=koi8-r>Grüße", "text/html; charset=utf-8"),
        *((f"<meta charset={name}>Grüße", "text/html") for name in ("unicode_escape", "raw_unicode_escape", "rot13")),
        *((f"<meta charset={name}>Grüße", "text/html") for name in ("utf-7", "idna", "punycode", "hex", "cp037")),
    ],
)
def test_charsets_that_a_browser_ignores_are_ignored(page: str, content_type: str):
    assert decode_text(page.encode(), content_type, content_type.startswith("text/html")) == page


def test_xml_declaration_names_the_charset():
    page = '<?xml version="1.0" encoding="windows-1251"?><html>Паром</html>'
    assert decode_text(page.encode("cp1251"), "application/xhtml+xml", True) == page
