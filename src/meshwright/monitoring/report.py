"""Report of a run: one self-contained HTML page with loss, throughput, recipe, evaluation and a generated sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.draw.axis import linear_axis
from meshwright.draw.line_chart import Series, draw_lines
from meshwright.draw.markup import Content, Markup, element
from meshwright.draw.page import page, paragraph, table
from meshwright.errors import UserError
from meshwright.monitoring.run_directory import METRICS, RECIPE, RESULT


def write_report(
    run_directory: Path, *, evaluation: dict[str, Any] | None = None, sample: dict[str, Any] | None = None
) -> Path:
    """Write `report.html` into a run directory from its metrics, recipe and result; return the path of the page.

    evaluation: the document returned by `evaluate`; sample: the document of `generate` (`prompt` and `text`).
    `UserError` when nothing has been trained there or the page cannot be written.
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
    path = run_directory / "report.html"
    name = run_directory.resolve().name
    try:
        text = _format_page(name, lines, result, recipe, evaluation, sample)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    return path


def _format_page(
    name: str,
    lines: list[dict[str, Any]],
    result: dict[str, Any],
    recipe: str,
    evaluation: dict[str, Any] | None,
    sample: dict[str, Any] | None,
) -> str:
    """Return the report page as HTML. name: of the run; lines: step lines of metrics.jsonl; result: the result
    document; recipe: its TOML text; evaluation, sample: documents of `evaluate` and `generate`, None: left out."""
    training = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
    validation = [(line["step"], line["validation_loss"]) for line in lines if line.get("validation_loss") is not None]
    work = _work_unit(lines)
    rate = [(line["step"], line[f"{work}_per_second"]) for line in lines]
    losses = [Series("training", training, "pale"), Series("training, smoothed", _smooth(training), "blue", dots=True)]
    if validation:
        losses.append(Series("validation", validation, "orange", dots=True))
    parts: list[Content] = [
        element("h1", f"Run {name}"),
        _summary_table(lines, result),
        element("h2", "Loss"),
        draw_step_chart(losses, "nats per token" if work == "tokens" else "loss"),
        element("h2", "Throughput"),
        draw_step_chart([Series(f"{work} per second", rate, "green", dots=True)], f"{work} per second", from_zero=True),
    ]
    if rows := _compared_rows(result):
        parts += [element("h2", "Predicted and measured"), table(("", "predicted", "measured"), rows)]
    if evaluation:
        parts += [element("h2", "Held-out files"), table((), _evaluation_rows(evaluation))]
    if sample:
        text = element("pre", element("b", sample["prompt"]), sample["text"])
        parts += [element("h2", "Sample"), text]
    if recipe:
        parts += [element("h2", "Recipe"), element("pre", recipe)]
    return page(name, *parts, narrow=True)


def _work_unit(lines: list[dict[str, Any]]) -> str:
    """Return the unit that throughput counts: "tokens", or "samples" for a user's own module. lines: step lines of
    metrics.jsonl."""
    return "tokens" if "tokens_per_second" in lines[0] else "samples"


def _summary_table(lines: list[dict[str, Any]], result: dict[str, Any]) -> Markup:
    """Return the HTML table of a run's main figures. lines: step lines of metrics.jsonl; result: the result
    document."""
    work = _work_unit(lines)
    rates = sorted(line[f"{work}_per_second"] for line in lines)
    parts: dict[str, float] = {}
    for line in lines:
        for part, seconds in line.get("seconds_by_part", {}).items():
            parts[part] = parts.get(part, 0.0) + seconds
    total = sum(parts.values()) or 1.0
    rows: list[tuple[str, str]] = [
        ("steps", f"{lines[-1]['step']:,}"),
        ("last training loss", _format_number(lines[-1]["loss"], ".4f")),
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
    return table((), rows)


def _compared_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return table rows (name, predicted, measured), all text, for step time, memory and traffic; empty if the result
    document has no prediction."""
    predicted, measured = (result.get(which) or {} for which in ("predicted", "measured"))
    said = [
        ("seconds of a step", *map(_format_step_seconds, (predicted, measured))),
        ("of which", *(_format_parts(side.get("seconds_by_part")) for side in (predicted, measured))),
    ]
    kinds = [side.get("seconds_by_kind") or {} for side in (predicted, measured)]
    for kind in dict.fromkeys(kind for side in kinds for kind in side):
        said.append((f"seconds of a step: {kind}", *(f"{side[kind]:.4g}" if kind in side else "" for side in kinds)))
    peaks = [side.get("memory_bytes") or {} for side in (predicted, measured)]
    said.append(("process memory of rank 0", *(_format_bytes(side.get("process_peak")) for side in peaks)))
    said.append(("tensors of rank 0", *(_format_bytes(side.get("allocator_peak")) for side in peaks)))
    for title, key in (
        ("process memory of rank 0", "process_memory_bytes"),
        ("memory of rank 0", "memory_bytes"),
        ("sent a step by rank 0", "sent_bytes_by_axis"),
    ):
        sides = [side.get(key) or {} for side in (predicted, measured)]
        for name in dict.fromkeys(name for side in sides for name in side):
            if name not in ("process_peak", "allocator_peak") and any(side.get(name) for side in sides):
                said.append((f"{title}: {name}", *(_format_bytes(side.get(name)) for side in sides)))
    return [(name, before or "–", after or "–") for name, before, after in said if before or after]


def _format_step_seconds(side: dict[str, Any]) -> str:
    """Return text for a step's seconds with their lower and upper bounds, empty if unknown. side: entry `predicted` or
    `measured` of the result document."""
    if side.get("step_seconds") is None:
        return ""
    low, high = side.get("step_seconds_low"), side.get("step_seconds_high")
    return f"{side['step_seconds']:.4g}" + (f" ({low:.4g} to {high:.4g})" if low and high else "")


def _format_parts(seconds: dict[str, float] | None) -> str:
    """Return text for the seconds of a step by phase, empty for None."""
    return ", ".join(f"{part} {value:.3g}" for part, value in (seconds or {}).items() if value)


def _format_bytes(size: int | None) -> str:
    """Return text for a number of bytes, empty for None."""
    return "" if size is None else f"{size:,} B"


def _share_of_peak(result: dict[str, Any]) -> str:
    """Return text for the MFU in % and for the peak FLOP/s to which it refers. result: the result document."""
    return f"{result['mfu']:.1%} of {result['peak_flops_per_device'] / 1e9:,.0f} GFLOP/s a process"


def _evaluation_rows(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return table rows (name, value), as text, of the document that `evaluate` returned for held-out files."""
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


def _format_number(value: float | None, form: str) -> str:
    """Return a number formatted by the format spec `form`; "not finite" for None."""
    return "not finite" if value is None else format(value, form)


def _smooth(points: list[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Return the exponential moving average of (step, value) points, corrected for start-up bias as in Adam. weight:
    factor of the previous average in each update."""
    smoothed, average, mass = [], 0.0, 0.0
    for step, value in points:
        average, mass = weight * average + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append((step, average / mass))
    return smoothed


def draw_step_chart(series: Sequence[Series], unit: str, *, from_zero: bool = False) -> Markup:
    """Return a line chart over the training steps as SVG markup. unit: of the values, for the axis title; from_zero:
    the y axis begins at 0."""
    points = [point for one in series for point in one.points]
    if not points:
        return paragraph("No finite values.")
    steps, values = ([point[at] for point in points] for at in (0, 1))
    low = 0.0 if from_zero else min(values)
    across = linear_axis(min(steps), max(steps), most=8)
    return draw_lines(
        across, linear_axis(low, max(values), f"step; {unit}", below=0.0 if from_zero else 0.04, above=0.04),
        [one for one in series if one.points],
    )  # fmt: skip
