"""Process settings of a rank before it trains."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from meshwright.errors import UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.rendezvous import RendezvousInfo
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
