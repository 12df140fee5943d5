"""HTML page about a cleaning: counts by rule, samples of dropped documents, distributions before and after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.data.cleaning.characters import KINDS
from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.rule_notes import RULE_NOTES
from meshwright.draw.axis import make_linear_axis
from meshwright.draw.bars import draw_grouped_bars
from meshwright.draw.line_chart import Mark, Series, draw_lines
from meshwright.draw.markup import Content, Markup, element
from meshwright.draw.page import bar, legend, page, paragraph, table

SIDES = {"before": "pale", "after": "blue"}
_MASKED = {
    "c4_lines": "lines removed by C4",
    "key": "keys",
    "email": "e-mail addresses",
    "phone": "telephone numbers",
    "ip": "internet addresses",
}


def render_cleaning_page(title: str, report: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page that shows a cleaning report. title: name of the corpus in the heading. report:
    JSON of `CleaningResult.report`.
    """
    return page(f"Cleaning of {title}", element("h1", f"Cleaning of {title}"), *_render_sections(report), narrow=True)


def _render_sections(report: Mapping[str, Any]) -> Iterator[Content]:
    """Yield the sections of the page in order: summary, rules, masked items, near duplicates, distributions, samples.
    report: JSON of `CleaningResult.report`.
    """
    yield _render_summary(report)
    yield element("h2", "Rules")
    yield _render_rules(report)
    if thresholds := report["language_thresholds"]:
        yield paragraph(f"language: probability of at least {thresholds}.")
    if report["masked"]:
        yield element("h2", "Masked or removed in the documents that are kept")
        yield table(("", "count"), [(_MASKED[kind], f"{count:,}") for kind, count in report["masked"].items()])
    if removed := report["removed_sentences"]:
        yield element("h2", "Repeated spans of three sentences")
        yield table(
            ("", "removed"),
            [("sentences", f"{removed['sentences']:,}"), ("megabytes", f"{removed['bytes'] / 1e6:,.2f}"),
             ("documents with such", f"{removed['documents']:,}")],
        )  # fmt: skip
    if report["minhash"]:
        yield element("h2", "Near duplicates")
        yield from _render_minhash_curve(MinHash(**report["minhash"]))
    for heading, drawn in (
        ("Lengths", _render_lengths(report["lengths"])),
        ("Characters", _render_characters(report["characters"])),
        ("Sources", _render_sources(report["sources"])),
    ):
        yield [element("h2", heading), legend(SIDES.items()), drawn]
    yield element("h2", "Samples of dropped documents")
    for rule, samples in report["samples"].items():
        yield from _render_samples(rule, samples)
    if not report["samples"]:
        yield paragraph("Nothing was dropped.")


def _render_summary(report: Mapping[str, Any]) -> Markup:
    """Return a table of documents and megabytes before and after the cleaning, with the fraction kept. report: JSON of
    `CleaningResult.report`.
    """
    documents, size = report["documents"], report["bytes"]
    return table(
        ("", "before", "after", "kept"),
        [
            ("documents", *_format_before_after(documents["before"], documents["after"], "{:,}")),
            ("megabytes", *_format_before_after(size["before"] / 1e6, size["after"] / 1e6, "{:,.2f}")),
        ],
    )


def _format_before_after(before: float, after: float, format_string: str) -> tuple[str, str, str]:
    """Return three table cells as text: `before` and `after`, both formatted by `format_string` (such as "{:,}"), and
    after / before in percent ("–" if `before` is 0).
    """
    return format_string.format(before), format_string.format(after), f"{after / before:.1%}" if before else "–"


def _render_rules(report: Mapping[str, Any]) -> Markup:
    """Return a table of the rules that ran, each with its note and the documents and megabytes that it dropped. report:
    JSON of `CleaningResult.report`.
    """
    most = max(report["dropped"].values(), default=0) or 1
    rows = []
    for rule in report["rules"]:
        dropped, (note, source) = report["dropped"][rule], RULE_NOTES[rule]
        where = [" ", element("span", f"({source})", class_="muted")] if source else None
        name = element("div", element("b", rule), element("br"), note, where, class_="words")
        rows.append((name, f"{dropped:,}", f"{report['dropped_bytes'][rule] / 1e6:,.2f}", bar(dropped / most)))
    return table(("rule", "documents", "MB", ""), rows)


def _render_minhash_curve(minhash: MinHash) -> Iterator[Markup]:
    """Yield a paragraph, a line chart and a table of the probability that MinHash matches a pair of documents, as a
    function of their Jaccard similarity. minhash: the numbers of bands and rows.
    """
    rows, bands = str(minhash.rows), str(minhash.bands)
    yield paragraph(
        f"{bands} bands of {rows} rows over shingles of {minhash.words} words. Two documents are matched with "
        "probability 1 − (1 − s", element("sup", rows), ")", element("sup", bands), " at Jaccard similarity s; the "
        f"curve is steepest near (1 / {bands})", element("sup", f"1 / {rows}"), f" = {minhash.threshold:.3f}.",
    )  # fmt: skip
    points = [(at / 200, minhash.match_probability(at / 200)) for at in range(201)]
    mark = Mark(minhash.threshold, f"threshold {minhash.threshold:.3f}")
    across = make_linear_axis(0, 1, "Jaccard similarity")
    yield draw_lines(
        across, make_linear_axis(0, 1, "probability"), [Series("found", points, "blue")], [mark], height=250
    )
    tenths = [at / 10 for at in range(4, 11)]
    found = ("found", *(f"{minhash.match_probability(at):.3f}" for at in tenths))
    yield table(("similarity", *(f"{at:.1f}" for at in tenths)), [found])


def _render_lengths(lengths: Mapping[str, Sequence[int]]) -> Markup:
    """Return a bar chart of the number of documents by length. lengths: for "before" and "after" the number of
    documents in each bin; bin 0 is empty texts, bin i > 0 holds lengths from 2^(i - 1) to 2^i - 1 characters.
    """
    used = [at for at, count in enumerate(lengths["before"]) if count]
    if not used:
        return paragraph("No documents.")
    bins = range(used[0], used[-1] + 1)
    names = [_format_binary(0 if at == 0 else 1 << (at - 1)) for at in bins]
    groups = [(side, colour, [lengths[side][at] for at in bins]) for side, colour in SIDES.items()]
    return draw_grouped_bars(names, groups, "characters (lower bound)")


def _format_binary(number: int) -> str:
    """Format a number with a binary suffix, rounded down: 2048 as "2k", 1 << 20 as "1M"."""
    return f"{number >> 20}M" if number >= 1 << 20 else f"{number >> 10}k" if number >= 1 << 10 else f"{number}"


def _render_characters(characters: Mapping[str, Mapping[str, int]]) -> Markup:
    """Return a table of the share of each kind of character ("digits" ...) before and after. characters: for "before"
    and "after" the number of characters by kind.
    """
    totals = {side: sum(counts.values()) or 1 for side, counts in characters.items()}
    rows = []
    for kind in KINDS:
        if characters["before"].get(kind):
            shares = [characters[side][kind] / totals[side] for side in SIDES]
            rows.append((kind, *(f"{share:.2%}" for share in shares), _render_bars(shares)))
    return table(("share of characters", *SIDES, ""), rows)


def _render_sources(sources: Iterable[Mapping[str, Any]]) -> Markup:
    """Return an HTML table with the number of documents and the megabytes of each source before and after cleaning.
    sources: the report's `sources`, [{source, before: {documents, bytes}, after: {documents, bytes}}].
    """
    listed = list(sources)
    most = max((source["before"]["bytes"] for source in listed), default=0) or 1
    rows = []
    for source in listed:
        sides = [source[side] for side in SIDES]
        counts = [f"{side['documents']:,} / {side['bytes'] / 1e6:,.2f}" for side in sides]
        rows.append((source["source"], *counts, _render_bars([side["bytes"] / most for side in sides])))
    return table(("documents / MB", *SIDES, ""), rows)


def _render_bars(shares: Sequence[float]) -> Markup:
    """Return two bars, one for before and one for after the cleaning. shares: lengths of the bars, (before, after), in
    [0, 1].
    """
    return bar(*shares, colours=[*SIDES.values()])


def _render_samples(rule: str, samples: Iterable[Mapping[str, str]]) -> Iterator[Markup]:
    """Yield a heading and a few documents that `rule` dropped. samples: {document: name, why: measured value, text},
    for duplicates also `earlier`, the beginning of the document they repeat.
    """
    yield element("h3", rule)
    for sample in samples:
        yield element("div", sample["document"], " ", element("span", sample["why"], class_="muted"))
        if sample["text"].strip():
            yield element("pre", sample["text"])
        if "earlier" in sample and sample["earlier"] != sample["text"]:
            yield element("div", "earlier document:", class_="muted")
            yield element("pre", sample["earlier"])
