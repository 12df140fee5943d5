"""The main texts of pages in WARC files are read; bodies that cannot be decoded, and hostile pages, are dropped."""

import gzip
import io
import sys
from pathlib import Path

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from meshwright.data import preparation
from meshwright.data.cleaning import cleaning_pass
from meshwright.data.cleaning.corpus import clean_and_split_corpus, make_reader
from meshwright.data.cleaning.rules import Cleaner
from meshwright.data.sources import http_bodies, page_process, reading, warc
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe, DataRecipe

pytestmark = pytest.mark.filterwarnings("ignore:Unclosed file <tempfile.Spooled")  # of warcio's writer
SENTENCE = "The café at the harbour opens every morning before the first ferry leaves for the islands. "
HTML = (
    f"<html><head><title>Ferry</title><script>var hidden = 1;</script></head><body>"
    f"<nav><a href='/'>Menu entry</a></nav>"
    f"<article><h1>Ferry</h1><p>{SENTENCE * 3}</p><p>{SENTENCE * 2}</p></article></body></html>"
)


def write(path: Path, pages: list[tuple[bytes, dict[str, str]]], status: str = "200 OK") -> Path:
    """A gzipped WARC file of (body, HTTP headers), as another implementation writes it."""
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=path.suffix == ".gz")
    for number, (body, fields) in enumerate(pages):
        head = StatusAndHeaders(status, list(fields.items()), protocol="HTTP/1.1")
        uri = f"https://example.org/{number}"
        writer.write_record(writer.create_warc_record(uri, "response", payload=io.BytesIO(body), http_headers=head))
    path.write_bytes(out.getvalue())
    return path


def read(path: Path) -> list[tuple[str, str | None]]:
    (file,) = find_files([str(path)])
    return [(name, text) for name, text, *_ in Reader().read_documents(file)]


def chunked(body: bytes) -> bytes:
    pieces = [body[at : at + 100] for at in range(0, len(body), 100)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_main_text_is_read_whatever_the_encodings_of_the_body(tmp_path: Path, name: str):
    pytest.importorskip("trafilatura")
    kind = {"Content-Type": "text/html; charset=utf-8"}
    utf8 = HTML.encode()
    pages = [
        (utf8, kind),
        (gzip.compress(utf8), kind | {"Content-Encoding": "gzip"}),
        (chunked(gzip.compress(utf8)), kind | {"Content-Encoding": "gzip", "Transfer-Encoding": "chunked"}),
        (utf8, kind | {"Content-Encoding": "gzip", "Transfer-Encoding": "chunked"}),  # stored decoded by a crawler
        (HTML.encode("cp1252"), {"Content-Type": "text/html; charset=iso-8859-1"}),
        (HTML.replace("<head>", "<head><meta charset='cp1252'>").encode("cp1252"), {"Content-Type": "text/html"}),
        (HTML.encode("utf-16"), {"Content-Type": "text/html"}),
        (HTML.encode(), {"Content-Type": "text/html; charset=idna"}),
    ]
    documents = read(write(tmp_path / name, pages))
    assert [document for document, _ in documents] == [f"{name}:{n + 1} https://example.org/{n}" for n in range(8)]
    for _, text in documents:
        assert text is not None and text.count(SENTENCE.strip()) == 5
        assert "hidden" not in text and "Menu entry" not in text


def test_undecodable_bodies_are_dropped_and_other_responses_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trafilatura")
    monkeypatch.setattr(http_bodies, "MAX_PAGE_BYTES", 10_000)
    kind = {"Content-Type": "text/html"}
    pages = [
        (gzip.compress(b"<p>" * 10_000), kind | {"Content-Encoding": "gzip"}),  # expands beyond the limit
        (gzip.compress(HTML.encode())[:-20], kind | {"Content-Encoding": "gzip"}),
        (b"\x0b\x02\x80", kind | {"Content-Encoding": "br"}),
        (b"\x89PNG", {"Content-Type": "image/png"}),
        (b"plain < text", {"Content-Type": "text/plain"}),
    ]
    assert [text for _, text in read(write(tmp_path / "a.warc.gz", pages))] == [None, None, None, "plain < text"]
    assert read(write(tmp_path / "b.warc.gz", [(HTML.encode(), kind)], "404 Not Found")) == []


def test_truncated_warc_file_is_refused_with_its_record(tmp_path: Path):
    pytest.importorskip("trafilatura")
    path = write(tmp_path / "a.warc", [(HTML.encode(), {"Content-Type": "text/html"})] * 2)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match="record 2 is cut short"):
        read(path)


@pytest.mark.parametrize("library, extra", [("trafilatura", "web"), ("resiliparse", "resiliparse")])
def test_missing_extractor_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, extra: str):
    monkeypatch.setitem(sys.modules, library, None)
    page_process.get_page_extractor.cache_clear()
    (file,) = find_files([str(write(tmp_path / "a.warc", [(HTML.encode(), {"Content-Type": "text/html"})]))])
    with pytest.raises(UserError, match=rf"pip install 'meshwright\[{extra}\]'"):
        list(Reader(extractor=library).read_documents(file))


def make_recipe(path: Path) -> DataRecipe:
    return DataRecipe(
        source=str(path), tokenizer="bytes", sequence=64, validation_fraction=0.0, cache=str(path.parent / "cache")
    )


def test_page_beyond_the_time_limit_is_dropped_and_counted_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The cost of an element grows with the square of the number of its attributes."""
    pytest.importorskip("trafilatura")
    monkeypatch.setattr(page_process, "EXTRACT_SECONDS", 1)
    page_process.get_page_extractor.cache_clear()
    kind = {"Content-Type": "text/html"}
    hostile = "<p " + " ".join(f"a{number}=1" for number in range(200_000)) + ">text</p>"
    pages = [(HTML.replace("café", name).encode(), kind) for name in ("pub", "bar", "inn")]
    recipe = make_recipe(write(tmp_path / "a.warc", [*pages[:2], (hostile.encode(), kind), *pages[2:]]))
    files = find_files([str(tmp_path / "a.warc")])
    cleaned = clean_and_split_corpus(files, recipe, print)
    assert cleaned.report["dropped"]["extraction"] == 1 and cleaned.report["documents"] == {"before": 4, "after": 3}
    assert cleaned.report["samples"]["extraction"][0]["why"] == "takes more than 1 s of CPU time"
    assert cleaned.report["examples"]["extraction"] == "a.warc:3 https://example.org/2"
    tried = []
    real = page_process.PageExtractor.extract_text
    monkeypatch.setattr(
        page_process.PageExtractor, "extract_text", lambda self, html: tried.append(html) or real(self, html)
    )
    assert [number for number, _ in cleaned.iterate_texts(files, make_reader(recipe, cleaned.longest), "train")] == [
        0,
        1,
        3,
    ]
    assert len(tried) == 3
    page_process.get_page_extractor.cache_clear()


@pytest.mark.parametrize(
    "judged, tried",
    [(3, ["0 again", "2", "3", "4"]), (5, ["0 again", "2 again", "3", "4"]), (7, ["0 again", "2 again", "4 again"])],
)
def test_resumed_pass_tries_no_failed_page_again_and_gives_new_pages_the_usual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: int, tried: list[str]
):
    """Five pages, of which numbers 1 and 3 fail and the others are cut into two documents each. A page that failed and
    now gives two documents would shift the numbers of all after it.
    """
    pages = [(f"<p>page {number}".encode(), {"Content-Type": "text/html"}) for number in range(5)]
    files = find_files([str(write(tmp_path / "a.warc", pages))])
    asked, failing = list[str](), {"<p>page 1", "<p>page 3"}

    class Extractor:
        def __init__(self, again: bool) -> None:
            self.again = " again" if again else ""

        def extract_text(self, html: str) -> tuple[str | None, str | None]:
            asked.append(f"{html[-1]}{self.again}")
            return (None, "takes too long") if html in failing else (f"{html}\n\n{'x' * 9}", None)

    def run(directory: Path) -> dict[str, bytes]:
        asked.clear()
        cleaner = Cleaner(CleanRecipe(exact_duplicates=False), extracts=True)
        result = cleaning_pass.run_cleaning_pass(files, Reader(longest=12), cleaner, directory, print)
        assert result.report["dropped"]["extraction"] == 2 and len(result.codes) == 8
        return {path.name: path.read_bytes() for path in directory.glob("*.segment")}

    monkeypatch.setattr(reading, "get_page_extractor", lambda library, again: Extractor(again))
    monkeypatch.setattr(cleaning_pass, "SEGMENT_DOCUMENTS", 1)
    whole = run(tmp_path / "whole")
    assert len(whole) == 8 and asked == ["0", "1", "2", "3", "4"]
    (tmp_path / "cut").mkdir()
    for name, content in sorted(whole.items())[:judged]:
        (tmp_path / "cut" / name).write_bytes(content)
    failing.remove("<p>page 1")  # the machine is less busy now
    assert run(tmp_path / "cut") == whole and asked == tried


def test_failing_extractor_drops_its_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trafilatura")
    program = tmp_path / "failing.py"
    program.write_text(
        "from meshwright.data.sources import page_extraction\n"
        "def fail(html):\n"
        "    return html if 'keep' in html else html[99]\n"
        "page_extraction._LOADERS = {'trafilatura': lambda: fail}\n"
        "make_handler = page_extraction.make_handler\n"
    )
    monkeypatch.setattr(page_process.page_extraction, "__file__", str(program))
    pages = page_process.PageExtractor("trafilatura", 10)
    failed = (None, "makes the extractor fail (IndexError)")
    assert [pages.extract_text(html) for html in ("keep", "x", "keep")] == [("keep", None), failed, ("keep", None)]


def test_version_and_limits_of_the_extractor_are_part_of_the_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trafilatura")
    path = write(tmp_path / "a.warc", [(HTML.encode(), {"Content-Type": "text/html"})])
    (tmp_path / "b.txt").write_text(HTML)
    page, text = make_recipe(path), make_recipe(tmp_path / "b.txt")
    keys = [preparation._Preparation(recipe, print, False).key for recipe in (page, text)]
    for name, value in (("describe_extractor", lambda library: f"{library} 99.0"), ("MEMORY_BYTES", 1 << 29)):
        with monkeypatch.context() as patch:
            patch.setattr(warc, name, value)
            changed = [preparation._Preparation(recipe, print, False).key for recipe in (page, text)]
        assert changed[0] != keys[0] and changed[1] == keys[1]


def test_extractor_that_cannot_be_loaded_is_an_error_and_drops_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "trafilatura.py").write_text("raise ImportError('cannot import name html_clean')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trafilatura", raising=False)
    with pytest.raises(UserError, match=r'loading "trafilatura" fails with ImportError: cannot import name html_clean'):
        page_process.PageExtractor("trafilatura", 10)


def test_resiliparse_reads_the_same_page(tmp_path: Path):
    pytest.importorskip("resiliparse")
    (file,) = find_files([str(write(tmp_path / "a.warc", [(HTML.encode(), {"Content-Type": "text/html"})]))])
    (document,) = Reader(extractor="resiliparse").read_documents(file)
    assert document.text is not None and document.text.count(SENTENCE.strip()) == 5
    assert "hidden" not in document.text and "Menu entry" not in document.text
