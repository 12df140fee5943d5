"""One rank as its launcher sees it: started, watched, reported on. Free of torch."""

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
from pathlib import Path
from typing import Any

from meshwright.flight_recorder.call_ring import create_memory_file
from meshwright.threads import build_child_environment

STACK_SECONDS = 0.5  # that a rank has to say where it is


@dataclass(slots=True)
class StartedRank:
    """A started rank. `pipe`: where it reports, -1 when closed. `calls`, `stack`: descriptors of the memory to which it
    writes its calls, and, on SIGUSR1, where it is. `ended`: when, on the monotonic clock."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    calls: int
    stack: int
    said: bytearray = field(default_factory=bytearray)
    report: dict[str, Any] | None = None
    ended: float | None = None
    told_to_end: bool = False

    @property
    def finished(self) -> bool:
        """Whether it ended with a result."""
        return self.report is not None and "result" in self.report

    @property
    def error(self) -> str | None:
        """The name of the error it reported."""
        return None if self.report is None else self.report.get("error", self.report.get("fault"))

    @property
    def lost_another(self) -> bool:
        """Whether the error it reported is about what another rank does: not a cause."""
        return self.error in ("RankLost", "RanksDisagree")

    @property
    def signal(self) -> int | None:
        """The signal that killed it, None if it exited."""
        code = self.process.returncode
        return -code if code is not None and code < 0 else None

    @property
    def how_it_ended(self) -> str:
        """Of one that has, without a report: how, to stand behind its name."""
        number = self.signal
        if number is None:
            return f"ended with exit code {self.process.returncode} and no report"
        known = number in {item.value for item in signal.Signals}
        return f"was killed by signal {number}" + (f" ({signal.Signals(number).name})" if known else "")

    def where(self) -> list[str]:
        """The stack of its main thread, innermost first, as it says itself; empty when it does not answer."""
        os.ftruncate(self.stack, 0)
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while os.fstat(self.stack).st_size == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # it writes piece by piece
        lines = os.pread(self.stack, 65536, 0).decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.lstrip().startswith("File ")]

    def close(self) -> None:
        """Give all descriptors back, when it has ended."""
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
    """Start a rank that reads `description` and more from its standard input. keep: descriptors that it inherits;
    output: that for what it prints."""
    ours, theirs = os.pipe()
    calls, stack = create_memory_file(number, ranks), _memory()
    told = {
        **description, "rank": number, "ranks": ranks, "threads": threads, "launcher": os.getpid(), "report": theirs,
        "keep": [*keep], "calls": calls, "stack": stack,
    }  # fmt: skip
    # Libraries read these before any code of ours could tell them; what the user has set stands.
    environment = {**_loopback(), **build_child_environment(threads)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the rank: until it ignores them
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            pass_fds=(theirs, calls, stack, *keep),
            env=environment,
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
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()  # and stays open: its end tells the rank that we have died
    return StartedRank(number, process, ours, calls, stack)


def _memory() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def machine_memory() -> int:
    """Bytes of memory of this machine, swap left out, or a container's limit where that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def _loopback() -> dict[str, str]:
    """Ranks of one machine talk over the loopback interface: a host name may lead to a network that is down."""
    with suppress(OSError):
        for _, name in socket.if_nameindex():
            if name in ("lo", "lo0"):
                return {"GLOO_SOCKET_IFNAME": name}
    return {}
