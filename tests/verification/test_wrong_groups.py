"""Wrong groups of an axis: equal sizes, ranks with the same calls, each rank in one, never a right group."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm import collectives
from meshwright.comm.faults import Fault
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.verification.wrong_groups import list_axis_groups, make_wrong_groups


def others(text: str, axis: str, equal: bool = True, alike: list | None = None) -> list[tuple[int, ...]]:
    layout = Layout.parse(text)
    return make_wrong_groups(layout, axis, equal, alike or [0] * layout.world_size)


def test_wrong_groups_swap_adjacent_and_distant_ranks():
    assert others("dp2 tp2", "data") == [(0, 1), (2, 3)]
    assert others("dp2 tp2", "tp") == [(0, 2), (1, 3)]
    assert others("dp4 zero1 hs2", "shard") == [(0, 2), (1, 3)]


@pytest.mark.parametrize("text", ["dp2 tp2", "dp2 cp2 tp2", "dp2 tp2 pp2 mb2", "dp4 zero3 hs2 pp2 mb2", "dp4 ep2"])
@pytest.mark.parametrize("axis", ["tp", "cp", "data", "shard", "replica", "ep"])
def test_wrong_groups_keep_group_size_and_pipeline_stage(text: str, axis: str):
    layout = Layout.parse(text)
    right, wrong = layout.groups(axis), others(text, axis)
    if wrong:
        assert sorted(rank for ranks in wrong for rank in ranks) == list(range(layout.world_size))
        assert {len(ranks) for ranks in wrong} == {len(ranks) for ranks in right}
        assert all(len({layout.coordinates(rank)["pp"] for rank in ranks}) == 1 for ranks in wrong)
        assert not set(wrong) & set(right)


def test_single_group_is_halved_unless_equal_sizes_are_required():
    assert others("dp4", "data", equal=False) == [(0, 1), (2, 3)]
    assert others("dp4", "data", equal=True) == others("dp2", "data", equal=False) == []
    assert others("dp2 pp2 mb2", "world", equal=False) == [(0, 1), (2, 3)]


def test_ranks_whose_calls_differ_are_not_mixed():
    """Under ZeRO the ranks of a tp group have the same shard; other groups have other shards."""
    assert others("dp2 zero1 tp2", "tp", alike=["first", "first", "second", "second"]) == []
    assert others("dp4 zero1 tp2", "tp", alike=list("aabbaabb")) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_sub_axis_names_select_their_groups():
    assert list_axis_groups(Layout.parse("tp4"), "tp/2") == [(0, 1), (2, 3)]
    assert list_axis_groups(Layout.parse("dp2 pp4 mb4"), "pp[0,3]") == [(0, 6), (1, 7)]
    assert others("dp2 pp4 mb4", "pp[0,3]") == [(0, 1), (6, 7)]


def with_wrong_groups() -> dict[str, tuple[list[float], int]]:
    """On each of four ranks (dp2 tp2): results of each operation over wrong groups, and numbers of affected calls."""
    mesh = Mesh.create(Layout.parse("dp2 tp2"))
    found = {}

    def spoil(operation: str, axis: str, groups: list[tuple[int, ...]], call) -> None:
        mesh.inject(Fault("site", operation, "wrong group", axis=axis, groups=tuple(groups)))
        found[f"{operation} {axis}"] = (call().tolist(), mesh.faults.affected_calls)

    me = float(mesh.rank)
    mine = torch.tensor([me])
    both = torch.tensor([me, 10 + me])

    def gather() -> torch.Tensor:
        output = torch.zeros(2)
        output[mesh.tp.rank] = me
        collectives.all_gather(output, output[mesh.tp.rank : mesh.tp.rank + 1], mesh.tp, "site")
        return output

    def gather_all() -> torch.Tensor:
        output = torch.zeros(4)
        collectives.all_gather(output, mine, mesh.world, "site")
        return output

    def reduce() -> torch.Tensor:
        total = mine.clone()
        collectives.all_reduce(total, mesh.data, "site")
        return total

    def scatter() -> torch.Tensor:
        output = torch.zeros(1)
        collectives.reduce_scatter(output, both.clone(), mesh.tp, "site")
        return output

    def exchange() -> torch.Tensor:
        output = torch.zeros(2)
        collectives.all_to_all(output, both, mesh.tp, "site")
        return output

    def spread() -> torch.Tensor:
        value = mine.clone()
        collectives.broadcast(value, mesh.world, "site")
        return value

    spoil("all_reduce", "data", [(0, 1), (2, 3)], reduce)
    spoil("all_gather", "tp", [(1, 2), (0, 3)], gather)
    spoil("all_gather", "world", [], gather_all)
    spoil("reduce_scatter", "tp", [(1, 2), (0, 3)], scatter)
    spoil("all_to_all", "tp", [(1, 2), (0, 3)], exchange)
    spoil("broadcast", "world", [], spread)
    mesh.inject(None)
    found["nothing"] = (reduce().tolist(), mesh.faults.affected_calls)
    mesh.close()
    return found


def test_call_over_wrong_group_returns_its_result():
    with LocalRanks(4, timeout=250.0) as ranks:
        found = ranks.run(with_wrong_groups)
    result = {name: [values[name][0] for values in found] for name in found[0]}
    assert result["all_reduce data"] == [[1], [1], [5], [5]]
    assert result["all_gather tp"] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert result["all_gather world"] == [[3, 0, 1, 2]] * 4  # in another order
    assert result["reduce_scatter tp"] == [[0 + 3], [1 + 2], [11 + 12], [10 + 13]]
    assert result["all_to_all tp"] == [[0, 3], [1, 2], [11, 12], [10, 13]]
    assert result["broadcast world"] == [[1]] * 4
    assert result["nothing"] == [[2], [4], [2], [4]]
    assert all(struck == (name != "nothing") for values in found for name, (_, struck) in values.items())
