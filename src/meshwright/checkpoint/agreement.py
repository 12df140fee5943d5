"""Small collective calls by which all ranks agree, before a save, around a load and at the ends of a
run. For the main thread only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.catalogue import find_adapter
from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.terminal import print_message

_TEXT_BYTES = 2048


class Agreement:
    """Small collective calls by which all ranks of `mesh` agree on flags, numbers and short texts (by all-reduces).
    Every rank calls every method, in the same order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def all_true(self, mine: bool) -> bool:
        """Return True, on every rank, if `mine` is true on all ranks."""
        return self._sum([int(not mine)]) == [0]

    def broadcast_numbers(self, values: Sequence[int], *, count: int) -> list[int]:
        """Broadcast rank 0's `values` (non-negative integers); return the first `count` of these values, or all if
        there are fewer. The values of other ranks are ignored. `count` must be equal on all ranks."""
        mine = [*values[:count], *[-1] * (count - len(values))] if self._mesh.rank == 0 else [0] * count
        return [value for value in self._sum(mine) if value >= 0]

    def broadcast_first_text(self, text: str | None) -> tuple[int, str] | None:
        """Broadcast the text of the lowest rank whose `text` is not None; return (that rank, its text) on every rank,
        or None if no rank has a text. A text is cut at 2048 bytes."""
        size, rank = self._mesh.world_size, self._mesh.rank
        has_text = self._sum([int(other == rank and text is not None) for other in range(size)])
        if not any(has_text):
            return None
        sender = has_text.index(1)
        sent = (text or "").encode()[:_TEXT_BYTES] if rank == sender else b""
        received = bytes(self._sum([*sent.ljust(_TEXT_BYTES, b"\0")]))
        return sender, received.rstrip(b"\0").decode(errors="replace")

    def raise_first(self, problem: str | None) -> None:
        """Raise `UserError` on every rank if any rank has a `problem`, with the message of the lowest such rank.
        problem: error message of this rank; None: this rank has no problem."""
        if (first := self.broadcast_first_text(problem)) is not None:
            raise UserError(first[1])

    def broadcast_from_largest(self, size: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Broadcast the `values` of the rank with the largest `size` >= 0, such as its peak memory; in a tie, of the
        lowest such rank. Return these values on every rank, with the number of that rank added under the key "rank".
        values: at most 2048 bytes as JSON.
        """
        rank = self._mesh.rank
        sizes = self._sum([size if other == rank else 0 for other in range(self._mesh.world_size)])
        largest = sizes.index(max(sizes))
        found = self.broadcast_first_text(json.dumps({"rank": rank, **values}) if rank == largest else None)
        assert found is not None
        shared: dict[str, Any] = json.loads(found[1])
        return shared

    def _sum(self, values: list[int]) -> list[int]:
        """All-reduce `values` by summation over all ranks; return the sums, one for each entry."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._mesh.device)
        collectives.all_reduce(tensor, self._mesh.world, "checkpoint.agreement")
        return tensor.tolist()


def agree_on_adapter(path: os.PathLike[str] | str, mesh: Mesh) -> Path:
    """Find the adapter directory on rank 0 (see `find_adapter`) and return it on every rank. Only rank 0 searches,
    because a run that is still training may save or delete checkpoints meanwhile. path: value of `adapter.from`.
    Collective. Raises `UserError` on every rank if there is no adapter."""
    agreement, found, problem = Agreement(mesh), None, None
    if mesh.rank == 0:
        try:
            found = str(find_adapter(path))
        except UserError as error:
            problem = str(error)
    agreement.raise_first(problem)
    sent = agreement.broadcast_first_text(found)
    assert sent is not None, "rank 0 has found a directory or an error"
    if mesh.rank == 0 and Path(sent[1]) != Path(path):
        print_message(f"adapter: from {sent[1]}")
    return Path(sent[1])
