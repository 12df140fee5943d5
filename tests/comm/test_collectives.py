"""Every collective against its definition, computed from all ranks' inputs in one process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.comm.faults import Fault
from meshwright.comm.handle import Handle
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh, calls_in_flight, find_axis
from meshwright.errors import RankLost
from meshwright.layout import Layout


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Input of a rank: small whole numbers, so that sums are exact in every dtype."""
    return torch.randint(-8, 9, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def every_collective(world_size: int, dtype: torch.dtype, count: int) -> None:
    mesh = Mesh.create(Layout(dp=world_size))
    axis, rank = mesh.data, mesh.rank
    everybody = torch.stack([values(r, count * world_size, dtype) for r in range(world_size)])
    mine = everybody[rank]
    total = everybody.sum(0)

    x = mine.clone()
    collectives.all_reduce(x, axis, "test.sum")
    assert torch.equal(x, total)
    x = mine.clone()
    collectives.all_reduce(x, axis, "test.max", op="max")
    assert torch.equal(x, everybody.amax(0))

    part = torch.empty(count, dtype=dtype)
    handle = collectives.reduce_scatter(part, mine, axis, "test.scatter", async_op=True)
    handle.wait()
    handle.wait()  # a second wait does nothing
    assert torch.equal(part, total[rank * count : (rank + 1) * count])
    x = mine.clone()
    collectives.reduce_scatter(x[rank * count : (rank + 1) * count], x, axis, "test.scatter")
    assert torch.equal(x[rank * count : (rank + 1) * count], part), "in place"

    whole = torch.empty(count * world_size, dtype=dtype)
    collectives.all_gather(whole, part, axis, "test.gather")
    assert torch.equal(whole, total)
    x = torch.zeros(count * world_size, dtype=dtype)
    x[rank * count : (rank + 1) * count] = part
    collectives.all_gather(x, x[rank * count : (rank + 1) * count], axis, "test.gather")
    assert torch.equal(x, total), "in place"

    x = mine.clone()
    collectives.broadcast(x, axis, "test.broadcast", source=world_size - 1)
    assert torch.equal(x, everybody[world_size - 1])
    x = torch.empty_like(mine)
    collectives.all_to_all(x, mine, axis, "test.exchange")
    assert torch.equal(x, everybody[:, rank * count : (rank + 1) * count].reshape(-1))
    x = torch.empty_like(mine)
    collectives.rotate(x, mine, axis, "test.rotate")
    assert torch.equal(x, everybody[rank - 1])
    collectives.barrier(axis, "test.barrier")
    mesh.close()


def several_in_flight(world_size: int) -> None:
    """Calls posted before earlier ones are waited for must not mix."""
    mesh = Mesh.create(Layout(dp=world_size))
    outputs = [torch.empty(1000 * world_size) for _ in range(8)]
    sources = [torch.full((1000,), 100.0 * index + mesh.rank) for index in range(8)]
    handles = [
        collectives.all_gather(output, source, mesh.data, "test.gather", async_op=True)
        for output, source in zip(outputs, sources, strict=True)
    ]
    total = torch.ones(5)
    collectives.all_reduce(total, mesh.data, "test.sum")
    for handle in reversed(handles):
        handle.wait()
    for index, output in enumerate(outputs):
        expected = torch.tensor([100.0 * index + rank for rank in range(world_size)]).repeat_interleave(1000)
        assert torch.equal(output, expected)
    mesh.close()


def recorded_bytes(world_size: int) -> list[dict]:
    mesh = Mesh.create(Layout(dp=world_size))
    for _ in range(3):
        collectives.all_gather(torch.empty(10 * world_size), torch.ones(10), mesh.data, "a")
    collectives.all_reduce(torch.ones(100 * world_size, dtype=torch.float64), mesh.data, "b")
    collectives.rotate(torch.empty(10), torch.ones(10), mesh.data, "c")
    mesh.close()
    return mesh.record.table()


def spoilt(world_size: int, operation: str, kind: str) -> torch.Tensor:
    """The second of two results with an injected fault."""
    mesh = Mesh.create(Layout(dp=world_size))
    mesh.faults.inject(Fault("test", operation, kind, position=1))
    axis = mesh.data
    for call in (1.0, 10.0):
        x = torch.full((world_size,), call * (mesh.rank + 1))
        if operation == "all_reduce":
            collectives.all_reduce(x, axis, "test")
            collectives.all_reduce(torch.ones(1), axis, "elsewhere")
        elif operation == "reduce_scatter":
            whole, x = x, torch.zeros(1)
            collectives.reduce_scatter(x, whole, axis, "test")
        elif operation == "rotate":
            whole, x = x[:1].clone(), torch.full((1,), -1.0)
            collectives.rotate(x, whole, axis, "test")
        else:
            part, x = x[:1].clone(), torch.zeros(world_size)
            collectives.all_gather(x, part, axis, "test")
    assert mesh.faults.affected_calls == (1 if kind == "stale" else 2)
    mesh.close()
    return x


def left_alone(world_size: int) -> str:
    mesh = Mesh.create(Layout(dp=world_size), timeout_seconds=0.5)
    if mesh.rank == 1:
        return ""
    with pytest.raises(RankLost) as error:
        collectives.all_reduce(torch.ones(4), mesh.data, "test.lonely")
    return str(error.value)


def survive(path: str) -> None:
    """Rank 1 dies; rank 0 records the error of a collective call."""
    mesh = Mesh.create(Layout(dp=2), timeout_seconds=30)
    collectives.barrier(mesh.world, "test.start")
    if mesh.rank == 1:
        os._exit(1)
    try:
        for _ in range(100):
            collectives.all_gather(torch.empty(2_000_000), torch.ones(1_000_000), mesh.shard, "test.orphan")
    except RankLost as error:
        Path(path).write_text(str(error))


def groups_of(layout: str) -> dict[str, tuple[int, ...]]:
    mesh = Mesh.create(Layout.parse(layout))
    x = torch.tensor([float(mesh.rank)])
    collectives.all_reduce(x, mesh.replica, "test")
    assert x.item() == sum(mesh.replica.ranks)
    mesh.close()
    return {name: getattr(mesh, name).ranks for name in ("data", "shard", "replica", "tp", "world")}


def axis_pairs(world_size: int) -> None:
    """The conjugate operators against one process that has all ranks' inputs."""
    from meshwright.comm import operators

    mesh = Mesh.create(Layout(tp=world_size))
    axis, rank = mesh.tp, mesh.rank
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3 * world_size, 5, generator=make, dtype=torch.float64) for _ in range(world_size)]
    weights = [torch.randn(2, 3 * world_size, 5, generator=make, dtype=torch.float64) for _ in range(world_size)]

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.sin() * weight[:, : x.shape[1]]).sum()

    shared = inputs[0].clone().requires_grad_()
    sum(loss(shared, weight) for weight in weights).backward()
    x = inputs[0].clone().requires_grad_()
    loss(operators.copy_to(x, axis, "in"), weights[rank]).backward()
    torch.testing.assert_close(x.grad, shared.grad)

    everybody = [value.clone().requires_grad_() for value in inputs]
    loss(sum(everybody), weights[0]).backward()
    x = inputs[rank].clone().requires_grad_()
    compiled = torch.compile(lambda x: loss(operators.reduce_from(x, axis, "out") * 1.0, weights[0]), backend="eager")
    compiled(x).backward()
    torch.testing.assert_close(x.grad, everybody[rank].grad)

    parts = [value[:, :3].clone().requires_grad_() for value in inputs]
    sum(loss(torch.cat(parts, dim=1), weight) for weight in weights).backward()
    x = inputs[rank][:, :3].clone().requires_grad_()
    loss(operators.gather_from(x, axis, "gather", dim=1), weights[rank]).backward()
    torch.testing.assert_close(x.grad, parts[rank].grad)

    everybody = [value.clone().requires_grad_() for value in inputs]
    slices = sum(everybody).chunk(world_size, dim=1)
    sum(loss(part, weight) for part, weight in zip(slices, weights, strict=True)).backward()
    x = inputs[rank].clone().requires_grad_()
    loss(operators.reduce_scatter_to(x, axis, "scatter", dim=1), weights[rank]).backward()
    torch.testing.assert_close(x.grad, everybody[rank].grad)

    shared = inputs[0].clone().requires_grad_()
    slices = shared.chunk(world_size, dim=1)
    sum(loss(part, weight) for part, weight in zip(slices, weights, strict=True)).backward()
    x = inputs[0].clone().requires_grad_()
    loss(operators.split_to(x, axis, "split", dim=1), weights[rank]).backward()
    torch.testing.assert_close(x.grad, shared.grad)

    everybody = [value[..., :4].clone().requires_grad_() for value in inputs]
    whole = torch.cat(everybody, dim=1).chunk(world_size, dim=2)
    sum(
        loss(part, weight.repeat(1, world_size, 1)[..., :1]) for part, weight in zip(whole, weights, strict=True)
    ).backward()
    x = inputs[rank][..., :4].clone().requires_grad_()
    mine = operators.all_to_all(x, axis, "trade", split=2, join=1)
    assert torch.equal(mine, whole[rank])
    loss(mine, weights[rank].repeat(1, world_size, 1)[..., :1]).backward()
    torch.testing.assert_close(x.grad, everybody[rank].grad)

    parts = [value[:, :3].clone().requires_grad_() for value in inputs]
    loss(torch.cat(parts, dim=1), weights[0]).backward()
    x = inputs[rank][:, :3].clone().requires_grad_()
    loss(operators.join_from(x, axis, "join", dim=1), weights[0]).backward()
    torch.testing.assert_close(x.grad, parts[rank].grad)

    # Rows: rank i has for rank j the (2 i + j) % 3 rows that `counts` says, some of them none.
    counts = [[(2 * i + j) % 3 * (i != 1) for j in range(world_size)] for i in range(world_size)]
    rows = [torch.randn(sum(mine), 5, generator=make, dtype=torch.float64) for mine in counts]
    got = [torch.randn(sum(each[j] for each in counts), 5, generator=make).double() for j in range(world_size)]
    everybody = [value.clone().requires_grad_() for value in rows]
    split = [value.split(mine) for value, mine in zip(everybody, counts, strict=True)]
    arrived = [torch.cat([each[j] for each in split]) for j in range(world_size)]
    sum((value.sin() * weight).sum() for value, weight in zip(arrived, got, strict=True)).backward()
    x = rows[rank].clone().requires_grad_()
    y = operators.all_to_all_rows(x, axis, "exchange", counts[rank], [each[rank] for each in counts])
    assert torch.equal(y, arrived[rank])
    (y.sin() * got[rank]).sum().backward()
    torch.testing.assert_close(x.grad, everybody[rank].grad)

    sizes = [len(value) for value in rows]
    factors = [torch.randn(sum(sizes), 5, generator=make, dtype=torch.float64) for _ in range(world_size)]
    everybody = [value.clone().requires_grad_() for value in rows]
    sum((torch.cat(everybody).sin() * factor).sum() for factor in factors).backward()
    x = rows[rank].clone().requires_grad_()
    y = operators.gather_rows(x, axis, "gather", sizes)
    (y.sin() * factors[rank]).sum().backward()
    torch.testing.assert_close(x.grad, everybody[rank].grad)

    everybody = [value.clone().requires_grad_() for value in factors]
    parts = sum(everybody).split(sizes)
    sum((part.sin() * weight).sum() for part, weight in zip(parts, rows, strict=True)).backward()
    x = factors[rank].clone().requires_grad_()
    y = operators.reduce_scatter_rows(x, axis, "scatter", sizes)
    (y.sin() * rows[rank]).sum().backward()
    torch.testing.assert_close(x.grad, everybody[rank].grad)
    ways = [line for line in mesh.record.table() if line["site"].startswith("exchange")]
    away = 5 * 8 * sum(count for j, count in enumerate(counts[rank]) if j != rank)
    back = 5 * 8 * sum(each[rank] for j, each in enumerate(counts) if j != rank)
    assert [line["sent_bytes"] for line in ways] == [away, back]

    sites = {(entry["site"], entry["operation"]) for entry in mesh.record.table()}
    assert ("out", "all_reduce") in sites, "a call inside a compiled function is recorded too"
    assert ("in.backward", "all_reduce") in sites
    mesh.close()


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(4) as started:
        yield started


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_collectives_return_results_of_their_operations(ranks, dtype):
    ranks.run(every_collective, 4, dtype, 1)
    ranks.run(every_collective, 4, dtype, 257)


def test_concurrent_calls_do_not_mix(ranks):
    ranks.run(several_in_flight, 4)


def test_recorded_bytes_are_the_closed_forms(ranks):
    for table in ranks.run(recorded_bytes, 4):
        gather, reduce, rotate = table
        assert rotate["payload_bytes"] == rotate["sent_bytes"] == 40
        assert gather["calls"] == 3
        assert gather["payload_bytes"] == 3 * 4 * 40
        assert gather["sent_bytes"] == 3 * 3 * 40, "all-gather: (N - 1) parts"
        assert reduce["sent_bytes"] == 2 * 3 * 800, "all-reduce: 2 (N - 1) / N of the vector"


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [  # ranks put in 10, 20, 30, 40 in the second call, a tenth of that in the first
        ("all_reduce", "skip", [[10.0] * 4, [20.0] * 4, [30.0] * 4, [40.0] * 4]),
        ("all_reduce", "double", [[200.0] * 4] * 4),
        ("all_reduce", "drop", [[80.0] * 4] * 4),
        ("all_reduce", "stale", [[10.0] * 4] * 4),
        ("reduce_scatter", "skip", [[10.0], [20.0], [30.0], [40.0]]),
        ("reduce_scatter", "double", [[200.0]] * 4),
        ("reduce_scatter", "drop", [[80.0]] * 4),
        ("reduce_scatter", "stale", [[10.0]] * 4),
        ("all_gather", "skip", [[10.0, 0, 0, 0], [0, 20.0, 0, 0], [0, 0, 30.0, 0], [0, 0, 0, 40.0]]),
        ("all_gather", "double", [[20.0, 40.0, 60.0, 80.0]] * 4),
        ("all_gather", "drop", [[10.0, 0.0, 30.0, 40.0]] * 4),
        ("all_gather", "stale", [[1.0, 2.0, 3.0, 4.0]] * 4),
        ("rotate", "skip", [[0.0]] * 4),
        ("rotate", "double", [[80.0], [20.0], [40.0], [60.0]]),
        ("rotate", "drop", [[40.0], [10.0], [0.0], [30.0]]),
        ("rotate", "stale", [[4.0], [1.0], [2.0], [3.0]]),
    ],
)
def test_planted_fault_corrupts_only_its_call_site(ranks, operation, kind, expected):
    assert [x.tolist() for x in ranks.run(spoilt, 4, operation, kind)] == expected


def test_hybrid_groups_shard_inside_and_replicate_across(ranks):
    first, _, third, _ = ranks.run(groups_of, "dp4 zero3 hs2")
    assert first["shard"] == (0, 1) and first["replica"] == (0, 2)
    assert third["shard"] == (2, 3) and third["replica"] == (0, 2)
    assert first["data"] == first["world"] == (0, 1, 2, 3)
    assert first["tp"] == (0,)


def test_operator_pairs_are_conjugates(ranks):
    ranks.run(axis_pairs, 4)


def test_abandoned_rank_reports_its_call():
    with LocalRanks(2) as pair:
        alone, _ = pair.run(left_alone, 2)
    assert "rank 0 had no answer from rank 1 in test.lonely (all_reduce over axis data, its call 1)" in alone


def test_rank_with_dead_peer_fails_immediately(tmp_path):
    with LocalRanks(2) as pair, pytest.raises(RankLost, match="local rank 1 died"):
        pair.run(survive, str(tmp_path / "said"))
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 0 had no answer from rank 1 in test.orphan (all_gather over axis shard, its call ")


def test_single_device_collectives_copy_nothing():
    mesh = Mesh.single()
    x = torch.ones(4)
    collectives.all_reduce(x, mesh.data, "test")
    collectives.all_gather(x, x, mesh.shard, "test")
    collectives.reduce_scatter(x, x, mesh.shard, "test")
    collectives.barrier(mesh.world, "test")
    assert mesh.record.table() == []
    assert not dist.is_initialized()


def nobody_waits(world_size: int) -> tuple[float, int]:
    """Post a call and drop its handle while its messages are in flight."""
    mesh = Mesh.create(Layout(dp=world_size))
    for _ in range(3):
        whole = torch.zeros(world_size * 300_000)
        time.sleep(0.05 * mesh.rank)  # the first call has posted its receives long before data arrive
        collectives.all_gather(whole, torch.ones(300_000), mesh.data, "test.gather", async_op=True)
        del whole
    mesh.close()
    total = torch.ones(300_000)
    collectives.all_reduce(total, Mesh.create(Layout(dp=world_size)).data, "test.sum")
    return float(total.mean()), len(calls_in_flight)


def test_call_without_wait_does_not_block_next_call():
    with LocalRanks(3, timeout=30.0) as own:
        assert own.run(nobody_waits, 3) == [(3.0, 0)] * 3


def test_failed_call_raises_at_every_wait():
    class Work:
        def wait(self) -> None:
            raise RuntimeError("connection closed")

    handle = Handle([Work()])
    finished = []
    handle.then(lambda: finished.append(1))
    for _ in range(2):
        with pytest.raises(RankLost, match="connection closed"):
            handle.wait()
    assert not finished


def test_closing_mesh_keeps_axes_of_other_meshes():
    first, second, third = Mesh.single(), Mesh.single(), Mesh.single()
    key = first.ep.key
    assert find_axis(key) is third.ep
    third.close()
    assert find_axis(key) is second.ep
    first.close()
    assert find_axis(key) is second.ep
    second.close()
