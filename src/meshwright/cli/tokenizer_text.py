"""Text output of `meshwright data tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.cli.tables import make_fact_table, make_table
from meshwright.terminal import escape_in_table

_ROWS = 10


def make_report_tables(report: Mapping[str, Any]) -> Any:
    """Format a report on a tokenizer as rich tables: bytes and tokens of each data source, use of the vocabulary, most
    frequent and longest tokens. report: dict from `measure_tokenizer`."""
    from rich.console import Group
    from rich.table import Table

    sources = make_table("source", "documents", "bytes", "tokens", "bytes per token")
    for source in report["sources"]:
        ratio = f"{source['bytes_per_token']:.3f}" if source["tokens"] else "-"
        counts = [f"{source[key]:,}" for key in ("documents", "bytes", "tokens")]
        sources.add_row(escape_in_table(source["source"]), *counts, ratio)

    facts = make_fact_table()
    often = ", ".join(f"{count:,} at least {int(least):,}" for least, count in report["occur_at_least"].items())
    facts.add_row("vocabulary", f"{report['vocabulary']:,} tokens, of which {report['used']:,} occur")
    facts.add_row("times", often)
    unused = " ".join(_quote_token(token["text"]) for token in report["unused_tokens"][:_ROWS])
    facts.add_row("never used", f"{report['unused']:,}" + (f": {unused}" if unused else ""))
    if report["unknown"]:
        share = report["unknown"]["count"] / max(1, report["tokens"])
        facts.add_row("unknown text", f"{report['unknown']['count']:,} times {report['unknown']['text']} ({share:.1%})")
    found = report["round_trip"]
    difference = found["first_difference"]
    lost = f"; {_quote_token(difference['text'])} becomes {_quote_token(difference['decoded'])}" if difference else ""
    facts.add_row("decoded", f"{found['exact']:,} of {found['documents']:,} validation documents exactly{lost}")
    facts.add_row("directory", escape_in_table(report["directory"]))

    both = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("most frequent", "longest"):
        both.add_column(title, no_wrap=True)
        both.add_column("times", justify="right")
    columns = [report[key][:_ROWS] for key in ("most_frequent", "longest")]
    for tokens in zip(*columns, strict=True):
        both.add_row(*(cell for token in tokens for cell in (_quote_token(token["text"]), f"{token['count']:,}")))
    return Group(sources, "", facts, "", both)


def make_token_lines(shown: Mapping[str, Any]) -> Any:
    """Format the tokens of a text as rich text, followed by the decoded text if that differs from the original. shown:
    dict from `describe_tokens`."""
    from rich.text import Text

    lines = [f"{len(shown['tokens'])} tokens: {' '.join(_quote_token(token['text']) for token in shown['tokens'])}"]
    if not shown["exact"]:
        lines.append(f"decoded: {_quote_token(shown['decoded'])}")
    return Text("\n".join(lines))


def _quote_token(token: str) -> str:
    """Format a token between ‹ and ›, with newlines and control characters escaped."""
    return f"‹{escape_in_table(token)}›"
