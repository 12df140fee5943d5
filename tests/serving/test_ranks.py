"""Claims on rank processes that need no model."""

from __future__ import annotations

import socket

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving import engine, ranks
from meshwright.serving.rank_starter import RankPlan


def test_rank_without_the_chosen_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "list_supported_instruction_sets", lambda: ("avx512", "avx2"))
    limits = ServingSizes(1, 1, 1, blocks=1)
    plan = RankPlan("nowhere", "dp1", limits, instruction_set="amx")
    with pytest.raises(UserError, match=f"rank 0 on {socket.gethostname()} runs avx512, avx2, but .* chosen amx"):
        engine.build_engine(plan, Mesh.single(device="cpu"))


def test_externally_started_ranks_compute_on_agreed_devices(monkeypatch: pytest.MonkeyPatch):
    """torchrun may leave the local rank unknown, or make one GPU visible to each rank."""
    taken = list[str]()

    class Stop(Exception): ...

    def initialise(place, store, device: str, seconds: float) -> None:
        taken.append(device)
        raise Stop

    monkeypatch.setattr(ranks.rendezvous, "read_rendezvous_info", lambda: "place")
    monkeypatch.setattr(ranks.rendezvous, "connect_to_store", lambda place, seconds: f"store of {place}")
    monkeypatch.setattr(ranks.rendezvous, "initialise_process_group", initialise)
    monkeypatch.setattr(ranks, "agree_on_device", lambda *given: f"cuda:{len(given)}" if given[0] == "auto" else "cpu")
    monkeypatch.setattr(ranks.torch.cuda, "set_device", lambda device: taken.append(f"current {device}"))
    for device in ("auto", "cpu"):
        with pytest.raises(Stop):
            ranks.serve_joined(None, device)
    assert taken == ["current cuda:3", "cuda:3", "cpu"]
