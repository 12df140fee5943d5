"""The backend that carries a group's calls, and calls that a group of one rank makes all the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.comm.backend import group_backends
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.training.loop import deterministic


def test_backend_of_a_group_is_named_by_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert group_backends(None) == {"cpu": "gloo", "cuda": "nccl"}


def call_with_one_rank(trivial_calls: bool) -> tuple[list[str], list[torch.Tensor], str]:
    mesh = Mesh.create(Layout())
    mesh.communicator.trivial_calls = trivial_calls
    axis = mesh.data
    calls = len(mesh.record.sites)
    total, whole, part = torch.arange(6.0), torch.empty(2, 3), torch.empty(2, 3)
    collectives.all_reduce(total, axis, "sum")
    collectives.all_gather(whole, torch.arange(6.0).view(2, 3), axis, "gather")
    collectives.reduce_scatter(part, torch.arange(6.0).view(2, 3), axis, "scatter")
    assert calls == 0
    return sorted(site for site, _, _ in mesh.record.sites), [total, whole, part], axis.backends["cpu"]


def test_trivial_calls_reach_the_backend_of_one_rank():
    with LocalRanks(1) as ranks:
        for trivial_calls, sites in ((False, []), (True, ["gather", "scatter", "sum"])):
            found, results, backend = ranks.run(call_with_one_rank, trivial_calls)[0]
            assert found == sites and backend == "gloo"
            assert all(torch.equal(each.view(-1), torch.arange(6.0)) for each in results)


def test_deterministic_runs_have_inductor_choose_kernels_by_rule():
    from torch._inductor import config

    with deterministic(True, compiled=True):
        assert config.deterministic and torch.are_deterministic_algorithms_enabled()
    assert not config.deterministic and not torch.are_deterministic_algorithms_enabled()
