"""Main texts of the web pages in WARC files, records of type "response".

Bodies are decoded here with limits: the extractor receives text, since it would decompress bytes without a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.data.sources.http_bodies import DECODING_VERSION, MAX_PAGE_BYTES, decode_body, decode_text
from meshwright.data.sources.page_process import EXTRACT_SECONDS, MEMORY_BYTES, Extraction, describe_extractor
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream
from meshwright.data.sources.wet import iterate_warc_records
from meshwright.errors import UserError

_HTML = ("text/html", "application/xhtml+xml")


def collect_page_fields(extractor: str) -> list[Any]:
    """Return a JSON list of everything besides the files that determines the texts extracted from pages, for the cache
    key of prepared data. extractor: one of `names.EXTRACTORS`. Raises `UserError` if it is not installed."""
    return [DECODING_VERSION, MAX_PAGE_BYTES, describe_extractor(extractor), EXTRACT_SECONDS, MEMORY_BYTES]


def iterate_warc_texts(
    file: SourceFile, stream: Stream, extract: Callable[[str], Extraction]
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (position and address, such as ":17 https://example.org/", text, problem) for each HTML or plain-text page
    in a WARC file, a response with HTTP status 200. Records are numbered from 1; other records are counted and skipped.

    text: the main text, "" if the page has none; None if its body cannot be decoded, or if there is a problem. problem:
    why the extractor yields no text, as a clause. stream: the file's decompressed bytes. extract: extracts the main
    text of a page, as `PageExtractor.extract_text` does.

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
        plain = decode_body(body, fields)
        if plain is None:
            yield where, None, None
            continue
        text = decode_text(plain, content_type, media in _HTML)
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
    """Parse the head of an HTTP response; return (status code as text, "" if it has none; {lower-case name of a header:
    value})."""
    first, *lines = head.decode("latin-1").splitlines() or [""]
    words = first.split()
    pairs = (line.partition(":") for line in lines)
    fields = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
    return words[1] if len(words) > 1 and words[0].startswith("HTTP/") else "", fields
