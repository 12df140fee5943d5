"""Base class of recorders of collective calls that add to what a rank's ring buffer records. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from meshwright.flight_recorder.call_log import RankCalls
from meshwright.flight_recorder.call_ring import CallWriter


class WrappedCalls:
    """Recorder of collective calls that forwards every method to the recorder `calls`; see `CallWriter` for methods.
    Subclasses override some."""

    def __init__(self, calls: CallRecorder) -> None:
        self._calls = calls

    def register_group(self, ranks: Sequence[int], pair: tuple[int, int] | None = None, purpose: str = "") -> int:
        """Register a group of ranks; return its number."""
        return self._calls.register_group(ranks, pair, purpose)

    def count_calls(self, group: int) -> int:
        """Return the number of calls that this rank has made in a group."""
        return self._calls.count_calls(group)

    def post(self, group: int, site: str, operation: str, axis: str, payload_bytes: int, dtype: Any, shape: Any) -> int:
        """Record that this rank enters a call; return the number of the call."""
        return self._calls.post(group, site, operation, axis, payload_bytes, dtype, shape)

    def post_together(self) -> AbstractContextManager[None]:
        """Return the context manager around messages that are posted as one group."""
        return self._calls.post_together()

    def wait(self, number: int) -> None:
        """Record that the process begins to wait for a call."""
        self._calls.wait(number)

    def done(self, number: int) -> None:
        """Record the completion of a call."""
        self._calls.done(number)

    def give_up(self) -> None:
        """Record that a call of this rank timed out."""
        self._calls.give_up()

    def read(self) -> RankCalls:
        """Return the recorded calls."""
        return self._calls.read()


CallRecorder = CallWriter | WrappedCalls
"""Recorder of a process's collective calls (`comm.mesh.CommunicationState.calls`)."""
