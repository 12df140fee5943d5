"""One rank process of a replica: loads its part of the model, then runs engine steps as the front (the HTTP server's
process) requests.

The front talks to the first rank of the replica, its leader. All ranks run the same deterministic scheduler, so the
leader only forwards the messages of each step; a rank without work sleeps on its socket."""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import sys
import time

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import MeshwrightError, RankLost, UserError, ignore_model_warnings
from meshwright.launcher import rendezvous
from meshwright.launcher.device import agree_on_device, choose_device
from meshwright.layout import Layout
from meshwright.processes import die_with_parent
from meshwright.serving.engine import Engine
from meshwright.serving.messages import Channel, Listener, Message, encode
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Output, Request
from meshwright.terminal import print_message

JOIN_SECONDS = 300.0
"""Time limit of the rendezvous of ranks that torchrun or SLURM started."""
LEADER_SITE = "serving.leader"
SHARED_BYTES = 1 << 16
"""Size of a text that ranks broadcast, filled with spaces: a `RankPlan` as JSON, of which a path may take 24,576 bytes
(4,096, escaped), or a listener's address."""
_REQUESTS = TypeAdapter(Request)


def serve_rank(plan: RankPlan, replica: int) -> None:
    """Run this process as one rank of the replica with index `replica`, until the front (the HTTP server's process)
    stops it or is gone. plan: settings of the ranks.

    `torch.distributed` must be initialised with the replica's ranks as its world. Raises UserError if the model cannot
    be loaded, RankLost when another process of the server is gone.
    """
    layout = Layout.parse(plan.layout).with_(dp=1)
    device = _set_device(choose_device(plan.device, replica * layout.world_size + dist.get_rank()))
    serve_mesh(plan, Mesh.create(layout, device, timeout_seconds=plan.collective_seconds), replica)


def serve_joined(plan: RankPlan | None, device: str) -> None:
    """Run this process, started by torchrun or SLURM, as one rank until the front (the HTTP server's process) stops it.
    plan: settings of the ranks on rank 0, which broadcasts them; None on all other ranks. `device`: "auto", "cpu" or
    "cuda", equal on all ranks. Raises UserError if the model cannot be loaded or the ranks cannot have a GPU each,
    RankLost when another process of the server is gone."""
    where = rendezvous.read_rendezvous_info()
    store = rendezvous.connect_to_store(where, JOIN_SECONDS)
    device = _set_device(agree_on_device(device, where, store))
    rendezvous.initialise_process_group(where, store, device, JOIN_SECONDS)
    shared = torch.tensor([*to_json(plan).ljust(SHARED_BYTES)], dtype=torch.uint8, device=device)
    try:
        dist.broadcast(shared, 0)
        plan = TypeAdapter(RankPlan).validate_json(bytes(shared.tolist()))
    except RuntimeError as error:  # of the process group: a connection is closed, or the time limit has passed
        raise RankLost("a rank ended or timed out before rank 0's settings reached all; see their output") from error
    mesh = Mesh.create(Layout.parse(plan.layout), device, timeout_seconds=plan.collective_seconds)
    serve_mesh(plan, mesh, mesh.dp.rank)


def serve_mesh(plan: RankPlan, mesh: Mesh, replica: int) -> None:
    """Run this process as one rank of `mesh`, whose tp and pp axes span the replica with index `replica`: build the
    engine, connect to the front (the HTTP server's process), and run steps until the front sends a stop message. plan:
    settings of the ranks. Raises UserError if the model cannot be loaded, RankLost when another process of the server
    is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the front alone decides when ranks end
        signal.signal(number, signal.SIG_IGN)
    began = time.perf_counter()
    engine: Engine = pkgutil.resolve_name(plan.engine)(plan, mesh)
    about = {**engine.properties(), "seconds": time.perf_counter() - began}
    peers, rank = mesh.tp.size * mesh.pp.size, mesh.pp.rank * mesh.tp.size + mesh.tp.rank
    front = Channel.connect(plan.front, plan.secret)
    gc.freeze()  # a full collection would look through all modules, for 0.1 s between two tokens
    front.send(encode({"hello": {"replica": replica, "rank": rank, "start": plan.start, "pid": os.getpid(), **about}}))
    followers = []
    if peers > 1:
        listener = None if rank else Listener(front.own_address, plan.secret)
        address = share_address("" if listener is None else listener.address, mesh)
        if listener is None:
            _run_follower(engine, Channel.connect(address, plan.secret))
            return
        followers = [listener.accept(plan.step_seconds) for _ in range(peers - 1)]
        listener.close()
    front.send(encode({"ready": engine.report()}))
    _run_leader(engine, front, followers)


def share_address(address: str, mesh: Mesh) -> str:
    """Return the `address` of a replica's first rank on all ranks of the replica. address: ignored on other ranks.
    Collective over the tp and pp axes of `mesh`: the ranks wait here for the slowest to load the model, at most for the
    time limit of a collective call (`Mesh.create`; `JOIN_SECONDS` if torchrun or SLURM started one replica alone).
    Raises RankLost if one of them is lost."""
    shared = torch.tensor([*address.encode().ljust(SHARED_BYTES)], dtype=torch.uint8, device=mesh.device)
    for axis in (mesh.pp, mesh.tp):  # to the first tp rank of each stage, and from it to the others
        collectives.broadcast(shared, axis, LEADER_SITE)
    return bytes(shared.tolist()).decode().rstrip()


def _set_device(device: str) -> str:
    """Make `device`, such as "cuda:1", the current CUDA device, unless it is "cpu"; return `device` unchanged."""
    if device != "cpu":
        torch.cuda.set_device(device)
    return device


def _run_leader(engine: Engine, front: Channel, followers: list[Channel]) -> None:
    """Main loop of a replica's first rank, until the front (the HTTP server's process) sends a stop message. Each
    iteration receives the front's messages, forwards them to the replica's other ranks (`followers`), runs an engine
    step, and sends the outputs and a report on the step to the front.

    `seconds` in the report is the time from the end of the previous engine step, or of a period without work, to the
    end of this step; 0 if no step ran."""
    began = time.perf_counter()
    while True:
        messages = front.receive_ready(wait=(slept := engine.idle))
        if slept:
            began = time.perf_counter()
        if followers:
            data = encode({"messages": messages})
            for follower in followers:
                follower.send(data)
        stop, outputs = _apply_messages(engine, messages)
        if ran := not engine.idle:
            outputs += engine.step()
        now = time.perf_counter()
        report = {**engine.report(), "seconds": now - began if ran else 0.0}
        began = now
        front.send(encode({"outputs": outputs, "step": report}))
        if stop:
            return


def _run_follower(engine: Engine, leader: Channel) -> None:
    """Main loop of each rank of a replica except the first: run a step of `engine` for each list of messages that the
    replica's first rank (`leader`) forwards, until a stop message arrives."""
    while True:
        stop, _ = _apply_messages(engine, leader.receive()["messages"])
        if not engine.idle:
            engine.step()
        if stop:
            return


def _apply_messages(engine: Engine, messages: list[Message]) -> tuple[bool, list[Output]]:
    """Apply the messages of the front (the HTTP server's process) to the engine: "add", "cancel" and "stop". Return
    (True if a stop message arrived, outputs). The outputs are one "cancelled" output for each request that the engine
    refuses."""
    refused = []
    for message in messages:
        if "add" in message:
            try:
                engine.add(_REQUESTS.validate_python(message["add"]))
            except (UserError, ValidationError):  # never for requests that the front has checked
                refused.append(Output(message["add"]["id"], [], "cancelled"))
        elif "cancel" in message:
            engine.cancel(message["cancel"])
    return any("stop" in message for message in messages), refused


def main() -> None:
    """Main function of rank 0's process where torchrun or SLURM starts the ranks: a child of the HTTP server's process,
    from which it reads the `RankPlan` as one line of JSON on standard input. An error is printed as one line."""
    die_with_parent()
    ignore_model_warnings()
    plan = TypeAdapter(RankPlan).validate_json(sys.stdin.readline())
    try:
        serve_joined(plan, plan.device)
    except MeshwrightError as error:
        print_message(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
