"""Page of a study, `index.html`: history, learning curves, importance of each key, parallel coordinates, slices. Free
of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.draw.axis import Axis, make_linear_axis, make_log_axis
from meshwright.draw.line_chart import Plot, Series
from meshwright.draw.markup import Content, Markup, element
from meshwright.draw.page import bar, legend, page, paragraph, table
from meshwright.draw.parallel_coordinates import Item, draw_parallel_coordinates
from meshwright.draw.picture import css_var, draw_for_two_widths
from meshwright.monitoring.report import write_page as write_html
from meshwright.recipe import Dimension
from meshwright.toml import format_toml_value
from meshwright.tuning.budget import count_states, sum_seconds

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from meshwright.tuning.study import Study

LISTED = 20
"""Maximum number of trials in the page's table."""
WIDTH = 760
"""Width in pixels of a chart on a wide screen."""
_COLOURS = {"COMPLETE": "blue", "PRUNED": "silver", "FAIL": "red", "RUNNING": "orange"}
_NAMES = {"COMPLETE": "complete", "PRUNED": "pruned, its last loss", "RUNNING": "running, its last loss"}


def write_page(study: Study) -> None:
    """Write the HTML page of a study to `index.html` in its directory. Raises `UserError` if it cannot be written."""
    write_html(study.directory / "index.html", lambda: page(f"tuning {study.recipe.run.name}", *_format_parts(study),
                                                            narrow=True))  # fmt: skip


def _format_parts(study: Study) -> Iterator[Content]:
    """Yield the contents of the study's page in order: headings, paragraphs, charts and tables."""
    trials = study.list_trials()
    complete = sorted((one for one in trials if one.state.name == "COMPLETE"), key=_get_loss)
    counts = count_states(trials)
    yield element("h1", f"Tuning {study.recipe.run.name}")
    yield paragraph(
        f"{counts['trials']} trials: {counts['complete']} complete, {counts['pruned']} pruned, {counts['failed']} "
        f"failed, {counts['running']} running; {sum_seconds(trials):,.0f} seconds of training. Losses are validation "
        "losses in nats per token."
    )
    if complete:
        yield element("h2", "Best trial")
        yield table(("", "value"), [
            ("trial", str(complete[0].number)), ("validation loss", f"{_get_loss(complete[0]):.4f}"),
            *((key, _format_value(value)) for key, value in study.read_values(complete[0]).items()),
        ])  # fmt: skip
        yield paragraph(f"Recipe with these values: {study.directory / 'best.toml'}", muted=True)
    shown = [one for one in trials if math.isfinite(_get_loss(one))]
    if not shown:
        return
    yield element("h2", "History")
    yield from _draw_history(shown)
    yield element("h2", "Learning curves")
    yield from _draw_curves(shown)
    yield from _draw_importance(study, complete)
    dimensions = study.recipe.tune.dimensions
    yield element("h2", "Parallel coordinates")
    yield paragraph("Each line is a trial; the tenth with the lowest losses is drawn thick. Point at a line for its "
                    "values.", muted=True)  # fmt: skip
    yield _draw_parallel(study, dimensions, shown)
    yield element("h2", "Slices")
    for dimension in dimensions:
        yield _draw_slice(study, dimension, shown)
    yield element("h2", f"Trials, the best {LISTED} first" if len(trials) > LISTED else "Trials")
    rows = [*complete, *(one for one in reversed(trials) if one.state.name != "COMPLETE")][:LISTED]
    yield table(
        ("trial", "state", "loss", *(dimension.key for dimension in dimensions), "reason"),
        [_format_row(study, dimensions, trial) for trial in rows],
    )


def _format_row(study: Study, dimensions: Sequence[Dimension], trial: FrozenTrial) -> list[str]:
    """Return the cells of one trial's row in the page's table of trials, as text: number, state, loss, value of each
    key, reason why it did not complete. dimensions: the searched keys, one column each."""
    values = study.read_values(trial)
    cells = [_format_value(values[one.key]) if one.key in values else "–" for one in dimensions]
    loss = f"{_get_loss(trial):.4f}" if math.isfinite(_get_loss(trial)) else "–"
    return [str(trial.number), trial.state.name.lower(), loss, *cells, trial.user_attrs.get("reason", "")]


def _get_loss(trial: FrozenTrial) -> float:
    """Return the final validation loss of a complete trial, or the last validation loss that any other trial reported;
    inf if no loss was reported."""
    if trial.state.name == "COMPLETE" and trial.value is not None:
        return trial.value
    reported = trial.intermediate_values
    return reported[max(reported)] if reported else math.inf


def _format_value(value: object) -> str:
    """Format the value of a recipe key; floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else format_toml_value(value).strip('"')


def _format_tooltip(study: Study, trial: FrozenTrial) -> str:
    """Format the tooltip of a trial of `study` in the charts: its number, loss and values."""
    values = ", ".join(f"{key} {_format_value(value)}" for key, value in study.read_values(trial).items())
    return f"trial {trial.number}: {_get_loss(trial):.4f}, {values}"


def _make_loss_axis(trials: Sequence[FrozenTrial], title: str = "validation loss") -> Axis:
    """Return a linear chart axis for the losses of trials. It spans the losses of the complete trials, or of all trials
    if fewer than two are complete. The worst tenth of these losses lies beyond the axis; callers draw them at its edge.
    title: label of the axis."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    return _make_axis([_get_loss(trial) for trial in (complete if len(complete) > 1 else trials)], title)


def _make_axis(losses: Sequence[float], title: str) -> Axis:
    """Return a linear chart axis from the lowest of `losses` to their ninth decile, with some space beyond both. title:
    label of the axis."""
    ascending = sorted(filter(math.isfinite, losses))
    high = ascending[min(len(ascending) - 1, math.ceil(0.9 * len(ascending)))]
    return make_linear_axis(ascending[0], high, title, below=0.05, above=0.1)


def _draw_history(trials: Sequence[FrozenTrial]) -> Iterator[Content]:
    """Yield the chart of the trials' losses over their numbers, with a line for the best loss so far, and then the
    chart's legend."""
    y_axis = _make_loss_axis(trials)
    last = max(trial.number for trial in trials)
    best, steps = math.inf, list[tuple[float, float]]()
    for trial in trials:
        if trial.state.name == "COMPLETE" and _get_loss(trial) < best:
            if steps:
                steps.append((trial.number, best))
            best = _get_loss(trial)
            steps.append((trial.number, best))

    def draw(width: int) -> Markup:
        """Return the chart as an SVG picture `width` pixels wide."""
        across = make_linear_axis(0, max(last, 1), "trial", most=min(10, width // 60), whole=True)
        plot = Plot(across, y_axis, right=width - 16, bottom=234)
        for trial in trials:
            _draw_dot(plot, trial.number, _get_loss(trial), trial)
        if steps:
            plot.draw_line(Series("best so far", [*steps, (last, best)], "orange"))
        return plot.picture.to_svg(width, 280, "validation loss of each trial")

    yield draw_for_two_widths(draw, WIDTH)
    states = dict.fromkeys(trial.state.name for trial in trials)
    yield legend([*((_NAMES.get(name, "failed, its last loss"), _COLOURS[name]) for name in states),
                  ("best so far", "orange")])  # fmt: skip


def _draw_dot(plot: Plot, x: float, loss: float, trial: FrozenTrial) -> None:
    """Draw a trial in the chart `plot` as a dot in the colour of its state. x, loss: coordinates of the dot in data
    units; a loss beyond the y axis is drawn at the edge."""
    y = plot.y(min(max(loss, plot.y_axis.low), plot.y_axis.high))
    plot.picture.add("circle", title=f"trial {trial.number}: {loss:.4f}", cx=round(plot.x(x), 1), cy=round(y, 1), r=3.5,
                     style=f"fill:{css_var(_COLOURS.get(trial.state.name, 'grey'))}")  # fmt: skip


def _draw_curves(trials: Sequence[FrozenTrial]) -> Iterator[Content]:
    """Yield the chart of the validation losses of all trials over their steps, one curve each, and then the chart's
    legend; the curve of the best trial is thick."""
    y_axis = _make_axis([loss for trial in trials for loss in trial.intermediate_values.values()], "validation loss")
    best = min(trials, key=lambda trial: (trial.state.name != "COMPLETE", _get_loss(trial)))
    ordered = [trial for trial in trials if trial is not best and trial.intermediate_values] + [best]
    series = [
        Series(
            f"trial {trial.number}",
            [(step, min(loss, y_axis.high)) for step, loss in sorted(trial.intermediate_values.items())],
            "orange" if trial is best else "blue" if trial.state.name == "COMPLETE" else "silver",
            "thick" if trial is best else "thin",
        )
        for trial in ordered
    ]
    steps = [step for one in series for step, _ in one.points]

    def draw(width: int) -> Markup:
        """Return the chart as an SVG picture `width` pixels wide."""
        across = make_linear_axis(min(0, *steps), max(steps), "step", most=min(8, width // 60), whole=True)
        plot = Plot(across, y_axis, right=width - 16, bottom=234)
        for one in series:
            plot.draw_line(one)
        return plot.picture.to_svg(width, 280, "validation loss over the steps of each trial")

    yield draw_for_two_widths(draw, WIDTH)
    named = {"orange": "best trial", "blue": "other complete trials", "silver": "trials that did not complete"}
    drawn = {one.colour for one in series}
    yield legend([(words, colour) for colour, words in named.items() if colour in drawn])


def _draw_importance(study: Study, complete: Sequence[FrozenTrial]) -> Iterator[Content]:
    """Yield a heading and the table of each searched key's importance (PED-ANOVA, arXiv:2304.10255): how much the
    distribution of the key's values among the better trials differs from the distribution among all trials. Yield
    nothing if the `complete` trials are too few or too similar."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    everywhere = [one.key for one in study.recipe.tune.dimensions if all(one.key in each.params for each in complete)]
    if len(complete) < 4 or len(everywhere) < 2:
        return
    try:
        shares = get_param_importances(study.optuna, evaluator=PedAnovaImportanceEvaluator(), params=everywhere)
    except (ValueError, RuntimeError):
        return
    if not any(math.isfinite(share) and share > 0 for share in shares.values()):
        return
    yield element("h2", "Importance")
    yield table(("", "share", ""), [(key, f"{share:.0%}", bar(share)) for key, share in shares.items()])
    if len(everywhere) < len(study.recipe.tune.dimensions):
        yield paragraph("Keys that some trials do not have are not rated.", muted=True)


def _make_value_axis(dimension: Dimension, title: str, most: int = 5) -> Axis:
    """Return the chart axis for the values of a searched key (`dimension`); the choices of a categorical key are at 0,
    1, 2 ... title: label of the axis. most: maximum number of ticks.
    """
    if dimension.choices:
        ticks = [(float(place), _format_value(value)) for place, value in enumerate(dimension.choices)]
        return Axis(-0.5, len(ticks) - 0.5, ticks, title)
    if dimension.kind == "log":
        return make_log_axis([dimension.low, dimension.high], title, lambda number: f"{number:g}")
    return make_linear_axis(dimension.low, dimension.high, title, below=0.03, above=0.03, most=most)


def _compute_coordinate(study: Study, dimension: Dimension, trial: FrozenTrial) -> float | None:
    """Return the coordinate of a trial of `study` on the axis of a searched key (`dimension`): the value, or its index
    in the key's list of choices; None if the trial does not have the key.
    """
    values = study.read_values(trial)
    if dimension.key not in values:
        return None
    value = values[dimension.key]
    return float(dimension.choices.index(value)) if dimension.choices else float(value)


def _draw_parallel(study: Study, dimensions: Sequence[Dimension], trials: Sequence[FrozenTrial]) -> Markup:
    """Return the parallel-coordinates chart of the trials: one vertical axis for each searched key (`dimensions`), and
    a last one for the loss. A line joins the values of a trial; the lines of the best tenth are thick."""
    y_axis = _make_loss_axis(trials, "")
    axes = [(one.key.removeprefix("train."), _make_value_axis(one, "")) for one in dimensions] + [("loss", y_axis)]
    ordered = sorted(trials, key=_get_loss, reverse=True)
    thick = len(ordered) - max(1, len(ordered) // 10)
    items = [
        Item(
            [*(_compute_coordinate(study, one, trial) for one in dimensions), min(_get_loss(trial), y_axis.high)],
            "orange" if at >= thick else _COLOURS.get(trial.state.name, "grey"), _format_tooltip(study, trial),
            "thick" if at >= thick else "thin",
        )
        for at, trial in enumerate(ordered)
    ]  # fmt: skip
    return draw_parallel_coordinates(axes, items, "values and loss of each trial")


def _draw_slice(study: Study, dimension: Dimension, trials: Sequence[FrozenTrial]) -> Markup:
    """Return the scatter chart of the trials' losses over their values of one searched key (`dimension`). study: the
    study."""

    def draw(width: int) -> Markup:
        """Return the chart as an SVG picture `width` pixels wide."""
        plot = Plot(_make_value_axis(dimension, dimension.key), _make_loss_axis(trials), right=width - 16, bottom=174)
        for trial in trials:
            if (place := _compute_coordinate(study, dimension, trial)) is not None:
                _draw_dot(plot, place, _get_loss(trial), trial)
        return plot.picture.to_svg(width, 220, f"validation loss over {dimension.key}")

    return draw_for_two_widths(draw, WIDTH)
