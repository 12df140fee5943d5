"""The handle of a communication call under way: what every call of `comm/` returns, and how an answer that never comes
is reported."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from meshwright.comm.mesh import Communicator, calls_under_way
from meshwright.errors import RankLost
from meshwright.flight_recorder.call_ring import get_process_writer


class Handle:
    """A call under way. `wait` may be called again; the result is there after the first, or the first one's error."""

    __slots__ = ("_call", "_communicator", "_error", "_finishers", "_timeout", "_what", "_works")

    def __init__(
        self,
        works: Sequence[Any] = (),
        what: Callable[[], tuple[str, str]] | None = None,
        timeout: timedelta | None = None,
        communicator: Communicator | None = None,
        call: int = 0,
    ) -> None:
        self._call = call  # its number in the ring of calls
        self._communicator = communicator
        self._error: RankLost | None = None
        self._works = works
        self._finishers: list[Callable[[], Any]] = []
        self._what = what
        self._timeout = timeout

    def then(self, finish: Callable[[], Any] | None) -> Handle:
        """Run `finish` when the call has been waited for."""
        if finish is not None:
            self._finishers.append(finish)
        return self

    def wait(self) -> None:
        """Return when the result may be used (on CUDA: by later work on the current stream). Raises RankLost."""
        if self._error is not None:
            raise self._error
        works, finishers = self._works, self._finishers
        self._works, self._finishers = (), []
        calls_under_way.pop(self, None)
        begun = time.perf_counter()
        if works and self._communicator is not None:
            self._communicator.calls.wait(self._call)
        try:
            for work in works:
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
        except (RuntimeError, RankLost) as error:
            self._error = lost(self._what, error)
            raise self._error from error
        if works and self._communicator is not None:
            self._communicator.calls.done(self._call)
            self._communicator.waited_seconds += time.perf_counter() - begun
        for finish in finishers:
            finish()

    def settle(self, seconds: float) -> None:
        """Let the transfers come through, for nobody: of a call whose result is not wanted any more. What is lost then,
        nobody misses."""
        works, self._works, self._finishers = self._works, (), []
        calls_under_way.pop(self, None)
        with suppress(RuntimeError, RankLost):
            for work in works:
                work.wait() if self._timeout is None else work.wait(timedelta(seconds=seconds))
            if works and self._communicator is not None:
                self._communicator.calls.done(self._call)


DONE = Handle()
"""The handle of a call that had nothing to do."""


def lost(what: Callable[[], tuple[str, str]] | None, error: Exception) -> RankLost:
    """The error of a call that had no answer; `what` says who waits, and where."""
    get_process_writer().give_up()
    who, where = what() if what else ("a collective call had no answer", "its site")
    if isinstance(error, RankLost):  # of a program, which knows better who waits for whom
        return RankLost(f"{error}, in {where}")
    reason = re.sub(r"^\[[^\]]*\] ", "", " ".join(str(error).split()))  # gloo begins with a place in its source
    return RankLost(f"{who} in {where}: {reason[:300]}")
