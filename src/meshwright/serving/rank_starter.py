"""Settings of rank processes, and starting and ending the ranks of a replica. Free of torch."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pydantic_core import to_json

from meshwright.comm.local import LocalRanks
from meshwright.errors import RankLost
from meshwright.launcher.daemon_thread import run_in_daemon_thread
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.threads import build_child_environment

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed by device; pipeline stages exchange host tensors, by gloo."""
SERVE_RANK = "meshwright.serving.ranks:serve_rank"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Settings of a server's rank processes, equal on all ranks. The front is the process of the HTTP server.

    Attributes:
        checkpoint: Directory of the model.
        layout: Layout over all ranks, as text; a replica is the ranks of one dp coordinate.
        sizes: Largest step (tokens, sequences), KV pool, dtype and threads of each rank, for which it allocates memory.
        step_seconds: Time limit of a step in seconds, after which the replica counts as lost; higher for steps that are
            predicted to be long.
        device: "cpu" or "cuda" (one GPU for each rank of a machine), or "auto": ranks that torchrun or SLURM started
            agree on "cpu" or "cuda".
        batch_invariant: On GPUs, make the bits of a sequence's results independent of the batch; on a CPU they always
            are.
        instruction_set: Instruction set of the kernels on all ranks, or "torch" for plain PyTorch without kernels;
            None: the fastest measured on this machine. No effect on GPUs.
        plain_torch: Reason why plain PyTorch is used, as text for users; "" with compiled kernels.
        secret: Shared secret by which front and ranks recognise each other.
        front: Address at which the front listens; "" until it listens.
        start: Number of earlier starts of the replica's ranks; 0 at the first start.
        engine: Function that builds a rank's engine, as `package.module:function`.
    """

    checkpoint: str
    layout: str
    sizes: ServingSizes
    step_seconds: float = 60.0
    device: str = "cpu"
    batch_invariant: bool = False
    instruction_set: str | None = None
    plain_torch: str = ""
    secret: str = field(default_factory=partial(secrets.token_hex, 32))
    front: str = ""
    start: int = 0
    engine: str = "meshwright.serving.engine:build_engine"

    @property
    def collective_seconds(self) -> float:
        """Time limit of a collective call in seconds: 32 times the time limit of a step, at least 60 s. The server's
        main process usually ends the ranks of a hanging step earlier, because it knows the step's predicted time."""
        return 32 * max(60.0, self.step_seconds)


class LocalStarter:
    """Starter of a replica's ranks as processes forked on this machine, which end with this process. Attribute
    `restarts` (True): lost ranks can be started again."""

    restarts = True

    async def run(self, replica: int, plan: RankPlan) -> None:
        """Start all ranks of the replica with index `replica` and wait until they have ended. Raises a rank's
        exception, or RankLost if a rank's process died. If the call is cancelled, all of these ranks are killed. plan:
        settings of the ranks."""
        count = Layout.parse(plan.layout).with_(dp=1).world_size
        backend, threads = BACKENDS[plan.device], plan.sizes.threads
        ranks = LocalRanks(count, threads=threads, timeout=plan.collective_seconds, backend=backend)
        call = run_in_daemon_thread(partial(ranks.run, SERVE_RANK, plan, replica, timeout=math.inf), "ranks")
        try:
            await asyncio.wrap_future(call)
        finally:
            while not call.done():  # a thread cannot be cancelled: it ends when its ranks do
                for process in ranks.pids:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                await asyncio.sleep(0.01)
            ranks.close()


class JoinedStarter:
    """Starter for a server whose ranks torchrun or SLURM has started, one process per rank. It only starts rank 0's
    child process; all other ranks connect by themselves. Lost ranks cannot be restarted from here (attribute
    `restarts`: False)."""

    restarts = False

    async def run(self, replica: int, plan: RankPlan) -> None:
        """Run the first rank of a replica until it ends. For replica 0, start rank 0 as a child process, and raise
        RankLost when it has ended. For any other replica, whose ranks are started elsewhere, wait forever. plan:
        settings of the ranks."""
        if replica:
            await asyncio.Event().wait()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "meshwright.serving.ranks"),
            stdin=asyncio.subprocess.PIPE, stdout=2, env=build_child_environment(plan.sizes.threads),
        )  # fmt: skip
        try:
            await process.communicate(to_json(plan) + b"\n")
            raise RankLost(f"rank 0 has ended with exit code {process.returncode}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
