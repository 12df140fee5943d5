"""Process settings of a rank before it trains."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import load_recipe
from meshwright.training import worker
from meshwright.verification.ranks import _require_compiled_graphs


def test_ranks_of_host_use_separate_compiler_caches_unless_named():
    def place(rank: int, **environment: str) -> str:
        with mock.patch.dict(os.environ, environment):
            if not environment:
                os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
            worker.separate_compile_caches(rank)
            return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    assert len({place(rank) for rank in range(4)}) == 4
    assert place(3, TORCHINDUCTOR_CACHE_DIR="/shared") == "/shared"


@pytest.mark.parametrize(("host_ranks", "refused"), [(None, True), (1, True), (2, False)])
def test_memory_is_checked_when_external_launcher_fills_one_host(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, host_ranks: int | None, refused: bool
):
    class Passed(Exception):
        pass

    def train(*given: object, **options: object) -> None:
        raise Passed

    start = RendezvousInfo(0, 1, 0, "env://", rendezvous.LAUNCHER, host_ranks=host_ranks)
    monkeypatch.setattr(rendezvous, "read_rendezvous_info", lambda address: start)
    monkeypatch.setattr(worker, "read_machine_memory", lambda: 1)
    monkeypatch.setattr(worker, "_run_as_rank", train)
    with pytest.raises(UserError if refused else Passed, match="take at least" if refused else None):
        worker.train_as_rank(load_recipe(tiny_recipe, ["run.device=cpu"]), probe=False)


def test_verified_ranks_compile_into_separate_caches_unless_named(monkeypatch: pytest.MonkeyPatch):
    """Importing torch._dynamo sets the variable to one directory for all ranks, which is not the user's choice."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    def place(rank: int, directory: str) -> str:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", directory)
        with _require_compiled_graphs("inductor", rank):
            return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    assert len({default_cache_dir(), place(0, default_cache_dir()), place(1, default_cache_dir())}) == 3
    assert place(3, "/shared") == "/shared"


@pytest.mark.parametrize(
    ("start", "host_ranks"),
    [
        (RendezvousInfo(0, 1, 0, "env://", rendezvous.LAUNCHER), 1),
        (RendezvousInfo(0, 1, 0, "env://", "RANK=0 WORLD_SIZE=1", host_ranks=4), 4),
        (RendezvousInfo(0, 1, 0, "env://", "RANK=0 WORLD_SIZE=1"), 8),
    ],
    ids=["launcher", "torchrun", "unknown"],
)
def test_gpu_process_is_set_up_before_cuda_starts_and_bound_once_threads_are_chosen(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, start: RendezvousInfo, host_ranks: int
):
    class Passed(Exception):
        pass

    def stop(*_: object) -> None:
        raise Passed

    done: list[object] = []
    monkeypatch.setattr(worker, "choose_device", lambda wanted, local_rank: "cuda:0")
    monkeypatch.setattr(worker, "prepare_gpu_process", lambda ranks: done.append(ranks))
    monkeypatch.setattr(worker, "_set_threads", lambda *_, **__: done.append("threads"))
    monkeypatch.setattr(worker, "get_pci_address", lambda device: f"address of {device}")
    monkeypatch.setattr(worker, "bind_to_gpu_cores", done.append)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(Mesh, "create", stop)
    with pytest.raises(Passed):
        worker._run_as_rank(load_recipe(tiny_recipe), start, RunDirectory(Path("unused")), None, {})
    assert done == [host_ranks, "cuda:0", "threads", "address of cuda:0"]


def test_graphs_are_released_before_communicators_are_closed(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch):
    """NCCL closes no communicator over which a CUDA graph has calls."""
    done, mesh = list[str](), Mesh.single()
    mesh.communicator.release_graphs = lambda: done.append("released")
    for owner, name, value in (
        (worker, "choose_device", lambda wanted, local_rank: "cpu"),
        (worker, "_set_threads", lambda *_, **__: None),
        (worker, "separate_compile_caches", lambda rank: None),
        (rendezvous, "connect_to_store", lambda *_: None),
        (rendezvous, "initialise_process_group", lambda *_: None),
        (torch.distributed, "destroy_process_group", lambda: done.append("closed")),
        (Mesh, "create", lambda *_: mesh),
    ):
        monkeypatch.setattr(owner, name, value)
    start = RendezvousInfo(0, 2, 0, "env://", rendezvous.LAUNCHER)
    worker._run_as_rank(load_recipe(tiny_recipe), start, RunDirectory(Path("unused")), None, {}, work=lambda *_: {})
    assert done == ["released", "closed"]
