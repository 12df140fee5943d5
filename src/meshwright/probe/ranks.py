"""Start of the ranks that measure a machine: by Meshwright's launcher, or by torchrun, Kubernetes or SLURM."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import RankLost, UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.device import agree_on_device, choose_device, choose_single_device
from meshwright.launcher.hosts import agree_on_interface
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.terminal import print_message
from meshwright.threads import count_available_cores

if TYPE_CHECKING:
    from meshwright.planner.hardware.measured import ReferenceStep
    from meshwright.probe.points import MeasurementPlan, ReferenceKernel

TIMEOUT_SECONDS = 120.0
SHORT_LIMIT_SECONDS = 60.0
"""Time limit of the short measurement before a run: several times its duration on an idle machine."""
MAX_RANKS = 64  # maximum number of processes on one machine


def probe(
    ranks: int | None = None,
    device: str = "auto",
    directory: Path = Path(),
    plan: dict[str, Any] | None = None,
    *,
    threads: int | None = None,
    short: dict[str, Any] | None = None,
    log: Callable[[str], None] = print_message,
) -> dict[str, Any]:
    """Measure the speed of this machine with `ranks` processes (None: one for each GPU, two without GPUs); return the
    result as a dict.

    device: "auto", "cpu" or "cuda". directory: directory on the disk to be measured. plan: fields of the default
    `MeasurementPlan` to override. threads: threads of each process (None: chosen by the number of cores). log: receives
    progress lines.

    short: None: measure everything. Otherwise make a short measurement on CPUs, for the prediction of one training run,
    with these keys: "precisions": list of the run's precisions such as "fp32"; "axes": list of its mesh axes such as
    "tp"; "fastest": True to first find out which of bf16 and fp32 is faster, and to measure the faster precision too.

    Keys of the result: "measured" (tables of speeds), "hosts" (host name by rank), "ratios" (slowdown by rank), "slow"
    (slow ranks), "device" (name and memory_bytes of rank 0's device) and "seconds" (duration of the measurement);
    "kind" ("cpu" or "cuda"); "rank" (0); "failed": None, or rank and error line if the training steps of a small
    reference model failed. With `short` also "cluster" (tables of the hardware profile) and "fastest" (faster
    precision; None: not asked for).

    Raises `UserError` for a device or number of ranks that this machine does not have; with `short`, `RankLost` after
    `SHORT_LIMIT_SECONDS`."""
    kind = choose_single_device(device)
    most = MAX_RANKS
    if kind == "cuda":
        import torch

        most = torch.cuda.device_count()
    ranks = (most if kind == "cuda" else 2) if ranks is None else ranks
    if not 1 <= ranks <= most:
        has = f"it has {most} CUDA device{'s' if most > 1 else ''}; " if kind == "cuda" else ""
        raise UserError(f"cannot probe with {ranks} ranks on this machine: {has}choose 1 to {most}")
    description = {
        "device": kind,
        "disk": str(directory.absolute()),
        "plan": plan or {},
        "short": short,
        "began": time.monotonic(),
    }
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as place:
        command = (sys.executable, "-P", "-m", __name__)
        spec = LaunchSpec(
            description, ranks, Path(place), threads=threads, collective_timeout=TIMEOUT_SECONDS, command=command,
            trains=False, log=log, limit_seconds=None if short is None else SHORT_LIMIT_SECONDS,
        )  # fmt: skip
        return launch(spec)


def probe_on_rank(device: str = "auto", directory: Path = Path()) -> dict[str, Any]:
    """Measure the machine in a process that torchrun, Kubernetes or SLURM started as one rank of a job. Every rank of
    the job must call this function. Return the result of `probe`, in which the entry "rank" is this rank's number.
    device: "auto", "cpu" or "cuda". directory: directory on the disk to be measured."""
    start = rendezvous.read_rendezvous_info()
    return _measure(start, {"device": device, "disk": str(directory.absolute()), "plan": {}}, started_by_others=True)


def _measure(start: RendezvousInfo, description: dict[str, Any], started_by_others: bool = False) -> dict[str, Any]:
    """Initialize the process group, measure the machine on this rank, and return the result of `probe`.

    start: this rank's number, and the address of the process group. description: what to measure, from `probe`:
    "device", "disk" (directory), "plan", "short", "began" (time at which the launcher started). started_by_others: True
    if torchrun, Kubernetes or SLURM started this rank.
    """
    import torch
    import torch.distributed as dist

    from meshwright.probe.communication import choose_precision
    from meshwright.probe.layer_kernels import list_layer_points
    from meshwright.probe.points import MeasurementPlan
    from meshwright.probe.rank import Host, make_probe_mesh, measure
    from meshwright.probe.report import make_cluster_tables
    from meshwright.probe.steps import measure_reference_steps

    keep_freed_memory()
    whole = False
    starts: dict[str, float] = {}
    store, host_ranks = None, start.ranks
    if started_by_others and start.ranks > 1:
        store = rendezvous.connect_to_store(start, TIMEOUT_SECONDS)
        interface = agree_on_interface(start, store)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        device = agree_on_device(description["device"], start, store)
        host_ranks = _count_host_ranks(start, store)
    else:
        device = choose_device(description["device"], start.local_rank or 0)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    if "began" in description:  # on the clock of this machine, where the launcher runs
        starts["rank"] = time.monotonic() - description["began"]
    if start.ranks > 1:
        begun = time.perf_counter()
        store = store or rendezvous.connect_to_store(start, TIMEOUT_SECONDS)
        rendezvous.initialise_process_group(start, store, device, TIMEOUT_SECONDS)
        starts["meeting"] = time.perf_counter() - begun
    try:
        mesh = make_probe_mesh(start.ranks, host_ranks, device, TIMEOUT_SECONDS)
        short, tables = description.get("short"), dict[str, Any]()
        if short is None:
            plan = _make_plan(mesh.device.type, description["plan"])
        else:
            fastest = choose_precision(mesh) if short["fastest"] else None
            precisions = dict.fromkeys([*short["precisions"], *([fastest] if fastest else [])])
            plan = MeasurementPlan.short(tuple(precisions), tuple(short["axes"]))
            tables["fastest"] = fastest
        log = _print_progress if short is None else lambda line: None  # short: the caller prints one line
        host = Host(max(1, count_available_cores()), Path(description["disk"]), starts)
        steps = _GuardedSteps(partial(measure_reference_steps, mesh, plan), start, store)
        found = measure(mesh, plan, host, log, list_layer_points(plan), steps)
        if short is not None:
            tables["cluster"] = make_cluster_tables(found, mesh.device.type)
        whole = steps.failed is None
        return {**found, **tables, "failed": steps.failed, "kind": mesh.device.type, "rank": start.rank}
    finally:
        if start.ranks > 1 and whole:
            dist.destroy_process_group()


class _GuardedSteps:
    """Callable that times training steps of a small reference model, and catches their errors, so that the results of
    earlier measurements are kept.

    measure: function that times the steps. start: this rank's number, and the number of ranks. store: key-value store
    of the process group, None for a single rank.

    Attributes:
        failed: {"rank", "line" (error text), "at" (Unix time)} of the first failure; None without one."""

    def __init__(
        self, measure: Callable[[ReferenceKernel, float], list[ReferenceStep]], start: RendezvousInfo, store: Any
    ) -> None:
        """Store the arguments; see the class."""
        self.measure, self.start, self.store = measure, start, store
        self.failed: dict[str, Any] | None = None

    def __call__(self, kernel: ReferenceKernel, usual_seconds: float) -> list[ReferenceStep]:
        """Time training steps of the small reference model; return [] after a failure. Raises the error if it is the
        loss of another rank, which has reported no failure.

        kernel: reference matrix product, by which times are corrected for the CPU's current speed. usual_seconds: its
        duration at the CPU's usual speed."""
        try:
            return self.measure(kernel, usual_seconds)
        except Exception as error:
            self.failed = self._find_first_failure(error)
            if self.failed is None:  # no rank reports a failure: a rank was lost
                raise
            return []

    def _find_first_failure(self, error: Exception) -> dict[str, Any] | None:
        """Publish this rank's failure to all ranks, and return the first failure of any rank: {"rank", "line" (error
        text), "at" (Unix time in seconds)}. Return None if every rank reports only that it lost another rank
        (`RankLost`). error: exception raised on this rank."""
        own = None
        if not isinstance(error, RankLost):
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            own = {"rank": self.start.rank, "line": line, "at": time.time()}
        if self.store is None:
            return own
        keys = [f"meshwright/failed/{rank}" for rank in range(self.start.ranks)]
        if own is not None:
            self.store.set(keys[self.start.rank], json.dumps(own))
        failures = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
        return min(failures, key=lambda one: float(one["at"]), default=None)


def _make_plan(kind: str, overrides: dict[str, Any]) -> MeasurementPlan:
    """Return the default measurement plan with some fields replaced. kind: "cpu" or "cuda". overrides: field ->
    value."""
    from meshwright.probe.points import MeasurementPlan

    as_tuples: dict[str, Any] = {
        key: tuple(map(tuple, value)) if key == "shapes" else value for key, value in overrides.items()
    }
    return replace(MeasurementPlan.default(kind), **as_tuples)


def _count_host_ranks(start: RendezvousInfo, store: Any) -> int:
    """Return the number of ranks on each host. All ranks must call this function. start: this rank's number, and the
    number of ranks. store: key-value store of all ranks. Raises `UserError` unless all hosts have equally many ranks,
    with consecutive numbers."""
    store.set(f"meshwright/host/{start.rank}", socket.gethostname())
    hosts = [name.decode() for name in store.multi_get([f"meshwright/host/{rank}" for rank in range(start.ranks)])]
    size = hosts.count(hosts[0])
    blocks = [hosts[at : at + size] for at in range(0, len(hosts), size)]
    if any(len(set(block)) > 1 or len(block) < size for block in blocks) or len({b[0] for b in blocks}) < len(blocks):
        counts = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
        raise UserError(f"every host needs equally many, consecutive ranks; started: {counts}")
    return size


def _print_progress(line: str) -> None:
    """Print a progress line to standard error."""
    print_message(f"probe: {line}")


if __name__ == "__main__":
    run_rank(lambda description, start: _measure(start, description))
