"""HTML page of training samples (`meshwright data show --html`): trained, context and special tokens in colours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.data.prepared import format_packing_report
from meshwright.draw import page as draw
from meshwright.draw.markup import Markup, element, join
from meshwright.draw.page import paragraph, table


def render_sample_page(name: str, shown: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page of training samples. name: the recipe's name. shown: JSON document of
    `meshwright data show`.
    """
    return draw.page(f"samples of {name}", *_render_sections(name, shown))


def _render_sections(name: str, shown: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield the sections of the page in order: counts, tokens by role if the data are records, samples. name: the
    recipe's name. shown: JSON document of `meshwright data show`."""
    yield element("h1", f"Samples of {name}")
    for split, counts in shown["splits"].items():
        words = f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens"
        if "packing" in counts and counts["documents"]:
            words = f"{split}: {format_packing_report(counts['packing'], counts['sequences'], shown['sequence'])}"
        yield paragraph(words, muted=True)
    if marks := shown.get("marks"):
        yield element("h2", "Tokens by author")
        rows = [
            (author, f"{marks['turns'].get(author, 0):,}", f"{tokens:,}", f"{marks['trained_tokens'].get(author, 0):,}")
            for author, tokens in marks["tokens"].items()
        ]
        yield table(("author", "turns", "tokens", "trained tokens"), rows)
        yield paragraph(f"{marks['spans']:,} spans of trained tokens, before examples are cut to a row", muted=True)
        kinds = ("trained", "context", "template", "special")
        yield paragraph([join([element("span", kind, class_=f"part {kind}"), " "]) for kind in kinds])
    for row in shown["rows"]:
        yield element("h2", f"Sample {row['sample']:,}")
        padding = f", {row['padding']:,} tokens of padding" if row.get("padding") else ""
        yield paragraph(f"{row['target_tokens']:,} tokens have a target{padding}", muted=True)
        yield from map(_render_document, row["documents"])


def _render_document(document: Mapping[str, Any]) -> Markup:
    """Return a document of a sample as HTML: its token range, then its text with the kinds of tokens in colours.
    document: entry of `documents` of `describe_samples`.
    """
    parts = document.get("parts") or [{"text": document["text"], "trained": False, "special": False, "author": ""}]
    texts = [element("span", part["text"], class_=_list_classes(part), title=part["author"] or None) for part in parts]
    place = f"tokens {document['start']:,} to {document['stop'] - 1:,}"
    place += f", {document['label']}" if "label" in document else ""
    return join([element("h3", place), element("div", texts, class_="example")])


def _list_classes(part: Mapping[str, Any]) -> str:
    """Return the CSS classes that style a run of tokens with equal properties (trained, role, special). part: entry of
    `parts` of `describe_samples`.
    """
    untrained = "template" if part["author"] == "template" else "context"
    kinds = ["trained" if part["trained"] else untrained, *["special"] * part["special"]]
    return " ".join(["part", *kinds])
