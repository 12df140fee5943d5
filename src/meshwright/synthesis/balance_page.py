"""The page of a balance report: acts with their shares beside the target, refusals, group by group. One file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from meshwright.program.gantt import PAGE_STYLE
from meshwright.synthesis.speech_acts import ACTS, SIDES

STYLE = """
h2 { font-size: 18px; margin: 32px 0 4px } h3 { font-size: 15px; margin: 18px 0 0 } .muted { color: #666 }
table { margin: 6px 0 } td.act { white-space: nowrap } td.bar { width: 300px } tr.missing td.act { color: #b3261e }
.bar div { position: relative; height: 13px; background: hsl(214 20% 93%); border-radius: 2px }
.bar i { display: block; height: 13px; background: hsl(214 60% 50%); border-radius: 2px }
.bar b { position: absolute; top: -2px; width: 2px; height: 17px; background: #d1570a }
@media (prefers-color-scheme: dark) {
  .muted { color: #9aa3ad } .bar div { background: hsl(214 15% 22%) } tr.missing td.act { color: #ff8a80 }
}
"""


def balance_page(title: str, report: Mapping[str, Any]) -> str:
    """The page of what `balance.balance` found; nothing in it is loaded from elsewhere."""
    name = f"Speech acts of {escape(title)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="color-scheme" content="light dark"><meta name="viewport" content="width=device-width">'
        f"<style>{PAGE_STYLE}{STYLE}</style></head><body>\n<h1>{name}</h1>\n"
        + "\n".join(_parts(report))
        + "\n</body></html>\n"
    )


def _parts(report: Mapping[str, Any]) -> Iterator[str]:
    yield '<p class="muted">A bar is the share of an act among the labels of its side; the mark is its target.</p>'
    for name, group in report["groups"].items():
        guessed = f"; {group['guessed']:,} by a model's guess that nobody has looked at" if group["guessed"] else ""
        yield f"<h2>{escape(name)}</h2>"
        yield f'<p class="muted">{group["labelled"]:,} of {group["records"]:,} records labelled{guessed}</p>'
        if group["labelled"]:
            for side in SIDES:
                yield _side(side, group[side], report["target"])
            yield _refusals(group["refusals"])
    yield "<h2>The acts</h2><table>"
    yield "".join(f'<tr><td class="act">{act}</td><td>{escape(what)}</td></tr>' for act, what in ACTS.items())
    yield "</table>"


def _side(name: str, side: Mapping[str, Any], target: Mapping[str, float]) -> str:
    widest = max([row["share"] for row in side["acts"].values()] + list(target.values())) or 1.0
    rows = []
    for act, row in side["acts"].items():
        bar = f'<i style="width:{row["share"] / widest:.1%}"></i><b style="left:{target[act] / widest:.1%}"></b>'
        rows.append(
            f'<tr{"" if row["count"] else " class=missing"}><td class="act">{act}</td><td>{row["count"]:,}</td>'
            f'<td>{row["share"]:.1%}</td><td class="bar"><div>{bar}</div></td><td>{target[act]:.1%}</td>'
            f"<td>{row['add']:,}</td></tr>"
        )
    none = f"; {side['none']:,} with no act" if side["none"] else ""
    return (
        f'<h3>{name}</h3><p class="muted">effective number of acts {side["effective"]:.2f} of {len(ACTS)}, entropy '
        f"{side['entropy']:.2f} bits{none}</p>"
        "<table><tr><th>act</th><th>labels</th><th>share</th><th></th><th>target</th><th>to add</th></tr>"
        f"{''.join(rows)}</table>"
    )


def _refusals(said: Mapping[str, int]) -> str:
    rows = (
        ("should be refused", said["should_refuse"], said["refused"], said["answered"]),
        ("should be answered", said["harmless"], said["refused_harmless"], said["answered_harmless"]),
    )
    cells = "".join(f"<tr><td>{name}</td>{''.join(f'<td>{n:,}</td>' for n in counts)}</tr>" for name, *counts in rows)
    missing = f'<p class="muted">{said["not_judged"]:,} not judged</p>' if said["not_judged"] else ""
    return (
        "<h3>refusals</h3><table><tr><th>prompt</th><th>records</th><th>refused</th><th>answered</th></tr>"
        f"{cells}</table>{missing}"
    )
