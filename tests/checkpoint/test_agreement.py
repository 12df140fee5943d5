"""What ranks agree on: emulated ranks, each of which sees another state of the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from meshwright.checkpoint import agreement
from meshwright.comm.mesh import Mesh
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.errors import UserError
from meshwright.layout import Layout


def agree(path: str) -> str:
    """Return the adapter directory, or the error, on which this rank agrees."""
    try:
        return str(agreement.agree_on_adapter(path, Mesh.create(Layout.parse("dp3"))))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("missing", [False, True])
def test_ranks_start_from_the_adapter_that_rank_0_finds(missing: bool, capfd: Any):
    """The run of the adapter saves a checkpoint after each look."""
    steps = iter(range(1, 4))

    def find(path: str) -> Path:
        if missing:
            raise UserError(f"{path}: no such directory")
        return Path(path, f"checkpoints/step-{next(steps):06d}")

    with mock.patch.object(agreement, "find_adapter", find), EmulatedRanks(3) as ranks:
        found = ranks.run(agree, "runs/other")
    assert found == ["runs/other: no such directory" if missing else "runs/other/checkpoints/step-000001"] * 3
    printed = "" if missing else "adapter: from runs/other/checkpoints/step-000001\n"
    assert printed in capfd.readouterr().err
