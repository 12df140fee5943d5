"""OpenMP threads of a process: how many, and how they wait for each other. Free of torch.

Torch's CPU wheels compute with libgomp, which reads its settings once, when it is loaded: `prepare_process` comes
before the first import of torch, `child_environment` before the start of a process that will import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from meshwright.errors import UserError
from meshwright.limits import limit_error, limit_of

OPENMP_SPIN_POLICY = {"GOMP_SPINCOUNT": "1000"}
"""OpenMP environment for training: threads spin about 10 microseconds (1,000 rounds) at a barrier, then sleep.
libgomp's default of 300,000 rounds (about 3 ms) starves co-located processes; passive waiting costs small models a
third of their speed (bench/threads.py)."""

_SPIN_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them is a person's own choice

THREADS_VARIABLE = "MESHWRIGHT_THREADS"
"""An environment variable: the OMP_NUM_THREADS that Meshwright has set for a process that it started."""

FLOPS_PER_THREAD = 2e8
"""Model FLOPs of one layer (the LM head's shared out among layers), forward and backward of a micro-batch, that keep a
thread busy: with fewer for each, one thread more costs as much as it saves (bench/threads.py)."""


def prepare_process(environment: MutableMapping[str, str] | None = None) -> None:
    """Set the waiting policy of this process's threads, before torch is loaded; a person's own stands. `UserError` for
    an OMP_NUM_THREADS beyond the limit of `meshwright.limits`."""
    environment = os.environ if environment is None else environment
    threads_from_environment(environment)
    if not any(name in environment for name in _SPIN_POLICY_VARIABLES):
        environment.update(OPENMP_SPIN_POLICY)


def child_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a process that will load torch, with `threads` threads unless None. Raises as
    `prepare_process`."""
    environment = dict(os.environ)
    prepare_process(environment)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = environment[THREADS_VARIABLE] = str(threads)
    return environment


def threads_from_environment(environment: Mapping[str, str] | None = None) -> int | None:
    """OMP_NUM_THREADS as a person has set it, None where nobody has. torchrun's own default of 1 is nobody's choice.
    `UserError` beyond the limit of `meshwright.limits`."""
    environment = os.environ if environment is None else environment
    first = (
        environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    )  # a list is one number for each nesting level
    if not first.isdecimal() or not int(first) or (first == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    if problem := limit_error("threads", int(first), "OMP_NUM_THREADS"):
        raise UserError(problem)
    return int(first)


def threads_set_by_user(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OMP_NUM_THREADS is a person's choice, and not what `child_environment` has set."""
    environment = os.environ if environment is None else environment
    said = threads_from_environment(environment)
    return said is not None and environment.get(THREADS_VARIABLE) != str(said)


def available_cores() -> int:
    """Processors that this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def choose_threads(ranks: int, cores: int | None = None, layer_flops: float | None = None) -> int:
    """Threads of each of `ranks` ranks on this machine: OMP_NUM_THREADS if a person has set it, else `cores` (unless
    given, those available) shared out, but no more than the work keeps busy.

    layer_flops: model FLOPs of one layer with its share of the LM head's, forward and backward of a micro-batch on one
    rank; None where the work is unknown.
    """
    said = threads_from_environment()
    if said is not None:
        return said
    share = max(1, (available_cores() if cores is None else cores) // ranks)
    busy = share if layer_flops is None else max(1, int(layer_flops / FLOPS_PER_THREAD))
    return min(share, busy, limit_of("threads"))
