"""`meshwright schedule`: check, simulate and draw a pipeline schedule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import (
    FiniteRange,
    is_standard_output,
    json_option,
    list_given_options,
    output_option,
    result_printer,
    write_files,
)
from meshwright.errors import UserError
from meshwright.names import SCHEDULES


def _parse_durations(context: click.Context, option: click.Parameter, text: str | None) -> float | list[float] | None:
    """Parse the text of an option with durations: one number to a float, several numbers separated by commas to a list
    of floats; None (not given) stays None. A click callback; context, option: as click passes them."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a duration such as 1, or several such as 1,1,2") from None
    if any(not 0 <= number < float("inf") for number in numbers):
        raise click.BadParameter(f"{text!r}: a duration is a finite number that is not negative")
    return numbers[0] if len(numbers) == 1 else numbers


def _duration_option(name: str, default: str | None, what: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the click option `name`, whose value is one duration or a list of durations.
    default: default value as text, None for no default. what: help text of the option.
    """
    return click.option(name, callback=_parse_durations, metavar="T[,T...]", default=default, help=what)


@plumbing.command(
    "schedule",
    "meshwright schedule 1f1b --stages 4 --microbatches 8 --text",
    "meshwright schedule zb-v --stages 8 --microbatches 32 --transfer 0.1 --html zb-v.html --trace zb-v.json",
    "meshwright schedule auto --stages 4 --microbatches 16 --forward 1,1,1,1.6 --memory 5 --program found.txt",
    "meshwright schedule dualpipe --stages 8 --microbatches 20 --parts 1,1,1,1 --layers 32 --html dualpipe.html",
    "meshwright schedule @found.txt",
)
@click.argument("schedule")
@click.option("--stages", type=click.IntRange(min=1), help="Number of pipeline ranks; a program file contains it.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Micro-batches per step, of both directions.")
@click.option("--chunks", type=click.IntRange(min=1), help="Stages per rank, if the schedule does not fix it.")
@_duration_option("--forward", "1", "Forward of a rank's share: one value, one per rank, or one per stage.")
@_duration_option("--input-gradient", "1", "Input-gradient pass (I; papers: B).")
@_duration_option("--weight-gradient", "1", "Weight-gradient pass (W).")
@_duration_option("--transfer", "0", "Transfer to the next stage: one value, or one per stage boundary.")
@_duration_option("--overlapped", None, "Overlapped forward and backward, in schedules that overlap them.")
@click.option(
    "--parts", callback=_parse_durations, metavar="A,D,M,C",
    help="Durations of attention, dispatch, MLP, combine in a forward, with all-to-all on a separate stream.",
)  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), help="Number of layers; show which of them each rank holds.")
@click.option(
    "--memory",
    type=FiniteRange(min=0),
    metavar="M",
    help="auto: maximum saved activations of a rank, in micro-batches.",
)
@output_option("--svg", help="Write a picture.")
@output_option("--html", help="Write a page: picture and figures.")
@output_option("--trace", help="Write a trace for ui.perfetto.dev.")
@output_option("--program", "program_file", help="Write the program: .json, .csv (PyTorch), else text; - prints it.")
@click.option("--text", is_flag=True, help="Print the picture as text.")
@json_option
def command(
    schedule: str, stages: int | None, microbatches: int | None, chunks: int | None, forward: float | list[float],
    input_gradient: float | list[float], weight_gradient: float | list[float], transfer: float | list[float],
    overlapped: float | list[float] | None, parts: float | list[float] | None, layers: int | None,
    memory: float | None, svg: Path | None, html: Path | None, trace: Path | None, program_file: Path | None,
    text: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check a pipeline SCHEDULE (a name, or @FILE), simulate its timing, and draw it.

    Durations are per rank and micro-batch, in any unit; a rank with several model chunks divides them among these.
    Reported are the bubble and, for each rank, the peak of saved activations (in micro-batches), the copies of its
    weights and the messages that it sends. Exit code 1 if the schedule's program (list of steps of each rank) is not
    valid; an error line names rank, step and reason.

    \f
    schedule: name or @FILE. stages: number of pipeline ranks; microbatches: number per step; chunks: number of model
    chunks per rank (all three None for a program file). forward, input_gradient, weight_gradient: durations of the
    passes, one number or one for each rank or stage. overlapped: duration of a forward and a backward that a schedule
    overlaps; None: their sum. transfer: duration of a message to the next stage, one number or one for each stage
    boundary. parts: durations of attention, dispatch, MLP and combine in a forward, in place of the durations of the
    passes. layers: number of layers of the model, to show which rank holds which. memory: for schedule auto, maximum
    saved activations of a rank in micro-batches. svg, html, trace, program_file: files to write, None for none. text:
    print the chart as text. as_json: print the report as JSON.
    """
    _require_counts(schedule, stages, microbatches)
    printed = is_standard_output(program_file, "--program", as_json)
    if parts is not None:
        if replaced := list_given_options().keys() & {"forward", "input_gradient", "weight_gradient", "overlapped"}:
            option = f"--{min(replaced).replace('_', '-')}"
            raise UserError(f"--parts gives the durations of a forward and of both gradient passes; leave out {option}")
        parts = parts if isinstance(parts, list) else [parts]
    from meshwright.draw.gantt import draw_page, draw_svg
    from meshwright.program.trace import build_chrome_trace
    from meshwright.schedules.api import StepDurations, check_memory_option
    from meshwright.schedules.api import schedule as report_of

    check_memory_option(schedule, memory, "--memory")

    durations = StepDurations(transfer=transfer)
    if parts is None:
        durations |= StepDurations(
            forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient, overlapped=overlapped
        )
    with result_printer(as_json) as answer:
        report = report_of(schedule, stages, microbatches, chunks=chunks, memory=memory, parts=parts, **durations)
        document, lines = report.to_json_dict(), [report.summary()]
        if layers is not None:
            from meshwright.schedules.placement import format_placement

            lines.append(format_placement(report.program, layers).rstrip())
        timeline = cache(report.timeline)
        program_text = _format_program(report.complete, program_file) if program_file else None
        document["files"] = write_files(
            ("picture", svg, lambda: draw_svg(timeline())),
            ("page", html, lambda: draw_page(timeline(), report.table(), "; ".join(report.summary().splitlines()[1:]))),
            ("trace", trace, lambda: json.dumps(build_chrome_trace(timeline()))),
            ("program", None if printed else program_file, lambda: program_text or ""),
        )
        if text:
            from meshwright.draw.gantt_text import draw_text

            width = shutil.get_terminal_size((120, 24)).columns
            document["drawing"] = draw_text(timeline(), width)
            lines.append(document["drawing"])
        lines += [f"{what}: {path}" for what, path in document["files"].items()]
        answer(document, "\n".join(lines), alone=program_text if printed else None)


def _require_counts(schedule: str, stages: int | None, micro_batches: int | None) -> None:
    """Raise `UserError` if `schedule` is a name such as "1f1b" and --stages or --microbatches (`micro_batches`) is
    missing. A program file (@FILE) contains both numbers."""
    if schedule not in SCHEDULES:
        return
    missing = [word for word, value in (("--stages 4", stages), ("--microbatches 8", micro_batches)) if value is None]
    if missing:
        raise UserError(f"schedule {schedule}: counts are missing, such as {' '.join(missing)}")


def _format_program(program: object, path: Path) -> str:
    """Format a pipeline program for the file `path`: PyTorch's CSV for `.csv`, JSON for `.json`, else text."""
    from meshwright.program.load import format_program
    from meshwright.program.pipeline import PipelineProgram
    from meshwright.schedules.pytorch_csv import to_csv

    assert isinstance(program, PipelineProgram)
    return to_csv(program) if path.suffix.lower() == ".csv" else format_program(program, path)
