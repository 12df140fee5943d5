"""Training ranks, one of which has a fault at one call: {"rank", "site", "call", "does"}."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.errors import RankLost
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.recipe import load_recipe_text
from meshwright.training import worker

ROOT = str(Path(__file__).resolve().parents[2])
COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {ROOT!r}); from tests.training import faulty_ranks; faulty_ranks.main()",
)
LAUNCHER = COMMAND[2].replace("main()", "start()")


def start() -> None:
    """Run the launcher of a description, a number of ranks and of restarts in its arguments; print its log, and its
    result or the line of its RankLost, as JSON."""
    description, ranks, restarts = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    directory = load_recipe_text(description["recipe"], "recipe").run_directory
    log: list[str] = []
    result, line = None, ""
    try:
        result = launch(LaunchSpec(description, ranks, directory, restarts, 1, command=COMMAND, log=log.append))
    except RankLost as error:
        assert error.exit_code == 3
        line = str(error)
    print(json.dumps([log, result, line]))


def main() -> None:
    """Run a training rank that the launcher started."""
    run_rank(work)


def join() -> None:
    """Run a rank that another launcher starts, with a recipe and a fault in its arguments."""
    recipe, fault, marker = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    plant(fault, int(os.environ["RANK"]), marker)
    try:
        worker.train_as_rank(load_recipe_text(recipe, "recipe"))
    except RankLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def work(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """Train with the fault description["fault"]."""
    import torch.distributed  # noqa: F401  (slow, and must not count towards the time-out)

    directory = Path(description["directory"])
    (directory / f"ready-{start.rank}").touch()
    while not all((directory / f"ready-{rank}").exists() for rank in range(start.ranks)):
        time.sleep(0.01)
    if not (directory / "struck").exists():  # the restarted run has no fault
        plant(description["fault"], start.rank, directory / "struck")
    return worker.train_as_described(description, start)


def plant(fault: dict[str, Any], rank: int, marker: Path) -> None:
    """Make the call number `call` at the site fail. From then on ranks time out early."""
    import torch

    from meshwright.comm import collectives, transport
    from meshwright.comm.handle import DONE

    calls = 0
    run = collectives._post_call

    def faulty(post, call, output, async_op, then=None):
        nonlocal calls
        axis = call.axis
        calls += call.site == fault["site"]
        if call.site != fault["site"] or calls != fault["call"]:
            return run(post, call, output, async_op, then)
        axis.communicator.timeout_seconds = fault["timeout"]
        if rank != fault["rank"]:
            return run(post, call, output, async_op, then)
        marker.touch()
        if fault["does"] == "skip":
            return DONE
        if fault["does"] == "shape":
            longer = torch.zeros(output.numel() + 3, dtype=output.dtype)
            post = lambda: transport.all_reduce(longer, axis, "sum")  # noqa: E731
            return run(post, call, longer, async_op, then)
        if fault["does"] == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[fault["does"]])
        return run(post, call, output, async_op, then)

    collectives._post_call = faulty
    writer = get_process_writer()  # `faulty` wraps it in its module
    writer._seen.append(faulty.__code__)
    writer._skipped.add(id(faulty.__code__))
