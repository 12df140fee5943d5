"""Process of one rank as its launcher handles it: started, supervised, reported on. Free of torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshwright.flight_recorder.call_ring import create_memory_file
from meshwright.threads import build_child_environment

STACK_SECONDS = 0.5  # that a rank has to report its stack


@dataclass(slots=True)
class StartedRank:
    """Process of one rank, as the launcher supervises it.

    Attributes:
        number: Global rank.
        process: Handle of the process.
        pipe: File descriptor from which the rank's report is read; -1 after it was closed.
        calls, stack: Descriptors of the memory files to which the rank writes its collective calls and, on SIGUSR1, its
            stack.
        report_bytes: The report (result or error, JSON) read so far.
        report: The parsed report; None until it is complete.
        ended: Time at which the process ended, in seconds of the monotonic clock; None while it runs.
        stop_requested: True once the launcher has sent the process a signal.
    """

    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    calls: int
    stack: int
    report_bytes: bytearray = field(default_factory=bytearray)
    report: dict[str, Any] | None = None
    ended: float | None = None
    stop_requested: bool = False

    @property
    def finished(self) -> bool:
        """True if the rank reported a result (not an error)."""
        return self.report is not None and "result" in self.report

    @property
    def error(self) -> str | None:
        """Class name of the exception that the rank reported; None if the rank reported no exception."""
        return None if self.report is None else self.report.get("error", self.report.get("fault"))

    @property
    def blames_another_rank(self) -> bool:
        """True if the rank reported an error that another rank caused (`RankLost`, `RanksDisagree`)."""
        return self.error in ("RankLost", "RanksDisagree")

    @property
    def signal(self) -> int | None:
        """Number of the signal that killed the rank; None if the rank exited by itself or still runs."""
        code = self.process.returncode
        return -code if code is not None and code < 0 else None

    @property
    def exit_description(self) -> str:
        """Predicate of a sentence on how the process of a rank without a report ended, such as "was killed by signal 9
        (SIGKILL)"."""
        number = self.signal
        if number is None:
            return f"ended with exit code {self.process.returncode} and no report"
        known = number in {item.value for item in signal.Signals}
        return f"was killed by signal {number}" + (f" ({signal.Signals(number).name})" if known else "")

    def read_stack(self) -> list[str]:
        """Return the stack of the rank's main thread as lines, innermost frame first; empty if the rank does not answer
        SIGUSR1 in time."""
        os.ftruncate(self.stack, 0)
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while os.fstat(self.stack).st_size == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # it is written in several parts
        lines = os.pread(self.stack, 65536, 0).decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.lstrip().startswith("File ")]

    def close(self) -> None:
        """Close the rank's pipes and the file descriptors of its memory files, after the rank has ended."""
        for descriptor in (self.calls, self.stack, self.pipe):
            if descriptor >= 0:
                os.close(descriptor)
        self.pipe = -1
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


def start_rank(
    number: int, ranks: int, description: Mapping[str, Any], command: Sequence[str], threads: int, keep: Sequence[int],
    output: int = 2,
) -> StartedRank:  # fmt: skip
    """Start the process of one rank; return its `StartedRank`.

    number: global rank. ranks: world size. description: what the rank is to do, sent as JSON on its standard input.
    command: command line. threads: number of the rank's compute threads. keep: file descriptors that the process
    inherits. output: file descriptor that becomes its standard output (2: standard error).
    """
    ours, theirs = os.pipe()
    calls, stack = create_memory_file(number, ranks), _open_temporary_file()
    message = {
        **description, "rank": number, "ranks": ranks, "threads": threads, "launcher": os.getpid(), "report": theirs,
        "keep": [*keep], "calls": calls, "stack": stack,
    }  # fmt: skip
    # Libraries read these before any code of ours runs; the user's settings take precedence.
    environment = {**_make_loopback_environment(), **build_child_environment(threads)}
    # Inherited by the rank, which unblocks the signal once it ignores it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, pass_fds=(theirs, calls, stack, *keep), env=environment
        )
    except OSError:
        for descriptor in (ours, calls, stack):
            os.close(descriptor)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()  # kept open: its end tells the rank that the launcher died
    return StartedRank(number, process, ours, calls, stack)


def _open_temporary_file() -> int:
    """Open a new temporary file without a name; return its file descriptor."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _make_loopback_environment() -> dict[str, str]:
    """Return environment variables that make gloo use the loopback interface, because this host's name may resolve to a
    network that is down."""
    with suppress(OSError):
        for _, name in socket.if_nameindex():
            if name in ("lo", "lo0"):
                return {"GLOO_SOCKET_IFNAME": name}
    return {}
