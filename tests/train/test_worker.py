"""What a rank sets for itself before it trains."""

from __future__ import annotations

import os
from unittest import mock

from meshwright.train import rendezvous, worker
from meshwright.train.rendezvous import Place


def test_ranks_of_one_host_compile_in_places_of_their_own_unless_one_is_named():
    def place(rank: int, local_rank: int | None, **environment: str) -> str:
        with mock.patch.dict(os.environ, environment):
            if not environment:
                os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
            worker._compile_apart(Place(rank, 4, local_rank, "file:///nowhere", rendezvous.LAUNCHER))
            return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    assert len({place(rank, rank % 2) for rank in range(4)}) == 2
    assert len({place(rank, None) for rank in range(4)}) == 4
    assert place(3, 1, TORCHINDUCTOR_CACHE_DIR="/shared") == "/shared"
