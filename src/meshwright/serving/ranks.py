"""One rank process of a replica: loads its part of the model, then steps its engine as the front's messages say.

The front talks to the rank that leads the replica. All ranks run the same deterministic scheduler, so the leader
forwards the messages of each step and nothing else; a rank that has nothing to do sleeps on its socket.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.serving.messages import Channel, Listener, Message, encode
from meshwright.serving.request import Output, Request


class RankEngine(Protocol):
    """Engine of one rank: deterministic, so that ranks with the same messages stay in the same state.

    idle: no sequence is left to compute.
    """

    @property
    def idle(self) -> bool: ...

    def add(self, request: Request) -> None:
        """Queue a request."""

    def cancel(self, request_id: str) -> None:
        """End a request and free its blocks; unknown ones are ignored."""

    def step(self) -> list[Output]:
        """Run one step, and return what it adds to each answer."""

    def report(self) -> dict[str, Any]:
        """Return the figures of the last step and of the blocks, for the front."""

    def properties(self) -> dict[str, Any]:
        """Return facts about the engine: `instruction_set`, `kernels` (version), `memory` (bytes by item)."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank process needs to know, equal on all ranks of a server.

    checkpoint: directory of the model. layout: of all ranks; a replica is one of its dp coordinates. dtype: of the
    parameters and of the KV cache. blocks: KV blocks on every rank. token_budget: most tokens of a step. max_sequences:
    most sequences of a step. max_length: most tokens of a sequence. threads: of each rank. front: address at which the
    front listens; secret: what it shares with the ranks. directory: private directory for sockets (None: TCP).
    step_seconds: longest step. engine: function that builds the engine, `package.module:function`.
    """

    checkpoint: str
    layout: str
    dtype: str
    blocks: int
    token_budget: int
    max_sequences: int
    max_length: int
    threads: int
    front: str
    secret: str
    directory: str | None
    step_seconds: float
    engine: str = "meshwright.serving.engine:build_engine"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return asdict(self)


def serve_rank(description: Mapping[str, Any], replica: int) -> None:
    """Run this process as a rank of replica number `replica` until the front stops it or is gone.

    description: a `RankPlan` as JSON. `torch.distributed` is initialised and its world is the replica. Raises UserError
    if the model cannot be loaded, RankLost when another process of the server is gone.
    """
    plan = RankPlan(**description)
    layout = Layout.parse(plan.layout).with_(dp=1)
    mesh = Mesh.create(layout, timeout_seconds=plan.step_seconds)
    serve_mesh(plan, mesh, replica)


def serve_mesh(plan: RankPlan, mesh: Mesh, replica: int) -> None:
    """Run this process as one rank of `mesh`, as `serve_rank` does. The mesh's tp and pp axes span the replica."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the front alone decides when ranks end
        signal.signal(number, signal.SIG_IGN)
    began = time.perf_counter()
    build = _import_function(plan.engine)
    engine: RankEngine = build(plan, mesh)
    peers = mesh.tp.size * mesh.pp.size
    rank = mesh.pp.rank * mesh.tp.size + mesh.tp.rank
    listener = Listener(plan.directory, f"replica-{replica}", plan.secret) if rank == 0 and peers > 1 else None
    front = Channel.connect(plan.front, plan.secret)
    hello = {
        "replica": replica, "rank": rank, "ranks": peers, "pid": os.getpid(),
        "seconds": time.perf_counter() - began, "leader": listener.address if listener else None,
        **engine.properties(),
    }  # fmt: skip
    front.send({"hello": hello})
    if rank:
        leader = Channel.connect(front.receive()["leader"], plan.secret)
        _follow(engine, leader)
        return
    followers = [listener.accept(plan.step_seconds) for _ in range(peers - 1)] if listener else []
    if listener:
        listener.close()
    front.send({"ready": True})
    _lead(engine, front, followers)


def _lead(engine: RankEngine, front: Channel, followers: list[Channel]) -> None:
    """Step the engine of the replica's first rank: one list of messages to the followers and one message to the front
    for each step."""
    step = 0
    while True:
        messages = front.receive_ready(wait=engine.idle)
        if followers:
            data = encode({"step": step, "messages": messages})
            for follower in followers:
                follower.send_encoded(data)
        stop = _apply(engine, messages)
        began = time.perf_counter()
        outputs = [] if engine.idle else engine.step()
        seconds = time.perf_counter() - began
        report = {**engine.report(), "seconds": seconds}
        front.send({"outputs": [output.to_json() for output in outputs], "step": report})
        if stop:
            return
        step += 1


def _follow(engine: RankEngine, leader: Channel) -> None:
    """Step the engine of another rank of the replica with the messages that the leader forwards."""
    step = 0
    while True:
        forwarded = leader.receive()
        assert forwarded["step"] == step, (forwarded["step"], step)
        stop = _apply(engine, forwarded["messages"])
        if not engine.idle:
            engine.step()
        if stop:
            return
        step += 1


def _apply(engine: RankEngine, messages: list[Message]) -> bool:
    """Pass the front's messages to the engine; return True if one of them stops the rank."""
    for message in messages:
        if "add" in message:
            engine.add(Request.from_json(message["add"]))
        elif "cancel" in message:
            engine.cancel(message["cancel"])
    return any("stop" in message for message in messages)


def _import_function(name: str) -> Callable[..., Any]:
    """Return the function named `package.module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
