"""The page of a tokenizer: bytes per token, how often tokens occur, the longest and the unused ones. One file, nothing
to download, readable by day and by night."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from meshwright.program.gantt import PAGE_STYLE

STYLE = """
h2 { font-size: 17px; margin: 28px 0 6px } .muted { color: #666 } td.words, th.words { text-align: left }
.token { display: inline-block; margin: 2px 3px 2px 0; padding: 0 5px; border-radius: 4px; white-space: pre;
  background: hsl(214 60% 92%); font: 13px ui-monospace, monospace }
.token:nth-child(even) { background: hsl(45 80% 90%) }
.bar { display: inline-block; height: 11px; background: hsl(214 60% 50%) }
@media (prefers-color-scheme: dark) {
  .muted { color: #9aa3ad } .token { background: hsl(214 35% 26%) }
  .token:nth-child(even) { background: hsl(45 30% 24%) }
}
"""


def page(report: Mapping[str, Any], shown: Mapping[str, Any] | None = None) -> str:
    """The whole page of what `measure_tokenizer` found; `shown`: what `describe_tokens` made of a text."""
    name = escape(str(report["tokenizer"]))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>tokenizer {name}</title>'
        f'<meta name="color-scheme" content="light dark"><style>{PAGE_STYLE}{STYLE}</style></head><body>\n'
        + "\n".join(_parts(report, shown))
        + "\n</body></html>\n"
    )


def _parts(report: Mapping[str, Any], shown: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"<h1>tokenizer {escape(str(report['tokenizer']))}</h1>"
    yield (
        f'<p class="muted">{report["vocabulary"]:,} tokens in the vocabulary; {report["tokens"]:,} tokens of text, '
        f"{report['used']:,} different ones; {report['unused']:,} never used; {_round_trip(report)}</p>"
    )
    if shown is not None:
        yield f"<h2>One text: {len(shown['tokens'])} tokens</h2>"
        yield "<p>" + "".join(_token(token["text"]) for token in shown["tokens"]) + "</p>"
    yield "<h2>Bytes per token</h2>"
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
    yield _table(("source", "documents", "bytes", "tokens", "bytes per token"), rows)
    yield "<h2>How often tokens occur</h2>"
    whole = report["vocabulary"]
    for least, count in report["occur_at_least"].items():
        yield (
            f'<div><span class="bar" style="width: {560 * count / whole:.0f}px"></span> '
            f"{count:,} ({count / whole:.0%}) at least {int(least):,} times</div>"
        )
    for title, key in (("The most frequent", "most_frequent"), ("The longest", "longest")):
        yield f"<h2>{title}</h2>"
        yield _table(
            ("token", "number", "times"),
            [(_token(row["text"]), f"{row['id']:,}", f"{row['count']:,}") for row in report[key]],
            marked=True,
        )
    if report["unused_tokens"]:
        yield f"<h2>Never used: {report['unused']:,}</h2>"
        yield "<p>" + "".join(_token(token["text"]) for token in report["unused_tokens"]) + "</p>"


def _round_trip(report: Mapping[str, Any]) -> str:
    found = report["round_trip"]
    return f"{found['exact']:,} of {found['documents']:,} documents come back exactly"


def _token(text: str) -> str:
    shown = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "\N{RIGHTWARDS ARROW}")
    return f'<span class="token">{escape(shown)}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], marked: bool = False) -> str:
    """A table; `marked`: its first cells are HTML already."""
    body = "".join(
        f"<tr><td>{row[0] if marked else escape(row[0])}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>\n{body}</table>"
