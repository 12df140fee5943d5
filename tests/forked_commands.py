"""Commands of Meshwright and ranks of their launchers, forked from the server of local ranks, which has loaded torch:
started as `python ...`, each of these processes would load it for seconds. They have their own process ids, sessions,
signals, environments and exit codes. `ForkedPython` is a program that scripts call in place of Python."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from meshwright.comm import local
from meshwright.layout import Layout
from meshwright.processes import die_with_parent


class Request(NamedTuple):
    """What the server is sent instead of the settings of a pool. directory: of the files `pid`, `code`, `stdout` and
    `stderr`, which the command's keeper writes."""

    words: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    directory: str
    world_size: int = 1


class ForkedCommand:
    """`python WORDS...` in its own session, with the methods of `subprocess.Popen` that tests call."""

    def __init__(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str] = os.environ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="meshwright-command-"))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self.returncode: int | None = None
        local._Server.running().fork(Request(tuple(words), str(cwd), dict(environment), str(self._directory)))
        self.pid = self._read("pid", 60.0)

    def _read(self, name: str, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while not (self._directory / name).exists():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(name, seconds)
            time.sleep(0.005)
        return int((self._directory / name).read_text())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float = 200.0) -> int:
        if self.returncode is None:
            self.returncode = self._read("code", timeout)
        return self.returncode

    def communicate(self, timeout: float = 200.0) -> tuple[str, str]:
        self.wait(timeout)
        output, errors = ((self._directory / name).read_text() for name in ("stdout", "stderr"))
        return output, errors

    def kill(self) -> None:
        """End the command, if it runs, and its ranks."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(60.0)


STAND_IN = """#!/bin/bash
request="$(mktemp -d '{directory}/XXXXXX')"
printf '%s\\0' "$@" > "$request/words"
env -0 > "$request/environment"
pwd > "$request/cwd"
mkfifo "$request/code"
echo "$request" > '{directory}/requests'
read -r code < "$request/code"
cat "$request/stdout"
cat "$request/stderr" >&2
exit "$code"
"""


class ForkedPython:
    """Program `path`, which does what `python` does: each call is a `ForkedCommand`, whose output it prints at the end.
    It is there inside the `with` block, which ends the commands."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "python"
        self._directory = directory
        self._commands: list[ForkedCommand] = []

    def __enter__(self) -> ForkedPython:
        self.path.write_text(STAND_IN.format(directory=self._directory))
        self.path.chmod(0o755)
        os.mkfifo(self._directory / "requests")
        self._requests = os.open(self._directory / "requests", os.O_RDWR)  # also for writing: it has no end
        self._server = threading.Thread(target=self._serve)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._requests, b"\n")
        self._server.join()
        for command in self._commands:
            command.kill()

    def _serve(self) -> None:
        with open(self._requests) as requests:
            while name := requests.readline().strip():
                request = Path(name)
                words, variables = ((request / kind).read_text().split("\0")[:-1] for kind in ("words", "environment"))
                cwd = Path((request / "cwd").read_text().removesuffix("\n"))
                command = ForkedCommand(words, cwd, dict(each.split("=", 1) for each in variables))
                self._commands.append(command)
                threading.Thread(target=self._answer, args=(command, request), daemon=True).start()

    def _answer(self, command: ForkedCommand, request: Path) -> None:
        for name, text in zip(("stdout", "stderr"), command.communicate(), strict=True):
            (request / name).write_text(text)
        (request / "code").write_text(
            f"{command.returncode if command.returncode >= 0 else 128 - command.returncode}\n"
        )


# --- in the server

STARTING = ("meshwright.launcher.started_rank", "meshwright.tuning.trial_run")
"""Modules that start processes which load torch."""
PRELOADED = ("meshwright.cli.main", "meshwright.cli.train", "numpy.ma")
"""Modules that commands and training load when they begin."""


def install() -> None:
    """Make the server of local ranks fork commands, too. Its processes time smaller matrix products than users' do, for
    MFU: those of a user take a rank as long as some twenty steps of these models."""
    from meshwright.planner.memory.ledger import ledger
    from meshwright.probe import matmul
    from meshwright.spec.presets import preset
    from meshwright.training import device_peak

    ledger(preset("llama-tiny"), Layout(), batch=1, sequence=8)  # reads the planner's tables, which a run predicts by
    for name in (*STARTING, *PRELOADED):
        importlib.import_module(name)
    matmul.SHAPES = matmul.DECIDING_SHAPES[:1]
    device_peak.measure_matmul_rate = partial(matmul.measure_matmul_rate, seconds=0.0)
    run_rank = local._run_rank_process

    def run(rank: int, settings: Any) -> None:
        if isinstance(settings, Request):
            _keep(settings)
        run_rank(rank, settings)

    local._run_rank_process = run


def _keep(request: Request) -> NoReturn:
    """Fork the command, and write its process id and exit code."""
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            _run_command(request)
        _write(request, "pid", pid)
        _write(request, "code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        os._exit(0)


def _write(request: Request, name: str, number: int) -> None:
    path = Path(request.directory, name)
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def _run_command(request: Request) -> NoReturn:
    os.setsid()
    die_with_parent()
    os.chdir(request.cwd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(f"{request.directory}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in STARTING:
        sys.modules[name].subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": _ForkedRank})
    if "torch.distributed.run" in request.words:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _ForkedRank
    _run_python(request.words, request.environment, ())


class _ForkedRank(subprocess.Popen):
    """A rank of our launcher or of torchrun, or the run of a trial, that is forked instead of executed."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid,
                       umask, start_new_session, process_group):  # fmt: skip
        # A signal waits until the rank has reset the handlers, as exec would: the launcher's handler would take it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self.pid = os.fork()
        if self.pid == 0:
            for given, standard in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
                if given != -1:
                    os.dup2(given, standard)
            if start_new_session:
                os.setsid()
            if preexec_fn is not None:
                preexec_fn()
            _run_python(tuple(args)[1:], env, pass_fds)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _run_python(words: Sequence[str], environment: Mapping[str, str], keep: Sequence[int]) -> NoReturn:
    """Do in this forked process what `python WORDS...` does, and end it. keep: file descriptors that stay open."""
    code: Any = 1
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in keep:
                with suppress(OSError):
                    os.close(descriptor)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        atexit._clear()
        os.environ.clear()
        os.environ.update(environment)
        words = list(words)
        while words[0] in ("-P", "-u"):
            del words[0]
        if words[0] == "-m":
            sys.argv = words[1:]
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # the server has loaded it
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(words[1], vars(sys.modules["__main__"]))
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if end.code is not None else 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
