"""Products that overlap with the all-gather of their input or the sum of their output over ranks, and the choice of how
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

from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Axis, CommunicationState, Mesh
from meshwright.comm.products import (
    choose_product_overlap,
    multiply_and_reduce,
    multiply_and_scatter,
    multiply_gathered,
)  # fmt: skip
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
    axis = Axis("tp", (0, 1), 0, None, CommunicationState(device))
    with (
        gathered_with(others),
        mock.patch.object(torch.cuda, "device_count", lambda: 4),
        mock.patch.object(torch.cuda, "current_device", lambda: 1),
        mock.patch.object(torch.cuda, "get_device_capability", lambda index: capability),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda here, peer: connected and here != peer),
    ):
        assert choose_product_overlap(setting, axis, True) == chosen


def test_overlap_without_the_fused_operators_is_in_chunks():
    axis = Axis("tp", (0, 1), 0, None, CommunicationState("cuda"))
    with (
        gathered_with(HERE),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_capability", lambda index: (9, 0)),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda here, peer: True),
        mock.patch.object(torch.ops, "symm_mem", object()),
    ):
        assert choose_product_overlap("auto", axis, True) == "chunks"


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "off"), ("cuda", "chunks")])
def test_all_reduces_do_not_choose_symmetric_memory(device: str, chosen: str):
    """Nor are the ranks asked for it, which would be a call without a group here."""
    assert choose_product_overlap("auto", Axis("tp", (0, 1), 0, None, CommunicationState(device)), False) == chosen


def multiply(
    ranks: int, overlap: str, fault: Fault | None = None, outputs: int = 7, dp: int = 1
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Return the results of the products on this rank, their exact values, and the recorded calls. A `fault` also
    affects earlier products, of the negated tokens."""
    mesh = Mesh.create(Layout(tp=ranks, dp=dp))
    axis = mesh.tp
    axis.communicator.product_overlap = overlap
    mesh.inject(fault)
    make = torch.Generator().manual_seed(3 + mesh.dp.rank)
    x_GBsX = torch.randn(ranks, 2, 3, 5, generator=make, dtype=torch.float64)
    matrices_GXY = torch.randn(ranks, 5, outputs, generator=make, dtype=torch.float64)
    matrix_XY, whole_BSX = matrices_GXY[axis.rank], x_GBsX.movedim(0, 1).flatten(1, 2)
    if fault is not None:
        multiply_gathered(-x_GBsX[axis.rank], matrix_XY, axis.key, "in", True)
        multiply_and_scatter([-whole_BSX], [matrix_XY], axis, "out")
        multiply_and_reduce([-whole_BSX], [matrix_XY], axis, "all")
    y_BSY, kept_BSX = multiply_gathered(x_GBsX[axis.rank], matrix_XY, axis.key, "in", True)
    _, dropped = multiply_gathered(x_GBsX[axis.rank], matrix_XY, axis.key, "again", False)
    sum_BsY = multiply_and_scatter([whole_BSX], [matrix_XY], axis, "out")
    sum_BSY = multiply_and_reduce([whole_BSX], [matrix_XY], axis, "all")
    total_BSY = torch.einsum("bsx,gxy->bsy", whole_BSX, matrices_GXY)
    exact = [whole_BSX @ matrix_XY, whole_BSX, total_BSY.chunk(ranks, dim=1)[axis.rank], total_BSY, torch.empty(0)]
    calls = mesh.record.table()
    mesh.close()
    return [y_BSY, kept_BSX, sum_BsY, sum_BSY, dropped, *exact], calls


def multiply_fused(ranks: int, overlap: str = "symmetric", *options: Any) -> Any:
    """Multiply by PyTorch's fused operators, as defined by their own fallbacks, which run on any backend."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    try:
        return multiply(ranks, overlap, *options)
    finally:
        library._destroy()


def test_overlapped_products_equal_those_of_gathered_and_summed_tokens():
    ranks = 3
    with LocalRanks(ranks) as pool:
        for found in (pool.run(multiply, ranks, "chunks"), pool.run(multiply_fused, ranks)):
            for tensors, calls in found:
                for mine, exact in zip(tensors[:5], tensors[5:], strict=True):
                    assert mine.shape == exact.shape and mine.is_contiguous()
                    torch.testing.assert_close(mine, exact.to(mine.dtype), rtol=1e-12, atol=1e-12)
                sites = "in", "out", "all"
                sent = {site: sum(call["sent_bytes"] for call in calls if call["site"] == site) for site in sites}
                # What an all-gather, a reduce-scatter and an all-reduce send.
                gathered, scattered = (2 * 3 * size * 8 * (ranks - 1) for size in (5, 7))
                assert sent == {"in": gathered, "out": scattered, "all": 2 * scattered}


@pytest.mark.parametrize("overlap", ["chunks", "symmetric"])
def test_injected_faults_corrupt_overlapped_products(overlap: str):
    run, operations = multiply, ["rotate", "rotate", "all_reduce"]
    if overlap == "symmetric":
        run, operations = multiply_fused, ["all_gather", "reduce_scatter", "all_reduce"]
    with LocalRanks(2) as pool:
        for kind in KINDS:
            for site, operation, result in zip(("in", "out", "all"), operations, (0, 2, 3), strict=True):
                found = pool.run(run, 2, overlap, Fault(site, operation, kind, axis="tp"))
                right = [torch.allclose(tensors[result], tensors[result + 5]) for tensors, _ in found]
                same_ring = kind == "wrong group" and operation in ("rotate", "all_reduce")
                assert all(right) == same_ring, (site, kind)


@pytest.mark.parametrize("overlap", ["chunks", "symmetric"])
def test_stale_and_misdirected_products_are_those_of_other_tokens(overlap: str):
    """Product and gathered tokens have the same shape: a stale one is its own predecessor, not the other's."""
    run, gather, scatter = multiply, "rotate", "rotate"
    if overlap == "symmetric":
        run, gather, scatter = multiply_fused, "all_gather", "reduce_scatter"
    crossed = (0, 2), (1, 3)
    with LocalRanks(4) as pool:
        right = pool.run(run, 2, overlap, None, 5, 2)
        found = pool.run(run, 2, overlap, Fault("in", gather, "stale"), 5, 2)
        for rank, (tensors, _) in enumerate(found):
            of_other = slice(3, 6) if rank % 2 == 0 else slice(0, 3)  # a rank may not wait for its own tokens
            for result in (0, 1):
                torch.testing.assert_close(tensors[result][:, of_other], -tensors[result + 5][:, of_other])
        found = pool.run(run, 2, overlap, Fault("in", gather, "wrong group", axis="tp", groups=crossed), 5, 2)
        assert torch.equal(found[0][0][1][:, 3:], right[2][0][1][:, :3])  # of rank 2, not 1
        found = pool.run(run, 2, overlap, Fault("out", scatter, "wrong group", axis="tp", groups=crossed), 5, 2)
        assert not any(torch.allclose(one[0][2], other[0][2]) for one, other in zip(found, right, strict=True))
