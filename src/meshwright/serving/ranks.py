"""One rank process of a replica: loads its part of the model, then steps its engine as the front's messages say.

The front talks to the rank that leads the replica. All ranks run the same deterministic scheduler, so the leader
forwards the messages of each step and nothing else; a rank that has nothing to do sleeps on its socket.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError, ignore_model_warnings
from meshwright.launcher import rendezvous
from meshwright.launcher.rank_process import die_with_parent
from meshwright.layout import Layout
from meshwright.serving.engine import Engine, build_scheduler
from meshwright.serving.messages import Channel, Listener, Message, encode
from meshwright.serving.pipeline_engine import PipelineEngine
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Output, Request
from meshwright.serving.runner import build_runner
from meshwright.serving.step_limits import StepLimits

JOIN_SECONDS = 300.0
"""How long ranks that others start wait for each other."""


class RankEngine(Protocol):
    """Engine of one rank: deterministic, so that ranks with the same messages stay in the same state.

    idle: no sequence is left to compute.
    """

    @property
    def idle(self) -> bool: ...

    def add(self, request: Request) -> None:
        """Queue a request."""

    def cancel(self, request_id: str) -> Output | None:
        """End a request and free its blocks; unknown ones are ignored."""

    def step(self) -> list[Output]:
        """Run one step, and return what it adds to each answer."""

    def report(self) -> dict[str, Any]:
        """Return the figures of the last step and of the blocks, for the front."""

    def properties(self) -> dict[str, Any]:
        """Return facts about the engine: `instruction_set`, `kernels` (version), `memory` (bytes by item)."""


def serve_rank(description: Mapping[str, Any], replica: int) -> None:
    """Run this process as a rank of replica number `replica` until the front stops it or is gone.

    description: a `RankPlan` as JSON. `torch.distributed` is initialised and its world is the replica. Raises UserError
    if the model cannot be loaded, RankLost when another process of the server is gone.
    """
    plan = RankPlan(**description)
    layout = Layout.parse(plan.layout).with_(dp=1)
    mesh = Mesh.create(layout, timeout_seconds=plan.step_seconds)
    serve_mesh(plan, mesh, replica)


def serve_joined(description: Mapping[str, Any] | None) -> None:
    """Run this process, which torchrun or SLURM has started, as a rank, as `serve_rank` does.

    description: a `RankPlan` as JSON on rank 0, from which the others get it.
    """
    where = rendezvous.place()
    rendezvous.initialise(where, rendezvous.meet(where, JOIN_SECONDS), "cpu", JOIN_SECONDS)
    shared = [description]
    dist.broadcast_object_list(shared)
    assert shared[0] is not None
    plan = RankPlan(**shared[0])
    mesh = Mesh.create(Layout.parse(plan.layout), timeout_seconds=plan.step_seconds)
    serve_mesh(plan, mesh, mesh.dp.rank)


def serve_mesh(plan: RankPlan, mesh: Mesh, replica: int) -> None:
    """Run this process as one rank of `mesh`, as `serve_rank` does. The mesh's tp and pp axes span the replica."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the front alone decides when ranks end
        signal.signal(number, signal.SIG_IGN)
    began = time.perf_counter()
    engine: RankEngine = _import_function(plan.engine)(plan, mesh)
    seconds = time.perf_counter() - began
    peers = mesh.tp.size * mesh.pp.size
    rank = mesh.pp.rank * mesh.tp.size + mesh.tp.rank
    front = Channel.connect(plan.front, plan.secret)
    listener = None
    if rank == 0 and peers > 1:
        listener = Listener(plan.directory, f"replica-{replica}", plan.secret, front.own_host)
    hello = {"replica": replica, "rank": rank, "pid": os.getpid(), "seconds": seconds, **engine.properties()}
    front.send({"hello": {**hello, "leader": listener.address if listener else None}})
    if rank:
        _follow(engine, Channel.connect(front.receive()["leader"], plan.secret))
        return
    followers = [listener.accept(plan.step_seconds) for _ in range(peers - 1)] if listener else []
    if listener:
        listener.close()
    front.send({"ready": True})
    _lead(engine, front, followers)


def build_engine(plan: RankPlan, mesh: Mesh) -> RankEngine:
    """Load this rank's part of the model and build its engine. Raises UserError if the model cannot be loaded."""
    limits = StepLimits(plan.blocks, plan.token_budget, plan.max_sequences, plan.max_length, plan.logit_rows)
    runner = build_runner(Path(plan.checkpoint), mesh, plan.dtype, limits, plan.threads)
    scheduler = build_scheduler(runner.config, limits, groups=mesh.pp.size)
    return Engine(runner, scheduler) if mesh.pp.size == 1 else PipelineEngine(runner, scheduler, mesh)


def _lead(engine: RankEngine, front: Channel, followers: list[Channel]) -> None:
    """Step the engine of the replica's first rank: one list of messages to the followers and one message to the front
    for each step. Step seconds are those of the whole iteration, with the message to the front of the one before."""
    step, began = 0, time.perf_counter()
    while True:
        slept = engine.idle
        messages = front.receive_ready(wait=slept)
        if slept:
            began = time.perf_counter()
        if followers:
            data = encode({"step": step, "messages": messages})
            for follower in followers:
                follower.send_encoded(data)
        stop, outputs = _apply(engine, messages)
        ran = not engine.idle
        if ran:
            outputs += engine.step()
        now = time.perf_counter()
        report = {**engine.report(), "seconds": now - began if ran else 0.0}
        began = now
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
        stop, _ = _apply(engine, forwarded["messages"])
        if not engine.idle:
            engine.step()
        if stop:
            return
        step += 1


def _apply(engine: RankEngine, messages: list[Message]) -> tuple[bool, list[Output]]:
    """Pass the front's messages to the engine. Return whether one of them stops the rank, and an end for each request
    that the engine refuses."""
    refused = []
    for message in messages:
        if "add" in message:
            try:
                engine.add(Request.from_json(message["add"]))
            except UserError:  # the front checks requests: this one would never fit
                refused.append(Output(message["add"]["id"], [], "cancelled"))
        elif "cancel" in message:
            engine.cancel(message["cancel"])
    return any("stop" in message for message in messages), refused


def _import_function(name: str) -> Callable[..., Any]:
    """Return the function named `package.module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    """Run the rank of the process that also runs the front: its plan comes as JSON on standard input."""
    die_with_parent()
    ignore_model_warnings()
    serve_joined(json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main()
