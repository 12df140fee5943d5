"""Process of one rank that the launcher started: reads its description, does its work, reports its result or error."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from meshwright.errors import MeshwrightError, RankLost, UserError, ignore_model_warnings, make_out_of_memory_message
from meshwright.flight_recorder.call_ring import attach_process_writer
from meshwright.launcher import rendezvous
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.processes import die_with_parent
from meshwright.terminal import print_message


def run_rank(work: Callable[[dict[str, Any], RendezvousInfo], dict[str, Any]]) -> None:
    """Run one rank: read its description (JSON: what the rank is to do) from standard input, call `work(description,
    info)`, and write the result or error as JSON to the report pipe.

    info: rank, world size and rendezvous. The launcher keeps standard input open. When the launcher dies, this process
    is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal also interrupts the launcher, which sends SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    description = json.loads(sys.stdin.readline() or "{}")
    _end_with_launcher(description.get("launcher"))
    faulthandler.enable()
    ignore_model_warnings()
    _report.append(os.fdopen(description["report"], "w"))
    os.set_inheritable(description["report"], False)
    for descriptor in (description["calls"], description["stack"], *description["keep"]):
        os.set_inheritable(descriptor, False)
    # By this signal the launcher requests the stack.
    faulthandler.register(signal.SIGUSR1, description["stack"], all_threads=False)
    attach_process_writer(description["calls"])
    start = RendezvousInfo(
        description["rank"], description["ranks"], description["rank"], description["method"], rendezvous.LAUNCHER
    )
    try:
        text, code = json.dumps({"result": work(description, start)}), 0
    except BaseException as error:
        if (reason := make_out_of_memory_message(error)) is not None:
            error = UserError(f"rank {start.rank}: {reason}")
        text, code = _describe_error(error), 1
    _end_process(text, code)


def end_as_lost(error: RankLost) -> NoReturn:
    """End this process immediately with `error`. May be called from any thread, as the main thread may wait for a
    device that never answers. The error is reported to the launcher, or printed if no launcher of Meshwright started
    this rank (torchrun, SLURM)."""
    if not _report:
        print_message(f"meshwright: error: {error}")
    _end_process(_describe_error(error), 1 if _report else error.exit_code)


_report: list[TextIO] = []  # pipe to the launcher, if that started this process
_ending = threading.Lock()  # held until the end by the thread that reports


def _describe_error(error: BaseException) -> str:
    """Return the report of the exception `error`, which is being handled, as JSON text from which the launcher can
    raise the exception again."""
    if isinstance(error, MeshwrightError):
        report: dict[str, Any] = {"error": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    else:
        report = {"fault": type(error).__name__, "traceback": traceback.format_exc()}
    return json.dumps(report | {"at": time.monotonic()})


def _end_process(text: str, code: int) -> NoReturn:
    """Write `text`, the result or error as JSON, to the report pipe, if there is one, and end the process with exit
    code `code`."""
    _ending.acquire()
    for report in _report:
        with suppress(BrokenPipeError):  # the launcher has ended
            report.write(text)
            report.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of process groups whose peers have died may never end.
    os._exit(code)


def _end_with_launcher(launcher: int | None) -> None:
    """Make the kernel kill this process when the launcher dies, so that it does not keep memory, ports and the run's
    lock. launcher: process id of the launcher. If this is None or not the id of this process's parent, the launcher has
    died, and this process exits at once."""
    die_with_parent()

    def watch() -> None:
        """Wait until standard input closes, which shows that the launcher has ended; then kill this process."""
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != launcher:
        os._exit(1)  # the launcher died before the call above
    threading.Thread(target=watch, name="launcher", daemon=True).start()
