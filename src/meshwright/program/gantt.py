"""A timeline as a picture for people: SVG, alone or in a page, readable by day and by night, nothing to download."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.program.timeline import Span, Timeline

# Kind of a step: its colour as hue, saturation, lightness; that of the second replica. Told apart by hue and by label.
COLOURS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "forward": ((214, 60, 46), (265, 42, 52)),
    "backward": ((24, 74, 46), (350, 50, 50)),
    "input gradient": ((24, 74, 46), (350, 50, 50)),
    "weight gradient": ((150, 45, 36), (180, 50, 33)),
    "all-to-all": ((215, 12, 52), (215, 12, 52)),
    "update": ((0, 0, 35), (0, 0, 35)),
    "send": ((214, 60, 46), (214, 60, 46)),
    "reduce": ((24, 74, 46), (24, 74, 46)),
}
ROW, GAP, STRIP, MARGIN, NAMES = 26, 6, 9, 14, 64  # pixels; a strip below each row shows its level
STYLE = """
.mw { font: 12px ui-sans-serif, system-ui, sans-serif; background: #fff }
.mw text { fill: #222 } .mw .muted { fill: #666 } .mw .small { font-size: 11px }
.mw .row { fill: #eef0f3 } .mw .line { stroke: #9aa3ad }
.mw .label { fill: #fff; font-size: 10.5px; text-anchor: middle; pointer-events: none } .mw .dark { fill: #16202c }
.mw .level { fill: #7d8894; fill-opacity: .55 }
.mw .arrow { stroke: #555; stroke-opacity: .5 }
@media (prefers-color-scheme: dark) {
  .mw { background: #15191e } .mw text { fill: #e4e7ea } .mw .muted { fill: #9aa3ad }
  .mw .row { fill: #232a32 } .mw .line { stroke: #5b6570 }
  .mw .label { fill: #fff } .mw .dark { fill: #10161d }
  .mw .arrow { stroke: #aaa }
}
"""
PAGE_STYLE = """
body { margin: 24px auto; max-width: 1400px; padding: 0 16px; color: #222; background: #fff;
  font: 15px/1.5 ui-sans-serif, system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 0 4px } table { border-collapse: collapse; margin: 16px 0 }
td, th { padding: 3px 12px 3px 0; text-align: right; font-variant-numeric: tabular-nums }
th { font-weight: 600; border-bottom: 1px solid #9aa3ad } td:first-child, th:first-child { text-align: left }
.wide { overflow-x: auto }
@media (prefers-color-scheme: dark) { body { color: #e4e7ea; background: #15191e } }
"""


def draw_svg(timeline: Timeline, width: int = 1200, arrows: bool = False, title: bool = True) -> str:
    """The picture as one SVG document: a row a track, time to the right; hovering over a step names it.

    width: of the picture, in pixels; long programs are drawn as wide as legible labels need, up to eight times that.
    arrows: draw the transfers too. title: write it above the picture.
    """
    spans = [span for span in timeline.spans if span.end > span.start]
    end = timeline.end or 1.0
    notes = 7 * max((len(note) for note in timeline.notes), default=0)
    plot = width - NAMES - notes - 2 * MARGIN
    if spans:
        shortest = min(span.end - span.start for span in spans)
        labels = max(len(span.label) for span in spans)
        plot = min(max(plot, round(end / shortest * (7.4 * labels + 3))), 8 * width)
    scale = plot / end
    left = MARGIN + NAMES
    pitch = ROW + GAP + (STRIP if timeline.levels else 0)
    total = left + plot + notes + 2 * MARGIN
    level_name = timeline.level_name if timeline.levels else ""
    legend, top = _legend(spans, level_name, left, total - MARGIN, 41 if title else 19)
    height = top + len(timeline.tracks) * pitch + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mw" width="{total}" height="{height}" '
        f'viewBox="0 0 {total} {height}" role="img" aria-label="{escape(timeline.title)}">',
        f"<style>{STYLE}</style>",
        *legend,
    ]
    if title:
        parts.append(
            f'<text x="{MARGIN}" y="20" style="font-size:14px;font-weight:600">{escape(timeline.title)}</text>'
        )
    for track, name in enumerate(timeline.tracks):
        y = top + track * pitch
        parts.append(f'<text x="{MARGIN}" y="{y + 17}">{escape(name)}</text>')
        parts.append(f'<rect class="row" x="{left}" y="{y}" width="{plot:.1f}" height="{ROW}"/>')
        if timeline.notes:
            parts.append(
                f'<text class="muted" x="{left + plot + 10:.1f}" y="{y + 17}">{escape(timeline.notes[track])}</text>'
            )
    parts += [_bar(span, left, top + span.track * pitch, scale) for span in spans]
    parts += _levels(timeline, left, top + ROW, pitch, scale)
    if arrows:
        for arrow in timeline.arrows:
            y1, y2 = (top + track * pitch + ROW // 2 for track in (arrow.source, arrow.target))
            parts.append(
                f'<line class="arrow" x1="{left + arrow.start * scale:.1f}" y1="{y1}" '
                f'x2="{left + arrow.end * scale:.1f}" y2="{y2}"><title>{escape(arrow.name)}</title></line>'
            )
    parts += _axis(end, scale, left, top + len(timeline.tracks) * pitch)
    return "\n".join([*parts, "</svg>", ""])


def draw_overview(timeline: Timeline, width: int = 1200, height: int = 800) -> str:
    """The whole of a long program in `width` pixels, its rows as low as `height` asks for: a colour for each kind of
    step, no names. Steps of a kind are one path, so that a hundred thousand of them are a picture still."""
    spans = [span for span in timeline.spans if span.end > span.start]
    left = MARGIN + NAMES
    plot = width - left - 2 * MARGIN
    scale = plot / (timeline.end or 1.0)
    pitch = max(4, min(ROW + GAP, height // max(1, len(timeline.tracks))))
    bar = pitch - (GAP if pitch > 12 else 1)
    legend, top = _legend(spans, "", left, width - MARGIN, 19)
    tall = top + len(timeline.tracks) * pitch + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mw" width="{width}" height="{tall}" '
        f'viewBox="0 0 {width} {tall}" role="img" aria-label="{escape(timeline.title)}">',
        f"<style>{STYLE}</style>",
        *legend,
    ]
    named = -(-14 // pitch)  # so many rows to a name
    for track, name in enumerate(timeline.tracks):
        y = top + track * pitch
        if track % named == 0:
            parts.append(f'<text class="small" x="{MARGIN}" y="{y + bar / 2 + 4:.0f}">{escape(name)}</text>')
        parts.append(f'<rect class="row" x="{left}" y="{y}" width="{plot:.1f}" height="{bar}"/>')
    paths: dict[str, list[str]] = {}
    for span in spans:
        fraction = bar / span.lanes
        above = top + span.track * pitch + span.lane * fraction
        wide = max((span.end - span.start) * scale - 0.3, 0.3)
        path = f"M{left + span.start * scale:.1f} {above:.1f}h{wide:.1f}v{fraction:.1f}h-{wide:.1f}z"
        paths.setdefault(_colour(span)[0], []).append(path)
    parts += [f'<path style="fill:{fill}" d="{"".join(path)}"/>' for fill, path in paths.items()]
    parts += _axis(timeline.end or 1.0, scale, left, top + len(timeline.tracks) * pitch)
    return "\n".join([*parts, "</svg>", ""])


def draw_html(timeline: Timeline, table: Sequence[Sequence[str]] = (), summary: str = "", arrows: bool = False) -> str:
    """A page of its own: the picture, one line of summary, a table whose first row is its head."""
    rows = "".join(
        "<tr>" + "".join(f"<{cell}>{escape(word)}</{cell}>" for word in row) + "</tr>\n"
        for cell, row in zip(["th", *["td"] * len(table)], table, strict=False)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(timeline.title)}</title>'
        f'<meta name="color-scheme" content="light dark"><style>{PAGE_STYLE}</style></head><body>\n'
        f"<h1>{escape(timeline.title)}</h1>\n<p>{escape(summary)}</p>\n"
        f'<div class="wide">{draw_svg(timeline, arrows=arrows, title=False)}</div>\n'
        f"<table>{rows}</table>\n</body></html>\n"
    )


def _colour(span: Span) -> tuple[str, bool]:
    """Fill of a step, and whether its label must be dark."""
    hue, saturation, lightness = COLOURS[span.kind][span.mirrored]
    lightness = round(lightness + 24 * span.shade)
    return f"hsl({hue} {saturation}% {lightness}%)", lightness > 58


def _bar(span: Span, left: int, top: int, scale: float) -> str:
    height = ROW / span.lanes
    x, width = left + span.start * scale, (span.end - span.start) * scale
    y = top + span.lane * height
    fill, dark = _colour(span)
    box = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width - 0.8, 0.3):.2f}" height="{height:.1f}" rx="2" '
        f'style="fill:{fill}">'
        f"<title>{escape(span.name)}: {span.start:g} to {span.end:g}</title></rect>"
    )
    if width < 5.5 * len(span.label) + 1 or height < 10:
        return box
    return (
        f'{box}<text class="label{" dark" if dark else ""}" x="{x + width / 2:.1f}" y="{y + height / 2 + 3.8:.1f}">'
        f"{escape(span.label)}</text>"
    )


def _legend(spans: Sequence[Span], level_name: str, left: int, right: float, y: int) -> tuple[list[str], int]:
    """A swatch for each kind of step in the picture, and one for the strips that show the level, in as many lines as
    it takes from the height y on; and the height at which the rows can begin."""
    parts, x = [], float(left)

    def add(words: str, paint: str) -> None:
        nonlocal x, y
        if x > left and x + 15 + 6.1 * len(words) > right:
            x, y = float(left), y + 17
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" rx="2" {paint}/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y}" class="muted small">{escape(words)}</text>')
        x += 15 + 6.1 * len(words) + 16

    seen: dict[tuple[str, float, bool], Span] = {}
    for span in spans:
        seen.setdefault((span.kind, span.shade, span.mirrored and len(set(COLOURS[span.kind])) > 1), span)
    for kind, shade, mirrored in sorted(seen, key=lambda key: (key[2], [*COLOURS].index(key[0]), key[1])):
        words = kind + (", second replica" if mirrored else "")
        chunks = sorted({key[1] for key in seen if key[0] == kind and key[2] == mirrored})
        if len(chunks) > 1:
            words += f", chunk {chunks.index(shade) + 1}"
        add(words, f'style="fill:{_colour(seen[kind, shade, mirrored])[0]}"')
    if level_name:
        add(level_name, 'class="level"')
    return parts, y + 11


def _levels(timeline: Timeline, left: int, top: int, pitch: int, scale: float) -> list[str]:
    """A strip below each row: the level over time, as high as the strip where it is the highest of all tracks."""
    highest = max((value for points in timeline.levels.values() for _, value in points), default=0.0)
    if not highest:
        return []
    parts = []
    for track, points in timeline.levels.items():
        base = top + track * pitch + STRIP
        path, before = [f"{left},{base}"], 0.0
        for time, value in [*points, (timeline.end, 0.0)]:
            x = left + time * scale
            path.append(f"{x:.1f},{base - before / highest * STRIP:.1f} {x:.1f},{base - value / highest * STRIP:.1f}")
            before = value
        most = max((value for _, value in points), default=0.0)
        title = f"{timeline.level_name} of {timeline.tracks[track]}: at most {most:g}"
        parts.append(f'<polygon class="level" points="{" ".join(path)}"><title>{escape(title)}</title></polygon>')
    return parts


def _axis(end: float, scale: float, left: int, y: int) -> list[str]:
    """Time below the rows, with about one tick every 90 pixels at round numbers."""
    parts = [f'<line class="line" x1="{left}" y1="{y}" x2="{left + end * scale:.1f}" y2="{y}"/>']
    rough = 90 / scale
    power = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 1.0
    while power > rough:
        power /= 10
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.7)
    tick = 0.0
    while tick <= end * 1.0001:
        x = left + tick * scale
        parts.append(f'<line class="line" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}"/>')
        parts.append(
            f'<text class="muted" x="{x:.1f}" y="{y + 17}" style="font-size:11px" text-anchor="middle">{tick:g}</text>'
        )
        tick = round(tick / step + 1) * step
    return parts
