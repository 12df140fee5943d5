"""Programs instead of the backend's calls: same results, exact bytes, same faults, more precise errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from meshwright.collectives.named import load_named_programs
from meshwright.comm import collectives
from meshwright.comm.faults import Fault
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import RankLost
from meshwright.layout import Layout
from meshwright.recipe import CollectivesRecipe

RING = CollectivesRecipe(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
OTHERS = CollectivesRecipe(all_reduce="rabenseifner", reduce_scatter="recursive-halving", all_gather="bruck")
TREES = CollectivesRecipe(all_reduce="double-binary-tree", reduce_scatter="pairwise", all_gather="bidirectional-ring")
AUTO = CollectivesRecipe(all_reduce="auto", reduce_scatter="auto", all_gather="auto")


def mesh_of(layout: str, table: CollectivesRecipe, timeout_seconds: float = 30.0) -> Mesh:
    parsed = Layout.parse(layout)
    return Mesh.create(parsed, timeout_seconds=timeout_seconds, programs=load_named_programs(table, parsed))


def every_call(layout: str, table: CollectivesRecipe, numel: int) -> None:
    """All three operations on all three axes, several in flight, exact on whole numbers."""
    mesh = mesh_of(layout, table)
    waiting: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for axis in (mesh.data, mesh.shard, mesh.replica):
        everybody = torch.stack([torch.arange(numel * axis.size) % 17 + 100.0 * rank for rank in axis.ranks])
        mine = everybody[axis.rank]
        part = slice(axis.rank * numel, (axis.rank + 1) * numel)

        total = mine.clone()
        waiting.append((collectives.all_reduce(total, axis, "test", async_op=True), total, everybody.sum(0)))
        largest = mine.clone()
        collectives.all_reduce(largest, axis, "test", op="max")
        assert torch.equal(largest, everybody.amax(0))

        output = torch.empty(numel)
        handle = collectives.reduce_scatter(output, mine.clone(), axis, "test", async_op=True)
        waiting.append((handle, output, everybody.sum(0)[part]))
        inside = mine.clone()
        handle = collectives.reduce_scatter(inside[part], inside, axis, "test", async_op=True)
        waiting.append((handle, inside[part], everybody.sum(0)[part]))

        whole, wanted = torch.empty(numel * axis.size), everybody[:, :numel].reshape(-1)
        waiting.append((collectives.all_gather(whole, mine[:numel], axis, "test", async_op=True), whole, wanted))
        whole = torch.zeros(numel * axis.size)
        whole[part] = mine[:numel]
        waiting.append((collectives.all_gather(whole, whole[part], axis, "test", async_op=True), whole, wanted))
    for handle, found, wanted in reversed(waiting):
        handle.wait()
        assert torch.equal(found, wanted)
    mesh.close()


def recorded(table: CollectivesRecipe, numel: int) -> dict[str, int]:
    """Bytes sent by operation."""
    mesh = mesh_of("dp4 zero1", table)
    collectives.all_reduce(torch.ones(numel), mesh.data, "test")
    collectives.reduce_scatter(torch.ones(numel // 4), torch.ones(numel), mesh.shard, "test")
    collectives.all_gather(torch.ones(numel), torch.ones(numel // 4), mesh.shard, "test")
    collectives.all_reduce(torch.ones(numel), mesh.world, "elsewhere")
    mesh.close()
    return {f"{line['site']} {line['operation']}": int(line["sent_bytes"]) for line in mesh.record.table()}


def spoilt(operation: str, kind: str) -> list[float]:
    """The second of two results with an injected fault."""
    mesh = mesh_of("dp4", RING)
    mesh.faults.inject(Fault("test", operation, kind, position=1))
    for call in (1.0, 10.0):
        x = torch.full((4,), call * (mesh.rank + 1))
        if operation == "all_reduce":
            collectives.all_reduce(x, mesh.data, "test")
        elif operation == "reduce_scatter":
            whole, x = x, torch.zeros(1)
            collectives.reduce_scatter(x, whole, mesh.data, "test")
        else:
            part, x = x[:1].clone(), torch.zeros(4)
            collectives.all_gather(x, part, mesh.data, "test")
    mesh.close()
    return x.tolist()


def left_alone() -> str:
    mesh = mesh_of("dp4", RING, timeout_seconds=0.5)
    if mesh.rank == 1:
        return ""
    with pytest.raises(RankLost) as error:
        collectives.all_reduce(torch.ones(40), mesh.data, "test.lonely")
    with pytest.raises(RankLost):
        collectives.all_reduce(torch.ones(40), mesh.data, "test.again")
    return str(error.value)


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(4) as started:
        yield started


@pytest.mark.parametrize("table", [RING, OTHERS, TREES, AUTO], ids=lambda table: table.all_reduce)
def test_programs_on_every_axis_match_backend_results(ranks, table):
    ranks.run(every_call, "dp4 zero3 hs2", table, 33)
    ranks.run(every_call, "dp4", table, 200_000)


def test_recorded_bytes_match_messages_of_program(ranks):
    found = ranks.run(recorded, RING, 4000)
    assert (
        found
        == [
            {
                "test all_reduce": 2 * 3 * 4000,
                "test reduce_scatter": 3 * 4000,
                "test all_gather": 3 * 4000,
                "elsewhere all_reduce": 2 * 3 * 4000,
            }
        ]
        * 4
    )
    butterfly = ranks.run(recorded, CollectivesRecipe(all_reduce="butterfly"), 4000)
    assert butterfly[0]["test all_reduce"] == 2 * 16000, "log2 4 rounds of the whole vector"
    assert butterfly[0]["elsewhere all_reduce"] == 24000, "no program serves the world"
    tree = ranks.run(recorded, CollectivesRecipe(all_reduce="binomial-tree"), 4000)
    assert [found["test all_reduce"] for found in tree] == [32000, 16000, 32000, 16000]


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [  # ranks put in 10, 20, 30, 40 in the second call, a tenth of that in the first
        ("all_reduce", "skip", [[10.0] * 4, [20.0] * 4, [30.0] * 4, [40.0] * 4]),
        ("all_reduce", "double", [[200.0] * 4] * 4),
        ("all_reduce", "drop", [[80.0] * 4] * 4),
        ("all_reduce", "stale", [[10.0] * 4] * 4),
        ("reduce_scatter", "drop", [[80.0]] * 4),
        ("reduce_scatter", "stale", [[10.0]] * 4),
        ("all_gather", "drop", [[10.0, 0.0, 30.0, 40.0]] * 4),
        ("all_gather", "double", [[20.0, 40.0, 60.0, 80.0]] * 4),
    ],
)
def test_injected_faults_affect_programs(ranks, operation, kind, expected):
    assert ranks.run(spoilt, operation, kind) == expected


def test_abandoned_rank_reports_peer_step_and_call_site():
    with LocalRanks(4) as four:
        said = four.run(left_alone)
    pattern = (
        r"rank \d waits for rank \d: step \d \((reduce|receive) data\[\d\] from \d\) of all-reduce ring: .*, "
        r"in test.lonely \(all_reduce over axis data, its call 1\)"
    )
    assert all(re.fullmatch(pattern, text) for text in (said[0], *said[2:])), said
    assert said[2].startswith("rank 2 waits for rank 1: step 0 (reduce data[0] from 1)")
