"""Chart and HTML page of `meshwright collective`: figures, time over size for all algorithms, buffers by round."""

from __future__ import annotations

import math

from meshwright.collectives.crossover import LARGEST, SMALLEST, Crossover, Curves
from meshwright.collectives.quantities import format_bytes, format_seconds
from meshwright.collectives.report import RANKING_HEAD, CollectiveReport, format_crossovers, list_ranking_rows
from meshwright.draw.axis import Axis
from meshwright.draw.buffers import draw_buffers
from meshwright.draw.line_chart import Band, Mark, Plot, Series
from meshwright.draw.markup import Markup, element
from meshwright.draw.page import page, paragraph, table
from meshwright.draw.picture import css_var, draw_for_two_widths
from meshwright.errors import UserError

_WIDTH = 1000  # pixels
_FEW_RANKS = 16  # up to this number, slow algorithms are simulated at all sizes
_COLOURS = ("blue", "orange", "green", "purple", "red", "teal", "yellow", "pink", "grey", "silver")


def simulate_curves(report: CollectiveReport) -> Curves:
    """Simulate the time over vector size of all algorithms of the report's operation on its network. Raises UserError
    for a barrier, which has no size."""
    if report.checked.program.operation == "barrier":
        raise UserError("a barrier moves no bytes, so there is no chart of its time over size")
    requested = report.total_bytes
    least, most = min(SMALLEST, max(requested, 1)), max(LARGEST, requested)
    within = math.inf if report.checked.program.ranks <= _FEW_RANKS else 4.0
    return Curves.simulate(report.chooser, least, most, within)


def draw_picture(report: CollectiveReport, curves: Curves) -> str:
    """Return an SVG file with the chart of time over vector size. curves: result of `simulate_curves`."""
    named = (report.checked.program.algorithm, report.timing.seconds)
    return draw_crossovers(curves, curves.find_crossovers(), report.total_bytes or None, named)


def draw_crossovers(
    curves: Curves,
    crossovers: list[Crossover],
    requested: float | None = None,
    named: tuple[str, float] | None = None,
    width: int = _WIDTH,
    alone: bool = True,
) -> Markup:
    """Return an SVG chart of simulated time over vector size, both logarithmic, with a band below that names the
    fastest algorithm. Curves are coloured for algorithms that are the fastest at some size, thin for the other
    algorithms, and dashed for the lower bound.

    curves: simulated times of all algorithms. crossovers: sizes at which the fastest algorithm changes. requested: size
    in bytes to mark; None: no mark. named: (algorithm that the user chose, its seconds at the requested size), drawn as
    a dot; the algorithm's curve, if there is one, is emphasized (a program from a file has no curve). None: the user
    chose no algorithm. width: width of the picture in pixels; with the default, each curve has its name at its end,
    else a legend names the emphasized curves. alone: True for an SVG file, False for a page.
    """
    names = [curves.find_fastest(0), *(crossover.after for crossover in crossovers)]
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(dict.fromkeys(names))}
    wanted = named[0] if named else ""
    rest = [name for name in curves.seconds if name not in colours and name != wanted]
    series = [Series(name, _list_curve_points(curves, name), "dim", "thin") for name in rest]
    if wanted in curves.seconds and wanted not in colours:
        series.append(Series(wanted, _list_curve_points(curves, wanted), "ink", "named"))
    series += [Series(name, _list_curve_points(curves, name), colour, "thick") for name, colour in colours.items()]
    series.append(Series("lower bound", [*zip(curves.sizes, curves.bound, strict=True)], "ink", "dashed"))
    values = [value for one in series for _, value in one.points if value > 0] + (
        [named[1]] if requested and named else []
    )
    network = curves.chooser.network
    whole = width == _WIDTH
    axes = _make_bytes_axis(curves.sizes), _make_seconds_axis([value for value in values if value > 0])
    plot = Plot(*axes, right=width - (190 if whole else 16), bottom=476, top=46)
    title = f"{curves.chooser.operation} on {network.ranks} ranks, {network.name}"
    if whole:
        plot.picture.add_text(plot.left, 20, title, class_="title")
    plot.picture.add_text(plot.left, 37, "seconds over bytes of the vector, simulated", class_="dim")
    for one in series:
        plot.draw_line(one)
    plot.draw_bands("best", _make_bands(curves, crossovers, colours))
    if requested and curves.sizes[0] <= requested <= curves.sizes[-1]:
        takes = f": {named[0]} takes {format_seconds(named[1])}" if named and named[1] > 0 else ""
        words = format_bytes(requested) + (takes if whole else "")
        plot.draw_mark(Mark(requested, words, named[1] if named and takes else None))
    if whole:
        plot.draw_names(series)
        return plot.picture.to_svg(width, 560, title, alone=alone)
    emphasized = [(one.name, one.colour) for one in series if one.kind in ("named", "thick")]
    entries = [*emphasized, ("other algorithms", "dim"), ("lower bound, dashed", "ink")]
    swatches = [(words, {"style": f"fill:{css_var(colour)}"}) for words, colour in entries]
    end = plot.picture.add_legend(swatches, 8, width - 8, 572)
    return plot.picture.to_svg(width, end + 8, title, alone=alone)


def _list_curve_points(curves: Curves, name: str) -> list[tuple[float, float]]:
    """Return the points (vector size in bytes, seconds) at which the algorithm `name` was simulated. curves: simulated
    times of all algorithms."""
    pairs = zip(curves.sizes, curves.seconds[name], strict=True)
    return [pair for pair in pairs if math.isfinite(pair[1])]


def _make_seconds_axis(values: list[float]) -> Axis:
    """Return the logarithmic chart axis for the times `values` in seconds."""
    low, high = min(values, default=1.0) * 0.83, max(values, default=1.0) * 1.2
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [(10.0**power, format_seconds(10.0**power * (1 + 1e-12))) for power in powers]
    return Axis(low, high, ticks, logarithmic=True)


def _make_bytes_axis(sizes: list[float]) -> Axis:
    """Return the logarithmic chart axis for the ascending sizes `sizes` in bytes."""
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    step = 2 if last - first <= 24 else 4
    powers = range(step * math.ceil(first / step - 1e-9), math.floor(last + 1e-9) + 1, step)
    return Axis(sizes[0], sizes[-1], [(2.0**power, format_bytes(2.0**power)) for power in powers], logarithmic=True)


def _make_bands(curves: Curves, crossovers: list[Crossover], colours: dict[str, str]) -> list[Band]:
    """Return the ranges of vector sizes in which each algorithm is the fastest, as bands below the x axis of a chart.

    curves: simulated times of all algorithms. crossovers: sizes at which the fastest algorithm changes. colours:
    algorithm -> style-sheet colour.
    """
    ends = [(float(one.size), one.before, format_bytes(one.size)) for one in crossovers]
    ends.append((curves.sizes[-1], crossovers[-1].after if crossovers else curves.find_fastest(0), ""))
    starts = [curves.sizes[0], *(one.size for one in crossovers)]
    return [
        Band(end, name, f"{name} from {format_bytes(start)} to {format_bytes(end)}", colours[name], until)
        for start, (end, name, until) in zip(starts, ends, strict=True)
    ]


def draw_page(report: CollectiveReport, curves: Curves) -> str:
    """Return the HTML page of a report: its numbers, a chart of time over vector size, and drawings of all ranks'
    buffers (one buffer per chunk of the vector) after each round, or a note if there are too many buffers to draw.
    curves: result of `simulate_curves`."""
    program = report.checked.program
    named = (program.algorithm, report.timing.seconds)
    crossovers = curves.find_crossovers()

    def draw(width: int) -> Markup:
        """Return the chart as an SVG picture `width` pixels wide."""
        return draw_crossovers(curves, crossovers, report.total_bytes or None, named, width, alone=False)

    try:
        subject = f"{program.operation} {program.algorithm}, {program.ranks} ranks"
        buffers = [element("h2", "Round by round: ", subject), draw_buffers(report.checked)]
    except UserError as error:
        buffers = [paragraph(f"The buffers are not drawn: {error}")]
    choice = []
    if report.choice is not None:
        rows = [(*row[:3], row[3] or "–") for row in list_ranking_rows(report.choice)]
        choice = [element("h2", "The choice"), paragraph(report.choice.reason, "."), table(RANKING_HEAD, rows)]
    return page(
        report.title(),
        element("h1", report.title()),
        table((), report.rows()),
        choice,
        None if report.crossovers is None else paragraph("C", format_crossovers(report.crossovers)[1:], "."),
        element("h2", "Time over size"),
        draw_for_two_widths(draw, _WIDTH),
        buffers,
    )
