"""`meshwright train` in a forked process, whose ranks are forked too: the same code, without loading PyTorch anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import IO, Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1)


def load() -> None:
    """Import what commands and ranks need; before it, the environment says how many threads there are."""
    import torch._dynamo  # noqa: F401  (recomputation loads it)

    import meshwright.cli.main
    import meshwright.cli.train
    import meshwright.launcher.launcher
    import meshwright.training.loop
    import meshwright.training.worker  # noqa: F401


def fork_command(arguments: Sequence[str], environment: Mapping[str, str], errors: IO[str]) -> Forked:
    """Run `meshwright ARGUMENTS` in a new POSIX session (setsid); its ranks are forked as well."""

    def work() -> int:
        from meshwright.cli.main import main
        from meshwright.launcher import started_rank

        os.setsid()
        started_rank.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=_fork_rank)  # type: ignore[assignment]
        return main(list(arguments))

    with open(os.devnull, "r+b") as nothing:
        return Forked(work, environment, (nothing.fileno(), nothing.fileno(), errors.fileno()))


def _fork_rank(
    command: Sequence[str], stdin: int, stdout: int, pass_fds: Sequence[int], env: Mapping[str, str]
) -> Forked:
    """In place of the Popen that starts a rank."""
    assert stdin == subprocess.PIPE and command[-1] == "meshwright.training.worker"

    def work() -> int:

        from meshwright.launcher.rank_process import run_rank
        from meshwright.training.worker import train_as_described

        run_rank(train_as_described)
        return 0

    ours, theirs = os.pipe()
    forked = Forked(work, env, (ours, stdout, 2), pass_fds)
    os.close(ours)
    forked.stdin = os.fdopen(theirs, "wb")
    return forked


class Forked:
    """A child process that runs a function and exits with what it returns; what a launcher uses of `Popen`.

    standard: descriptors that become its standard input, output and error. keep: others that it inherits.
    """

    def __init__(
        self,
        work: Callable[[], int],
        environment: Mapping[str, str],
        standard: tuple[int, int, int],
        keep: Sequence[int] = (),
    ) -> None:
        self.returncode: int | None = None
        self.stdin: Any = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _be_new(environment, standard, keep)
                code = work()
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended; raises `TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_new(environment: Mapping[str, str], standard: tuple[int, int, int], keep: Sequence[int]) -> None:
    """Leave behind what a program that is started would not have: handlers, descriptors, environment, open streams."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    copies = [os.dup(descriptor) for descriptor in standard]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
