"""What a rank process is told, and how the ranks of a replica are started and ended. Free of torch."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from meshwright.comm.local import LocalRanks
from meshwright.errors import RankLost
from meshwright.threads import build_child_environment

PRELOADED = ("torch", "torch.distributed", "meshwright.serving.ranks")
"""What ranks need, imported once by the process that they are forked from."""
SERVE_RANK = "meshwright.serving.ranks:serve_rank"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank process needs to know, equal on all ranks of a server.

    Attributes:
        checkpoint: Directory of the model.
        layout: Layout of all ranks; a replica is one of its dp coordinates.
        dtype: Of the parameters and of the KV cache.
        blocks: KV blocks of every rank.
        token_budget: Most tokens of a step.
        max_sequences: Most sequences of a step.
        max_length: Most tokens of a sequence.
        logit_rows: Most rows of logits of a step.
        threads: Of each rank.
        front: Address at which the front listens.
        secret: What front and ranks share.
        directory: Private directory for sockets; None: TCP.
        step_seconds: Longest step.
        engine: Function that builds the engine of a rank, `package.module:function`.
    """

    checkpoint: str
    layout: str
    dtype: str
    blocks: int
    token_budget: int
    max_sequences: int
    max_length: int
    logit_rows: int
    threads: int
    front: str
    secret: str
    directory: str | None
    step_seconds: float
    engine: str = "meshwright.serving.ranks:build_engine"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return asdict(self)


class RankStarter(Protocol):
    """Starts and ends the rank processes of replicas.

    restarts: lost ranks can be started again.
    """

    restarts: bool

    async def run(self, replica: int, plan: RankPlan) -> None:
        """Start all ranks of a replica and wait until they have ended. Raises what a rank raised, RankLost when one
        died. Ends all of them when it is cancelled."""


class LocalStarter:
    """Starts ranks on this machine, forked from a server process that has torch loaded; they end with this process.

    ranks: of one replica.
    """

    restarts = True

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    async def run(self, replica: int, plan: RankPlan) -> None:
        """Start the ranks and wait for their end, as `RankStarter.run`."""
        ranks = LocalRanks(self.ranks, threads=plan.threads, timeout=plan.step_seconds)
        pool = ThreadPoolExecutor(1, "ranks")
        call = pool.submit(ranks.run, SERVE_RANK, plan.to_json(), replica, timeout=math.inf)
        try:
            await asyncio.wrap_future(call)
        finally:
            while not call.done():  # a thread cannot be cancelled: it ends when its ranks do
                for process in ranks.pids:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                await asyncio.sleep(0.01)
            pool.shutdown()
            ranks.close()


class JoinedStarter:
    """Starts the rank of this process where torchrun or SLURM has started one process for each rank: the others connect
    by themselves, and whoever started them all starts them again."""

    restarts = False

    async def run(self, replica: int, plan: RankPlan) -> None:
        """Start rank 0 as a child of this process, with replica 0; raise RankLost at its end."""
        if replica:
            await asyncio.Event().wait()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "meshwright.serving.ranks"),
            stdin=asyncio.subprocess.PIPE, stdout=2, env=build_child_environment(plan.threads),
        )  # fmt: skip
        try:
            await process.communicate(json.dumps(plan.to_json()).encode() + b"\n")
            raise RankLost(f"rank 0 has ended with exit code {process.returncode}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
