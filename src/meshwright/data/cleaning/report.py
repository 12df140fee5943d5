"""The page about a cleaning: counts per rule, what was dropped, distributions before and after, in one HTML file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.data.cleaning.characters import KINDS
from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.rule_notes import RULE_NOTES

BEFORE, AFTER = "#9ec5f4", "#0b63ce"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 240, 64, 36, 12
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}h3{font-size:1rem;margin:1.2rem 0 .2rem}
table{border-collapse:collapse;width:100%}td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}
th{font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.bar{width:22%}.bar i{display:block;height:.55rem;margin-top:.15rem;border-radius:2px}
pre{background:#f5f6f8;padding:.6rem .8rem;border-radius:4px;font-size:12.5px;white-space:pre-wrap;margin:.3rem 0;
overflow-wrap:anywhere;max-height:14rem;overflow-y:auto}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#57606a}
.muted{color:#57606a}.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin:0 .3rem 0 .8rem}
"""


def cleaning_page(title: str, report: Mapping[str, Any]) -> str:
    """The page of a report as `cleaning_pass.run_cleaning_pass` makes it; nothing in it is loaded from elsewhere."""
    parts = [
        f"<h1>Cleaning of {html.escape(title)}</h1>",
        _summary(report),
        "<h2>Rules</h2>",
        _rules(report),
        _masks(report),
    ]
    if report["minhash"]:
        minhash = MinHash(**report["minhash"])
        parts += ["<h2>Near duplicates</h2>", _curve(minhash)]
    parts += [
        "<h2>Lengths</h2>",
        _KEY,
        _lengths(report["lengths"]),
        "<h2>Characters</h2>",
        _KEY,
        _characters(report["characters"]),
        "<h2>Sources</h2>",
        _KEY,
        _sources(report["sources"]),
        "<h2>Samples of what was dropped</h2>",
        *(_samples(rule, samples) for rule, samples in report["samples"].items()),
    ]
    if not report["samples"]:
        parts.append("<p>Nothing was dropped.</p>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Cleaning of {html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>{"".join(parts)}'
        "</body></html>\n"
    )


_KEY = f'<p class="muted key"><i style="background:{BEFORE}"></i>before<i style="background:{AFTER}"></i>after</p>'


def _summary(report: Mapping[str, Any]) -> str:
    documents, size = report["documents"], report["bytes"]
    return _table(
        ("", "before", "after", "kept"),
        [
            ("documents", *_kept(documents["before"], documents["after"], "{:,}")),
            ("megabytes", *_kept(size["before"] / 1e6, size["after"] / 1e6, "{:,.2f}")),
        ],
    )


def _kept(before: float, after: float, form: str) -> tuple[str, str, str]:
    return form.format(before), form.format(after), f"{after / before:.1%}" if before else "–"


def _rules(report: Mapping[str, Any]) -> str:
    most = max(report["dropped"].values(), default=0) or 1
    rows = []
    for rule in report["rules"]:
        dropped, (note, source) = report["dropped"][rule], RULE_NOTES[rule]
        where = f' <span class="muted">({html.escape(source)})</span>' if source else ""
        rows.append(
            f"<tr><td><b>{rule}</b><br>{html.escape(note)}{where}</td>"
            f'<td class="n">{dropped:,}</td><td class="n">{report["dropped_bytes"][rule] / 1e6:,.2f}</td>'
            f'<td class="bar">{_bar(dropped / most, AFTER)}</td></tr>'
        )
    head = '<tr><th>drops a document</th><th class="n">documents</th><th class="n">MB</th><th></th></tr>'
    return f"<table>{head}{''.join(rows)}</table>"


def _masks(report: Mapping[str, Any]) -> str:
    if not report["masked"]:
        return ""
    names = {"c4_lines": "lines that C4 leaves out", "key": "keys", "email": "e-mail addresses"}
    names |= {"phone": "telephone numbers", "ip": "internet addresses"}
    rows = [(names[kind], f"{count:,}") for kind, count in report["masked"].items()]
    return "<h2>Masked or left out in the documents that are kept</h2>" + _table(("", "count"), rows)


def _curve(minhash: MinHash) -> str:
    """The probability that two documents are found, against their similarity."""
    right, bottom = _WIDTH - 16, _HEIGHT - _BOTTOM

    def place(similarity: float, probability: float) -> str:
        x = _LEFT + similarity * (right - _LEFT)
        return f"{x:.1f},{bottom - probability * (bottom - _TOP):.1f}"

    points = " ".join(place(at / 200, minhash.match_probability(at / 200)) for at in range(201))
    lines = [
        f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#e3e6ea"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{share:g}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
        for y in [round(bottom - share * (bottom - _TOP), 1)]
    ]
    ticks = [_tick(_LEFT + tenth / 10 * (right - _LEFT), bottom, f"{tenth / 10:g}") for tenth in range(0, 11, 2)]
    at = _LEFT + minhash.threshold * (right - _LEFT)
    mark = (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#d1570a" stroke-dasharray="4 3"/>'
        f'<text x="{at - 6:.1f}" y="{_TOP + 12}" text-anchor="end">threshold {minhash.threshold:.3f}</text>'
    )
    rows = [(f"{at / 10:.1f}", f"{minhash.match_probability(at / 10):.3f}") for at in range(4, 11)]
    return (
        f"<p>{minhash.bands} bands of {minhash.rows} rows over runs of {minhash.words} words. Two documents are found "
        f"with probability 1 − (1 − s<sup>{minhash.rows}</sup>)<sup>{minhash.bands}</sup> at Jaccard similarity s; the "
        f"curve is steepest near (1 / {minhash.bands})<sup>1 / {minhash.rows}</sup> = {minhash.threshold:.3f}.</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(lines)}{"".join(ticks)}'
        f'<polyline points="{points}" fill="none" stroke="{AFTER}" stroke-width="2"/>{mark}'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">Jaccard similarity</text></svg>'
        + _table(("similarity", *(row[0] for row in rows)), [("found", *(row[1] for row in rows))])
    )


def _lengths(lengths: Mapping[str, Sequence[int]]) -> str:
    """Documents by their number of characters, in steps of two."""
    used = [at for at, count in enumerate(lengths["before"]) if count]
    if not used:
        return "<p>No documents.</p>"
    bins = range(used[0], used[-1] + 1)
    most = max(lengths["before"])
    right, bottom = _WIDTH - 16, _HEIGHT - _BOTTOM
    step = (right - _LEFT) / len(bins)
    bars = []
    for place, at in enumerate(bins):
        for side, (kind, colour) in enumerate((("before", BEFORE), ("after", AFTER))):
            height = lengths[kind][at] / most * (bottom - _TOP)
            x = _LEFT + place * step + step * (0.08 + 0.42 * side)
            bars.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{step * 0.42:.1f}" height="{height:.1f}" '
                f'fill="{colour}"><title>{kind}: {lengths[kind][at]:,}</title></rect>'
            )
        first = 0 if at == 0 else 1 << (at - 1)
        if len(bins) < 15 or place % 2 == 0:
            bars.append(_tick(_LEFT + (place + 0.5) * step, bottom, _short(first)))
    scale = [
        f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#e3e6ea"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{most * share:,.0f}</text>'
        for share in (0, 0.5, 1)
        for y in [round(bottom - share * (bottom - _TOP), 1)]
    ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(scale)}{"".join(bars)}'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">characters from … on</text></svg>'
    )


def _tick(x: float, bottom: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'


def _short(number: int) -> str:
    return f"{number >> 20}M" if number >= 1 << 20 else f"{number >> 10}k" if number >= 1 << 10 else f"{number}"


def _characters(characters: Mapping[str, Mapping[str, int]]) -> str:
    totals = {side: sum(counts.values()) or 1 for side, counts in characters.items()}
    rows = []
    for kind in KINDS:
        if characters["before"].get(kind):
            shares = [characters[side][kind] / totals[side] for side in ("before", "after")]
            rows.append(_pair(kind, [f"{share:.2%}" for share in shares], shares))
    return _pairs("of the characters", rows)


def _sources(sources: Iterable[Mapping[str, Any]]) -> str:
    listed = list(sources)
    most = max((source["before"]["bytes"] for source in listed), default=0) or 1
    rows = []
    for source in listed:
        sizes = [source[side]["bytes"] for side in ("before", "after")]
        counts = [f"{source[side]['documents']:,} / {source[side]['bytes'] / 1e6:,.2f}" for side in ("before", "after")]
        rows.append(_pair(source["source"], counts, [size / most for size in sizes]))
    return _pairs("documents / MB", rows)


def _pair(name: str, said: Sequence[str], shares: Sequence[float]) -> str:
    bars = "".join(_bar(share, colour) for share, colour in zip(shares, (BEFORE, AFTER), strict=True))
    cells = "".join(f'<td class="n">{text}</td>' for text in said)
    return f'<tr><td>{html.escape(name)}</td>{cells}<td class="bar">{bars}</td></tr>'


def _pairs(what: str, rows: Sequence[str]) -> str:
    head = f'<tr><th>{what}</th><th class="n">before</th><th class="n">after</th><th></th></tr>'
    return f"<table>{head}{''.join(rows)}</table>"


def _bar(share: float, colour: str) -> str:
    return f'<i style="width:{share:.1%};background:{colour}"></i>'


def _samples(rule: str, samples: Iterable[Mapping[str, str]]) -> str:
    parts = [f"<h3>{rule}</h3>"]
    for sample in samples:
        why = html.escape(_visible(sample["why"]))
        parts.append(f'<div>{html.escape(_visible(sample["document"]))} <span class="muted">{why}</span></div>')
        if sample["text"].strip():
            parts.append(f"<pre>{html.escape(_visible(sample['text']))}</pre>")
        if "earlier" in sample and sample["earlier"] != sample["text"]:
            parts.append(
                f'<div class="muted">the earlier one:</div><pre>{html.escape(_visible(sample["earlier"]))}</pre>'
            )
    return "".join(parts)


def _visible(text: str) -> str:
    """Control characters as their pictures: a browser shows nothing for them."""
    return "".join(chr(0x2400 + ord(at)) if ord(at) < 32 and at not in "\n\t" else at for at in text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        first, *rest = (html.escape(cell) for cell in cells)
        return f"<tr><th>{first}</th>" + "".join(f'<{tag} class="n">{cell}</{tag}>' for cell in rest) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
