"""Measurement of a machine on one rank, synchronously with all other ranks.

On CPUs, matrix products and memory passes are timed in up to three phases: all ranks compute concurrently, as in
training; one rank of each host computes alone with its usual number of threads; that rank computes alone with all cores
of the host. The differences show how processes on one machine slow each other down.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.comm.backend import get_group_backends
from meshwright.comm.mesh import Mesh
from meshwright.launcher.host_memory import read_machine_memory
from meshwright.layout import Layout
from meshwright.machine import processor_name
from meshwright.planner.hardware.measured import (
    CollectiveCurve,
    CopyCurve,
    Curve,
    KernelCurve,
    Measured,
    Products,
    ReferenceStep,
)
from meshwright.probe.communication import OPERATIONS, compute_slowest_median, make_axes, time_collective
from meshwright.probe.compare import compute_ratios, find_slow
from meshwright.probe.disk import measure_disk
from meshwright.probe.points import (
    MeasurementPlan,
    MeasurementPoint,
    ReferenceKernel,
    start_backward,
    synchronize,
    time_call,
    time_point,
)
from meshwright.probe.stopwatch import DISTURBED, Stopwatch

_SITE = "probe"
_NAME_BYTES = 256


def make_probe_mesh(ranks: int, host_ranks: int, device: str, timeout_seconds: float = 120.0) -> Mesh:
    """Create the mesh for `measure` over the initialized process group, with the ranks of a host on axis tp and the
    hosts on axis dp.

    ranks: world size. host_ranks: number of ranks on each host, with consecutive numbers. device: "cpu" or "cuda".
    timeout_seconds: time limit of a collective call.
    """
    return Mesh.create(Layout(tp=host_ranks, dp=ranks // host_ranks), device, timeout_seconds)


@dataclass(frozen=True, slots=True)
class Host:
    """Properties of this rank's host.

    cores: number of CPU cores that the host's ranks share. directory: directory on the disk to be measured. starts:
    seconds of start-up phases measured before: "rank" (start of the process) and "meeting" (initialization of the
    process group)."""

    cores: int
    directory: Path
    starts: Mapping[str, float] = field(default_factory=dict)


def measure(
    mesh: Mesh,
    plan: MeasurementPlan,
    host: Host,
    log: Callable[[str], None] = lambda line: None,
    kernels: Sequence[MeasurementPoint] = (),
    steps: Callable[[ReferenceKernel, float], Sequence[ReferenceStep]] = lambda kernel, usual_seconds: (),
) -> dict[str, Any]:
    """Make all measurements of `plan` on this machine. All ranks must call this function.

    mesh: from `make_probe_mesh`. host: this rank's host. log: receives progress lines on rank 0. kernels: measurement
    points of layer operations, timed with all ranks at once. steps: function that times training steps of the reference
    model (a small transformer). Its arguments: the reference matrix product, by which times are corrected for the CPU's
    current speed, and the seconds of this product at the CPU's usual speed.

    Returns a JSON dict: "measured" (`Measured.tables`), "hosts" (host name of each rank), "ratios" ({"products",
    "memory": slowdown of each rank}), "slow" (fields of each `SlowRank`), "failed" (None), "device" (name and
    memory_bytes) and "seconds" (duration of the whole measurement). Start-up times, launch overheads, copies, "device"
    and "seconds" are measured on this rank, the disk's bandwidth on rank 0; all other values are equal on all ranks."""
    begun = time.perf_counter()
    leader = mesh.rank == 0
    threads = torch.get_num_threads()
    Stopwatch.shared = mesh.device.type != "cpu" or mesh.tp.size * threads > host.cores
    watch = Stopwatch()
    durations: list[tuple[float, float]] = []
    hosts = _gather_hosts(mesh)
    points = [*plan.list_points(), *kernels]
    phases = [(mesh.tp.size, threads)]
    if mesh.device.type == "cpu" and plan.single_rank:
        phases += [phase for phase in ((1, threads), (1, host.cores)) if phase not in phases]
    products: list[Products] = []
    passes: list[KernelCurve] = []
    kernel, usual_seconds = ReferenceKernel(mesh.device), 0.0
    for busy, each in phases:
        if leader:
            who = f"{busy} ranks concurrently" if busy > 1 else "one rank"
            log(f"matrix products and memory passes: {who}, {each} thread{'s' if each > 1 else ''} each")
        if (busy, each) != phases[0]:
            points = plan.list_points()
        by_rank, usual = _time_points(mesh, points, busy, each, plan.point_seconds, kernel)
        usual_seconds = usual_seconds or usual
        seconds = [statistics.median(rank[at] for rank in by_rank if rank) for at in range(len(points))]
        for precision, form, timed, took in _group_by_name(points, seconds, ("product",)):
            shapes: Any = tuple(point.sizes for point in timed)
            products.append(Products(precision, form, busy, each, shapes, took))
        for precision, name, timed, took in _group_by_name(points, seconds, ("pass", "kernel")):
            passes.append(KernelCurve(name, precision, busy, each, Curve(tuple(point.bytes for point in timed), took)))
        durations = durations or [watch.read()]  # later phases have other numbers of threads
    torch.set_num_threads(threads)
    watch = Stopwatch()
    measured = Measured(
        backend=get_group_backends(None)[mesh.device.type] if dist.is_initialized() else "none",
        ranks=mesh.tp.size,
        threads=threads,
        products=tuple(products),
        passes=tuple(passes),
        collectives=tuple(_time_collectives(mesh, plan, log if leader else lambda line: None)),
        copies=tuple(_time_copies(mesh.device, plan)),
        yardstick=usual_seconds if mesh.device.type == "cpu" else None,
        starts=tuple({**host.starts, **_measure_launch_overhead(mesh.device, plan.point_seconds)}.items()),
    )
    if leader and plan.steps:
        log("training steps of the reference model")
    measured = replace(measured, steps=tuple(steps(kernel, usual_seconds)))
    if leader and plan.compare_seconds and mesh.world.size > 1:
        log("comparison of ranks")
    passed, waited = (sum(column) for column in zip(*durations, watch.read(), strict=True))
    disturbed = max(rank[0] for rank in _all_gather(mesh, [waited / passed]))
    if disturbed > DISTURBED:
        measured = replace(measured, disturbed=disturbed)
    slow, compared_as = [], {}
    for what, by_rank in _time_comparison(mesh, plan).items():
        slow += find_slow(what, by_rank, hosts)
        compared_as[what] = compute_ratios(by_rank)
    rates = None
    if leader and plan.disk_bytes:
        log("disk")
        rates = measure_disk(host.directory, plan.disk_bytes)
    tables = measured.tables()
    if rates is not None:
        tables["disk_write"], tables["disk_read"] = rates
    return {
        "measured": tables,
        "hosts": hosts,
        "ratios": compared_as,
        "slow": [asdict(each) for each in slow],
        "failed": None,
        "device": _describe_device(mesh),
        "seconds": time.perf_counter() - begun,
    }


# --- computing


def _time_points(
    mesh: Mesh, points: list[MeasurementPoint], busy: int, threads: int, seconds: float, kernel: ReferenceKernel
) -> tuple[list[list[float]], float]:
    """Time every measurement point while the first `busy` ranks of each host compute, with `threads` threads each, and
    the other ranks idle. Return (times, usual).

    times: seconds of one run of each point, scaled to the CPU's usual speed, [rank][point]; an empty list for an idle
    rank. usual: seconds of the reference matrix product at the CPU's usual speed: the median over all points, then the
    mean over the computing ranks. seconds: time spent on each point. mesh: mesh of all ranks. kernel: reference matrix
    product, timed after each point to scale the point's time."""
    torch.set_num_threads(threads)
    mine = mesh.tp.rank < busy
    times, local = [], []
    for point in points:
        collectives.barrier(mesh.world, _SITE)  # all ranks start together
        times.append(time_point(point, mesh.device, seconds) if mine else 0.0)
        local.append(kernel.measure_seconds() if mine else 0.0)
    collectives.barrier(mesh.world, _SITE)
    found, levels = [], []
    for taken, reference in zip(_all_gather(mesh, times), _all_gather(mesh, local), strict=True):
        if any(taken):
            levels.append(statistics.median(reference))
            taken = [one * levels[-1] / here for one, here in zip(taken, _smooth_times(reference), strict=True)]
        found.append(taken if any(taken) else [])
    return found, statistics.mean(levels)


def _time_comparison(mesh: Mesh, plan: MeasurementPlan) -> dict[str, list[list[float]]]:
    """Time matrix products and memory passes on all ranks of `mesh`, to find slow ranks. Return {"products": times,
    "memory": times}, with times in seconds, [rank][measurement]; {} if `plan.compare_seconds` is 0.

    Each round times every product and pass briefly; rounds are repeated for `plan.compare_seconds`, so that the
    half-second slowdowns of a shared machine affect all ranks alike.
    """
    if not plan.compare_seconds:
        return {}
    kinds = {"products": "product", "memory": "pass"}
    found: dict[str, list[list[float]]] = {what: [[] for _ in range(mesh.world.size)] for what in kinds}
    points = plan.list_points()
    begun = time.perf_counter()
    while mesh.world.size > 1:
        times = []
        for point in points:
            collectives.barrier(mesh.world, _SITE)
            times.append(time_point(point, mesh.device, plan.point_seconds / 4))
        for rank, taken in enumerate(_all_gather(mesh, times)):
            for what, kind in kinds.items():
                found[what][rank] += [one for one, point in zip(taken, points, strict=True) if point.kind == kind]
        if max(rank[0] for rank in _all_gather(mesh, [time.perf_counter() - begun])) >= plan.compare_seconds:
            break
    return found


def _smooth_times(times: list[float]) -> list[float]:
    """Return the running median over five consecutive times of the reference matrix product, in seconds. The median
    removes single outliers but keeps slowdowns by other load, which last for seconds."""
    return [statistics.median(times[max(0, at - 2) : at + 3]) for at in range(len(times))]


def _group_by_name(
    points: list[MeasurementPoint], seconds: list[float], kinds: tuple[str, ...]
) -> Iterator[tuple[str, str, tuple[MeasurementPoint, ...], tuple[float, ...]]]:
    """Group the measurement points of certain kinds by precision and name; yield for each group (precision, name,
    points of the group, seconds of each of these points).

    seconds: duration of each of `points`. kinds: kinds to include, of "product", "pass" and "kernel".
    """
    timed = [(point, took) for point, took in zip(points, seconds, strict=True) if point.kind in kinds]
    for key in dict.fromkeys((point.precision, point.name) for point, _ in timed):
        chosen, times = zip(*(each for each in timed if (each[0].precision, each[0].name) == key), strict=True)
        yield *key, chosen, times


# --- communication, copies, launch overhead, device


def _time_collectives(mesh: Mesh, plan: MeasurementPlan, log: Callable[[str], None]) -> list[CollectiveCurve]:
    """Time every collective operation of the plan for every kind of process group (ranks of a host, ranks across hosts,
    all ranks) and every vector size. Return one curve (seconds over bytes) for each operation and kind of group. mesh:
    mesh of all ranks. log: receives progress lines."""
    found = []
    for place, axis in make_axes(mesh):
        log(f"collectives of {axis.size} ranks" + (f" ({place})" if mesh.dp.size > 1 else ""))
        for operation in OPERATIONS:
            seconds = []
            for size in plan.vector_bytes:
                found_here = time_collective(mesh, axis, operation, size, plan.point_seconds * 4)
                seconds.append(compute_slowest_median(*(_all_gather(mesh, values) for values in found_here)))
            found.append(
                CollectiveCurve(
                    operation, axis.size, place, Curve(tuple(map(float, plan.vector_bytes)), tuple(seconds))
                )
            )
    return found


def _time_copies(device: torch.device, plan: MeasurementPlan) -> list[CopyCurve]:
    """Time copies between pinned host memory and a GPU at the plan's sizes. Return a curve for each direction,
    "to-device" and "to-host"; an empty list on CPUs."""
    if device.type != "cuda":
        return []
    found = []
    for name in ("to-device", "to-host"):
        seconds = []
        for size in plan.vector_bytes:
            on_device = torch.empty(size, dtype=torch.uint8, device=device)
            on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            target, source = (on_device, on_host) if name == "to-device" else (on_host, on_device)
            seconds.append(time_call(partial(target.copy_, source, non_blocking=True), device, plan.point_seconds))
        found.append(CopyCurve(name, Curve(tuple(map(float, plan.vector_bytes)), tuple(seconds))))
    return found


def _measure_launch_overhead(device: torch.device, seconds: float) -> dict[str, float]:
    """Measure the launch overhead on `device`: the seconds of one elementwise operation on a minimal tensor. Return
    {"operation": without autograd, "differentiated_operation": with its backward pass}. seconds: time for each
    measurement."""
    x = torch.zeros(16, device=device)
    leaf = torch.zeros(16, device=device, requires_grad=True)
    operations = 200  # enough that the fixed cost of a backward pass is negligible

    def differentiated() -> None:
        """Run a chain of `operations` multiplications of a minimal tensor, and its backward pass, with autograd."""
        y = leaf
        for _ in range(operations):
            y = y * x
        start_backward(y, x).backward()

    plain = time_call(lambda: x * x, device, seconds)
    return {"operation": plain, "differentiated_operation": time_call(differentiated, device, seconds) / operations}


def _describe_device(mesh: Mesh) -> dict[str, Any]:
    """Describe the device on which this rank of `mesh` computes; return {"name": text, "memory_bytes": number}. For a
    CPU the memory is this rank's share of the host's memory."""
    if mesh.device.type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
        return {"name": torch.cuda.get_device_name(mesh.device), "memory_bytes": properties.total_memory}
    return {"name": processor_name(), "memory_bytes": read_machine_memory() // mesh.tp.size}


# --- exchange between ranks


def _all_gather(mesh: Mesh, values: list[float]) -> list[list[float]]:
    """All-gather `values`, a list of floats that has the same length on every rank, over all ranks of `mesh`. Return
    each rank's list, indexed by rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    everybody = torch.empty(mesh.world.size * len(values), dtype=torch.float64, device=mesh.device)
    collectives.all_gather(everybody, mine, mesh.world, _SITE).wait()
    synchronize(mesh.device)
    return [list(rank) for rank in everybody.view(mesh.world.size, -1).tolist()]


def _gather_hosts(mesh: Mesh) -> list[str]:
    """All-gather the host names of all ranks of `mesh`; return the names by rank. If the operating system reports no
    host name on a rank, the name of that rank's host is the text "this host"."""
    name = platform.node().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return [
        bytes(map(int, rank)).rstrip(b"\0").decode(errors="replace") or "this host"
        for rank in _all_gather(mesh, [float(byte) for byte in name])
    ]
