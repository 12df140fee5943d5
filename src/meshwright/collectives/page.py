"""The page of `meshwright collective --html`: figures, time over size for all algorithms, buffers round by round."""

from __future__ import annotations

import math
from html import escape

from meshwright.collectives.crossover import LARGEST, SMALLEST, Curves, draw_crossovers
from meshwright.collectives.quantities import format_seconds
from meshwright.collectives.report import Report, crossover_line
from meshwright.errors import UserError
from meshwright.program.buffers import draw_buffers_html

_FEW_RANKS = 16  # up to which every algorithm is followed to the end, however slow
_STYLE = """
.figures { border-collapse: collapse; margin: 12px 0 } .figures td, .figures th { padding: 2px 18px 2px 0;
  text-align: left } .figures td.number { text-align: right; font-variant-numeric: tabular-nums }
.figures th { color: var(--dim); font-weight: 500 } h2.part { font-size: 18px; margin: 26px 0 6px }
.wide { overflow-x: auto; margin: 18px 0 }
"""


def draw_picture(report: Report) -> str:
    """Time over size for every algorithm of the operation on the report's network, as an SVG of its own."""
    if report.checked.program.operation == "barrier":
        raise UserError("a barrier moves no bytes: there is no picture of its time over size")
    asked = report.total_bytes
    least, most = min(SMALLEST, max(asked, 1)), max(LARGEST, asked)
    within = math.inf if report.checked.program.ranks <= _FEW_RANKS else 4.0
    curves = Curves.over(report.chooser, least, most, within)
    named = (report.checked.program.algorithm, report.timing.seconds)
    return draw_crossovers(curves, curves.crossovers(), asked or None, named)


def draw_page(report: Report, picture: str) -> str:
    """A page that needs nothing but itself. The buffers are left out, and that is said, where they are too large."""
    try:
        drawing = draw_buffers_html(report.checked)
        style, body = _between(drawing, "<style>", "</style>"), _between(drawing, "<body>", "</body>")
        buffers = f'<h2 class="part">Round by round</h2>\n{body.replace("<h1>", "<h2>").replace("</h1>", "</h2>")}'
    except UserError as error:
        style, buffers = "", f"<p>The buffers are not drawn: {escape(str(error))}</p>"
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n" for name, value in report.rows())
    parts = [f"<h1>{escape(report.title())}</h1>", f'<table class="figures">{rows}</table>']
    if report.choice is not None:
        parts.append(f'<h2 class="part">The choice</h2>\n<p>{escape(report.choice.reason)}.</p>')
        parts.append(_ranking(report))
    if report.crossovers is not None:
        parts.append(f"<p>C{escape(crossover_line(report.crossovers)[1:])}.</p>")
    parts += [f'<h2 class="part">Time over size</h2>\n<div class="wide">{picture}</div>', buffers]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark">\n<title>{escape(report.title())}</title>\n<style>{style}{_STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _ranking(report: Report) -> str:
    assert report.choice is not None
    head = "".join(f"<th>{word}</th>" for word in ("algorithm", "settings", "simulated", "closed form"))
    rows = []
    for one in report.choice.ranking:
        form = "–" if one.closed_form_seconds is None else format_seconds(one.closed_form_seconds)
        rows.append(
            f"<tr><td>{escape(one.algorithm)}</td><td>{escape(one.settings.describe())}</td>"
            f'<td class="number">{format_seconds(one.seconds)}</td><td class="number">{form}</td></tr>'
        )
    return f'<table class="figures"><tr>{head}</tr>\n{"".join(rows)}</table>'


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]
