"""How the rank processes of a replica are started and ended. Free of torch."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from contextlib import suppress
from typing import Any, Protocol

from meshwright.comm.local import LocalRanks

SERVE_RANK = "meshwright.serving.ranks:serve_rank"


class RankStarter(Protocol):
    """Starts and ends the rank processes of replicas."""

    restarts: bool
    """Lost ranks can be started again."""

    async def run(self, replica: int, plan: dict[str, Any]) -> None:
        """Start all ranks of a replica and wait until they have ended. plan: a `RankPlan` as JSON.

        Raises what a rank raised, RankLost when one died. Ends all of them when it is cancelled."""


class LocalStarter:
    """Starts ranks on this machine, forked from a server process that has torch loaded; they end with this process.

    ranks: of one replica. threads: torch threads of each. timeout: seconds of a collective call.
    """

    restarts = True

    def __init__(self, ranks: int, threads: int, timeout: float) -> None:
        self.ranks, self.threads, self.timeout = ranks, threads, timeout

    async def run(self, replica: int, plan: dict[str, Any]) -> None:
        """Start the ranks and wait for their end, as `RankStarter.run`."""
        ranks = LocalRanks(self.ranks, threads=self.threads, timeout=self.timeout)
        call = asyncio.create_task(asyncio.to_thread(ranks.run, SERVE_RANK, plan, replica, timeout=math.inf))
        try:
            await asyncio.shield(call)
        finally:
            while not call.done():  # a thread cannot be cancelled: it ends when its ranks do
                for process in ranks.pids:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                await asyncio.wait({call}, timeout=0.02)
            with suppress(Exception):
                call.result()
            ranks.close()


class JoinedStarter:
    """Stands for ranks that torchrun or SLURM has started: they connect by themselves, and whoever started them starts
    them again."""

    restarts = False

    async def run(self, replica: int, plan: dict[str, Any]) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()
