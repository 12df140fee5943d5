"""Products that overlap with the all-gather of their input or the reduce-scatter of their output, and the choice of how
they overlap."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from meshwright.comm.faults import Fault
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Axis, Communicator, Mesh
from meshwright.comm.products import choose_product_overlap, multiply_and_scatter, multiply_gathered
from meshwright.layout import Layout

HERE = socket.gethostname(), True


@contextmanager
def gathered_with(others: tuple[str, bool]) -> Iterator[None]:
    """Two ranks, of which the other reports `others`: host and support of symmetric memory."""

    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, others]

    with mock.patch.object(dist, "get_world_size", lambda: 2), mock.patch.object(dist, "all_gather_object", gather):
        yield


@pytest.mark.parametrize(
    ("setting", "device", "others", "capability", "connected", "chosen"),
    [
        ("off", "cuda", HERE, (9, 0), True, "off"),
        ("off", "cpu", HERE, None, True, "off"),
        ("chunks", "cpu", HERE, None, True, "chunks"),
        ("chunks", "cuda", HERE, (9, 0), True, "chunks"),
        ("auto", "cpu", HERE, None, True, "off"),
        ("auto", "cuda", HERE, (9, 0), True, "symmetric"),
        ("auto", "cuda", HERE, (8, 0), True, "symmetric"),
        ("auto", "cuda", HERE, (7, 5), True, "chunks"),
        ("auto", "cuda", HERE, (9, 0), False, "chunks"),
        ("auto", "cuda", (HERE[0], False), (9, 0), True, "chunks"),  # another rank cannot
        ("auto", "cuda", ("another host", True), (9, 0), True, "chunks"),
    ],
)
def test_overlap_is_chosen_by_setting_and_devices_of_all_ranks(
    setting: str, device: str, others: tuple[str, bool], capability: Any, connected: bool, chosen: str
):
    axis = Axis("tp", (0, 1), 0, None, Communicator(device))
    with (
        gathered_with(others),
        mock.patch.object(torch.cuda, "device_count", lambda: 4),
        mock.patch.object(torch.cuda, "current_device", lambda: 1),
        mock.patch.object(torch.cuda, "get_device_capability", lambda index: capability),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda here, peer: connected and here != peer),
    ):
        assert choose_product_overlap(setting, axis) == chosen


def test_overlap_without_the_fused_operators_is_in_chunks():
    axis = Axis("tp", (0, 1), 0, None, Communicator("cuda"))
    with (
        gathered_with(HERE),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_capability", lambda index: (9, 0)),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda here, peer: True),
        mock.patch.object(torch.ops, "symm_mem", object()),
    ):
        assert choose_product_overlap("auto", axis) == "chunks"


def multiply(ranks: int, overlap: str, fault: Fault | None = None) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Return the results of both products on this rank, their exact values, and the recorded calls."""
    mesh = Mesh.create(Layout(tp=ranks))
    axis = mesh.tp
    axis.communicator.product_overlap = overlap
    mesh.faults.inject(fault)
    make = torch.Generator().manual_seed(3)
    x_GBsX = torch.randn(ranks, 2, 3, 5, generator=make, dtype=torch.float64)
    matrices_GXY = torch.randn(ranks, 5, 7, generator=make, dtype=torch.float64)
    matrix_XY, whole_BSX = matrices_GXY[axis.rank], x_GBsX.movedim(0, 1).flatten(1, 2)
    y_BSY, kept_BSX = multiply_gathered(x_GBsX[axis.rank], matrix_XY, axis, "in", True)
    _, dropped = multiply_gathered(x_GBsX[axis.rank], matrix_XY, axis, "again", False)
    sum_BsY = multiply_and_scatter(whole_BSX, matrix_XY, axis, "out")
    total_BSY = torch.einsum("bsx,gxy->bsy", whole_BSX, matrices_GXY)
    exact = [whole_BSX @ matrix_XY, whole_BSX, total_BSY.chunk(ranks, dim=1)[axis.rank], torch.empty(0)]
    calls = mesh.record.table()
    mesh.close()
    return [y_BSY, kept_BSX, sum_BsY, dropped, *exact], calls


def multiply_fused(ranks: int, overlap: str = "symmetric", fault: Fault | None = None) -> Any:
    """Multiply by PyTorch's fused operators, as defined by their own fallbacks, which run on any backend."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    try:
        return multiply(ranks, overlap, fault)
    finally:
        library._destroy()


def test_overlapped_products_equal_those_of_gathered_and_summed_tokens():
    ranks = 3
    with LocalRanks(ranks) as pool:
        for found in (pool.run(multiply, ranks, "chunks"), pool.run(multiply_fused, ranks)):
            for tensors, calls in found:
                for mine, exact in zip(tensors[:4], tensors[4:], strict=True):
                    assert mine.shape == exact.shape and mine.is_contiguous()
                    torch.testing.assert_close(mine, exact.to(mine.dtype), rtol=1e-12, atol=1e-12)
                sent = {
                    site: sum(call["sent_bytes"] for call in calls if call["site"] == site) for site in ("in", "out")
                }
                # What an all-gather and a reduce-scatter send.
                assert sent == {"in": 2 * 3 * 5 * 8 * (ranks - 1), "out": 2 * 3 * 7 * 8 * (ranks - 1)}


@pytest.mark.parametrize("overlap", ["chunks", "symmetric"])
def test_injected_faults_corrupt_overlapped_products(overlap: str):
    run, operations = multiply, ["rotate", "rotate"]
    if overlap == "symmetric":
        run, operations = multiply_fused, ["all_gather", "reduce_scatter"]
    with LocalRanks(2) as pool:
        for kind in ("skip", "drop", "double"):
            for site, operation, result in zip(("in", "out"), operations, (0, 2), strict=True):
                found = pool.run(run, 2, overlap, Fault(site, operation, kind))
                right = [torch.allclose(tensors[result], tensors[result + 4]) for tensors, _ in found]
                assert not all(right), (site, kind)
