"""Files are read as documents; an unreadable file gives a one-line error."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.sources.reading import _cut_text, check_encoding
from meshwright.errors import UserError
from tests.data.documents import read, refusal


def test_text_file_is_one_document_with_normalized_newlines(file):
    assert read(file("a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")) == [("a.txt", "one\ntwo\nthree\n")]


def test_json_line_is_one_document_named_by_line(file):
    lines = b'\xef\xbb\xbf{"text": "one\\r\\ntwo", "id": 1}\r\n\n{"text": ""}\n{"text": "last"}'
    assert read(file("a.jsonl", lines)) == [("a.jsonl:1", "one\ntwo"), ("a.jsonl:3", ""), ("a.jsonl:4", "last")]


def test_gzipped_files_read_like_plain_ones(file):
    assert read(file("a.txt.gz", gzip.compress(b"text"))) == [("a.txt.gz", "text")]
    line = json.dumps({"body": "text"}).encode()
    assert read(file("a.jsonl.gz", gzip.compress(line)), text_key="body") == [("a.jsonl.gz:1", "text")]


def test_other_encodings_are_read_when_named(file):
    text = "Grüße, 世界"
    assert read(file("a.txt", text.encode("utf-16")), encoding="utf-16") == [("a.txt", text)]
    assert read(file("b.txt", "Grüße".encode("latin-1")), encoding="latin-1") == [("b.txt", "Grüße")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_json_lines_in_wide_encodings_are_read_line_by_line(file, encoding: str):
    texts = ["Ċ is U+010A", "日本語", "line\nfeed"]  # bytes of a line feed inside characters
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n\n"
    found = read(file("a.jsonl", lines.encode(encoding)), encoding=encoding)
    assert found == [(f"a.jsonl:{number}", text) for number, text in enumerate(texts, 1)]
    broken = file("b.jsonl", lines.encode(encoding) + b"\x00")
    assert f"b.jsonl:5: not {encoding.upper()}" in refusal(broken, encoding=encoding)


def test_undecodable_byte_becomes_surrogate(file):
    ((_, text),) = read(file("a.txt", b"plain text with one byte \xff that is none"))
    assert text is not None and "\udcff" in text


def test_broken_utf_16_is_not_text(file):
    assert read(file("a.txt", "text".encode("utf-16") + b"\x00\xd8\x41"), encoding="utf-16")[-1][1] is None


@given(text=st.text(alphabet="ab\n é"), longest=st.integers(1, 12), chunk=st.integers(1, 7))
def test_cut_texts_are_short_and_join_to_the_text(text: str, longest: int, chunk: int):
    chunks = [text[begin : begin + chunk] for begin in range(0, len(text), chunk)]
    pieces = list(_cut_text(iter(chunks), longest))
    assert "".join(pieces) == text
    assert all(len(piece) <= longest for piece in pieces)
    assert pieces == [""] or all(pieces)


def test_long_text_is_cut_after_blank_lines(file):
    text = "".join(f"paragraph {number}\nsecond line\n\n" for number in range(40))
    pieces = read(file("a.txt", text.encode()), longest=100)
    assert [name for name, _ in pieces][:3] == ["a.txt", "a.txt#2", "a.txt#3"]
    assert all(piece is not None and piece.endswith("\n\n") for _, piece in pieces)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"", "is empty"),
        ("a.txt", b"\x7fELF\x02\x01\x01\x00\x00\x00", "is binary, not text: it has NUL bytes"),
        ("a.txt", bytes(range(128, 256)) * 10, "is binary or not in utf-8: 100% of its beginning does not decode"),
        ("a.txt.gz", b"not gzip at all", "not a readable gzip file"),
        ("a.txt.gz", gzip.compress(b"text" * 9999, mtime=0)[:-9], "cut short, its end is missing"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20], "cut short, its end is missing"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', ":2: not JSON (Expecting ',' delimiter at column 13)"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', ':2: the record is not an object, as in {"text": "..."}'),
        (
            "a.jsonl",
            b'{"texts": 1, "id": 2}',
            '(it has "texts", "id"); set data.text_key = "texts"',
        ),
        (
            "a.jsonl",
            b'{"body": "", "id": 2}',
            'no key "text" (it has "body", "id"); set data.text_key to',
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}',
            ':2: no key "text" (it has "body"), which the records before it have; records with other keys must be in a',
        ),
        ("a.jsonl", b"{}", 'no key "text" (it has no keys)'),
        ("a.jsonl", b'{"text": ["a"]}', ':1: "text" is ["a"], not a string'),
        ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
        ("a.jsonl", b'{"text": "a", "id": %s}' % (b"1" * 5000), ":1: not JSON"),
    ],
)
def test_unreadable_file_is_one_line_error(file, name: str, data: bytes, said: str):
    assert said in refusal(file(name, data))


@pytest.mark.parametrize("data", [b"\x7fELF\x00\x00", bytes(range(128, 256)) * 10])
def test_unnamed_binary_file_is_left_to_cleaning(file, data: bytes):
    assert read(file("a.txt", data), named=False) == [("a.txt", None)]


def test_unnamed_empty_file_is_an_empty_document(file):
    assert read(file("a.txt", b""), named=False) == [("a.txt", "")]


def test_unknown_encoding_error_suggests_nearest():
    check_encoding("utf-8")
    with pytest.raises(UserError, match='unknown encoding "utf-9"; did you mean "utf-8"'):
        check_encoding("utf-9")
    for name in ("hex", "undefined", "idna", "punycode", "a\0b"):  # known to Python, but not as text encodings
        with pytest.raises(UserError, match="unknown encoding"):
            check_encoding(name)
