"""Charts of a run's steps: loss, throughput, learning rate, gradient norm, memory, time by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from meshwright.draw.axis import make_linear_axis
from meshwright.draw.line_chart import Series, draw_lines
from meshwright.draw.markup import Markup, element
from meshwright.draw.page import paragraph

COLOURS = ("blue", "orange", "green", "purple", "pink", "teal", "grey", "red")
"""Colours of runs in a comparison, and of parts of a step."""

Lines = Sequence[Mapping[str, Any]]
"""Step lines of metrics.jsonl."""


def find_throughput_unit(lines: Lines) -> str:
    """Return the unit in which a run counts throughput: "tokens", or "samples" for a user's own module. lines: step
    lines of metrics.jsonl."""
    return "tokens" if "tokens_per_second" in lines[0] else "samples"


def draw_run(lines: Lines) -> Iterator[Markup]:
    """Yield the headings and charts of one run: loss, throughput, learning rate, gradient norm, memory, time by phase.
    lines: step lines of metrics.jsonl."""
    work, training = find_throughput_unit(lines), select_points(lines, "loss")
    smoothed = Series("training, smoothed", smooth(training), "blue", "thick", dots=True)
    losses = [Series("training", training, "pale", "thin"), smoothed]
    if validation := select_points(lines, "validation_loss"):
        losses.append(Series("validation", validation, "orange", dots=True))
    yield element("h2", "Loss")
    yield draw_step_chart(losses, _get_loss_unit(work))
    for title, key, unit, scale in _list_curve_charts([lines], work):
        if points := select_points(lines, key, scale):
            yield element("h2", title)
            yield draw_step_chart([Series(title.lower(), points, "green", dots=True)], unit, from_zero=True)
    parts = list(dict.fromkeys(part for line in lines for part in line.get("seconds_by_part", {})))
    if parts and len(lines) > 1:
        curves = [
            Series(
                part, smooth([(line["step"], 1e3 * line.get("seconds_by_part", {}).get(part, 0.0)) for line in lines]),
                COLOURS[at % len(COLOURS)],
            )
            for at, part in enumerate(parts)
        ]  # fmt: skip
        yield element("h2", "Time by part, smoothed")
        yield draw_step_chart(curves, "milliseconds of a step", from_zero=True)


def draw_runs(runs: Mapping[str, Lines]) -> Iterator[Markup]:
    """Yield headings and charts that compare several runs, with one curve per run. runs: run name -> step lines of
    metrics.jsonl."""
    work = find_throughput_unit(next(iter(runs.values())))
    coloured = [(name, lines, COLOURS[at % len(COLOURS)]) for at, (name, lines) in enumerate(runs.items())]

    def curves(read: Callable[[Lines], Sequence[tuple[float, float]]]) -> list[Series]:
        """Return a curve for each run that has points. read: function that returns a run's (step, value) points from
        its lines."""
        found = [Series(name, read(lines), colour) for name, lines, colour in coloured]
        return [one for one in found if one.points]

    titled = [
        (
            "Training loss, smoothed",
            curves(lambda lines: smooth(select_points(lines, "loss"))),
            _get_loss_unit(work),
            False,
        ),
        ("Validation loss", curves(lambda lines: select_points(lines, "validation_loss")), _get_loss_unit(work), False),
    ]
    for title, key, unit, scale in _list_curve_charts(list(runs.values()), work):
        titled.append((title, curves(partial(select_points, key=key, scale=scale)), unit, True))
    for title, series, unit, from_zero in titled:
        if series:
            yield element("h2", title)
            yield draw_step_chart(series, unit, from_zero=from_zero, legend=True)


def _get_loss_unit(work: str) -> str:
    """Return the unit of the loss for the axis of a chart: "nats per token", or "loss" for a user's own module. work:
    unit of throughput, "tokens" or "samples"."""
    return "nats per token" if work == "tokens" else "loss"


def _list_curve_charts(runs: Sequence[Lines], work: str) -> list[tuple[str, str, str, float]]:
    """Describe the charts in which each run has one curve: (title, key of metrics.jsonl, unit, factor that converts the
    key's value to that unit). runs: step lines of each run; work: unit of throughput, "tokens" or "samples"."""
    largest = max((line["memory_gib"] for lines in runs for line in lines), default=0.0)
    memory = ("GiB", 1.0) if largest >= 1.0 else ("MiB", 1024.0)
    return [
        ("Throughput", f"{work}_per_second", f"{work} per second", 1.0),
        ("Learning rate", "learning_rate", "learning rate", 1.0),
        ("Gradient norm", "gradient_norm", "gradient norm before clipping", 1.0),
        ("Peak memory of rank 0", "memory_gib", *memory),
    ]


def select_points(lines: Lines, key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """Extract the points (step, `scale` x value) of one key of metrics.jsonl; steps without a finite value are left
    out. lines: step lines of the file."""
    return [(line["step"], scale * line[key]) for line in lines if line.get(key) is not None]


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Return the exponential moving average of (step, value) points, bias-corrected as in Adam. weight: factor of the
    previous average in each update."""
    smoothed, average, mass = [], 0.0, 0.0
    for step, value in points:
        average, mass = weight * average + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append((step, average / mass))
    return smoothed


def draw_step_chart(series: Sequence[Series], unit: str, *, from_zero: bool = False, legend: bool = False) -> Markup:
    """Draw a line chart over the training steps, with values on hover; return SVG markup. series: curves, each with a
    name and (step, value) points. unit: unit of the values, for the axis title. from_zero: True to begin the y axis at
    0, or at the lowest value if that is negative. legend: True to name the curve even if there is only one curve."""
    points = [point for one in series for point in one.points]
    if not points:
        return paragraph("No finite values.")
    steps, values = ([point[at] for point in points] for at in (0, 1))
    low = min([0.0] * from_zero + values)
    across = make_linear_axis(min(steps), max(steps), most=8, whole=True)
    return draw_lines(
        across, make_linear_axis(low, max(values), f"step; {unit}", below=0.0 if from_zero else 0.04, above=0.04),
        [one for one in series if one.points], hover="step", legend=legend,
    )  # fmt: skip
