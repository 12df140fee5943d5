"""Timing of collectives between ranks as a function of message size, with the calls that training makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.transport import Message
from meshwright.probe.matmul import is_bf16_faster
from meshwright.probe.points import synchronize
from meshwright.probe.stopwatch import Stopwatch

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send-receive")
BATCHES = 5
_SITE = "probe"


def make_axes(mesh: Mesh) -> list[tuple[str, Axis]]:
    """Create the process groups whose collectives are timed; return (scope, axis) for each kind of group. All ranks
    must call this function.

    Scope "inside": groups of consecutive ranks of a host, one axis for each group size that divides the number of ranks
    per host; "across": groups of one rank of each host; "world": all ranks. mesh: from `probe.rank.make_probe_mesh`.
    """
    inside = [size for size in range(2, mesh.tp.size + 1) if mesh.tp.size % size == 0]
    axes = [("inside", mesh.make_block_axis("tp", size)) for size in inside]
    if mesh.dp.size > 1:
        axes.append(("across", mesh.data))
        if mesh.tp.size > 1:
            axes.append(("world", mesh.world))
    return axes


def time_collective(
    mesh: Mesh, axis: Axis, operation: str, size: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Time a collective on a float32 vector, in `BATCHES` batches of calls. Return two lists with one value per batch:
    the seconds per call, and how many of these seconds this rank waited for a CPU core. All ranks call this with equal
    arguments; all groups of the axis run the collective at once.

    operation: one of `OPERATIONS`, such as "all-reduce"; for "send-receive" the time of one message is returned. size:
    bytes of the full (unsharded) vector. seconds: duration of the whole measurement. axis: process groups over which
    the collective runs. mesh: from `probe.rank.make_probe_mesh`."""
    device = mesh.device
    call, calls_each = _make_call(axis, operation, size, device)
    for _ in range(2):  # warm-up: creates connections and buffers
        call()
    collectives.barrier(mesh.world, _SITE)
    begun = time.perf_counter()
    call()
    synchronize(device)
    longest = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=device)
    collectives.all_reduce(longest, mesh.world, _SITE, op="max").wait()
    calls = max(1, min(500, int(seconds / BATCHES / float(longest))))
    times, waits = [], []
    for _ in range(BATCHES):
        collectives.barrier(mesh.world, _SITE)
        watch = Stopwatch()
        for _ in range(calls):
            call()
        synchronize(device)
        passed, waited = watch.read()
        times.append(passed / calls / calls_each)
        waits.append(waited / calls / calls_each)
    return times, waits


def choose_precision(mesh: Mesh) -> str:
    """Choose the faster precision of matrix products, measured on rank 0 of `mesh`: return "bf16" if bf16 is faster
    than fp32, else "fp32". The result is equal on all ranks, which must all call this function."""
    faster = torch.tensor(float(mesh.rank == 0 and is_bf16_faster(mesh.device)), device=mesh.device)
    collectives.all_reduce(faster, mesh.world, "start.precision")
    return "bf16" if faster > 0 else "fp32"


def compute_slowest_median(by_rank: list[list[float]], waits: list[list[float]]) -> float:
    """Return the duration of a collective in seconds: the median, over batches of calls, of the slowest rank's time.

    by_rank: seconds per call, [rank][batch]. waits: seconds per call in which the rank waited for a CPU core,
    [rank][batch]. If the waits of all ranks in a batch add up to more than half of the slowest rank's time, the sum is
    subtracted from this time, but at most 90% of the time."""
    found = []
    for times, waited in zip(zip(*by_rank, strict=True), zip(*waits, strict=True), strict=True):
        slowest, lost = max(times), sum(waited)
        found.append(slowest - (min(lost, 0.9 * slowest) if lost > slowest / 2 else 0.0))
    return statistics.median(found)


def _make_call(axis: Axis, operation: str, size: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """Return (function that runs the collective once over `axis`, number by which to divide the function's duration).
    This number is 2 for "send-receive", which sends a message to another rank and back, and 1 for all other operations.

    operation: such as "all-reduce". size: bytes of the full float32 vector, which is allocated on `device`.
    """
    share = max(1, size // 4 // axis.size)
    whole = torch.zeros(share * axis.size, device=device)
    mine = whole[axis.rank * share : (axis.rank + 1) * share]
    if operation == "all-reduce":
        return lambda: collectives.all_reduce(whole, axis, _SITE).wait(), 1
    if operation == "all-gather":
        return lambda: collectives.all_gather(whole, mine, axis, _SITE).wait(), 1
    if operation == "reduce-scatter":
        return lambda: collectives.reduce_scatter(torch.empty_like(mine), whole, axis, _SITE).wait(), 1
    if operation == "all-to-all":
        other = torch.empty_like(whole)
        return lambda: collectives.all_to_all(other, whole, axis, _SITE).wait(), 1
    assert operation == "send-receive", operation
    message = torch.zeros(max(1, size // 4), device=device)
    return partial(_ping_pong, message, axis), 2


def _ping_pong(message: torch.Tensor, axis: Axis) -> None:
    """Send `message` to the neighbour on `axis` and back, to time point-to-point messages. Ranks 0 and 1, 2 and 3, ...
    of the axis form the pairs; the lower rank sends first."""
    first, peer = axis.rank % 2 == 0, axis.rank ^ 1
    if peer >= axis.size:  # the last rank of an odd number has no partner
        return
    for arrives in (not first, first):
        for handle in collectives.transfer([Message(message, peer, arrives, _SITE, "message")], axis):
            handle.wait()
