"""Generated schedules by name (all but `auto`, which searches), and the sizes that each accepts."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.errors import UserError
from meshwright.names import SCHEDULE_CHUNKS
from meshwright.program.pipeline import PipelineProgram
from meshwright.schedules.asynchronous import pipedream, pipedream_2bw
from meshwright.schedules.chimera import chimera
from meshwright.schedules.dualpipe import dualpipe
from meshwright.schedules.dualpipe_v import dualpipe_v
from meshwright.schedules.gems import gems
from meshwright.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from meshwright.schedules.synchronous import gpipe, one_f_one_b
from meshwright.schedules.v_shape import v_half, v_min
from meshwright.schedules.zb_v import zb_v
from meshwright.schedules.zero_bubble import zb_h1, zb_h2

# Each generator takes ranks, micro-batches and, if their number is free, chunks.
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
MAX_STEPS = 4_000_000  # a few seconds and a gigabyte


def generate_named(name: str, ranks: int | None, micro_batches: int | None, chunks: int | None) -> PipelineProgram:
    """Generate the pipeline schedule called `name`, such as `1f1b`. ranks, micro_batches: numbers of pipeline ranks and
    micro-batches (None is an error). chunks: stages per rank (None: the schedule's default).

    Raises UserError for missing numbers, and for numbers that the schedule does not accept.
    """
    ranks, micro_batches, count = check_sizes(name, ranks, micro_batches, chunks)
    least, most = SCHEDULE_CHUNKS[name][1:]
    return SCHEDULES[name](ranks, micro_batches, *([] if least == most else [count]))


def check_sizes(name: str, ranks: int | None, micro_batches: int | None, chunks: int | None) -> tuple[int, int, int]:
    """Return (ranks, micro-batches, stages per rank) if the schedule called `name` accepts these numbers, else raise
    UserError.

    ranks, micro_batches: numbers of pipeline ranks and micro-batches; None (missing) is an error. chunks: stages per
    rank; None: the schedule's default, which is returned.
    """
    ranks = _check_positive(name, "ranks", "on", ranks)
    micro_batches = _check_positive(name, "micro-batches", "with", micro_batches)
    count = _check_chunks(name, chunks)
    if (steps := 3 * ranks * micro_batches * count) > MAX_STEPS:
        size = f"{ranks} ranks with {micro_batches} micro-batches has about {steps:,} steps"
        raise UserError(f"{name} on {size}; programs have at most {MAX_STEPS:,}; use fewer micro-batches")
    return ranks, micro_batches, count


def _check_positive(name: str, what: str, preposition: str, number: int | None) -> int:
    """Return `number` if it is at least 1. Raise UserError, such as "1f1b on 0 ranks", if the number is smaller or
    missing (None).

    name: name of the schedule. what: the quantity, such as `ranks`. preposition: word of the message between name and
    number, such as `on`."""
    if number is None:
        raise UserError(f"{name}: the number of {what} is missing")
    if number < 1:
        raise UserError(f"{name} {preposition} {number} {what}: at least 1 is needed")
    return number


def _check_chunks(name: str, chunks: int | None) -> int:
    """Return the number of stages per rank: `chunks`, or the default of the schedule `name` if None. Raises UserError
    if the schedule does not accept the number."""
    default, least, most = SCHEDULE_CHUNKS[name]
    if chunks is None:
        return default
    if chunks < least or (most is not None and chunks > most):
        right = f"exactly {least}" if least == most else f"at least {least}"
        raise UserError(f"{name} with {chunks} chunk{'s' * (chunks != 1)} per rank: it needs {right}")
    return chunks
