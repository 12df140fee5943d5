"""Zstandard, Parquet and WET files are read as documents; damaged ones give a one-line error."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import re
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from warcio.archiveiterator import ArchiveIterator
from warcio.warcwriter import WARCWriter

from meshwright.data import prepare
from meshwright.data.records import record_files
from meshwright.data.sources import parquet as parquet_module
from meshwright.data.sources import reading as reading_module
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe
from tests.data.documents import read, refusal

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
zstd = importlib.import_module(ZSTD)
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed file <tempfile.Spooled")  # of warcio's writer

TEXTS = [f"document {number}, καὶ {'words and words ' * (number % 7)}" for number in range(300)]


def texts(path: Path, **settings: object) -> list[str | None]:
    return [text for _, text in read(path, **settings)]


@pytest.fixture
def parquet(tmp_path: Path):
    """Writes columns to a Parquet file."""

    def write(columns: dict, **settings: object) -> Path:
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, **settings)
        return path

    return write


# --- Zstandard


def test_zstandard_files_of_several_frames_read_like_plain_ones(file):
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    frames = zstd.compress(b"".join(lines[:100])) + zstd.compress(b"".join(lines[100:]))
    assert texts(file("a.jsonl.zst", frames)) == TEXTS
    assert texts(file("a.txt.zst", zstd.compress(b"one\r\ntwo"))) == ["one\ntwo"]


def test_a_frame_with_the_longest_window_is_read(file):
    options = {zstd.CompressionParameter.window_log: 31}
    assert texts(file("a.txt.zst", zstd.compress(b"text", options=options))) == ["text"]


def test_truncated_zstandard_file_is_refused(file):
    data = zstd.compress("\n".join(json.dumps({"text": text}) for text in TEXTS).encode())
    for end in range(1, len(data), 97):
        assert "the Zstandard file is cut short, its end is missing" in refusal(file("a.jsonl.zst", data[:end]))


def test_invalid_zstandard_file_is_refused(file):
    assert "not a readable Zstandard file" in refusal(file("a.txt.zst", b"plain text, named wrongly"))


# --- Parquet


def test_parquet_rows_are_documents_named_by_row(parquet):
    path = parquet({"id": list(range(300)), "text": TEXTS}, row_group_size=70)
    assert read(path) == [(f"a.parquet:row {number}", text) for number, text in enumerate(TEXTS, 1)]


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "brotli", "none"])
@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary(pyarrow.int32(), "string")]
)
def test_text_columns_of_any_type_and_compression_read_alike(parquet, compression: str, kind):
    column = pyarrow.array(TEXTS).cast(kind)
    assert texts(parquet({"text": column}, compression=compression, row_group_size=100)) == TEXTS


def test_null_is_empty_text_in_every_format(parquet, file):
    assert texts(parquet({"text": ["a", None, "b"]})) == ["a", "", "b"]
    assert texts(file("a.jsonl", b'{"text": "a"}\n{"text": null}\n{"text": "b"}')) == ["a", "", "b"]


def test_dotted_key_selects_nested_field(parquet, file):
    rows = [{"body": {"raw": "x", "text": "inner"}}]
    assert texts(parquet({"page": rows}), text_key="page.body.text") == ["inner"]
    assert texts(parquet({"page.body.text": ["flat"], "page": rows}), text_key="page.body.text") == ["flat"]
    assert texts(file("a.jsonl", json.dumps({"page": rows[0]}).encode()), text_key="page.body.text") == ["inner"]
    assert texts(file("a.jsonl", b'{"a.b": "flat", "a": {"b": "deep"}}'), text_key="a.b") == ["flat"]
    assert 'no key "page.body.txt"' in (
        line := refusal(file("a.jsonl", b'{"page": {"body": {"text": ""}}}'), text_key="page.body.txt")
    )
    assert 'set data.text_key = "page.body.text"' in line


def test_undecodable_bytes_become_surrogates(parquet):
    kind = pyarrow.binary()
    broken = pyarrow.array([b"good", b"bad \xff byte"], kind)
    as_text = pyarrow.Array.from_buffers(pyarrow.string(), 2, broken.buffers())
    for column in (broken, as_text):
        assert texts(parquet({"text": column})) == ["good", "bad \udcff byte"]
    latin = pyarrow.array(["Grüße".encode("latin-1")], kind)
    assert texts(parquet({"text": latin}), encoding="latin-1") == ["Grüße"]


@pytest.mark.parametrize(
    ("columns", "key", "said"),
    [
        (
            {"id": [1], "content": ["a"]},
            "text",
            'no column "text" (columns "id", "content"); set data.text_key = "content"',
        ),
        ({"id": [1], "texts": ["a"], "b": ["a"]}, "text", 'set data.text_key = "texts"'),
        ({"id": [1], "text": [2]}, "text", 'the column "text" is int64, not text (it has no column of text)'),
        ({"body": ["a"], "text": [["a"]]}, "text", 'is list<element: string>, not text (columns of text: "body"; set'),
        ({"text": [{"a": "b"}]}, "text", 'the column "text" is struct<a: string>, not text'),
        ({"text": ["a"]}, "text.inner", 'the column "text" is string, without fields'),
        ({"text": [{"inner": 1}]}, "text.inner", 'the column "text.inner" is int64, not text'),
        ({"text": [{"inner": "a"}]}, "text.iner", 'set data.text_key = "text.inner"'),
    ],
)
def test_missing_or_non_text_column_error_lists_columns(parquet, columns, key: str, said: str):
    assert said in refusal(parquet(columns), text_key=key)


def test_truncated_or_damaged_parquet_file_is_refused(parquet, file):
    data = parquet({"text": TEXTS}, row_group_size=50, write_page_checksum=True).read_bytes()
    for end in range(1, len(data), 211):
        assert "not a complete Parquet file" in refusal(file("a.parquet", data[:end]))
    damaged = bytearray(data)
    damaged[len(data) // 3] ^= 0xFF
    assert refusal(file("a.parquet", bytes(damaged)))
    assert "is empty" in refusal(file("a.parquet", b""))
    assert "Parquet is compressed internally" in refusal(file("a.parquet.gz", gzip.compress(data)))


@pytest.mark.parametrize(
    "old, new, found",
    [
        (b"\x04text", b"\x04body", '"body" (BYTE_ARRAY)'),
        (b"\x15\x0c\x19", b"\x15\x04\x19", '"text" (INT64)'),  # the column's type in Thrift's compact protocol
    ],
)
def test_row_group_with_another_schema_is_refused_with_its_first_row(parquet, old: bytes, new: bytes, found: str):
    path = parquet({"text": ["a", "b", "c", "d", "e"]}, row_group_size=2)
    data = path.read_bytes()
    at = data.rfind(old)  # in the footer, of the last row group
    path.write_bytes(data[:at] + new + data[at + len(old) :])
    said = f'a.parquet: row 5: row group 3 has {found} in place of the column "text" (BYTE_ARRAY)'
    assert said in refusal(path)


def test_large_row_group_is_read_in_batches(parquet):
    text = "sixteen letters " * 640  # 10 KiB
    path = parquet({"text": [f"{number} {text}" for number in range(8_000)]}, row_group_size=8_000, compression="none")
    assert path.stat().st_size < 2e6 or path.stat().st_size > 8e7
    before = pyarrow.total_allocated_bytes()
    peak = 0
    [file] = find_files([str(path)])
    for _ in Reader().read_documents(file):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert peak < 50e6


# --- WET


def wet(records: list[tuple[str, str, bytes]], compressed: bool = True) -> bytes:
    """A WARC file of (type, URI, text), as another implementation writes it."""
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=compressed)
    writer.write_record(writer.create_warcinfo_record("a.warc.wet.gz", {"software": "test"}))
    for kind, uri, text in records:
        record = writer.create_warc_record(uri, kind, payload=io.BytesIO(text), warc_content_type="text/plain")
        writer.write_record(record)
    return out.getvalue()


PAGES = [("conversion", f"https://example.org/{number}?a=b", text.encode()) for number, text in enumerate(TEXTS[:60])]


@pytest.mark.parametrize("compressed", [True, False])
def test_wet_pages_are_documents_named_by_record_and_uri(file, compressed: bool):
    path = file("a.warc.wet.gz" if compressed else "a.wet", wet(PAGES, compressed))
    expected = [
        (f"{path.name}:{number} {uri}", text.decode().strip("\ufeff")) for number, (_, uri, text) in enumerate(PAGES, 2)
    ]
    assert read(path) == expected
    theirs = [
        record.content_stream().read().decode()
        for record in ArchiveIterator(path.open("rb"))
        if record.rec_type == "conversion"
    ]
    assert [text for _, text in read(path)] == theirs


def test_other_wet_record_types_are_skipped(file):
    data = wet([("metadata", "a:b", b"no page"), *PAGES[:2]])
    assert [name for name, _ in read(file("a.wet.gz", data))] == [
        "a.wet.gz:3 https://example.org/0?a=b",
        "a.wet.gz:4 https://example.org/1?a=b",
    ]


def test_wet_page_may_contain_record_headers_and_undecodable_bytes(file):
    text = b"WARC/1.0\r\nContent-Length: 5\r\n\r\nbad \xff"
    assert texts(file("a.wet", wet([("conversion", "a:b", text)], False))) == [
        "WARC/1.0\nContent-Length: 5\n\nbad \udcff"
    ]


@pytest.mark.parametrize("compressed", [True, False])
def test_truncated_wet_file_is_refused(file, compressed: bool):
    name = "a.wet.gz" if compressed else "a.wet"
    data = wet(PAGES[:6], compressed)
    begins = [found.start() for found in re.finditer(rb"\x1f\x8b\x08" if compressed else rb"WARC/1\.0\r\n", data)]
    assert len(begins) == 7
    # The two line ends after a record may be missing: no text is lost.
    whole = {end for begin in begins for end in ([begin] if compressed else range(begin - 4, begin + 1))}
    for end in set(range(1, len(data) - 4, 7)) - whole:
        assert re.search("cut short|does not begin with WARC/|not a readable gzip", refusal(file(name, data[:end]))), (
            end
        )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (wet([("response", "a:b", b"HTTP/1.1 200 OK\r\n\r\n")], False), "only response, warcinfo: WET files are read"),
        (b"<html>not a crawl</html>", "record 1 does not begin with WARC/1.0"),
        (b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\n", "record 1 has no Content-Length"),
        (b"WARC/1.0\r\nContent-Length: -5\r\n\r\n", "has a Content-Length of -5 bytes"),
        (b"WARC/1.0\r\nContent-Length: 99999999999\r\n\r\n", "has a Content-Length of 99,999,999,999 bytes; at most"),
        (b"", "is empty"),
    ],
)
def test_invalid_wet_file_is_refused(file, data: bytes, said: str):
    assert said in refusal(file("a.wet", data))


# --- oversized records and missing packages


def test_record_of_100_megabytes_is_cut_into_documents(file):
    paragraph = "A hundred megabytes, one paragraph after another.\n\n"
    whole = paragraph * (100_000_000 // len(paragraph))
    path = file("a.jsonl", b'{"text": "small"}\n' + json.dumps({"text": whole}).encode() + b'\n{"text": "after"}\n')
    pieces = texts(path)
    assert len(pieces) == 102 or len(pieces) > 100
    assert pieces[0] == "small" and pieces[-1] == "after"
    assert all(len(piece or "") <= reading_module.MAX_DOCUMENT_LENGTH for piece in pieces)
    assert "".join(piece or "" for piece in pieces[1:-1]) == whole


def test_endless_line_is_refused_early(file, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 1000)
    path = file("a.jsonl", b'{"text": "a"}\n{"text": "' + b"a" * 5_000_000)
    tracemalloc.start()
    assert ":2: a line of 1,000 bytes or more; JSON Lines has one record a line" in refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("quick", [True, False])
def test_json_reads_alike_with_and_without_orjson(file, monkeypatch: pytest.MonkeyPatch, quick: bool):
    if not quick:
        monkeypatch.setitem(sys.modules, "orjson", None)
    path = file("a.jsonl", b'{"text": "a\xff"}\n{"text": "\\ud800", "x": NaN}\n {"text": "\\u00e9", "id": 1e999} \r\n')
    assert texts(path) == ["a\udcff", "\ud800", "é"]
    assert "not JSON" in refusal(file("b.jsonl", b'{"text": "cut'))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("a.parquet", "pyarrow.parquet", "pyarrow"), ("a.txt.zst", ZSTD, "backports.zstd")],
)
def test_missing_package_error_shows_install_command(
    file, monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
):
    monkeypatch.setitem(sys.modules, module, None)
    assert f"needs the package {package}: pip install 'meshwright[data]'" in refusal(file(name, b"PAR1"))


# --- all formats together


def test_same_texts_prepare_alike_in_any_format(tmp_path: Path, file, parquet):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    pages = wet([("conversion", f"a:{number}", text.encode()) for number, text in enumerate(TEXTS)])
    paths = [
        file("a.jsonl", lines),
        file("a.jsonl.gz", gzip.compress(lines)),
        file("a.jsonl.zst", zstd.compress(lines)),
        parquet({"text": TEXTS}, row_group_size=37),
        file("a.warc.wet.gz", pages),
    ]
    made = []
    for path in paths:
        recipe = DataRecipe(source=str(path), tokenizer="bytes", sequence=16, cache=str(tmp_path / "cache"))
        made.append(prepare(recipe).sha256)
    assert len(set(made)) == 1


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.parquet", "a.warc.wet.gz"])
def test_truncated_source_leaves_no_partial_data(tmp_path: Path, file, parquet, name: str):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    whole = {
        "a.jsonl.zst": lambda: zstd.compress(lines),
        "a.jsonl.gz": lambda: gzip.compress(lines),
        "a.parquet": lambda: parquet({"text": TEXTS}).read_bytes(),
        "a.warc.wet.gz": lambda: wet(PAGES),
    }[name]()
    path = file(name, whole[: len(whole) // 2])
    cache = tmp_path / "cache"
    recipe = DataRecipe(source=str(path), tokenizer="bytes", sequence=16, cache=str(cache))
    with pytest.raises(UserError, match=name):
        prepare(recipe)
    assert [found.name for found in cache.rglob("*") if found.is_file()] == ["lock"]
    path.write_bytes(whole)
    assert prepare(recipe).summary()["documents"] > 50


REPEATED = 1 << 21  # bytes of a value that the file stores once
ONE_PAGE = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}


def peak_of_rows(rows, count: int) -> int:
    """Peak bytes that pyarrow holds, in addition to those before, while the first `count` of `rows` are read."""
    before, peak = pyarrow.total_allocated_bytes(), 0
    for _ in range(count):
        next(rows)
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    return peak


@pytest.mark.parametrize("first", [0, 1, None], ids=["short text first", "long text first", "null first"])
def test_repeated_text_is_decoded_in_bounded_memory(parquet, first: int | None):
    """2,048 rows that repeat 2 MiB are 4 GiB of text in a file of some kilobytes."""
    indices, texts = pyarrow.array([first, *[1] * 2047]), pyarrow.array(["short", "x" * REPEATED])
    path = parquet({"text": pyarrow.DictionaryArray.from_arrays(indices, texts), "id": range(2048)}, **ONE_PAGE)
    assert path.stat().st_size < 20_000
    with path.open("rb") as stream:
        (file,) = find_files([str(path)])
        rows = parquet_module.iterate_parquet_texts(file, stream, "text", "utf-8", {})
        assert peak_of_rows(rows, 20) < 1 << 28
        assert len(next(rows)[1]) == REPEATED


def test_repeated_text_of_records_is_decoded_in_bounded_memory(parquet):
    content = pyarrow.DictionaryArray.from_arrays([0] * 2047, pyarrow.array(["x" * REPEATED]))
    turns = pyarrow.StructArray.from_arrays([content], ["content"])
    path = parquet({"messages": pyarrow.ListArray.from_arrays([0, *range(2048)], turns)}, **ONE_PAGE)
    with path.open("rb") as stream:
        (file,) = find_files([str(path)], records=True)
        assert peak_of_rows(record_files.iterate_file_records(file, stream, None, "utf-8"), 12) < 1 << 28


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_columns_without_dictionary_are_read(parquet, encoding: str):
    settings = {"use_dictionary": False, "column_encoding": {"text": encoding, "other": encoding}}
    path = parquet({"text": TEXTS, "other": TEXTS}, row_group_size=70, **settings)
    assert texts(path) == texts(path, required_keys={"other": "text"}) == TEXTS


def test_every_column_bounds_the_rows_of_a_batch(parquet):
    """The first rows have short texts and empty lists; later lists hold one long text."""
    long = pyarrow.DictionaryArray.from_arrays([0] * 40, pyarrow.array(["x" * REPEATED]))
    lists = pyarrow.ListArray.from_arrays([*[0] * 200, *range(41)], long)
    path = parquet({"text": ["short"] * 240, "turns": lists}, **ONE_PAGE)
    with path.open("rb") as stream, parquet_module.open_parquet(find_files([str(path)])[0], stream) as table:

        def bound(columns: list[str]) -> int:
            leaves = parquet_module.find_leaves(find_files([str(path)])[0], table, 0, columns)
            return parquet_module.bound_batch_rows(find_files([str(path)])[0], stream, table, 0, leaves)

        assert bound(["text", "turns"]) == bound(["turns"]) == (1 << 26) // REPEATED < bound(["text"])


def test_footer_is_read_once_for_all_row_groups(parquet, monkeypatch: pytest.MonkeyPatch):
    opened, real = [], pyarrow.parquet.ParquetFile
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", lambda *a, **k: opened.append(k["metadata"]) or real(*a, **k))
    assert texts(parquet({"text": TEXTS}, row_group_size=50)) == TEXTS
    assert [each is None for each in opened] == [True] + [False] * 6


def test_text_beyond_the_limit_is_refused(parquet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parquet_module, "MAX_VALUE_BYTES", 1000)
    assert "a value of 1,001 bytes; at most 1,000 are read" in refusal(parquet({"text": ["a", "x" * 1001]}))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_endless_line_of_a_compressed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 1 << 20)
    text = b'{"text": "' + b"x" * (1 << 24)
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else zstd.compress(text))
    assert (tmp_path / name).stat().st_size < 50_000
    tracemalloc.start()
    try:
        assert "a line of 1,048,576 bytes or more" in refusal(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
