"""The report of a run: one self-contained HTML page with loss, throughput, recipe, evaluation and a sample."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.monitoring.run_directory import METRICS, RECIPE, RESULT

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 280, 64, 40, 16, 16
BUCKETS = 720  # of a curve with more than twice as many points: one for each column of the chart

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{background:#f5f6f8;padding:.8rem;overflow-x:auto;border-radius:4px;font-size:13px}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#57606a}
.muted{color:#57606a}
"""


def write_report(
    run_directory: Path, *, evaluation: dict[str, Any] | None = None, sample: dict[str, Any] | None = None
) -> Path:
    """Write `report.html` into a run directory from the metrics, the recipe and the result that lie there.

    `evaluation` is what `evaluate` returned, `sample` what `generate` did (`prompt` and `text`). Returns the path of
    the page. `UserError` when nothing has been trained there or the page cannot be written.
    """
    from meshwright.monitoring.report_inputs import (
        check_evaluation,
        check_sample,
        read_recipe,
        read_result,
        read_steps,
    )

    metrics_path = run_directory / METRICS
    if not metrics_path.exists():
        raise UserError(f"no {METRICS} in {run_directory}: name the directory of a run that has trained")
    lines, result, recipe_path = read_steps(metrics_path), read_result(run_directory / RESULT), run_directory / RECIPE
    recipe = read_recipe(recipe_path) if recipe_path.exists() else ""
    if evaluation is not None:
        check_evaluation(evaluation)
    if sample is not None:
        check_sample(sample)
    page = run_directory / "report.html"
    name = run_directory.resolve().name
    try:
        text = _page(name, lines, result, recipe, evaluation, sample)
        page.write_text(text, encoding="utf-8", errors="replace")  # JSON may hold half a character
    except OSError as error:
        raise UserError(f"{page} cannot be written: {(error.strerror or str(error)).lower()}") from None
    return page


def _page(
    name: str,
    lines: list[dict[str, Any]],
    result: dict[str, Any],
    recipe: str,
    evaluation: dict[str, Any] | None,
    sample: dict[str, Any] | None,
) -> str:
    training = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
    validation = [(line["step"], line["validation_loss"]) for line in lines if line.get("validation_loss") is not None]
    work = _work(lines)
    rate = [(line["step"], line[f"{work}_per_second"]) for line in lines]
    parts = [
        f"<h1>Run {html.escape(name)}</h1>",
        _summary(lines, result),
        "<h2>Loss</h2>",
        line_chart(
            [("training", "#9ec5f4", training), ("training, smoothed", "#0b63ce", _smooth(training))]
            + ([("validation", "#d1570a", validation)] if validation else []),
            "nats per token" if work == "tokens" else "loss",
        ),
        "<h2>Throughput</h2>",
        line_chart([(f"{work} per second", "#2f855a", rate)], f"{work} per second", from_zero=True),
    ]
    if rows := _compared_rows(result):
        parts += ["<h2>Predicted and measured</h2>", _comparison(rows)]
    if evaluation:
        parts += ["<h2>Held-out files</h2>", _table(_evaluation_rows(evaluation))]
    if sample:
        parts += [
            "<h2>Sample</h2>",
            f"<pre><b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}</pre>",
        ]
    if recipe:
        parts += ["<h2>Recipe</h2>", f"<pre>{html.escape(recipe)}</pre>"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>{"".join(parts)}'
        "</body></html>\n"
    )


def _work(lines: list[dict[str, Any]]) -> str:
    """What the steps are made of: tokens, or the samples of a module that is not ours."""
    return "tokens" if "tokens_per_second" in lines[0] else "samples"


def _summary(lines: list[dict[str, Any]], result: dict[str, Any]) -> str:
    work = _work(lines)
    rates = sorted(line[f"{work}_per_second"] for line in lines)
    parts: dict[str, float] = {}
    for line in lines:
        for part, seconds in line.get("seconds_by_part", {}).items():
            parts[part] = parts.get(part, 0.0) + seconds
    total = sum(parts.values()) or 1.0
    rows: list[tuple[str, str]] = [
        ("steps", f"{lines[-1]['step']:,}"),
        ("last training loss", _number(lines[-1]["loss"], ".4f")),
        (f"{work} per second (median)", f"{rates[len(rates) // 2]:,.0f}"),
        ("peak memory of rank 0", f"{max(line['memory_gib'] for line in lines):.2f} GiB"),
        ("time by part", ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())),
    ]
    if result.get("parameters"):
        rows.insert(0, ("parameters", f"{result['parameters']:,}"))
    if result.get("layout"):
        rows.insert(1, ("layout", result["layout"]))
    if result.get("mfu") and result.get("peak_flops_per_device") and result.get("flops_convention"):
        rows.append(("model FLOP utilisation", _share_of_peak(result)))
        rows.append(("FLOP convention", result["flops_convention"]))
    if result.get("skipped_steps"):
        rows.append(("skipped steps", str(result["skipped_steps"])))
    return _table(rows)


def _compared_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, predicted, measured: the time of a step, memory by category, bytes by axis. Nothing for a run that recorded
    no prediction."""
    predicted, measured = (result.get(which) or {} for which in ("predicted", "measured"))
    said = [
        ("seconds of a step", *map(_step_seconds, (predicted, measured))),
        ("of which", *(_parts(side.get("seconds_by_part")) for side in (predicted, measured))),
    ]
    kinds = [side.get("seconds_by_kind") or {} for side in (predicted, measured)]
    for kind in dict.fromkeys(kind for side in kinds for kind in side):
        said.append((f"seconds of a step: {kind}", *(f"{side[kind]:.4g}" if kind in side else "" for side in kinds)))
    peaks = [side.get("memory_bytes") or {} for side in (predicted, measured)]
    said.append(("process memory of rank 0", *(_size(side.get("process_peak")) for side in peaks)))
    said.append(("tensors of rank 0", *(_size(side.get("allocator_peak")) for side in peaks)))
    for title, key in (
        ("process memory of rank 0", "process_memory_bytes"),
        ("memory of rank 0", "memory_bytes"),
        ("sent a step by rank 0", "sent_bytes_by_axis"),
    ):
        sides = [side.get(key) or {} for side in (predicted, measured)]
        for name in dict.fromkeys(name for side in sides for name in side):
            if name not in ("process_peak", "allocator_peak") and any(side.get(name) for side in sides):
                said.append((f"{title}: {name}", *(_size(side.get(name)) for side in sides)))
    return [(name, before or "–", after or "–") for name, before, after in said if before or after]


def _step_seconds(side: dict[str, Any]) -> str:
    if side.get("step_seconds") is None:
        return ""
    low, high = side.get("step_seconds_low"), side.get("step_seconds_high")
    return f"{side['step_seconds']:.4g}" + (f" ({low:.4g} to {high:.4g})" if low and high else "")


def _parts(seconds: dict[str, float] | None) -> str:
    return ", ".join(f"{part} {value:.3g}" for part, value in (seconds or {}).items() if value)


def _size(size: int | None) -> str:
    return "" if size is None else f"{size:,} B"


def _comparison(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(before)}</td><td>{html.escape(after)}</td></tr>"
        for name, before, after in rows
    )
    return f"<table><tr><th></th><th>predicted</th><th>measured</th></tr>{cells}</table>"


def _share_of_peak(result: dict[str, Any]) -> str:
    return f"{result['mfu']:.1%} of {result['peak_flops_per_device'] / 1e9:,.0f} GFLOP/s a process"


def _evaluation_rows(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("loss", f"{evaluation['loss']:.4f} nats per token"),
        ("perplexity", f"{evaluation['perplexity']:.2f}"),
        ("tokens", f"{evaluation['tokens']:,}"),
    ]
    if evaluation["bits_per_byte"] is not None:  # of records there are none
        rows.insert(2, ("bits per byte", f"{evaluation['bits_per_byte']:.3f}"))
    if evaluation.get("xz_bits_per_byte") is not None:
        rows.insert(3, ("xz -9 on the same bytes", f"{evaluation['xz_bits_per_byte']:.3f} bits per byte"))
    return rows


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _smooth(points: list[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Exponential moving average without start-up bias."""
    smoothed, average, mass = [], 0.0, 0.0
    for step, value in points:
        average, mass = weight * average + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append((step, average / mass))
    return smoothed


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most twice `BUCKETS` points that look the same: the lowest and the highest of every bucket, both ends."""
    if len(points) <= 2 * BUCKETS:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(BUCKETS - 1):
        places = range(len(points) * bucket // (BUCKETS - 1), len(points) * (bucket + 1) // (BUCKETS - 1))
        kept |= {choose(places, key=lambda index: points[index][1]) for choose in (min, max)}
    return [points[index] for index in sorted(kept)]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) covering [low, high]."""
    span = max(high - low, 1e-9)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(series: list[tuple[str, str, list[tuple[float, float]]]], unit: str, *, from_zero: bool = False) -> str:
    """An SVG line chart; `series` is (name, colour, points), x is the step."""
    series = [(name, colour, _thinned(some)) for name, colour, some in series if some]
    points = [point for _, _, some in series for point in some]
    if not points:
        return "<p>No finite values.</p>"
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = (0.0 if from_zero else min(y for _, y in points)), max(y for _, y in points)
    margin = 0.04 * (y_high - y_low or max(1.0, abs(y_high)))
    y_low, y_high = (y_low if from_zero else y_low - margin), y_high + margin
    x_high = x_high if x_high > x_low else x_low + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - BOTTOM - TOP)

    drawn = []
    for tick in _ticks(y_low, y_high):
        _, y = place(x_low, tick)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    for tick in _ticks(x_low, x_high, 8):
        x, _ = place(tick, y_low)
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:,.6g}</text>')
    for _, colour, some in series:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in some))
        marker = (
            "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
                for x, y in (place(*point) for point in some)
            )
            if len(some) <= 40
            else ""
        )
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{marker}')
    legend, at = [], LEFT
    for name, colour, _ in series:
        legend.append(f'<rect x="{at}" y="{HEIGHT - 12}" width="12" height="4" fill="{colour}"/>')
        legend.append(f'<text x="{at + 18}" y="{HEIGHT - 6}">{html.escape(name)}</text>')
        at += 40 + 7 * len(name)
    title = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step; {html.escape(unit)}</text>'
    label = html.escape(unit)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawn + legend)}{title}</svg>'
