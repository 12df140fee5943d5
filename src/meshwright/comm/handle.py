"""Handles of collective calls in flight, and the error that reports a call without an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from meshwright.comm.backend import format_backend_error
from meshwright.comm.mesh import CommunicationState, calls_in_flight
from meshwright.errors import RankLost
from meshwright.flight_recorder.call_ring import get_process_writer


class Handle:
    """Handle of a collective call in flight, like torch.distributed's Work. `wait` returns when the result is valid;
    `wait` may be called again, and if the call has failed, raises its error each time.

    works: torch.distributed work handles of the call's transfers. describe: function that returns two texts for an
    error message: which rank waits for which, and in which call. timeout: limit of one wait (None: the backend's).
    communicator: owner of the flight recorder (ring of recent calls), in which the call has the number `call`; None:
    the call is not recorded."""

    __slots__ = ("_call", "_communicator", "_describe", "_error", "_finishers", "_timeout", "_works")

    def __init__(
        self, works: Sequence[Any] = (), describe: Callable[[], tuple[str, str]] | None = None,
        timeout: timedelta | None = None, communicator: CommunicationState | None = None, call: int = 0,
    ) -> None:  # fmt: skip
        self._call = call  # its number in the flight recorder
        self._communicator = communicator
        self._error: RankLost | None = None
        self._works = works
        self._finishers: list[Callable[[], Any]] = []
        self._describe = describe
        self._timeout = timeout

    def then(self, finish: Callable[[], Any] | None) -> Handle:
        """Add the callback `finish`, which `wait` calls once when the transfers are complete (None: add nothing).
        Return this handle."""
        if finish is not None:
            self._finishers.append(finish)
        return self

    def wait(self) -> None:
        """Wait until the call's result may be used, then run the callbacks. The result of a CUDA tensor may then be
        used by later work on the current stream; the host does not wait for it. Raises RankLost on an error or
        timeout."""
        if self._error is not None:
            raise self._error
        works, finishers = self._take()
        begun = time.perf_counter()
        if works and self._communicator is not None:
            self._communicator.calls.wait(self._call)
        try:
            self._wait_for_transfers(works, self._timeout)
        except (RuntimeError, RankLost) as error:
            self._error = make_rank_lost_error(self._describe, error)
            raise self._error from error
        if works and self._communicator is not None:
            self._communicator.waited_seconds += time.perf_counter() - begun
        for finish in finishers:
            finish()

    def _take(self) -> tuple[Sequence[Any], list[Callable[[], Any]]]:
        """Return the transfers and callbacks of the call, which is no longer in flight, and forget them."""
        taken = self._works, self._finishers
        self._works = ()
        self._finishers = []
        calls_in_flight.pop(self, None)
        return taken

    def settle(self, seconds: float) -> None:
        """Wait for the transfers of a call whose result is no longer needed; ignore errors and run no callbacks.
        seconds: limit of the wait for each transfer. On CUDA the backend's limit applies instead."""
        works, _ = self._take()
        with suppress(RuntimeError, RankLost):
            self._wait_for_transfers(works, self._timeout and timedelta(seconds=seconds))

    def _wait_for_transfers(self, works: Sequence[Any], timeout: timedelta | None) -> None:
        """Wait for the transfers `works`, and record the end of the call in the flight recorder. timeout: limit of the
        wait for each transfer (None: the backend's)."""
        for work in works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        if works and self._communicator is not None:
            self._communicator.calls.done(self._call)


DONE = Handle()
"""Handle of a call without communication: complete."""


def make_rank_lost_error(describe: Callable[[], tuple[str, str]] | None, error: Exception) -> RankLost:
    """Build the RankLost error for a collective call that failed.

    describe: function that returns two texts for the message: which rank waits for which, and in which call; None: the
    message names neither. error: the backend's error."""
    get_process_writer().give_up()
    who, where = describe() if describe else ("a collective call had no answer", "its site")
    if isinstance(error, RankLost):  # from a collective program, which names the waiting ranks
        return RankLost(f"{error}, in {where}")
    return RankLost(f"{who} in {where}: {format_backend_error(error)[:300]}")
