"""Local ranks that are shared between tests."""

from __future__ import annotations

from typing import Any

from meshwright.comm.local import LocalRanks
from meshwright.flight_recorder.rank_report import Snapshot


class KeptRanks:
    """Replacement of `LocalRanks` whose processes stay open for the next test."""

    started: dict[int, LocalRanks] = {}

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        if world_size not in self.started:
            self.started[world_size] = LocalRanks(world_size)
        self._ranks = self.started[world_size]

    def run(self, *arguments: Any, **options: Any) -> list[Any]:
        return self._ranks.run(*arguments, **options)

    def calls(self) -> Snapshot:
        return self._ranks.calls()

    def close(self) -> None:
        pass
