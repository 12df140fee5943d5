"""Local ranks: processes of this machine with torch.distributed (gloo), forked from a server that has torch loaded.

    with LocalRanks(4) as ranks:
        results = ranks.run("package.module:function", argument)   # one result per rank

The server and its ranks end with the process that started them, even if it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from meshwright.errors import RankLost, ignore_model_warnings
from meshwright.flight_recorder.call_ring import attach_process_writer, create_named_file
from meshwright.flight_recorder.rank_report import Snapshot
from meshwright.processes import die_with_parent
from meshwright.threads import build_child_environment

_SERVER_CODE = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[3:]; from meshwright.comm.local import serve; "
    "serve(int(sys.argv[1]), sys.argv[2].split(','))"
)

CONNECT_SECONDS = 60.0
"""Time limit in seconds for forked ranks to connect to the process that started them."""
MAX_WAIT_SECONDS = 86400.0
"""Maximum seconds of one poll(2) call, which accepts at most 24 days; the timeout of `run` may be math.inf."""

PRELOADED = ("torch", "torch.distributed", "torch.utils.checkpoint", "torch._dynamo")
"""Modules that the server imports once for all ranks (the last one for activation checkpointing)."""

PRELOADED_TO_SERVE = ("torch", "torch.distributed", "meshwright.serving.ranks")
"""Modules preloaded for the ranks of an inference server."""


def _find_socket_parent() -> str:
    """Return the directory in which to create private directories for Unix sockets. The result is the temporary
    directory, unless its path is so long that socket paths would exceed the limit of 108 bytes (unix(7)); else /tmp."""
    parent = tempfile.gettempdir()
    return parent if len(os.fsencode(parent)) <= 48 else "/tmp"


class RemoteTraceback(Exception):
    """Exception that carries the traceback `text` of an exception on rank `rank` of a pool. `LocalRanks.run` raises the
    rank's exception in the parent process, with a RemoteTraceback as its `__cause__`."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n{text}")


class LocalRanks:
    """Pool of processes on this machine, with torch.distributed initialised, that runs functions on all ranks.

    world_size: number of processes (ranks). threads: number of torch threads of each process. timeout: default time
    limit of `run` in seconds. backend: backend of torch.distributed."""

    def __init__(self, world_size: int, threads: int = 1, timeout: float = 120.0, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.threads = threads
        self.timeout = timeout
        self.backend = backend
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._directory: Path | None = None
        self._rings: dict[int, int] = {}  # file descriptor of each rank's call records

    def __enter__(self) -> LocalRanks:
        self._start_ranks()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process IDs of the pool's processes, by rank."""
        return tuple(self._pids)

    def run(self, function: str | Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call `function(*args)` on every rank and return the list of results, by rank.

        function: "package.module:function", or a function of an importable module. timeout: limit in seconds (None: the
        pool's `timeout`). An exception on a rank is raised here, with the rank's traceback as its cause. RankLost is
        raised if a rank ends or does not answer in time; its message names the rank and the collective call at which
        ranks diverged. After either error the rank processes are ended, and the next `run` starts new processes."""
        if not self._connections:
            self._start_ranks()
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        try:
            for connection in self._connections:
                connection.send((function, args))
        except OSError as error:
            self.close()
            raise RankLost(f"a local rank exited before {function} began: {error}") from error
        return self._collect_results(function, self.timeout if timeout is None else timeout)

    def calls(self) -> Snapshot:
        """Return a snapshot of the pool's flight recorders, each with the last collective calls of one rank."""
        return Snapshot.take(self._rings)

    def _collect_results(self, function: str, timeout: float) -> list[Any]:
        """Wait for the results of the call of `function` on all ranks; return them by rank.

        timeout: limit in seconds. Raises the exception of a failed rank, and RankLost for dead and silent ranks.
        """
        answers: dict[int, tuple[str, Any, str]] = {}
        died: list[int] = []
        deadline = time.monotonic() + timeout
        seen: Snapshot | None = None
        while len(answers) + len(died) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in answers and rank not in died]
            left = max(0.0, deadline - time.monotonic())
            ready = wait([self._connections[rank] for rank in waiting], min(left, MAX_WAIT_SECONDS))
            if not ready and left <= MAX_WAIT_SECONDS:
                break
            for rank in waiting:
                if self._connections[rank] in ready:
                    try:
                        answers[rank] = self._connections[rank].recv()
                    except (EOFError, OSError):
                        died.append(rank)
            if died or any(kind == "error" for kind, *_ in answers.values()):
                seen = seen or self.calls()
                # The others may wait for this rank in a collective: give them two seconds to report.
                deadline = min(deadline, time.monotonic() + 2.0)
        failures = {rank: answer for rank, answer in answers.items() if answer[0] == "error"}
        if not failures and not died and len(answers) == self.world_size:
            return [answers[rank][1] for rank in range(self.world_size)]
        seen = seen or self.calls()
        parted = "" if seen.verdict is None else f"; {seen.verdict.line}"
        self.close()
        if died:
            raise RankLost(f"local rank {', '.join(map(str, sorted(died)))} died in {function}{parted}")
        if failures:
            # RankLost is a consequence; the cause is another rank's exception.
            rank = min(failures, key=lambda r: (isinstance(failures[r][1], RankLost), r))
            _, error, text = failures[rank]
            if isinstance(error, RankLost) and parted:
                error = type(error)(f"{error}{parted}")
            raise error from RemoteTraceback(rank, text)
        silent = [str(rank) for rank in range(self.world_size) if rank not in answers]
        raise RankLost(f"local rank {', '.join(silent)} did not answer within {timeout:g} s in {function}{parted}")

    def _start_ranks(self) -> None:
        """Fork the pool's rank processes and connect to them; raises RankLost if they do not start."""
        self._directory = Path(tempfile.mkdtemp(prefix="meshwright-ranks-", dir=_find_socket_parent()))
        for rank in range(self.world_size):
            self._rings[rank] = create_named_file(self._directory / f"calls-{rank}", rank, self.world_size)
        key = secrets.token_bytes(16)
        with Listener(str(self._directory / "socket"), backlog=self.world_size, authkey=key) as listener:
            directory = str(self._directory)
            settings = _PoolSettings(directory, key, self.world_size, self.threads, self.timeout, self.backend)
            self._pids = _Server.running().fork(settings)
            connections: dict[int, Connection] = {}
            listener._listener._socket.settimeout(0.2)  # type: ignore[attr-defined]
            deadline = time.monotonic() + CONNECT_SECONDS
            try:
                while len(connections) < self.world_size:
                    try:
                        connection = listener.accept()
                    except TimeoutError:
                        if time.monotonic() > deadline:
                            raise
                        for pid in self._pids:
                            os.kill(pid, 0)  # ProcessLookupError: it has died
                        continue
                    connections[connection.recv()] = connection
            except (OSError, EOFError) as error:
                self.close()
                raise RankLost(f"the local ranks did not start: {error}") from error
        self._connections = [connections[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the pool's rank processes; the next `run` starts new processes."""
        for connection in self._connections:
            connection.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for descriptor in self._rings.values():
            os.close(descriptor)
        self._connections = []
        self._pids = []
        self._rings = {}
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


@dataclass(frozen=True)
class _PoolSettings:
    """Settings shared by all rank processes of one pool.

    directory: path of the directory with the pool's socket, the store of torch.distributed and the flight recorders
    (each rank's last collective calls). key: authentication key of the socket. world_size: number of ranks. threads:
    torch threads of a rank. timeout: time limit of torch.distributed in seconds. backend: backend of torch.distributed.
    path, cwd: `sys.path` and working directory that each process sets."""

    directory: str
    key: bytes
    world_size: int
    threads: int
    timeout: float
    backend: str
    path: list[str] = field(default_factory=lambda: list(sys.path))
    cwd: str = field(default_factory=os.getcwd)


def start_server(preloaded: Sequence[str] = PRELOADED) -> None:
    """Start the server process that forks local ranks, so that it loads torch in the background before ranks are
    needed. Optional: `LocalRanks` starts the server if it does not run.

    preloaded: names of modules that the server imports. Ignored if the server runs already.
    """
    _Server.running(preloaded)


class _Server:
    """Server process that has loaded torch and forks rank processes on request, so that they start fast. A process that
    uses local ranks has at most one server, started on first use. preloaded: names of modules that the server imports.
    """

    _instance: _Server | None = None

    @classmethod
    def running(cls, preloaded: Sequence[str] | None = None) -> _Server:
        """Return this process's fork server, from which the processes of local ranks are forked; start one if none
        runs.

        preloaded: names of modules that a new server imports before it forks. None: the modules of the last server, or
        the default list."""
        last = cls._instance
        if last is not None and last.process.poll() is None and last.owner == os.getpid():
            return last
        cls._instance = cls(preloaded or (PRELOADED if last is None else last.preloaded))
        return cls._instance

    def __init__(self, preloaded: Sequence[str]) -> None:
        self.preloaded = preloaded
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER_CODE, str(theirs.fileno()), ",".join(preloaded), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=build_child_environment(),
            )
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.connection = Connection(ours.detach())
        atexit.register(self.stop)

    def fork(self, settings: _PoolSettings) -> list[int]:
        """Fork the rank processes of a pool with `settings`; return their process IDs, by rank. Raises RankLost if the
        server has ended."""
        try:
            with self.lock:  # pools may start in threads
                self.connection.send(settings)
                return self.connection.recv()
        except (EOFError, OSError) as error:
            raise RankLost(f"the server of local ranks has exited: {error}") from error

    def stop(self) -> None:
        """Close the connection to the server process, which makes it end, and wait for its end."""
        if self.owner == os.getpid():
            self.connection.close()
            self.process.wait()


# --- in the server


def serve(descriptor: int, preloaded: Sequence[str]) -> None:
    """Run the main loop of the server process: fork ranks as requested, until the requesting process closes the
    connection.

    descriptor: file descriptor of the socket with requests. preloaded: names of modules to import first.
    """
    connection = Connection(descriptor)
    # The starting process handles an interrupt, and SIGTERM, which may come to all processes of a service. Without
    # SIGCHLD ended ranks leave no zombies.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    for name in preloaded:
        importlib.import_module(name)
    # Collections are off while modules are imported, as they would free nothing. Those of ranks look through no module:
    # that would take 0.1 s, and copy the memory which they share with this process.
    gc.freeze()
    while True:
        try:
            settings: _PoolSettings = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        pids = []
        for rank in range(settings.world_size):
            pid = os.fork()
            if pid == 0:
                gc.enable()
                connection.close()
                _run_rank_process(rank, settings)
            pids.append(pid)
        connection.send(pids)


# --- in a rank


def _run_rank_process(rank: int, settings: _PoolSettings) -> None:
    """Run the forked process of rank `rank` of a pool with `settings`: initialise torch.distributed, then run the
    functions that the parent requests. Never returns."""
    status = 1
    directory = settings.directory
    try:
        die_with_parent()
        ignore_model_warnings()
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.path[:] = settings.path
        os.chdir(settings.cwd)
        attach_process_writer(os.open(f"{directory}/calls-{rank}", os.O_RDWR | os.O_CLOEXEC))
        import torch
        import torch.distributed as dist

        torch.set_num_threads(settings.threads)
        with Client(f"{directory}/socket", authkey=settings.key) as connection:
            connection.send(rank)
            dist.init_process_group(
                settings.backend,
                init_method=f"file://{directory}/store",
                rank=rank,
                world_size=settings.world_size,
                timeout=timedelta(seconds=settings.timeout),
            )
            _serve_calls(connection)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve_calls(connection: Connection) -> None:
    """Answer the function calls requested on `connection`, until it is closed. A request is ("package.module:function",
    arguments); its answer is ("ok", result, "") or ("error", exception, traceback text)."""
    while True:
        try:
            name, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            connection.send_bytes(pickle.dumps(("ok", _import_function(name)(*args), "")))
        except Exception as error:
            text = traceback.format_exc()
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = RuntimeError(f"{type(error).__name__}: {error}")
            connection.send(("error", error, text))


def _import_function(name: str) -> Callable[..., Any]:
    """Import and return the function called `name`, "package.module:function"."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
