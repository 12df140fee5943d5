"""`meshwright.schedule`: a pipeline schedule, checked and simulated, as `meshwright schedule` reports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from meshwright.errors import UserError
from meshwright.names import SCHEDULES, check_options, unknown
from meshwright.program.durations import Durations
from meshwright.schedules.report import ScheduleReport
from meshwright.schedules.report import schedule as report_schedule


class StepDurations(TypedDict, total=False):
    """Durations of the passes and transfers of one micro-batch in a pipeline, in any unit of time.

    Any field may be omitted. A number is the time on all stages of a rank together, equal on all ranks. A list with one
    entry per rank has such a time for each rank; a list with one entry per stage has the time of each stage. `transfer`
    is the time of one message instead.

    Attributes:
        forward: Time of the forward pass; 1 unless given.
        input_gradient: Time of the input-gradient pass (I); 1 unless given.
        weight_gradient: Time of the weight-gradient pass (W); 1 unless given.
        transfer: Time of a message from a stage to the next: one number, or a list with one per stage boundary; 0
            unless given.
        overlapped: Time of a forward and a backward together, where a schedule overlaps them; the sum of their times
            unless given."""

    forward: float | Sequence[float]
    input_gradient: float | Sequence[float]
    weight_gradient: float | Sequence[float]
    transfer: float | Sequence[float]
    overlapped: float | Sequence[float] | None


def check_memory_option(name: str, memory: float | None, option: str = "memory") -> None:
    """Raise `UserError` if a memory limit is given for a schedule other than `auto`, the only schedule whose search
    respects a limit.

    name: name of the schedule. memory: maximum number of micro-batches whose activations a rank saves at once; None:
    not given. option: name of the option, for the error message."""
    if memory is not None and name != "auto":
        raise UserError(f"{option} {memory:g}: {name} has no memory limit; only auto searches within a memory limit")


def schedule(
    name: str,
    stages: int | None = None,
    micro_batches: int | None = None,
    *,
    chunks: int | None = None,
    memory: float | None = None,
    parts: Sequence[float] | None = None,
    **durations: Unpack[StepDurations],
) -> ScheduleReport:
    """Generate or read a pipeline schedule, check it, and simulate it.

    Args:
        name: A schedule such as `"1f1b"`, `"auto"` (a search), or `"@FILE"`.
        stages: Number of pipeline ranks, each with `chunks` stages; None for a file, which has its own number.
        micro_batches: Micro-batches of a training step, over both directions of a bidirectional schedule; None for a
            file.
        chunks: Stages per rank; None for the schedule's default.
        memory: For `"auto"`: maximum number of micro-batches whose activations a rank saves at once (activations on
            one of its n stages count as 1/n); None: no limit.
        parts: Four durations, of attention, dispatch, MLP and combine in a forward (the components of a
            mixture-of-experts layer), used instead of the durations of whole passes. The program is then simulated
            component by component, with dispatch and combine (all-to-alls) on a second stream. None: steps are not
            divided.
        **durations: Fields of `StepDurations`.

    Returns:
        The checked program and its simulation: `report.timing.makespan`, `.bubble_fraction`, `.peak_activations`.
        Times are in the unit of the durations.

    Raises:
        UserError: A name is unknown, or a number is out of range.
        ProgramError: The program of a file is wrong: rank, step and reason.

    Examples:
        >>> import meshwright as mw
        >>> report = mw.schedule("1f1b", stages=4, micro_batches=8)
        >>> float(report.timing.makespan)
        33.0
        >>> report.steps()[3][:4]
        ['3F0', '3B0', '3F1', '3B1']
    """
    check_options(schedule, durations, StepDurations)
    if not isinstance(name, str):
        raise UserError(f"schedule: takes a name or @FILE, not {name!r}")
    if not name.startswith("@"):
        if name not in SCHEDULES:
            raise UserError(unknown("schedule", name, SCHEDULES) + "; write @FILE for a file")
        missing = [word for word, value in (("stages", stages), ("micro_batches", micro_batches)) if value is None]
        if missing:
            raise UserError(f"schedule {name}: {' and '.join(missing)} missing, such as stages=4, micro_batches=8")
    check_memory_option(name, memory)
    whole_passes = [each for each in durations if each != "transfer" and durations.get(each) is not None]
    if parts is not None and whole_passes:
        raise UserError(f"parts: already sets the durations of forward and both gradients; leave out {whole_passes[0]}")
    return report_schedule(name, stages, micro_batches, chunks, Durations(**durations), memory, parts)
