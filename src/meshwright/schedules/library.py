"""Every pipeline schedule by its name, and what each of them can take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import SCHEDULE_CHUNKS, unknown
from meshwright.names import SCHEDULES as KNOWN
from meshwright.program.durations import Durations, StageDurations
from meshwright.program.load import load_program, read_program_text
from meshwright.program.pipeline import PipelineProgram
from meshwright.schedules.asynchronous import pipedream, pipedream_2bw
from meshwright.schedules.chimera import chimera
from meshwright.schedules.dualpipe import dualpipe
from meshwright.schedules.dualpipe_v import dualpipe_v
from meshwright.schedules.gems import gems
from meshwright.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from meshwright.schedules.pytorch_csv import from_csv
from meshwright.schedules.synchronous import gpipe, one_f_one_b
from meshwright.schedules.v_shape import v_half, v_min
from meshwright.schedules.zb_v import zb_v
from meshwright.schedules.zero_bubble import zb_h1, zb_h2

if TYPE_CHECKING:
    from meshwright.schedules.auto import Found

# Each takes ranks and micro-batches and, where the number of chunks is free, chunks. `auto` searches instead.
SCHEDULES: dict[str, Callable[..., PipelineProgram]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "interleaved-zb": interleaved_zero_bubble,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "chimera": chimera,
    "gems": gems,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
}
MOST_STEPS = 4_000_000  # some seconds and a gigabyte


def generate(
    name: str,
    ranks: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    durations: Durations | StageDurations | None = None,
    memory: float | None = None,
) -> PipelineProgram:
    """The program of a named schedule, or the one in a file (`@FILE`): computing steps, without transfers.

    chunks: stages a rank and replica; None: as many as the schedule has unless said. durations, memory (activations of
    whole micro-batches that a rank can hold): for `auto` alone. A file says itself how many ranks and micro-batches it
    has; where they are given, they must agree.

    Raises UserError for an unknown name and for numbers that the schedule cannot take, with those that it could.
    """
    if name == "@":
        raise UserError("@: the name of the schedule's file is missing")
    if name.startswith("@"):
        return _agree(load(name[1:]), name, ranks, micro_batches, chunks)
    if name not in KNOWN:
        raise UserError(unknown("schedule", name, KNOWN))
    if name == "auto":
        return search(ranks, micro_batches, chunks, durations, memory).program
    ranks, micro_batches, count = _sizes(name, ranks, micro_batches, chunks)
    least, most = SCHEDULE_CHUNKS[name][1:]
    return SCHEDULES[name](ranks, micro_batches, *([] if least == most else [count]))


def program_of(layout: Layout, durations: StageDurations | None = None) -> PipelineProgram:
    """The program of a layout's pipeline; on one rank forward and backward of one micro-batch after the other.

    durations: of the model's stages, for `auto` (None: all alike); equal ones give the same program. For a model, ask
    `model.stage_times.program_for`. Raises UserError for numbers that the schedule cannot take, and for a file's
    program that is more than one plain step.
    """
    version = None
    if layout.schedule.startswith("@"):
        with suppress(OSError):  # reading it will say what is wrong
            state = Path(layout.schedule[1:]).stat()
            version = state.st_mtime_ns, state.st_size
    name = layout.schedule
    chunks = None if name.startswith("@") or (name == "auto" and layout.chunks == 1) else layout.chunks
    try:
        program = _generated(
            name, layout.pp, layout.micro_batches, chunks, durations if name == "auto" else None, version
        )
    except UserError as error:
        raise UserError(f'layout "{layout}": {error}') from None
    if program.asynchronous:
        raise UserError(
            f'layout "{layout}": {name} updates weights while micro-batches are under way; that cannot run yet'
        )
    if program.steps.component.any():
        raise UserError(f'layout "{layout}": {name} cuts layers into their parts; that cannot run yet')
    return program


@lru_cache(maxsize=32)
def _generated(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    durations: StageDurations | None,
    version: tuple[int, int] | None,
) -> PipelineProgram:
    """`generate`, once; `version`: of the file, which is read again when it has changed."""
    return generate(name, ranks, micro_batches, chunks, durations)


def search(
    ranks: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    durations: Durations | StageDurations | None = None,
    memory: float | None = None,
) -> Found:
    """What `auto` finds, with all that it tried. Arguments and errors as in `generate`."""
    from meshwright.schedules.auto import search_schedule  # it looks at the named ones, too

    ranks, micro_batches, _ = _sizes("auto", ranks, micro_batches, chunks)
    return search_schedule(ranks, micro_batches, durations or Durations.per_rank((ranks, 1)), memory, chunks)


def _sizes(name: str, ranks: int | None, micro_batches: int | None, chunks: int | None) -> tuple[int, int, int]:
    """Ranks, micro-batches and chunks of a named schedule, if there can be such a program."""
    ranks = _positive(name, "ranks", "on", ranks)
    micro_batches = _positive(name, "micro-batches", "with", micro_batches)
    count = _chunks(name, chunks)
    if (steps := 3 * ranks * micro_batches * count) > MOST_STEPS:
        size = f"{ranks} ranks with {micro_batches} micro-batches has about {steps:,} steps"
        raise UserError(f"{name} on {size}; programs have at most {MOST_STEPS:,}: take fewer micro-batches")
    return ranks, micro_batches, count


def load(path: str) -> PipelineProgram:
    """The pipeline program in a file: PyTorch's CSV where it is called `.csv`, else our text or JSON form.

    Raises UserError for a file that cannot be read, with the line that is wrong.
    """
    if Path(path).suffix.lower() == ".csv":
        return from_csv(read_program_text(path), where=path)
    return load_program(path, "pipeline")


def _positive(name: str, what: str, preposition: str, number: int | None) -> int:
    if number is None:
        raise UserError(f"{name}: the number of {what} is missing")
    if number < 1:
        raise UserError(f"{name} {preposition} {number} {what}: right is 1 or more")
    return number


def _chunks(name: str, chunks: int | None) -> int:
    default, least, most = SCHEDULE_CHUNKS[name]
    if chunks is None:
        return default
    if chunks < least or (most is not None and chunks > most):
        right = f"exactly {least}" if least == most else f"at least {least}"
        raise UserError(f"{name} with {chunks} chunk{'s' * (chunks != 1)} a rank: right is {right}")
    return chunks


def _agree(
    program: PipelineProgram, name: str, ranks: int | None, micro_batches: int | None, chunks: int | None
) -> PipelineProgram:
    """The program, if it has the numbers that were asked for."""
    for what, asked, has in (
        ("ranks", ranks, program.ranks),
        ("micro-batches", micro_batches, program.micro_batches),
        ("chunks a rank", chunks, program.chunks),
    ):
        if asked is not None and asked != has:
            raise UserError(f"schedule {name} is written for {has} {what}, not {asked}")
    return program
