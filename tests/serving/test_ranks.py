"""Claims on rank processes that need no model."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from pydantic_core import to_json

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import RankLost, UserError
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving import engine, ranks
from meshwright.serving.rank_starter import RankPlan


def test_rank_without_the_chosen_instruction_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "list_supported_instruction_sets", lambda: ("avx512", "avx2"))
    sizes = ServingSizes(1, 1, 1, blocks=1)
    plan = RankPlan("nowhere", "dp1", sizes, instruction_set="amx")
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


def share_addresses(place: Path) -> list[str]:
    """Share the addresses of the first ranks of each replica, in two layouts. Under "pp2 dp2" the second replica
    finishes loading only after the first one has shared its address."""
    mesh = Mesh.create(Layout.parse("tp2:nosp pp2"), timeout_seconds=60.0)
    found = [ranks.share_address("unix:first" if mesh.rank == 0 else "ignored", mesh)]
    mesh.close()
    mesh = Mesh.create(Layout.parse("pp2 dp2"), timeout_seconds=60.0)
    replica, deadline = mesh.dp.rank, time.monotonic() + 30.0
    while replica == 1 and not all((place / str(stage)).exists() for stage in (0, 1)):
        assert time.monotonic() < deadline, "the first replica waits for the second"
        time.sleep(0.01)
    found.append(ranks.share_address(f"tcp:host-{replica}:{mesh.pp.rank}", mesh))
    (place / str(mesh.pp.rank)).touch()
    mesh.close()
    return [*found, str(replica)]


def receive_plan(plan: RankPlan) -> RankPlan:
    """The settings with which this rank serves, which it has got from rank 0 without pickle, as a pickle is code."""
    received = list[RankPlan]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        join_by_pool(monkeypatch)
        for name in ("_pickler", "_unpickler"):  # of objects that torch.distributed sends
            monkeypatch.setattr(dist.distributed_c10d, name, None)
        monkeypatch.setattr(ranks, "serve_mesh", lambda plan, mesh, replica: received.append(plan))
        ranks.serve_joined(plan if dist.get_rank() == 0 else None, "cpu")
    return received[0]


def test_ranks_share_settings_without_pickle_and_replicas_the_address_of_their_first_rank(tmp_path: Path):
    plan = RankPlan("modèle", "tp2:nosp pp2", ServingSizes(8, 4, 100, blocks=3), plain_torch='no "g++"')
    with LocalRanks(4) as pool:
        assert pool.run(receive_plan, plan) == [plan] * 4
        for first, second, replica in pool.run(share_addresses, tmp_path):
            assert (first, second) == ("unix:first", f"tcp:host-{replica}:0")


def wait_for_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.share_address("", Mesh.create(Layout.parse("tp2:nosp"), timeout_seconds=60.0))


def join_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the rendezvous out: the pool has started torch.distributed."""
    for name in ("read_rendezvous_info", "connect_to_store", "initialise_process_group"):
        monkeypatch.setattr(ranks.rendezvous, name, lambda *given: None)
    monkeypatch.setattr(ranks, "agree_on_device", lambda *given: "cpu")


def wait_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    join_by_pool(monkeypatch)
    ranks.serve_joined(None, "cpu")


def lose_the_first_rank(wait: Callable[[pytest.MonkeyPatch], None], outcome: Path) -> None:
    """The first rank exits while it loads; the other one writes what it raises."""
    dist.barrier()  # both have connected
    if dist.get_rank() == 0:
        os._exit(1)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            wait(monkeypatch)
    except Exception as error:
        outcome.write_text(f"{type(error).__name__}, exit code {getattr(error, 'exit_code', None)}: {error}")
        raise


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (wait_for_the_address, "rank 1 had no answer from rank 0 in serving.leader"),
        (wait_for_the_plan, "a rank ended or timed out before rank 0's settings reached all"),
    ],
)
def test_rank_lost_while_loading_is_no_internal_error(
    tmp_path: Path, wait: Callable[[pytest.MonkeyPatch], None], message: str
):
    outcome = tmp_path / "outcome"
    with LocalRanks(2) as pool, pytest.raises(RankLost):
        pool.run(lose_the_first_rank, wait, outcome)
    assert outcome.read_text().startswith(f"RankLost, exit code 3: {message}")


def test_error_of_the_first_joined_rank_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def lose_rank(plan: RankPlan, device: str) -> None:
        raise RankLost(f"rank 0 had no answer from rank 1 on {device}")

    plan = RankPlan("nowhere", "tp2", ServingSizes(1, 1, 1, blocks=1))
    monkeypatch.setattr(ranks, "serve_joined", lose_rank)
    monkeypatch.setattr(ranks, "die_with_parent", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(to_json(plan).decode() + "\n"))
    with pytest.raises(SystemExit) as ended:
        ranks.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == "rank 0 had no answer from rank 1 on cpu\n"
