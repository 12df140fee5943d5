"""A fast deterministic engine for tests of ranks and replicas: each token is a function of all tokens before it.

Requests steer it by the first token of their prompt: `KILL` kills the rank before the third step after their arrival,
`HANG` makes that step compute for a minute, unless the file `marker` of the plan's checkpoint directory says that it
has happened.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from meshwright.comm.collectives import barrier
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult

VOCABULARY = 1000
KILL, HANG, KILL_ALWAYS = 901, 902, 903


def next_token(tokens: list[int]) -> int:
    """The token after `tokens`."""
    return int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:4], "little") % 900


def answer(request: Request) -> list[int]:
    """All tokens that the engine generates for a request."""
    tokens = list(request.tokens)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.tokens) :]


class FakeEngine:
    def __init__(self, plan: RankPlan, mesh: Mesh, step_seconds: float = 0.002) -> None:
        self.plan, self.mesh, self.step_seconds = plan, mesh, step_seconds
        self.requests: dict[str, tuple[Request, list[int]]] = {}
        self.steps = 0

    @property
    def idle(self) -> bool:
        return not self.requests

    def add(self, request: Request) -> None:
        self.requests[request.id] = request, [*request.tokens, *request.replayed]

    def cancel(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def step(self) -> list[Output]:
        self.steps += 1
        time.sleep(self.step_seconds)
        barrier(self.mesh.world, "fake.step")
        outputs = []
        for name, (request, tokens) in list(self.requests.items())[: self.plan.sizes.max_sequences]:
            made = len(tokens) - len(request.tokens)
            if made == 3:
                self.misbehave(request.tokens[0])
            tokens.append(next_token(tokens))
            finished = made + 1 == request.sampling.max_tokens
            outputs.append(Output(name, [TokenResult(tokens[-1], None, ())], "length" if finished else None))
            if finished:
                del self.requests[name]
        return outputs

    def misbehave(self, token: int) -> None:
        """Cause the fault that a request asks for, once, on the last rank of the replica."""
        marker = Path(self.plan.checkpoint, f"done-{token}")
        if token not in (KILL, HANG, KILL_ALWAYS) or self.mesh.rank < self.mesh.world_size - 1:
            return
        if token != KILL_ALWAYS:
            if marker.exists():
                return
            marker.touch()
        end = time.monotonic() + 60
        while token == HANG and time.monotonic() < end:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    def report(self) -> dict[str, Any]:
        running = min(len(self.requests), self.plan.sizes.max_sequences)
        return {
            "tokens": running, "context": 0, "running": running, "waiting": len(self.requests) - running, "paused": 0,
            "places": self.plan.sizes.max_sequences, "prompt_tokens": self.plan.sizes.token_budget,
            "free": self.plan.sizes.blocks, "cached": 0, "held": 0,
        }  # fmt: skip

    def properties(self) -> dict[str, Any]:
        return {"instruction_set": "none", "kernels": "fake", "memory": {"weights": 0}, "block_tables": 1}


def build(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    return FakeEngine(plan, mesh)


def build_slow(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    return FakeEngine(plan, mesh, 0.05)


def build_long(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    return FakeEngine(plan, mesh, 0.5)


def build_unlike(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    """An engine whose kernels differ from process to process."""
    engine = FakeEngine(plan, mesh)
    same = engine.properties()
    engine.properties = lambda: {**same, "kernels": str(os.getpid())}  # type: ignore[method-assign]
    return engine


def refuse(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    raise UserError("model.safetensors: damaged")


def fail(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    raise ValueError("unforeseen")


def build_once(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    """An engine whose second start fails."""
    marker = Path(plan.checkpoint, "built")
    if marker.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    marker.touch()
    return FakeEngine(plan, mesh)


def die(plan: RankPlan, mesh: Mesh) -> FakeEngine:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
