"""HTML page about a tokenizer: bytes per token, token frequencies, longest and unused tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.draw import page as draw
from meshwright.draw.markup import Markup, element
from meshwright.draw.page import paragraph, table


def render_tokenizer_page(report: Mapping[str, Any], shown: Mapping[str, Any] | None = None) -> str:
    """Return a self-contained HTML page about a tokenizer. report: JSON of `measure_tokenizer`. shown: JSON of
    `describe_tokens`, whose text the page shows token by token; None: the page has no such section."""
    return draw.page(f"tokenizer {report['tokenizer']}", *_render_sections(report, shown))


def _render_sections(report: Mapping[str, Any], shown: Mapping[str, Any] | None) -> Iterator[Markup]:
    """Yield the sections of the page in order: summary, a text token by token, bytes per token, frequencies, longest
    and unused tokens. report: JSON of `measure_tokenizer`. shown: JSON of `describe_tokens` for the text; None: no
    text."""
    yield element("h1", f"tokenizer {report['tokenizer']}")
    trip = report["round_trip"]
    yield paragraph(
        f"{report['vocabulary']:,} tokens in the vocabulary; {report['tokens']:,} tokens of text, "
        f"{report['used']:,} different ones; {report['unused']:,} never used; {trip['exact']:,} of "
        f"{trip['documents']:,} documents round-trip exactly",
        muted=True,
    )
    if shown is not None:
        yield element("h2", f"One text: {len(shown['tokens'])} tokens")
        yield _render_tokens(shown["tokens"])
    yield element("h2", "Bytes per token")
    rows = [
        (
            source["source"],
            f"{source['documents']:,}",
            f"{source['bytes']:,}",
            f"{source['tokens']:,}",
            f"{source['bytes_per_token']:.3f}" if source["tokens"] else "-",
        )
        for source in report["sources"]
    ]
    yield table(("source", "documents", "bytes", "tokens", "bytes per token"), rows)
    yield element("h2", "How often tokens occur")
    whole = report["vocabulary"]
    counts = report["occur_at_least"].items()
    yield table(
        ("at least", "tokens", "of all", ""),
        [
            (f"{int(least):,} time{'s' * (int(least) != 1)}", f"{n:,}", f"{n / whole:.0%}", draw.bar(n / whole))
            for least, n in counts
        ],
    )
    for title, key in (("The most frequent", "most_frequent"), ("The longest", "longest")):
        yield element("h2", title)
        yield table(
            ("token", "number", "times"),
            [(_render_token(row["text"]), f"{row['id']:,}", f"{row['count']:,}") for row in report[key]],
        )
    if report["unused_tokens"]:
        yield element("h2", f"Never used: {report['unused']:,}")
        yield _render_tokens(report["unused_tokens"])


def _render_tokens(tokens: Iterable[Mapping[str, Any]]) -> Markup:
    """Return a paragraph of tokens, each in a box. tokens: objects with the readable text of a token under `text`."""
    return paragraph(_render_token(token["text"]) for token in tokens)


def _render_token(text: str) -> Markup:
    """Return a token's readable text in a box, line feeds and tabs as arrows."""
    shown = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "\N{RIGHTWARDS ARROW}")
    return element("span", shown, class_="token")
