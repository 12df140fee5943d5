"""Settings of rank processes, and starting and ending the ranks of a replica. Free of torch."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.comm.local import LocalRanks
from meshwright.errors import RankLost
from meshwright.serving.messages import make_secret
from meshwright.serving.step_limits import StepLimits
from meshwright.threads import build_child_environment

PRELOADED = ("torch", "torch.distributed", "meshwright.serving.ranks")
"""Modules of a rank, imported once by the process from which ranks are forked."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed by device: what stages of a pipeline send lies on the host."""
SERVE_RANK = "meshwright.serving.ranks:serve_rank"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Settings of a rank process, equal on all ranks of a server.

    Attributes:
        checkpoint: Directory of the model.
        layout: Layout of all ranks; a replica is one of its dp coordinates.
        dtype: Of the parameters and of the KV cache.
        limits: Sizes of the KV pool and of a step, of every rank.
        threads: Of each rank.
        directory: Private directory for sockets; None: TCP.
        step_seconds: Longest step.
        device: "cpu" or "cuda": a GPU for each rank of a machine.
        batch_invariant: As of `runner.build_runner`.
        instruction_set: Of the kernels, chosen by the front for all ranks; None where it cannot build any.
        secret: Shared secret of front and ranks.
        front: Address at which the front listens, set by the front.
        start: How often the replica's ranks have been started before, set by the front.
        engine: Function that builds the engine of a rank, `package.module:function`.
    """

    checkpoint: str
    layout: str
    dtype: str
    limits: StepLimits
    threads: int
    directory: str | None
    step_seconds: float = 60.0
    device: str = "cpu"
    batch_invariant: bool = False
    instruction_set: str | None = None
    secret: str = field(default_factory=make_secret)
    front: str = ""
    start: int = 0
    engine: str = "meshwright.serving.ranks:build_rank_engine"

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RankPlan:
        """Rebuild the plan of an `asdict` document."""
        return cls(**{**document, "limits": StepLimits(**document["limits"])})


class LocalStarter:
    """Starts ranks on this machine, forked from a server process that has torch loaded; they end with this process.

    ranks: of one replica. restarts: lost ranks can be started again.
    """

    restarts = True

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    async def run(self, replica: int, plan: RankPlan) -> None:
        """Start all ranks of a replica and wait until they have ended. Raises what a rank raised, RankLost when one
        died. Ends all of them when it is cancelled."""
        backend = BACKENDS[plan.device]
        ranks = LocalRanks(self.ranks, threads=plan.threads, timeout=plan.step_seconds, backend=backend)
        pool = ThreadPoolExecutor(1, "ranks")
        call = pool.submit(ranks.run, SERVE_RANK, plan, replica, timeout=math.inf)
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
    by themselves, and whoever started them all starts them again. The same interface as `LocalStarter`."""

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
            await process.communicate(json.dumps(asdict(plan)).encode() + b"\n")
            raise RankLost(f"rank 0 has ended with exit code {process.returncode}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
