"""Collective programs that replace the backend's calls on mesh axes, and the thread that runs them.

On CPU tensors one thread runs programs in posting order, the same on every rank, while the process computes. On CUDA
tensors under NCCL programs are queued on their own stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.collectives.named import NamedProgram
from meshwright.comm.device_thread import start_thread
from meshwright.comm.programs import Executable, ScratchBuffers
from meshwright.program.check_collective import CheckedCollective


class Work:
    """Work handle of one run of a collective program on this process's communication thread, like torch.distributed's
    Work. run: function that runs the program."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._done = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Run the program now, in the calling thread; store its exception, if any, for `wait`."""
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the run of the program has ended; raise its exception, if any. `timeout` is ignored: each of the
        program's own waits has a limit."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class _StreamWork:
    """Work handle of one run of a collective program that was queued on a CUDA stream, like torch.distributed's Work.
    event: CUDA event recorded on that stream after the run."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> None:
        """Make later work of the current CUDA stream wait for the run. timeout: ignored."""
        torch.cuda.current_stream().wait_event(self._event)


class NamedPrograms:
    """Collective programs that one process runs in place of the torch.distributed backend's calls, and the queue of
    their runs.

    named: {(name of a mesh axis, operation): program}; all other calls go to the backend. timeout_seconds: limit of one
    wait. device: device of the vectors.
    """

    def __init__(
        self,
        named: Mapping[tuple[str, str], NamedProgram] | None = None,
        timeout_seconds: float = 600.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.named = dict(named or {})
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._buffers = ScratchBuffers()  # one run at a time
        self._executables: dict[tuple[tuple[int, ...], int], tuple[CheckedCollective, Executable]] = {}
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    def find(
        self, axis: str, operation: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, size: int
    ) -> Executable | None:
        """Return the prepared program to run in place of a call of the backend; None: use the backend's call.

        axis: name of the mesh axis. operation: such as "all_reduce". ranks, group: global ranks of the axis and their
        process group. size: bytes of the vector, by which the program is chosen."""
        named = self.named.get((axis, operation))
        if named is None:
            return None
        checked = named.choose_program(size)
        key = (ranks, id(checked))
        if key not in self._executables:  # the program is kept too: its id must not be reused
            made = Executable(checked, group, self._timeout_seconds, self._buffers, self._device)
            self._executables[key] = (checked, made)
        return self._executables[key][1]

    def post(self, run: Callable[[], Any], tensor: torch.Tensor, batched: bool) -> Work | _StreamWork:
        """Queue a run of a program and return its work handle without waiting for it.

        run: function that runs the program on `tensor`, the operation's vector. batched: True if the program posts each
        group of messages as one call on a CUDA stream (NCCL). With a CUDA tensor, such a run is queued on a CUDA
        stream. Any other run is executed by the communication thread, which waits for the messages.
        """
        if tensor.is_cuda and batched:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
                tensor.record_stream(self._stream)
                return _StreamWork(self._stream.record_event())
        if self._thread is None:
            self._thread = start_thread(self._run_posted_programs, "collective programs", tensor.is_cuda)
        work = Work(run)
        self._queue.put(work)
        return work

    def close(self) -> None:
        """Wait for all posted runs, end the communication thread, and release the prepared programs."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._executables.clear()

    def _run_posted_programs(self) -> None:
        """Run posted programs in order until `close` is called: main loop of the communication thread."""
        while (work := self._queue.get()) is not None:
            work.start()
