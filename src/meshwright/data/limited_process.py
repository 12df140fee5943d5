"""Subprocess that handles untrusted input, one request at a time, under limits on CPU time and memory.

This file imports nothing of Meshwright: the subprocess runs it, too, and holds nothing but the program's libraries.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

_WAIT_SECONDS = 300.0  # for an answer that takes at most some seconds of CPU time, on a busy machine
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")  # passed on; no keys or tokens
_START = "import sys, runpy; sys.path[:] = sys.argv[5:]; runpy.run_path(sys.argv[1], run_name='__main__')"

Handler: TypeAlias = "Callable[[dict[str, Any]], dict[str, Any]]"
"""Answers a request; both are JSON objects."""


class HandlerFailed(Exception):
    """Error: the function in the subprocess that answers requests raised an exception. The text is the type and message
    of that exception."""


class LimitedProcess:
    """Subprocess that answers requests (JSON objects) under limits on CPU time and memory. It is started on the first
    request, and restarted after a limit has ended it.

    program: path of a Python file that imports nothing of Meshwright; its function `make_handler` returns the function
    that answers requests. first: request sent to every new process before all others, such as the template to compile.
    cpu_seconds: limit for one request. memory_bytes: limit of the process's address space.
    """

    def __init__(self, program: str, first: Mapping[str, Any], cpu_seconds: int, memory_bytes: int) -> None:
        """Store the settings; the process starts with `start` or the first request."""
        self._program, self._first, self._cpu_seconds, self._memory_bytes = program, first, cpu_seconds, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id of the starter: a forked copy does not own the pipes
        self._lock = threading.Lock()

    def start(self) -> dict[str, Any]:
        """Start the subprocess and return its answer to the first request. If a limit ends the process, the answer is
        {"limit": reason}. Raises `HandlerFailed` if answering raised an exception."""
        with self._lock:
            return self._start()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. If a limit ends the process, the answer is {"limit": a clause such as
        "takes more than 10 s of CPU time"}, and the next request starts a new process. Raises `HandlerFailed` if
        answering raised an exception."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                answer = self._start()
                if "limit" in answer:
                    return answer
            return self._send_request(request)

    def _start(self) -> dict[str, Any]:
        """Start the subprocess and return its answer to the first request."""
        self._process = subprocess.Popen(
            # -I: imports depend on neither the current directory nor the environment.
            [
                *(sys.executable, "-I", "-c", _START, __file__, self._program),
                *(str(self._cpu_seconds), str(self._memory_bytes), *filter(None, sys.path)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end_process, self._process, self._owner)
        return self._send_request(self._first)

    def _send_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the subprocess and return the answer, {"limit": reason} if no answer comes. Raises
        `HandlerFailed` if answering raised an exception."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line()
        except BrokenPipeError:
            line = b""
        except BaseException:  # an interrupt: the pending answer must not be taken for that of the next request
            self._stop()
            raise
        if not line.endswith(b"\n"):
            return {"limit": self._find_exit_reason()}
        answer: dict[str, Any] = json.loads(line)
        if "limit" in answer or "exception" in answer:
            self._stop()
        if "exception" in answer:
            raise HandlerFailed(answer["exception"])
        return answer

    def _read_line(self) -> bytes:
        """Read one line from the subprocess. If the process ends, or 300 seconds pass, the incomplete line is returned,
        without a newline at its end."""
        assert self._process is not None and self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + _WAIT_SECONDS
        parts: list[bytes] = []
        while not (parts and parts[-1].endswith(b"\n")):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                break
            part = os.read(descriptor, 1 << 20)
            if not part:
                break
            parts.append(part)
        return b"".join(parts)

    def _find_exit_reason(self) -> str:
        """Stop the subprocess and return the reason why it gave no answer, as a clause such as "takes more than 10 s of
        CPU time".
        """
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        self._stop()
        if code is None:
            return f"gave no answer within {_WAIT_SECONDS:.0f} s"
        if code == -signal.SIGPROF:
            return f"takes more than {self._cpu_seconds} s of CPU time"
        return f"ended the process that handles it ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def _stop(self) -> None:
        """End the subprocess; the next request starts a new one."""
        assert self._process is not None
        _end_process(self._process, self._owner)
        self._process = None


def _end_process(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill the subprocess, unless the caller is a forked copy of the process that started it. owner: id of the process
    that started the subprocess.
    """
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.kill()
    process.wait()


def serve_requests(program: str, cpu_seconds: int, memory_bytes: int) -> None:
    """Main loop of the subprocess: read requests from standard input, one JSON object per line, and write one answer
    per line, until the input ends. The kernel ends the process when a request exceeds `cpu_seconds`, and refuses
    allocations beyond `memory_bytes`. program: path of the Python file whose function `make_handler` returns the
    function that answers requests; the file is imported before memory is limited. What the program prints is discarded.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    handle: Handler = runpy.run_path(program)["make_handler"]()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(hard, memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interrupts from the terminal
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = handle(json.loads(line))
            data = json.dumps(answer).encode()
        except MemoryError:
            answer = {"limit": f"needs more than {memory_bytes / 2**30:g} GiB of memory"}
            data = json.dumps(answer).encode()
        except Exception as error:
            answer = {"exception": f"{type(error).__name__}: {error}"[:1000]}
            data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(data + b"\n")
        answers.flush()
        if "limit" in answer or "exception" in answer:
            return


if __name__ == "__main__":
    serve_requests(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
