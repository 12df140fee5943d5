"""Ranks for tests of the launcher: started like training ranks, but without torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from meshwright.errors import CheckFailed, RankLost, RanksDisagree, Terminated, UserError
from meshwright.flight_recorder import device_calls
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.flight_recorder.device_calls import DeviceCalls
from meshwright.launcher.rank_process import end_as_lost, run_rank
from meshwright.launcher.rendezvous import RendezvousInfo, connect_to_store, initialise_process_group

ROOT = str(Path(__file__).resolve().parents[2])
COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {ROOT!r}); from tests.training import launcher_ranks; launcher_ranks.main()",
)


def main() -> None:
    """Run a rank that the launcher started."""
    run_rank(work)


def work(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """Run description["case"]."""
    return globals()["case_" + description["case"].replace(" ", "_")](description, start)


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def case_tell(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    print("something on standard output")
    kept = {key: description[key] for key in ("threads", "ranks", "method")}
    kept["spin"] = os.environ.get("GOMP_SPINCOUNT")
    return {**kept, "rank": start.rank, "group": os.getpgid(0), "process": os.getpid(), "long": "x" * 300_000}


def case_never_ends(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    time.sleep(600)
    return {}


def case_rank_1_is_killed(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: None)  # like a rank that hangs in a collective
    if start.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return {}


def case_rank_1_is_killed_and_the_others_notice(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    started = Path(description["directory"]) / "started"
    if start.rank == 1:
        started.touch()
        time.sleep(0.3)  # after the reports of the others
        os.kill(os.getpid(), signal.SIGKILL)
    until(started)  # on a busy machine ranks may start seconds apart
    if start.rank == 2:
        raise RuntimeError("connection closed by peer")
    raise RankLost(f"rank {start.rank} was left alone in data.gradients")


def case_rank_2_exits(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    started = Path(description["directory"]) / "started"
    if start.rank == 2:
        started.touch()
        os._exit(7)
    until(started)  # on a busy machine ranks may start seconds apart
    raise (RankLost, RanksDisagree)[start.rank]("left alone")


def case_user_error(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    raise UserError("data.source: no such file: corpus.txt")


def case_check_failed(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    raise CheckFailed("11 steps in a row were not finite")


def case_fault_on_rank_1(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    failing = Path(description["directory"]) / "rank 1 is failing"
    if start.rank == 1:
        failing.touch()
        raise ZeroDivisionError("the cause")
    until(failing)
    time.sleep(1.0)  # rank 1 may be slow on a busy machine
    raise RuntimeError("a consequence: connection closed by peer")


def case_left_alone(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    if start.rank == 0:
        raise RankLost("rank 0 was left alone in data.gradients")
    time.sleep(60)
    return {}


def wait_in_a_call(start: RendezvousInfo, description: dict[str, Any], site: str) -> None:
    """Post a call once rank 0 is waiting."""
    until(Path(description["directory"]) / "elsewhere")
    calls = get_process_writer()
    calls.wait(calls.post(calls.register_group((0, 1)), site, "all_reduce", "data", 16, "float32", (4,)))


def case_rank_0_is_elsewhere(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    if start.rank == 0:
        (Path(description["directory"]) / "elsewhere").touch()
        time.sleep(60)
    wait_in_a_call(start, description, "data.gradients")
    time.sleep(0.3)
    get_process_writer().give_up()
    raise RankLost("rank 1 had no answer")


class NeverReached:
    """Event of a device that hangs."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False


def case_device_of_rank_0_hangs(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """The host continues after each call and then waits for its device in C; rank 1 runs, but never makes the call."""
    if start.rank == 1:
        (Path(description["directory"]) / "elsewhere").touch()
    else:
        until(Path(description["directory"]) / "elsewhere")
        device_calls.LOOK_SECONDS = 0.01
        error = RankLost("the GPU of rank 0 did not complete a call within 0.2 s")
        calls = DeviceCalls(get_process_writer(), NeverReached, 0.2, lambda number: end_as_lost(error))
        for _ in range(2):
            number = calls.post(
                calls.register_group((0, 1)), "data.gradients", "all_reduce", "data", 16, "float32", (4,)
            )
            calls.wait(number)
            calls.done(number)
        threading.Thread(target=calls.watch, daemon=True).start()
    time.sleep(60)
    return {}


def case_stopped_in_a_call(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    if start.rank == 0:
        (Path(description["directory"]) / "elsewhere").touch()
        time.sleep(60)
    wait_in_a_call(start, description, "data.gradients")
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}


def case_stopped_outside_calls(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """As in a save: rank 1 waits for a file of rank 0, which is stopped."""
    calls = get_process_writer()
    calls.done(calls.post(calls.register_group((0, 1)), "data.gradients", "all_reduce", "data", 16, "float32", (4,)))
    posted = Path(description["directory"]) / "posted"
    if start.rank == 0:
        until(posted)
        os.kill(os.getpid(), signal.SIGSTOP)
    posted.touch()
    time.sleep(60)
    return {}


def case_save_on_sigterm(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    directory = Path(description["directory"])
    (directory / f"ready-{start.rank}").touch()
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3 * (1 + start.rank))  # saves take time, and ranks end one after the other
    (directory / f"saved-{start.rank}").touch()
    raise Terminated("stopped by SIGTERM after saving step 40")


def case_still_loading(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    (Path(description["directory"]) / f"ready-{start.rank}").touch()
    time.sleep(60)
    return {}


def case_never_end(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: None)
    (Path(description["directory"]) / f"ready-{start.rank}").touch()
    while True:
        time.sleep(1)


def case_die_twice(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    deaths = Path(description["directory"]) / "deaths"
    count = len(deaths.read_text()) if deaths.exists() else 0
    if count < 2:
        if start.rank == 0:
            deaths.write_text("x" * (count + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return {"deaths": count}


def case_meet(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    initialise_process_group(start, connect_to_store(start, 60.0), "cpu", 60.0)
    total = torch.tensor([2.0**start.rank])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"sum": float(total), "threads": torch.get_num_threads(), "method": start.method}
