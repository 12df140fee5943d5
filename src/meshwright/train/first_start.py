"""What the first start of a run on this machine measures, so that its step time is predicted: in processes of its own,
as many as the run's ranks and with as many threads, before these start. Free of torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import MeshwrightError, Terminated
from meshwright.layout import Layout
from meshwright.plan.cluster import Cluster, cluster, this_machine
from meshwright.plan.machine_profile import (
    Profile,
    ProfileKey,
    may_measure,
    one_at_a_time,
    read_profile,
    write_profile,
)
from meshwright.threads import available_cores

WAITING_AXES = ("tp", "cp")
"""Axes whose ranks wait for each other in every layer: what that costs is measured for each. Experts wait as tp does
(`plan/reference_step.py`)."""


def known_machine(ranks: int, threads: int) -> Cluster | None:
    """This machine's processors as so many ranks of so many threads find them: what `meshwright probe` wrote where that
    is of as many threads and of enough ranks, else what a start has measured; None without either. `UserError` where
    the file of `meshwright probe` is damaged."""
    if (probed := _probed(ranks, threads)) is not None:
        return probed
    profile = read_profile(ProfileKey.here(available_cores(), ranks, threads))
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
    key = ProfileKey.here(available_cores(), ranks, threads)
    try:
        if _probed(ranks, threads) is not None or _covered(key, layout.precision, axes):
            return
        with one_at_a_time(key):
            if not _covered(key, layout.precision, axes):  # by who measured before
                _measure(key, layout.precision, axes, log)
    except (Terminated, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        log(f"this machine could not be measured, and the run goes on without a predicted step time: {reason}")


def _waiting(layout: Layout) -> tuple[str, ...]:
    """Which of `WAITING_AXES` price this layout."""
    used = {"tp": layout.tp > 1 or layout.ep > 1, "cp": layout.cp > 1}
    return tuple(axis for axis in WAITING_AXES if used[axis])


def _measure(key: ProfileKey, precision: str | None, axes: tuple[str, ...], log: Callable[[str], None]) -> None:
    from meshwright.train.probe_ranks import probe

    earlier = read_profile(key)
    precisions, measured_axes = ((), ()) if earlier is None else (earlier.precisions, earlier.axes)
    axes = tuple(sorted({*axes, *measured_axes}))
    wanted = {"precision": precision, "also": [*precisions], "axes": [*axes]}
    log(
        f"measuring this machine for the predicted step time: {_ranks(key.ranks)} of {key.threads} "
        f"thread{'s' * (key.threads > 1)}, a few seconds, once (kept in {key.path}; --no-probe leaves it out)"
    )
    begun = time.monotonic()
    found = probe(key.ranks, key.device, Path(), threads=key.threads, short=wanted, log=log)
    if found["kind"] != key.device:
        return
    default = found["precision"] if precision is None else None if earlier is None else earlier.default
    profile = Profile(tuple(found["precisions"]), axes, default, found["cluster"])
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


def _covered(key: ProfileKey, precision: str | None, axes: tuple[str, ...]) -> bool:
    profile = read_profile(key)
    if profile is None or not profile.covers(precision, axes):
        return False
    try:
        _usable(profile)
    except MeshwrightError:
        return False
    return True


def _usable(profile: Profile) -> Cluster:
    """The cluster of its tables. `UserError` where they are damaged."""
    return cluster(profile.cluster, "measurements of this machine")


def _on_processors(device: str) -> bool:
    """Whether ranks will compute on processors: without a look into torch, which would take a second."""
    gpus = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    return device == "cpu" or (device == "auto" and not gpus)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
