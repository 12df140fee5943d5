"""OpenMP threads of a process: how many, and how long they spin at barriers. Torch-free.

Torch's CPU wheels use libgomp, which reads its settings once, when it is loaded: call `prepare_process` before the
first import of torch, and `build_child_environment` before starting a process that will import it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from meshwright.errors import UserError
from meshwright.limits import get_limit, make_limit_error

OPENMP_SPIN_POLICY = {"GOMP_SPINCOUNT": "1000"}
"""OpenMP environment for training: threads spin about 10 microseconds (1,000 rounds) at a barrier, then sleep.
libgomp's default of 300,000 rounds (about 3 ms) starves co-located processes; passive waiting costs small models a
third of their speed (bench/threads.py)."""

_SPIN_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them is the user's choice

THREADS_VARIABLE = "MESHWRIGHT_THREADS"
"""Environment variable with the OMP_NUM_THREADS that Meshwright has set for a process it started."""

FLOPS_PER_THREAD = 4e8
"""Model FLOPs of one layer (with its share of the LM head's), forward and backward of a micro-batch, that keep a
thread busy. Over the measured cases on a quiet and a busy machine (bench/results/threads.json), the choice between one
thread and two loses least time if the second is used from anywhere between 600 and 1,800 MFLOP on: at 580 it saves 2%
on the quiet machine and takes 1.46 times as long on the busy one, at 1,870 it saves 27% and takes 1.2 times."""


def prepare_process(environment: MutableMapping[str, str] | None = None) -> None:
    """Set OpenMP's spin policy (how long threads spin at barriers) for this process, unless the user has set one. Must
    be called before torch is imported.

    environment: environment variables to change in place; default os.environ. Raises `UserError` for an OMP_NUM_THREADS
    above the limit of `meshwright.limits`.
    """
    environment = os.environ if environment is None else environment
    read_user_threads(environment)
    if not any(name in environment for name in _SPIN_POLICY_VARIABLES):
        environment.update(OPENMP_SPIN_POLICY)


def build_child_environment(threads: int | None = None) -> dict[str, str]:
    """Return the environment variables for a child process that will import torch. threads: number of OpenMP threads of
    the child; None: it inherits OMP_NUM_THREADS. Raises `UserError` for an OMP_NUM_THREADS above the limit of
    `meshwright.limits`."""
    environment = dict(os.environ)
    prepare_process(environment)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = environment[THREADS_VARIABLE] = str(threads)
    return environment


def read_user_threads(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the thread count in OMP_NUM_THREADS; None if the variable is not set, is not a positive number, or has the
    value 1 that torchrun sets by default. Raises `UserError` above the limit of `meshwright.limits`. environment:
    environment variables; default os.environ."""
    environment = os.environ if environment is None else environment
    # A list has one number for each nesting level.
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not first.isdecimal() or not int(first) or (first == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    if problem := make_limit_error("threads", int(first), "OMP_NUM_THREADS"):
        raise UserError(problem)
    return int(first)


def are_threads_set_by_user(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if the user chose the thread count in OMP_NUM_THREADS. Return False if the variable is not a positive
    number, has the value 1 that torchrun sets by default, or was set by the Meshwright process that started this one.
    environment: environment variables; default os.environ."""
    environment = os.environ if environment is None else environment
    chosen = read_user_threads(environment)
    return chosen is not None and environment.get(THREADS_VARIABLE) != str(chosen)


def count_available_cores() -> int:
    """Return the number of cores that this process may use: the number of cores in its CPU affinity, limited by a
    container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def measure_busy_share(seconds: float = 0.2) -> float:
    """Sleep for `seconds` and return the fraction of this machine's CPU time, in [0, 1], that other processes used
    meanwhile. Return 0.0 if the kernel does not report CPU times (Linux does, in /proc/stat)."""

    def read() -> tuple[int, int]:
        """Return (idle time, total time) of all cores since the machine started, in kernel clock ticks."""
        ticks = [int(each) for each in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)  # idle and waiting for a disk

    with suppress(OSError, ValueError, IndexError):
        idle, everything = read()
        time.sleep(seconds)
        later_idle, later = read()
        if later > everything:
            return min(1.0, max(0.0, 1 - (later_idle - idle) / (later - everything)))
    return 0.0


def choose_threads(ranks: int, cores: int | None = None, layer_flops: float | None = None) -> int:
    """Choose the number of OpenMP threads of each of `ranks` ranks on this machine. The number is OMP_NUM_THREADS if
    the user set this variable (to another value than torchrun's default of 1), otherwise an equal share of `cores`
    (None: all cores available to this process), but at most one thread for every `FLOPS_PER_THREAD` FLOPs of
    `layer_flops`.

    layer_flops: model FLOPs of the forward and backward pass of one layer, with its share of the LM head, for one
    micro-batch on one rank; None if unknown.
    """
    chosen = read_user_threads()
    if chosen is not None:
        return chosen
    share = max(1, (count_available_cores() if cores is None else cores) // ranks)
    busy = share if layer_flops is None else max(1, int(layer_flops / FLOPS_PER_THREAD))
    return min(share, busy, get_limit("threads"))


def check_local_threads(ranks: int, threads: int) -> None:
    """Raise `UserError` if `ranks` ranks with `threads` threads each are too many for one machine."""
    most = max(get_limit("local_threads"), 4 * count_available_cores())
    if ranks * threads > most:
        raise UserError(
            f"{ranks:,} ranks x {threads:,} threads are more than the {most:,} threads allowed on this machine; reduce "
            "run.threads or OMP_NUM_THREADS"
        )
