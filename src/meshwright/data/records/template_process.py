"""Subprocess that renders untrusted chat templates under CPU-time and memory limits.

Limits inside Jinja would have to cover every operator, method and filter that can produce large values.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright.data.records import template_rendering
from meshwright.data.records.template_rendering import RENDER_SECONDS, LimitReached, NotATemplate, TemplateError

_WAIT_SECONDS = 300.0  # for an answer that takes at most RENDER_SECONDS of CPU time, on a busy machine
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")  # passed on; no keys or tokens


class RenderProcess:
    """Chat template that is rendered in a sandboxed subprocess with limits on CPU time and memory. It has the same
    methods as `Renderer`.

    source: Jinja source. named: special tokens by the variable that stands for them in templates, such as {"bos_token":
    "<s>"}.
    """

    def __init__(self, source: str, named: Mapping[str, str]) -> None:
        """Start the subprocess, which compiles the template. Raises `NotATemplate` if `source` is no valid Jinja,
        `LimitReached` if compiling it exceeds the limits.
        """
        self._first = {"source": source, "named": dict(named)}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id of the starter: a forked copy does not own the pipes
        self._lock = threading.Lock()
        with self._lock:
            self._start()

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render a conversation in the subprocess; returns the text with the private-use characters `BEGIN` and `END`
        around each {% generation %} block. messages: the template's variables for each message (`role`, `content` ...).
        prompt: append the header of the assistant's next turn. tools: JSON schemas of functions. Raises `TemplateError`
        if the template refuses the messages, `LimitReached` if a limit is exceeded.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            return self._send_request({"messages": list(map(dict, messages)), "prompt": prompt, "tools": list(tools)})

    def _start(self) -> None:
        """Start the subprocess and send it the template to be compiled. Raises `NotATemplate` if the template does not
        compile, `LimitReached` if a limit is exceeded.
        """
        program = "import sys, runpy; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
        self._process = subprocess.Popen(
            # -I: imports depend on neither the current directory nor the environment.
            [sys.executable, "-I", "-c", program, template_rendering.__file__, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end_process, self._process, self._owner)
        self._send_request(self._first)

    def _send_request(self, request: Mapping[str, Any]) -> str:
        """Send a request, a JSON object as described in `serve_requests`, to the subprocess and return the rendered
        text. Raises `TemplateError` if the template refuses the messages, `NotATemplate` if it does not compile,
        `LimitReached` if a limit is exceeded or no answer comes.
        """
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
            raise LimitReached(self._find_exit_reason())
        answer = json.loads(line)
        if "limit" in answer:
            self._stop()
            raise LimitReached(answer["limit"])
        if "not_a_template" in answer:
            self._stop()
            raise NotATemplate(answer["not_a_template"], answer["line"])
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def _read_line(self) -> bytes:
        """Read one line from the subprocess. The line returned has no newline at its end if the process ended, or 300
        seconds passed, before the line was complete.
        """
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
            return f"takes more than {RENDER_SECONDS} s of CPU time"
        return f"ended the process that renders it ({f'signal {-code}' if code < 0 else f'exit code {code}'})"

    def _stop(self) -> None:
        """End the subprocess; the next request starts a new one."""
        assert self._process is not None
        _end_process(self._process, self._owner)
        self._process = None


def _end_process(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill the subprocess, unless the caller is a forked copy of the process that started it. owner: id of the process
    that started it.
    """
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.kill()
    process.wait()
