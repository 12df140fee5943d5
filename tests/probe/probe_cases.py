"""Functions that ranks run in the tests of `test_probe.py`."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.probe import points
from meshwright.probe import rank as probe_rank
from meshwright.probe.points import MeasurementPlan

SMALL = MeasurementPlan(
    shapes=((16, 32, 48), (64, 64, 64), (128, 256, 64)),
    pass_sizes=(256, 4096, 65536),
    vector_bytes=(1024, 65536),
    precisions=("fp32",),
    disk_bytes=2**20,
    point_seconds=0.004,
    compare_seconds=1.5,
)


def measured(directory: str, host_ranks: int | None = None, slow: int | None = None) -> dict[str, Any]:
    """Measure with all ranks. host_ranks: number of ranks that report the same host name (None: all). slow: rank that
    computes everything twice."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    host_ranks = host_ranks or ranks
    node, call_of = platform.node, points.make_call
    platform.node = lambda: f"host-{rank // host_ranks}"
    if rank == slow:
        points.make_call = lambda *of: _twice(call_of(*of))
    try:
        mesh = probe_rank.make_probe_mesh(ranks, host_ranks, "cpu")
        lines: list[str] = []
        # Ranks of one host are compared for as long as it takes to find the slow one.
        plan = SMALL if host_ranks == ranks else replace(SMALL, compare_seconds=0.1)
        found = probe_rank.measure(mesh, plan, probe_rank.Host(2, Path(directory), {"rank": 1.5}), lines.append)
        return {**found, "progress": lines, "threads": torch.get_num_threads()}
    finally:
        platform.node, points.make_call = node, call_of


def _twice(call: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        call()
        call()

    return both
