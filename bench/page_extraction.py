"""Main texts of web pages by trafilatura and by Resiliparse: speed, and words against the WET text of the same records.

python bench/page_extraction.py PAGES TEXTS [--turns 5]

PAGES is a directory of saved pages (.html, searched at any depth), TEXTS one of main texts written by people, as
NAME.txt for NAME.html. The recorded figures come from the test pages in the source distributions of trafilatura 0.9.3,
htmldate 1.4.0 and newspaper4k 0.9.6; the last has the texts. The pages are written to one WARC file, and their
text outside of scripts and styles, which is what Common Crawl's WET files hold, to a WET file.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import lxml.html
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from common import paired_ratio, write_result
from meshwright.data.cleaning.words import Words
from meshwright.data.sources.page_process import describe_extractor
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import SourceFile
from meshwright.names import EXTRACTORS

HIDDEN = ("script", "style", "noscript", "template", "head")


def write_records(pages: Sequence[Path], directory: Path) -> tuple[Path, Path]:
    """Write a WARC file of responses and a WET file of conversions, with the same records in the same order."""
    paths = directory / "pages.warc", directory / "pages.wet"
    with paths[0].open("wb") as warc, paths[1].open("wb") as wet:
        for page in pages:
            body = page.read_bytes()
            head = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
            uri, writer = f"https://example.org/{page.stem}", WARCWriter(warc, gzip=False)
            writer.write_record(writer.create_warc_record(uri, "response", payload=io.BytesIO(body), http_headers=head))
            writer = WARCWriter(wet, gzip=False)
            text = io.BytesIO(list_visible_text(body).encode())
            writer.write_record(writer.create_warc_record(uri, "conversion", payload=text))
    return paths


def list_visible_text(body: bytes) -> str:
    """The text of a page outside of scripts and styles, with its title."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body.decode("cp1252", "replace")
    tree = lxml.html.document_fromstring(text.encode(), parser=lxml.html.HTMLParser(encoding="utf-8"))
    title = [tree.findtext(".//title") or ""]
    for element in list(tree.iter(*HIDDEN, lxml.etree.Comment)):
        element.drop_tree()
    return "\n".join(title + [one for piece in tree.itertext() if (one := piece.strip())])


def read(path: Path, extractor: str = "trafilatura") -> list[str]:
    file = SourceFile(path.name, path, path.suffix[1:], True)
    return [document.text or "" for document in Reader(extractor=extractor).read_documents(file)]


def share(of: str, found: str) -> float:
    """Share of the words of one text that another has, each counted as often as it occurs."""
    wanted, held = (Counter(Words(text).hashes.tolist()) for text in (of, found))
    return (wanted & held).total() / max(1, wanted.total())


def mean(shares: Iterable[float]) -> float:
    return round(statistics.fmean(shares), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    pages = [page for page in sorted(arguments.pages.rglob("*.html")) if page.stat().st_size > 2_000]
    with tempfile.TemporaryDirectory() as directory:
        warc, wet = write_records(pages, Path(directory))
        megabytes = warc.stat().st_size / 1e6
        whole = read(wet)
        assert len(whole) == len(pages)
        texts = {library: read(warc, library) for library in EXTRACTORS}  # starts the processes, too
        seconds: dict[str, list[float]] = {library: [] for library in EXTRACTORS}
        for _ in range(arguments.turns):
            for library, taken in seconds.items():
                begun = time.perf_counter()
                assert read(warc, library) == texts[library]
                taken.append(time.perf_counter() - begun)
    written = {
        number: path.read_text()
        for number, page in enumerate(pages)
        if (path := arguments.texts / f"{page.stem}.txt").exists()
    }
    figures = {}
    for library, found in texts.items():
        both = [(text, found[number]) for number, text in written.items()]
        figures[library] = {
            "version": describe_extractor(library).split()[1],
            "pages_per_second": round(len(pages) / statistics.median(seconds[library]), 1),
            "megabytes_per_second": round(megabytes / statistics.median(seconds[library]), 2),
            "pages_without_text": sum(not text for text in found),
            "words": sum(len(Words(text)) for text in found),
            "mean_word_recall_of_wet": mean(map(share, whole, found)),
            "mean_word_precision_by_wet": mean(share(own, text) for text, own in zip(whole, found, strict=True) if own),
            "main_texts": len(both),
            "mean_word_recall_of_main_text": mean(share(*pair) for pair in both),
            "mean_word_precision_by_main_text": mean(share(own, text) for text, own in both if own),
        }
    write_result(
        "page_extraction",
        {
            "pages": len(pages),
            "megabytes": round(megabytes, 2),
            "words_of_wet": sum(len(Words(text)) for text in whole),
            "extractors": figures,
            "resiliparse_times_as_fast": paired_ratio(seconds["resiliparse"], seconds["trafilatura"]),
        },
    )


if __name__ == "__main__":
    main()
