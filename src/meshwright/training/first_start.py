"""Measure the inputs of a run's predictions that this machine lacks, before the ranks start: a hardware profile, with
as many processes and threads as the run has, and process memory beyond tensors. Free of torch."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint import find_newest
from meshwright.errors import MeshwrightError, Terminated, UserError
from meshwright.layout import Layout
from meshwright.machine import PROBE_VARIABLE, has_bf16_instructions, may_measure
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.planner.hardware.cluster import Cluster, cluster, this_machine
from meshwright.planner.hardware.machine_profile import (
    HardwareProfile,
    HardwareProfileKey,
    ProcessConstants,
    ProcessKey,
    parse_constants,
    read_fastest_precision,
    read_profile,
    write_fastest_precision,
    write_profile,
)
from meshwright.probe.ranks import SHORT_LIMIT_SECONDS
from meshwright.recipe import Recipe
from meshwright.threads import count_available_cores, measure_busy_share
from meshwright.training.measurement_failures import (
    BUSY_SHARE,
    FailedMeasurement,
    describe_failure,
    log_failed,
    was_logged,
)
from meshwright.training.measurement_lock import LOCK_SECONDS, measurement_lock

LIMIT_SECONDS = 120.0
"""Time limit of a measurement of process memory: many times the duration on an idle machine."""

MAX_SECONDS = LOCK_SECONDS + SHORT_LIMIT_SECONDS + LIMIT_SECONDS
"""Maximum time that a start waits for its measurements."""

PROFILE_SECONDS, PROFILE_SECONDS_MORE = 8, 5
"""About the duration of a hardware profile in the first precision, and of each further one (bench/first_start.py)."""
MEMORY_SECONDS, MEMORY_SECONDS_COMPILED = 5, 37
"""About the duration of the measurement of process memory, of all precisions at once; with compiled blocks."""


SYNCHRONOUS_AXES = ("tp", "cp")
"""Mesh axes with a collective in every layer, whose synchronization cost is measured; expert parallelism has that of
tp (`planner/cost/reference_step.py`)."""

SLOW_WITHOUT_INSTRUCTIONS = ("bf16", "fp16")
"""Precisions whose matmuls take several times as long as in float32 on CPUs without instructions for them."""


def list_candidate_precisions() -> tuple[str, ...]:
    """Return the precisions among which a run on this CPU chooses the fastest if its layout names none: ("bf16",
    "fp32") on a CPU with bf16 instructions, else ("fp32",)."""
    return ("bf16", "fp32") if has_bf16_instructions() else ("fp32",)


def describe_slow_precision(layout: Layout, device: str) -> str | None:
    """Return a warning for the user if the layout's precision is a 16-bit format for which this machine's CPU has no
    instructions, else None. device: the recipe's `run.device` ("auto", "cpu" or "cuda")."""
    if layout.precision not in SLOW_WITHOUT_INSTRUCTIONS or not runs_on_cpu(device) or has_bf16_instructions():
        return None
    return (
        f"warning: precision {layout.precision}: this CPU has no instructions for 16-bit matmuls, which may take many "
        "times as long as in fp32; a layout without a precision takes the faster one"
    )


def find_hardware_profile(ranks: int, threads: int) -> Cluster | None:
    """Return the stored hardware profile (measured speeds) of this machine's CPU for `ranks` processes of `threads`
    threads each; None if no such profile is stored.

    The profile of `meshwright probe` is preferred if it covers at least as many processes; otherwise the result is the
    profile that the first run with these `ranks` and `threads` measured and stored. `UserError` if the file of
    `meshwright probe` is damaged."""
    if (probed := _read_probed_cluster(ranks, threads)) is not None:
        return probed
    key = HardwareProfileKey.here(count_available_cores(), ranks, threads)
    profile = read_profile(key)
    return None if profile is None else _parse_cluster(profile, key.path)


def describe_missing(what: str, device: str, measurement: Path, remedy: str = "") -> str:
    """Return an error message about a missing measurement of this machine: `what` is missing, and how the user gets it
    measured, such as "start once without --no-probe". If the measurement has failed, the message contains the text of
    `describe_failure`, or "see above" if that text was already logged.

    what: clause such as "no hardware profile for 2 ranks". device: the recipe's `run.device` ("auto", "cpu" or "cuda").
    measurement: path of the missing file. remedy: another remedy, named first, such as 'run "meshwright probe"'."""
    if not may_measure():
        way = f"without {PROBE_VARIABLE}=0"
    elif not runs_on_cpu(device):  # there is a GPU device file, but torch does not use the GPU
        way = "with run.device=cpu"
    elif (failed := FailedMeasurement.read(measurement)) is not None:
        if was_logged(failed):
            return f"{what}, since its measurement failed (see above)"
        return f"{what}; {describe_failure(failed, ' (at an earlier start)')} unless --no-probe is given"
    else:
        way = "without --no-probe"
    return f"{what}; {remedy and f'{remedy}, or '}start once {way}"


def measure_run(recipe: Recipe, threads: int, log: Callable[[str], None]) -> None:
    """Measure and store the inputs of a run's predictions: the machine's speeds (hardware profile) and the memory of a
    process. Measurements that an earlier start stored are reused; nothing is measured if the run has no steps left.

    recipe: settings of the run. threads: number of OpenMP threads of each rank. log: called with each line for the
    user.
    """
    checkpoint = find_newest(RunDirectory(recipe.run_directory).checkpoints)
    if checkpoint is None or checkpoint.step < recipe.train.steps:
        layout, device = recipe.parsed_layout, recipe.run.device
        measure_first_start(layout, device, threads, log, compiled=recipe.train.compile)


def measure_first_start(
    layout: Layout, device: str, threads: int, log: Callable[[str], None], *, compiled: bool | None = None,
    search: bool = False,
) -> None:  # fmt: skip
    """Measure and store the inputs from which step time and memory of this layout are predicted: the machine's speeds
    (hardware profile) and the memory of a process. Stored measurements are not repeated. If the layout names no
    precision, the fastest precision on this machine is found and stored first.

    device: the recipe's `run.device`. threads: number of OpenMP threads of each rank. log: called with each line for
    the user. compiled: True if the blocks run under torch.compile; None: process memory is not measured. search: True
    to measure for a search over all layouts with this number of ranks: every candidate precision, and the collectives
    of every axis. A failure is logged as one line, and the run continues without a prediction; only an interrupt or
    SIGTERM ends it.
    """
    if not may_measure() or not runs_on_cpu(device):
        return
    ranks = layout.world_size
    axes = SYNCHRONOUS_AXES if search else _list_synchronous_axes(layout)
    key = HardwareProfileKey.here(count_available_cores(), ranks, threads)

    def precisions() -> tuple[str, ...] | None:
        """Return the precisions to be measured, such as ("bf16",); None if the fastest one is not known yet."""
        if layout.precision is not None:
            return (layout.precision,)
        candidates = list_candidate_precisions()
        if search or len(candidates) == 1:
            return candidates
        fastest = read_fastest_precision(threads)
        return None if fastest is None else (fastest,)

    def profile_known(log: Callable[[str], None]) -> bool:
        """Return True if the stored hardware profile (measured machine speeds) covers these ranks, threads, precisions
        and axes. log: called with a line if that profile was disturbed."""
        if _read_probed_cluster(ranks, threads) is not None:
            return True
        wanted = precisions()
        return wanted is not None and _has_usable_profile(key, wanted, axes, log)

    def unmeasured() -> list[ProcessKey]:
        """Return the conditions (precision, threads, compiled) under which process memory must still be measured."""
        if compiled is None:
            return []
        keys = [ProcessKey(each, threads, compiled) for each in precisions() or list_candidate_precisions()]
        return [each for each in keys if each.read() is None]

    with _log_failure("hardware measurement failed", log):
        if profile_known(log) and not unmeasured():
            return
        with measurement_lock(log):
            # Another process may have measured in the meantime.
            profile = (
                None
                if profile_known(lambda line: None) or not _may_repeat(key.path, log)
                else _ProfileRequest(key, precisions(), axes)
            )
            memory = unmeasured()
            if memory and not _may_repeat(memory[0].path, log):
                memory = []
            if profile or memory:
                _measure_and_store(profile, unmeasured if memory else list, log)


class _ProfileRequest(NamedTuple):
    """Hardware profile (measured machine speeds) that is to be measured.

    key: number of ranks, threads per rank and device. precisions: precisions in which speeds are measured, such as
    ("fp32",); None: only the fastest precision, which is found first. axes: mesh axes ("tp", "cp") whose collectives
    are timed."""

    key: HardwareProfileKey
    precisions: tuple[str, ...] | None
    axes: tuple[str, ...]

    @property
    def seconds(self) -> int:
        """Approximate duration of the profile's measurement in seconds, announced before it starts."""
        return PROFILE_SECONDS + PROFILE_SECONDS_MORE * (len(self.precisions or "1") - 1)


def _may_repeat(measurement: Path, log: Callable[[str], None]) -> bool:
    """Return True if a measurement of this machine may be made: it has not failed before, or it failed while other
    programs used the processor, and these programs no longer do. Otherwise log one line about the earlier failure and
    return False.

    measurement: path of the file that the measurement writes. log: called with the line.
    """
    failed = FailedMeasurement.read(measurement)
    if failed is None or (failed.busy > BUSY_SHARE and measure_busy_share() <= BUSY_SHARE):
        return True
    log_failed(failed, log, " (at an earlier start)")
    return False


@contextmanager
def _log_failure(what: str, log: Callable[[str], object]) -> Iterator[None]:
    """Context manager that suppresses an exception and logs it as one line that begins with the text `what`.
    `Terminated` is re-raised. log: called with the line."""
    try:
        yield
    except Terminated:
        raise
    except Exception as error:
        last = ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
        log(f"{what}: {' '.join(last.split())[:200]}")


def _list_synchronous_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes, of "tp" and "cp", over which this layout communicates in every layer while compute waits.
    Expert parallelism is measured as "tp"."""
    used = {"tp": layout.tp > 1 or layout.ep > 1, "cp": layout.cp > 1}
    return tuple(axis for axis in SYNCHRONOUS_AXES if used[axis])


def _measure_and_store(
    profile: _ProfileRequest | None, unmeasured: Callable[[], list[ProcessKey]], log: Callable[[str], None]
) -> None:
    """Measure and store a hardware profile (machine speeds) and process memory; log both and their duration.

    profile: profile to measure; None: none. unmeasured: function that returns the conditions (precision, threads,
    compiled) under which process memory is still to be measured. The function is called before and after the profile is
    measured, because the profile may determine the run's precision. log: called with each line for the user.
    """
    what, paths, seconds, expected = [], [], 0, unmeasured()
    if profile is not None:
        ranks, threads = profile.key.ranks, profile.key.threads
        what.append(f"hardware profile ({ranks} rank{'s' * (ranks > 1)} x {_format_threads(threads)})")
        paths.append(str(profile.key.path))
        seconds += profile.seconds
    if expected:
        what.append(f"process memory ({_format_threads(expected[0].threads)})")
        paths += [str(each.path) for each in expected]
        seconds += MEMORY_SECONDS_COMPILED if expected[0].compiled else MEMORY_SECONDS
    whole = f"about {seconds} s, once (stored in {' and '.join(paths)}; skip with --no-probe)"
    log(f"measuring {' and '.join(what)}: {whole}")
    begun = time.monotonic()
    failures: dict[Path, str] = {}
    if profile is not None:
        with _log_failure("hardware measurement failed", partial(failures.setdefault, profile.key.path)):
            _measure_profile(profile, log)
    if processes := unmeasured():
        with _log_failure(
            "process memory overhead could not be measured", partial(failures.setdefault, processes[0].path)
        ):
            for each, constants in zip(processes, measure_process_memory(processes, log), strict=True):
                each.write(constants)
    for path, line in failures.items():
        failed = FailedMeasurement(path.name, line, measure_busy_share())
        log_failed(failed, log)
        failed.write()
    if not failures:
        log(f"measured in {time.monotonic() - begun:.1f} s")


def measure_process_memory(keys: Sequence[ProcessKey], log: Callable[[str], None]) -> list[ProcessConstants]:
    """Measure the memory that a rank process takes besides its tensors; return one result for each of `keys`, in order.
    Each measurement runs in a separate process, started like a rank. All processes run at the same time, because they
    do not influence each other's resident memory.

    keys: precision, number of threads (equal in all keys) and whether blocks are compiled. log: called with each line
    for the user. Raises `RankLost` after `LIMIT_SECONDS`, `Terminated` after SIGTERM."""
    from meshwright.launcher.launcher import LaunchSpec, launch

    command = (sys.executable, "-P", "-m", "meshwright.training.process_memory_probe")
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as place:
        spec = LaunchSpec(
            {"keys": [asdict(key) for key in keys], "results": place}, len(keys), Path(place), threads=keys[0].threads,
            command=command, trains=False, log=log, limit_seconds=LIMIT_SECONDS,
        )  # fmt: skip
        launch(spec)
        return [parse_constants(json.loads(Path(place, f"{rank}.json").read_text())) for rank in range(len(keys))]


def _measure_profile(profile: _ProfileRequest, log: Callable[[str], None]) -> None:
    """Measure a hardware profile (machine speeds) and store it; also find and store the fastest precision if it is not
    known. If a stored profile covers as much and was less disturbed by other programs, keep the stored profile instead.

    profile: what the profile must cover at least. If there is an earlier profile with the same key, its precisions and
    axes are covered, too. log: called with each line for the user. `UserError` if the measurement failed on a rank.
    """
    from meshwright.probe.ranks import probe

    key, earlier = profile.key, read_profile(profile.key)
    precisions, axes = {*(profile.precisions or ())}, {*profile.axes}
    if earlier is not None:
        precisions, axes = precisions | {*earlier.precisions}, axes | {*earlier.axes}
    short = {"precisions": sorted(precisions), "axes": sorted(axes), "fastest": profile.precisions is None}
    found = probe(key.ranks, key.device, Path(), threads=key.threads, short=short, log=log)
    if found["failed"] is not None:
        raise UserError(f"rank {found['failed']['rank']}: {found['failed']['line']}")
    if profile.precisions is None:
        write_fastest_precision(key.threads, found["fastest"])
        precisions.add(found["fastest"])
    made = HardwareProfile(tuple(sorted(precisions)), tuple(sorted(axes)), found["cluster"])
    _parse_cluster(made, key.path)
    disturbed = _read_disturbed_fraction(made, key.path)
    if disturbed:
        log(
            f"other programs used a rank's core for {disturbed:.0%} of that time: the predicted time is that of an "
            "idle machine, its upper bound that of one as busy; the next start on an idle machine measures again"
        )
    if (
        earlier is None
        or not earlier.covers(made.precisions, made.axes)
        or (disturbed <= _read_disturbed_fraction(earlier, key.path))
    ):
        write_profile(key, made)


def _read_probed_cluster(ranks: int, threads: int) -> Cluster | None:
    """Read the machine speeds that `meshwright probe` stored; None unless it measured at least `ranks` CPU ranks with
    `threads` threads each."""
    if not this_machine().exists():
        return None
    found = cluster("this")
    alike = found.kind == "cpu" and found.measured is not None and found.measured.threads == threads
    return found if alike and found.devices >= ranks else None


def _has_usable_profile(
    key: HardwareProfileKey, precisions: tuple[str, ...], axes: tuple[str, ...], log: Callable[[str], None]
) -> bool:
    """Return True if a usable hardware profile is stored for the ranks and threads of `key`: undamaged, and measured in
    these precisions ("fp32", "bf16" ...) and over these axes ("tp", "cp"). A profile measured while other programs were
    busy is usable only as long as the machine is still busy; `log` then receives one line about it."""
    profile = read_profile(key)
    if profile is None or not profile.covers(precisions, axes):
        return False
    disturbed = _read_disturbed_fraction(profile, key.path)
    if not 0 < disturbed < 1:
        return disturbed == 0
    share = measure_busy_share()
    if share > BUSY_SHARE:
        log(f"hardware profile: measured on a busy machine; kept, since other programs use {share:.0%} of its cores")
    return share > BUSY_SHARE


def _read_disturbed_fraction(profile: HardwareProfile, path: Path) -> float:
    """Return how much other programs disturbed the measurement of a hardware profile: the fraction, 0 to 1, of the
    measuring time in which other programs occupied a rank's core. 0.0 if negligible, 1.0 if the profile is damaged.
    path: the profile's file, named in errors.
    """
    try:
        measured = _parse_cluster(profile, path).measured
    except MeshwrightError:
        return 1.0
    return (measured.disturbed if measured is not None else None) or 0.0


def _parse_cluster(profile: HardwareProfile, path: Path) -> Cluster:
    """Return the machine speeds in a stored hardware profile. path: its file, named in errors. `UserError` if it is
    damaged."""
    return cluster(profile.cluster, str(path))


def runs_on_cpu(device: str) -> bool:
    """Return True if ranks with this `run.device` ("auto", "cpu" or "cuda") will compute on CPUs and not on GPUs.
    Decided without importing torch, which takes a second."""
    gpus = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    return device == "cpu" or (device == "auto" and not gpus)


def _format_threads(count: int) -> str:
    """Format a thread count: "1 thread", "4 threads"."""
    return f"{count} thread{'s' * (count > 1)}"
