"""Measures a hardware profile before the ranks of a run start, if none fits. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import MeshwrightError, Terminated
from meshwright.layout import Layout
from meshwright.plan.cluster import Cluster, cluster, this_machine
from meshwright.plan.machine_profile import (
    HardwareProfile,
    HardwareProfileKey,
    may_measure,
    measurement_lock,
    read_profile,
    write_profile,
)
from meshwright.threads import available_cores

SYNCHRONOUS_AXES = ("tp", "cp")
"""Mesh axes with a collective in every layer; their synchronization cost is measured. Experts count as tp
(`plan/reference_step.py`)."""


def find_hardware_profile(ranks: int, threads: int) -> Cluster | None:
    """CPU cluster description for (ranks, threads): the file of `meshwright probe` if it fits, else a stored
    first-start profile; None without either. `UserError` where the file of `meshwright probe` is damaged."""
    if (probed := _probed(ranks, threads)) is not None:
        return probed
    profile = read_profile(HardwareProfileKey.here(available_cores(), ranks, threads))
    return None if profile is None else _usable(profile)


def measure_first_start(
    layout: Layout, device: str, threads: int, log: Callable[[str], None], *, ranks: int | None = None,
    axes: tuple[str, ...] | None = None,
) -> None:  # fmt: skip
    """Measure what the prediction of a step of this layout needs, unless it is known; keep it for later starts. device:
    the recipe's; ranks, axes: unless given, the layout's.

    What goes wrong is a line, and the run goes on without a prediction; only an interrupt or SIGTERM ends it.
    """
    if not may_measure() or not _on_processors(device):
        return
    ranks = ranks or layout.world_size
    axes = _waiting(layout) if axes is None else axes
    key = HardwareProfileKey.here(available_cores(), ranks, threads)
    try:
        if _probed(ranks, threads) is not None or _covered(key, layout.precision, axes):
            return
        with measurement_lock(key):
            if not _covered(key, layout.precision, axes):  # by who measured before
                _measure(key, layout.precision, axes, log)
    except (Terminated, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        log(f"hardware measurement failed, so step time is not predicted: {reason}")


def _waiting(layout: Layout) -> tuple[str, ...]:
    """Which of `SYNCHRONOUS_AXES` price this layout."""
    used = {"tp": layout.tp > 1 or layout.ep > 1, "cp": layout.cp > 1}
    return tuple(axis for axis in SYNCHRONOUS_AXES if used[axis])


def _measure(key: HardwareProfileKey, precision: str | None, axes: tuple[str, ...], log: Callable[[str], None]) -> None:
    from meshwright.train.probe_ranks import probe

    earlier = read_profile(key)
    precisions, measured_axes = ((), ()) if earlier is None else (earlier.precisions, earlier.axes)
    axes = tuple(sorted({*axes, *measured_axes}))
    wanted = {"precision": precision, "also": [*precisions], "axes": [*axes]}
    log(
        f"measuring hardware profile: {_ranks(key.ranks)} x {key.threads} thread{'s' * (key.threads > 1)}, "
        f"a few seconds, once (stored in {key.path}; skip with --no-probe)"
    )
    begun = time.monotonic()
    found = probe(key.ranks, key.device, Path(), threads=key.threads, short=wanted, log=log)
    if found["kind"] != key.device:
        return
    default = found["precision"] if precision is None else None if earlier is None else earlier.default
    profile = HardwareProfile(tuple(found["precisions"]), axes, default, found["cluster"])
    _usable(profile)
    write_profile(key, profile)
    log(f"measured in {time.monotonic() - begun:.1f} s")


def _probed(ranks: int, threads: int) -> Cluster | None:
    """What `meshwright probe` wrote, where it measured this."""
    if not this_machine().exists():
        return None
    found = cluster("this")
    alike = found.kind == "cpu" and found.measured is not None and found.measured.threads == threads
    return found if alike and found.devices >= ranks else None


def _covered(key: HardwareProfileKey, precision: str | None, axes: tuple[str, ...]) -> bool:
    profile = read_profile(key)
    if profile is None or not profile.covers(precision, axes):
        return False
    try:
        _usable(profile)
    except MeshwrightError:
        return False
    return True


def _usable(profile: HardwareProfile) -> Cluster:
    """The cluster of its tables. `UserError` where they are damaged."""
    return cluster(profile.cluster, "measurements of this machine")


def _on_processors(device: str) -> bool:
    """Whether ranks will compute on processors: without a look into torch, which would take a second."""
    gpus = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    return device == "cpu" or (device == "auto" and not gpus)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
