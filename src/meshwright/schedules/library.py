"""Pipeline schedules by the names of layouts and commands: generated schedules, `auto` and files (`@FILE`)."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import SCHEDULES, unknown
from meshwright.program.durations import Durations, StageDurations
from meshwright.program.load import load_program, read_program_text
from meshwright.program.pipeline import PipelineProgram
from meshwright.schedules.auto import SearchResult, search_schedule
from meshwright.schedules.named import check_sizes, generate_named
from meshwright.schedules.pytorch_csv import from_csv


def generate(
    name: str,
    ranks: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    durations: Durations | StageDurations | None = None,
    memory: float | None = None,
) -> PipelineProgram:
    """Return a pipeline schedule by its name, or from a file (`@FILE`). The schedule has the compute steps of every
    rank; only a schedule from a file may also have sends and receives.

    ranks, micro_batches: numbers of pipeline ranks and micro-batches. chunks: stages per rank and replica (None: the
    schedule's default). For a file `ranks`, `micro_batches` and `chunks` may be None; a number that is given must agree
    with the file. durations: times of the passes of one micro-batch; used by `auto` only. memory: maximum number of
    micro-batches whose activations a rank saves at once (activations on one of its n stages count as 1/n); None: no
    limit; used by `auto` only. Raises UserError for unknown names, and for numbers that the schedule does not accept;
    the message names valid numbers."""
    if name == "@":
        raise UserError("@: the file name of the schedule is missing")
    if name.startswith("@"):
        return _check_agreement(load_schedule(name[1:]), name, ranks, micro_batches, chunks)
    if name not in SCHEDULES:
        raise UserError(unknown("schedule", name, SCHEDULES))
    if name == "auto":
        return search_auto(ranks, micro_batches, chunks, durations, memory).program
    return generate_named(name, ranks, micro_batches, chunks)


def generate_for_layout(layout: Layout, durations: StageDurations | None = None) -> PipelineProgram:
    """Return the pipeline schedule of a parallel layout, for its schedule name and its numbers of pipeline ranks,
    micro-batches and chunks (stages per rank). With one pipeline rank, each micro-batch runs its forward and backward
    before the next micro-batch starts.

    durations: function from a number of stages to the durations of the model's stages (None: all equal); used by the
    schedule `auto` only. For a model, use `spec.stage_times.program_for` instead. Raises UserError for numbers that the
    schedule does not accept, and for a schedule file (`@FILE` in the layout) that is not one synchronous training step.
    """
    version = None
    if layout.schedule.startswith("@"):
        with suppress(OSError):  # loading the file reports the error
            state = Path(layout.schedule[1:]).stat()
            version = state.st_mtime_ns, state.st_size
    name = layout.schedule
    chunks = None if name.startswith("@") or (name == "auto" and layout.chunks == 1) else layout.chunks
    try:
        program = _generate_cached(
            name, layout.pp, layout.micro_batches, chunks, durations if name == "auto" else None, version
        )
    except UserError as error:
        raise UserError(f'layout "{layout}": {error}') from None
    if program.asynchronous:
        raise UserError(
            f'layout "{layout}": {name} updates weights asynchronously, which training does not support yet'
        )
    if program.steps.component.any():
        raise UserError(f'layout "{layout}": {name} splits layers into components, which training does not support yet')
    return program


@lru_cache(maxsize=32)
def _generate_cached(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    durations: StageDurations | None,
    version: tuple[int, int] | None,
) -> PipelineProgram:
    """Return a pipeline schedule by its name, or from a file (`@FILE`); cached.

    ranks, micro_batches: numbers of pipeline ranks and micro-batches. chunks: stages per rank; None: the schedule's
    default. durations: function from a number of stages to their durations, for the schedule `auto`. version:
    (modification time in ns, size in bytes) of the file, part of the cache key, so that a changed file is read again;
    None for a named schedule."""
    return generate(name, ranks, micro_batches, chunks, durations)


def search_auto(
    ranks: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    durations: Durations | StageDurations | None = None,
    memory: float | None = None,
) -> SearchResult:
    """Search for a pipeline schedule with a small makespan (schedule name `auto`); return the result with all
    candidates.

    ranks, micro_batches: numbers of pipeline ranks and micro-batches. chunks: stages per rank (None: 1 and 2 are
    tried). durations: times of the passes of one micro-batch (each field: one number, a list with one per rank, or a
    list with one per stage), or a function (number of stages) -> `Durations`; None: all equal. memory: maximum number
    of micro-batches whose activations a rank saves at once (activations on one of its n stages count as 1/n); None: no
    limit. Raises UserError for invalid or missing numbers."""
    ranks, micro_batches, _ = check_sizes("auto", ranks, micro_batches, chunks)
    return search_schedule(ranks, micro_batches, durations or Durations.per_rank((ranks, 1)), memory, chunks)


def load_schedule(path: str) -> PipelineProgram:
    """Load a pipeline schedule from the file `path`: PyTorch's CSV if the path ends with `.csv`, else Meshwright's text
    or JSON form.

    Raises UserError for a file that cannot be read, and for an invalid line, which the message names.
    """
    if Path(path).suffix.lower() == ".csv":
        return from_csv(read_program_text(path), where=path)
    return load_program(path, "pipeline")


def _check_agreement(
    program: PipelineProgram, name: str, ranks: int | None, micro_batches: int | None, chunks: int | None
) -> PipelineProgram:
    """Return `program`, loaded from a file, if it has the requested numbers of ranks, micro-batches and chunks (stages
    per rank); raise UserError if not. None: any number is accepted.

    name: the file, for the message.
    """
    for what, requested, has in (
        ("ranks", ranks, program.ranks),
        ("micro-batches", micro_batches, program.micro_batches),
        ("chunks per rank", chunks, program.chunks),
    ):
        if requested is not None and requested != has:
            raise UserError(f"schedule {name} is written for {has} {what}, not {requested}")
    return program
