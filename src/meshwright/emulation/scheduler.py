"""Scheduler of emulated ranks: threads of one process, of which one runs at a time. A rank runs until it waits for
another rank; then the next rank, in cyclic order, that can continue runs. Free of torch."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import CheckFailed

_sleep = time.sleep

GRACE = 5.0  # seconds that a rank may take to end after an interrupt
MAX_POLLS = 1000
"""Number of polls of one rank without any rank making a call, after which a run in which no other rank can run is a
deadlock."""


class EmulationFailed(CheckFailed):
    """Failure of a communication call of emulated ranks: all ranks wait (deadlock), or their calls do not match."""


class RankStopped(BaseException):
    """Raised in waiting ranks after another rank has failed, to end them. A BaseException, so that `except Exception`
    in programs does not catch it."""


@dataclass(frozen=True, slots=True)
class WaitCondition:
    """Condition that a rank waits for.

    ready: function that returns True once the rank can go on. describe: function that returns text such as "recv from
    rank 1 (its call 3, ring.py:14)". polled: True if the program polls the call (asks repeatedly whether it is
    complete) instead of blocking."""

    ready: Callable[[], bool]
    describe: Callable[[], str]
    polled: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """First error in one run of a function on emulated ranks.

    rank: rank that raised the error; None: no single rank (a deadlock). error: the exception. text: traceback of the
    error, without the frames of the emulation.
    """

    rank: int | None
    error: BaseException
    text: str


class EmulatedRankThread(threading.Thread):
    """Operating-system thread in which an emulated rank runs."""


def is_emulated_rank() -> bool:
    """Return True if the calling thread is that of an emulated rank."""
    return isinstance(threading.current_thread(), EmulatedRankThread)


class RankThread:
    """Thread of one emulated rank. index: number of the rank. state: the rank's process state, which is loaded into the
    process while the rank runs."""

    def __init__(self, index: int, state: Any) -> None:
        """Create the record of a rank whose thread has not started; arguments: see the class."""
        self.index, self.state = index, state
        self.resume = threading.Semaphore(0)
        self.wait: WaitCondition | None = None
        self.task: Callable[[], Any] | None = None
        self.result: Any = None
        self.calls = 0  # communication calls so far
        self.polls, self.calls_at_poll = 0, -1  # polls since the last call of any rank; all ranks' calls at that time
        self.thread: threading.Thread | None = None


class Scheduler:
    """Scheduler that runs a function on each rank's thread, one thread at a time, in a deterministic order.

    states: [rank], process state (default process group, random generators, environment) of each rank: its method
    `load` installs the state before the rank's thread runs, its method `save` stores the state afterwards. outside:
    process state of the calling program, saved before a run and restored after it.
    """

    def __init__(self, states: list[Any], outside: Any) -> None:
        """Create the ranks' records without starting threads; arguments: see the class."""
        self.ranks = [RankThread(index, state) for index, state in enumerate(states)]
        self.outside = outside
        self.running: RankThread | None = None
        self.failure: Failure | None = None
        self.turns = 0  # turns of all ranks so far
        self._idle = threading.Event()
        self._closed = False
        self._abandoned = False  # interrupted while a rank computed: its thread must not change the process state
        self._lock = threading.Lock()

    def run(self, tasks: list[Callable[[], Any]]) -> list[Any]:
        """Run tasks[r]() on rank r for all ranks; return the results, [rank].

        Raises the first error of a rank. Raises EmulationFailed for a deadlock, and if an earlier run was interrupted
        (Ctrl-C) while a rank computed, as the rank's thread may still run.
        """
        if self._abandoned:
            raise EmulationFailed("the ranks were interrupted: create new ones")
        for rank, task in zip(self.ranks, tasks, strict=True):
            rank.task, rank.wait, rank.result = task, None, None
            rank.polls = 0
            if rank.thread is None:
                rank.thread = EmulatedRankThread(
                    target=self._serve, args=(rank,), name=f"rank {rank.index}", daemon=True
                )
                rank.thread.start()
        self.failure = None
        self._idle.clear()
        self.outside.save()
        try:
            self._resume(self.ranks[0])
            self._idle.wait()
        except KeyboardInterrupt:  # the running rank stops at its next communication call
            self.failure = Failure(None, KeyboardInterrupt(), "interrupted")
            self._idle.wait(GRACE)
            raise
        finally:
            with self._lock:
                if self.running is not None:
                    self._abandoned = True
                    self.running.state.save()
                self.outside.load()
        if self.failure is not None:
            raise self.failure.error
        return [rank.result for rank in self.ranks]

    def current(self) -> RankThread:
        """Return the emulated rank in whose thread this method is called. Raises RuntimeError in any other thread."""
        rank = self.running
        if rank is None or rank.thread is not threading.current_thread():
            raise RuntimeError(
                "communication call from a thread that is not an emulated rank: threads started by a rank cannot "
                "communicate under emulation"
            )
        return rank

    def wait(self, ready: Callable[[], bool], describe: Callable[[], str], polled: bool = False) -> None:
        """Block the running rank until `ready()` is True, while the other ranks run.

        describe: returns text on what the rank waits for, such as "recv from rank 1", for the deadlock report. polled:
        True if the program polls the call (asks repeatedly whether it is complete) instead of blocking; the deadlock
        report says so. Raises RankStopped if the run has failed meanwhile (an error on a rank, or a deadlock).
        """
        rank = self.current()
        self.check_stopped()
        if not ready():
            rank.wait = WaitCondition(ready, describe, polled)
            if not self._switch_to_next(rank):
                raise RankStopped
            rank.resume.acquire()
            rank.wait = None
            self.check_stopped()

    def yield_turn(self, describe: Callable[[], str] = lambda: "polling", polled: bool = False) -> None:
        """Let the next rank that can run do so, and return at this rank's next turn. A deadlock of ranks that only call
        this method is not detected.

        describe: returns text on the call that the rank polls, for the deadlock report. polled: True if the program
        polls a communication call (asks repeatedly whether the call is complete). While this rank then waits for its
        turn, `poll` on another rank counts it as stuck when it looks for a deadlock, and the report says that the rank
        polls."""
        turns = iter((False,))
        self.wait(lambda: next(turns, True), describe, polled)

    def poll(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Let other ranks run once. Call this when the program asks whether a communication call is complete, for
        example by `is_completed`, and the call is not complete.

        ready: returns True once the call is complete. describe: returns text on the call for the deadlock report. The
        run fails with a deadlock, and RankStopped is raised, after 1000 polls (`MAX_POLLS`) of this rank during which
        no rank made a call and no other rank could run."""
        self.yield_turn(describe, polled=True)
        rank, calls = self.current(), sum(each.calls for each in self.ranks)
        rank.polls, rank.calls_at_poll = (rank.polls + 1 if calls == rank.calls_at_poll else 1), calls
        others = (other for other in self.ranks if other is not rank and other.task is not None)
        if rank.polls >= MAX_POLLS and not ready() and all(map(_is_stuck, others)):
            rank.wait = WaitCondition(ready, describe, polled=True)
            self.fail(EmulationFailed(self._describe_deadlock()), None)
            rank.wait = None
            raise RankStopped

    def sleep(self, seconds: float) -> None:
        """Stand-in for `time.sleep`: let another rank run; sleep for `seconds` only if no other rank can run, or if the
        calling thread is not that of a rank."""
        rank = self.running
        if rank is None or rank.thread is not threading.current_thread() or self._closed:
            _sleep(seconds)
            return
        turn = self.turns
        self.yield_turn()
        if self.turns == turn + 1:  # no other rank ran
            _sleep(seconds)

    def check_stopped(self) -> None:
        """Raise RankStopped if the run has failed (an error on a rank, or a deadlock)."""
        if self.failure is not None:
            raise RankStopped

    def fail(self, error: BaseException, rank: int | None) -> None:
        """Record `error` as the failure of the run, unless an earlier error is recorded. rank: rank that raised the
        error; None: a deadlock."""
        if self.failure is None:
            self.failure = Failure(rank, error, format_error(error))

    def close(self) -> None:
        """End the threads of all ranks."""
        self._closed = True
        for rank in self.ranks:
            rank.resume.release()
        for rank in self.ranks:
            if rank.thread is not None and self.running is None:
                rank.thread.join()

    def _serve(self, rank: RankThread) -> None:
        """Main function of a rank's thread: each time the thread is resumed, run the rank's current task; return when
        the scheduler is closed."""
        while True:
            rank.resume.acquire()
            if self._closed:
                return
            try:
                if self.failure is None and rank.task is not None:
                    rank.result = rank.task()
            except RankStopped:
                pass
            except BaseException as error:
                self.fail(error, rank.index)
            rank.task = None
            if not self._switch_to_next(rank):
                return

    def _switch_to_next(self, rank: RankThread) -> bool:
        """Save the process state of `rank`, which stops running, and resume the next rank that can run; return True. If
        the run was interrupted (Ctrl-C) while `rank` computed, do neither and return False."""
        with self._lock:
            if not self._abandoned:
                rank.state.save()
                self._resume_after(rank)
            return not self._abandoned

    def _resume_after(self, rank: RankThread) -> None:
        """Resume the next rank, in cyclic order after `rank`, that can go on. If all ranks have finished, end the run;
        if all unfinished ranks wait, record a deadlock."""
        count = len(self.ranks)
        others = [self.ranks[(rank.index + distance) % count] for distance in range(1, count + 1)]
        waiting = [other for other in others if other.task is not None]
        if not waiting:
            self.running = None
            self._idle.set()
            return
        ready = (other for other in waiting if self.failure or other.wait is None or other.wait.ready())
        following = next(ready, None)
        if following is None:
            self.fail(EmulationFailed(self._describe_deadlock()), None)
            following = waiting[0]
        self._resume(following)

    def _resume(self, rank: RankThread) -> None:
        """Make `rank` the running one: load its process state and wake its thread."""
        self.running = rank
        self.turns += 1
        rank.state.load()
        rank.resume.release()

    def _describe_deadlock(self) -> str:
        """Return the report of a deadlock: one line for each rank, with the call in which it waits or polls."""
        lines = ["deadlock: no rank can continue"]
        for rank in self.ranks:
            does = "has ended"
            if rank.wait is not None:
                does = f"{'polls' if rank.wait.polled else 'waits in'} {rank.wait.describe()}"
            lines.append(f"  rank {rank.index} {does}")
        return "\n".join(lines)


def _is_stuck(rank: RankThread) -> bool:
    """Return True if a rank waits for a communication call that is not complete, or polls a call."""
    return rank.wait is not None and (rank.wait.polled or not rank.wait.ready())


def format_error(error: BaseException) -> str:
    """Return the traceback of an error as text, without leading frames of the emulation."""
    frame = error.__traceback__
    while frame is not None and "/meshwright/emulation/" in frame.tb_frame.f_code.co_filename:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))
