"""`meshwright collective`: an algorithm for a collective operation, checked, timed on a network, drawn and run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import is_standard_output, json_option, output_option, result_printer, write_files
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.collectives.report import CollectiveReport


def _quantity_option(option: str, name: str, parser: str, help: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the click option `option` for a number with a unit, such as a size or a bandwidth.
    If the option is not given, its value is None.

    name: parameter of the command that gets the value. parser: name of the function in `collectives.quantities` that
    parses the text, such as "parse_bytes"; a name, so that the module is imported only when it is needed. help: help
    text.
    """

    def read(context: click.Context, option: click.Parameter, text: str | None) -> Any:
        """Click callback of the option: parse its text by the function `parser`; None (not given) stays None."""
        from meshwright.collectives import quantities

        return None if text is None else getattr(quantities, parser)(text, option.opts[0])

    metavar = {"parse_bytes": "B", "parse_seconds": "T", "parse_rate": "R"}[parser]
    return click.option(option, name, callback=read, metavar=metavar, help=help)


def _parse_dims(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Parse the text of --dims, such as `4x4`, to the side lengths (4, 4) of the grid of ranks; None (not given) stays
    None. A click callback; context, option: as click passes them."""
    if text is None:
        return None
    try:
        sides = tuple(int(side) for side in text.split("x"))
    except ValueError:
        sides = ()
    if not sides or min(sides) < 1:
        raise UserError(f'--dims: "{text}" is not a shape such as 4x4')
    return sides


@plumbing.command(
    "collective",
    "meshwright collective all-reduce ring --ranks 8 --bytes 64MiB",
    "meshwright collective all-reduce auto --ranks 16 --bytes 1MiB --topology nodes:2x8,rails --html choice.html",
    "meshwright collective all-reduce 2d-torus --ranks 16 --bytes 1GB --topology torus:4x4,50GB/s,1us",
    "meshwright collective all-reduce ring --ranks 4 --bytes 16 --text",
    "meshwright collective broadcast @mine.txt --bytes 4096 --run",
)
@click.argument("operation")
@click.argument("algorithm")
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks; a program file contains it.")
@_quantity_option("--bytes", "total_bytes", "parse_bytes", "Size of the full vector: 64MiB, 1GB, 4096.")
@click.option(
    "--topology", default="switch", metavar="T",
    help="switch, ring, full-mesh, torus:4x4, mesh:4x4, nodes:2x8[,rails], spine-leaf:4x8[,oversubscription=4].",
)  # fmt: skip
@_quantity_option("--latency", "latency", "parse_seconds", "Latency of a link.  [default: 5us]")
@_quantity_option("--bandwidth", "bandwidth", "parse_rate", "Bandwidth of a link, each way.  [default: 25GB/s]")
@_quantity_option("--reduce-rate", "reduce_rate", "parse_rate", "Reduction rate of a rank.  [default: no cost]")
@click.option("--root", type=click.IntRange(min=0), help="Root rank of the operation.  [default: 0]")
@click.option("--segments", type=click.IntRange(min=1), help="Segments of the vector, for pipelined algorithms.")
@click.option("--groups", type=click.IntRange(min=1), help="Ranks per node, for hierarchical algorithms.")
@click.option("--dims", callback=_parse_dims, metavar="AxB", help="Shape of the grid, for torus and mesh algorithms.")
@click.option("--reduction", metavar="R", help="sum, mean, minimum or maximum.  [default: sum]")
@click.option("--run", is_flag=True, help="Run it on local processes and compare with torch.distributed.")
@output_option("--svg", help="Write a picture: time over size, for all algorithms.")
@output_option("--html", help="Write a page: figures, picture, buffers.")
@output_option("--trace", help="Write a trace for ui.perfetto.dev.")
@output_option("--program", "program_file", help="Write the program: .json, else text; - prints it.")
@click.option("--text", is_flag=True, help="Print the buffers of all ranks after each round.")
@json_option
def command(
    operation: str, algorithm: str, ranks: int | None, total_bytes: int | None, topology: str, latency: float | None,
    bandwidth: float | None, reduce_rate: float | None, root: int | None, segments: int | None, groups: int | None,
    dims: tuple[int, ...] | None, reduction: str | None, run: bool, svg: Path | None, html: Path | None,
    trace: Path | None, program_file: Path | None, text: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check an ALGORITHM (a name, auto, or @FILE) for a collective OPERATION, and simulate its time on a network.

    auto simulates every algorithm of the operation and takes the fastest. Exit code 1 if the algorithm's program (list
    of sends and receives of each rank) is not valid; an error line names rank, step and reason.

    \f
    ranks: number of ranks, None for a program file. total_bytes: size of the full vector. topology: kind of network.
    root: root rank of a broadcast, reduce, scatter or gather. reduction: such as "sum". latency: latency of each link
    in seconds. bandwidth: bytes per second for each link and direction. reduce_rate: bytes per second that a rank
    reduces, None if reduction takes no time. segments: number of pieces into which a pipelined algorithm divides the
    vector. groups: ranks per node. dims: side lengths of the grid of ranks. run: also execute the program on local
    processes. svg, html, trace, program_file: files to write, None for none. text: also print each rank's buffers after
    each round of messages. as_json: print the report as JSON.
    """
    printed = is_standard_output(program_file, "--program", as_json)
    with result_printer(as_json) as answer:
        from meshwright.collectives.page import draw_page, draw_picture, simulate_curves
        from meshwright.comm.api import collective
        from meshwright.program.load import format_program

        report = collective(
            operation, algorithm, ranks, total_bytes, topology=topology, run=run,
            root=root, segments=segments, groups=groups, dims=dims, reduction=reduction,
            latency=latency, bandwidth=bandwidth, reduce_bytes_per_second=reduce_rate or float("inf"),
        )  # fmt: skip
        document = report.to_json_dict()
        parts = [report.summary()]
        if text:
            from meshwright.draw.buffers_text import draw_buffers_text

            width = shutil.get_terminal_size((110, 24)).columns
            document["drawing"] = draw_buffers_text(report.checked, width)
            parts.append(document["drawing"])
        curves = cache(lambda: simulate_curves(report))
        program_text = None if program_file is None else format_program(report.checked.program, program_file)
        document["files"] = write_files(
            ("picture", svg, lambda: draw_picture(report, curves())),
            ("page", html, lambda: draw_page(report, curves())),
            ("trace", trace, lambda: json.dumps(_make_chrome_trace(report))),
            ("program", None if printed else program_file, lambda: program_text or ""),
        )
        if document["files"]:
            parts.append("\n".join(f"{what}: {path}" for what, path in document["files"].items()))
        answer(document, "\n\n".join(part.rstrip("\n") for part in parts), alone=program_text if printed else None)


def _make_chrome_trace(report: CollectiveReport) -> dict[str, Any]:
    """Return the simulated transfers of a collective as a trace document (JSON dict) in Chrome's format, which
    ui.perfetto.dev opens. report: result of `comm.api.collective`."""
    from meshwright.program.timeline import build_collective_timeline
    from meshwright.program.trace import build_chrome_trace

    checked, timing = report.checked, report.timing
    program = checked.program
    return build_chrome_trace(
        build_collective_timeline(program, checked.sends, checked.receives, timing.start, timing.end)
    )
