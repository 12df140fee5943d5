"""`meshwright collective`: an algorithm for a collective operation, checked, timed on a network, drawn and run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.plumbing import command as a_command
from meshwright.cli.plumbing import is_standard_output, json_option, result_printer, write_file
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.collectives.report import CollectiveReport


def _parse_with(parser: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a click callback that parses an option's text by the function of `collectives.quantities` named `parser`,
    such as "parse_bytes"; None (option not given) stays None. The module is imported only when an option is parsed."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> Any:
        """Parse the option's text; None (not given) stays None."""
        from meshwright.collectives import quantities

        return None if text is None else getattr(quantities, parser)(text, option.opts[0])

    return read


def _parse_dims(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Click callback of --dims: parse `4x4` into the grid's sides (4, 4); None (not given) stays None."""
    if text is None:
        return None
    try:
        sides = tuple(int(side) for side in text.split("x"))
    except ValueError:
        sides = ()
    if not sides or min(sides) < 1:
        raise UserError(f'--dims: "{text}" is not a shape such as 4x4')
    return sides


@a_command(
    "collective",
    "meshwright collective all-reduce ring --ranks 8 --bytes 64MiB",
    "meshwright collective all-reduce auto --ranks 16 --bytes 1MiB --topology nodes:2x8,rails --html choice.html",
    "meshwright collective all-reduce 2d-torus --ranks 16 --bytes 1GB --topology torus:4x4,50GB/s,1us",
    "meshwright collective all-reduce ring --ranks 4 --bytes 16 --text",
    "meshwright collective broadcast @mine.txt --bytes 4096 --run",
)
@click.argument("operation")
@click.argument("algorithm")
@click.option("--ranks", type=click.IntRange(min=1), help="How many ranks (a file says it itself).")
@click.option(
    "--bytes",
    "total_bytes",
    callback=_parse_with("parse_bytes"),
    metavar="B",
    help="The full vector: 64MiB, 1GB, 4096.",
)
@click.option(
    "--topology", default="switch", show_default=True, metavar="T",
    help="switch, ring, full-mesh, torus:4x4, mesh:4x4, nodes:2x8[,rails], spine-leaf:4x8[,oversubscription=4].",
)  # fmt: skip
@click.option("--latency", callback=_parse_with("parse_seconds"), metavar="T", help="Of a link: 5us unless said.")
@click.option("--bandwidth", callback=_parse_with("parse_rate"), metavar="R", help="Each way: 25GB/s unless said.")
@click.option(
    "--reduce-rate", callback=_parse_with("parse_rate"), metavar="R", help="How fast a rank adds: no cost unless said."
)
@click.option("--root", type=click.IntRange(min=0), help="The rank that sends out or collects; 0 unless said.")
@click.option("--segments", type=click.IntRange(min=1), help="Parts that a pipelined algorithm cuts the vector into.")
@click.option("--groups", type=click.IntRange(min=1), help="Ranks of one node, for hierarchical algorithms.")
@click.option("--dims", callback=_parse_dims, metavar="AxB", help="Sides of the grid, for tori and meshes.")
@click.option("--reduction", metavar="R", help="sum (unless said), mean, minimum or maximum.")
@click.option("--run", is_flag=True, help="Run it on processes of this machine, beside torch.distributed's own call.")
@click.option(
    "--svg", type=click.Path(path_type=Path), metavar="F", help="Write the picture: time over size, all algorithms."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="F", help="Write a page: figures, picture, buffers.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="F", help="Write a trace for ui.perfetto.dev.")
@click.option(
    "--program", "program_file", type=click.Path(path_type=Path), metavar="F",
    help="Write the program: .json, else text; - prints it. @F reads it.",
)  # fmt: skip
@click.option("--text", is_flag=True, help="Print the buffers of all ranks, round by round.")
@json_option
def command(
    operation: str,
    algorithm: str,
    ranks: int | None,
    total_bytes: int | None,
    topology: str,
    latency: float | None,
    bandwidth: float | None,
    reduce_rate: float | None,
    root: int | None,
    segments: int | None,
    groups: int | None,
    dims: tuple[int, ...] | None,
    reduction: str | None,
    run: bool,
    svg: Path | None,
    html: Path | None,
    trace: Path | None,
    program_file: Path | None,
    text: bool,
    as_json: bool,
) -> None:
    """Check an ALGORITHM (a name, auto, or @FILE) for a collective OPERATION, and simulate its time on a network.

    auto simulates every algorithm of the operation and takes the fastest. Exit code 1 if a program is not valid: a line
    names rank, step and reason.

    \f
    ranks: number of ranks, None for a program file. total_bytes: size of the full vector. topology, root, reduction: as
    in `comm.api.collective`. latency: seconds for each link. bandwidth: bytes per second for each link and direction.
    reduce_rate: bytes per second that a rank adds, None for no cost. segments: number of pieces of a pipelined vector.
    groups: ranks per node. dims: sides of the grid. run: also execute the program on local processes. svg, html, trace,
    program_file: files to write, None for none. text: print the buffers after each round. as_json: print the report as
    JSON.
    """
    printed = is_standard_output(program_file, "--program", as_json)
    with result_printer(as_json) as answer:
        from meshwright.comm.api import collective

        report = collective(
            operation, algorithm, ranks, total_bytes, topology=topology, run=run,
            root=root, segments=segments, groups=groups, dims=dims, reduction=reduction,
            latency=latency, bandwidth=bandwidth, reduce_bytes_per_second=reduce_rate or float("inf"),
        )  # fmt: skip
        document = report.to_json_dict()
        parts = [report.summary()]
        if text:
            from meshwright.draw.buffers_text import draw_buffers_text

            document["drawing"] = draw_buffers_text(report.checked)
            parts.append(document["drawing"])
        if svg is not None or html is not None:
            from meshwright.collectives.page import draw_page, draw_picture

            picture = draw_picture(report)
            if svg is not None:
                write_file(svg, picture)
            if html is not None:
                write_file(html, draw_page(report, picture))
        if trace is not None:
            write_file(trace, json.dumps(_make_chrome_trace(report)))
        program_text = None
        if program_file is not None:
            from meshwright.program.load import format_program

            program_text = format_program(report.checked.program, program_file)
            if not printed:
                write_file(program_file, program_text)
        named = (("picture", svg), ("page", html), ("trace", trace), ("program", None if printed else program_file))
        document["files"] = {what: str(path) for what, path in named if path is not None}
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
