"""HTML page of a balance report: shares and targets of the acts, and refusals, by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.draw.markup import Markup, element
from meshwright.draw.page import bar, page, paragraph, table
from meshwright.synthesis.speech_acts import ACTS, SIDES


def render_balance_page(title: str, report: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page on how evenly speech acts are distributed over labelled records.

    title: name of the data, for the heading. report: JSON of `balance.measure_balance`: counts, shares and targets of
    each act by group.
    """
    return page(f"Speech acts of {title}", element("h1", f"Speech acts of {title}"), *_render_sections(report))


def _render_sections(report: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield the HTML sections of the page: for each group of records its counts, speech acts and refusals. report: JSON
    of `balance.measure_balance`."""
    yield paragraph("A bar is the share of an act among the labels of its side; the mark is its target.", muted=True)
    for name, group in report["groups"].items():
        guessed = f"; {group['guessed']:,} by a model, not reviewed" if group["guessed"] else ""
        yield element("h2", name)
        yield paragraph(f"{group['labelled']:,} of {group['records']:,} records labelled{guessed}", muted=True)
        if group["labelled"]:
            for side in SIDES:
                yield from _render_side(side, group[side], report["target"])
            yield from _render_refusals(group["refusals"])
    yield element("h2", "The acts")
    yield table((), ACTS.items())


def _render_side(name: str, side: Mapping[str, Any], target: Mapping[str, float]) -> Iterator[Markup]:
    """Yield a heading, key figures and a table of the speech acts in the prompts, or in the responses, of a group of
    records.

    name: "prompt" or "response". side: entry for "prompt" or "response" of the group in the report of
    `balance.measure_balance` (`acts`, `entropy`, `effective` ...). target: {act: desired share}.
    """
    widest = max([row["share"] for row in side["acts"].values()] + list(target.values())) or 1.0
    none = f"; {side['none']:,} with no act" if side["none"] else ""
    yield element("h3", name)
    yield paragraph(
        f"effective number of acts {side['effective']:.2f} of {len(ACTS)}, entropy {side['entropy']:.2f} bits{none}",
        muted=True,
    )
    rows = [
        (
            element("span", act, class_=None if row["count"] else "missing"), f"{row['count']:,}",
            f"{row['share']:.1%}", bar(row["share"] / widest, mark=target[act] / widest), f"{target[act]:.1%}",
            f"{row['add']:,}",
        )
        for act, row in side["acts"].items()
    ]  # fmt: skip
    yield table(("act", "labels", "share", "", "target", "to add"), rows)


def _render_refusals(counted: Mapping[str, int]) -> Iterator[Markup]:
    """Yield an HTML table of refused and answered prompts. counted: {name such as "refused": number of records}, from
    `balance._count_refusals`.
    """
    counts = (
        ("should be refused", counted["should_refuse"], counted["refused"], counted["answered"]),
        ("should be answered", counted["harmless"], counted["refused_harmless"], counted["answered_harmless"]),
    )
    yield element("h3", "refusals")
    rows = [(name, *(f"{count:,}" for count in row)) for name, *row in counts]
    yield table(("prompt", "records", "refused", "answered"), rows)
    if counted["not_judged"]:
        yield paragraph(f"{counted['not_judged']:,} not judged", muted=True)
