"""Watch over the collective calls that a rank has queued on its GPU: a hang is reported before NCCL aborts the
processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from meshwright.comm.device_thread import start_thread
from meshwright.comm.mesh import CommunicationState
from meshwright.errors import RankLost
from meshwright.flight_recorder.device_calls import DeviceCalls
from meshwright.launcher.host_calls import HostCalls
from meshwright.launcher.rank_process import end_as_lost


@contextmanager
def watch_device_calls(communicator: CommunicationState, host_calls: HostCalls | None) -> Iterator[None]:
    """Context manager that watches the communicator's collective calls on a GPU. Each call is recorded as complete once
    the GPU has executed the call. A call that exceeds the communicator's time limit ends this process with a `RankLost`
    error. No effect on CPUs.

    host_calls: flight recorder of the host's ranks, which writes the hang report; None: the launcher writes the report.
    """
    if communicator.device.type != "cuda":
        yield
        return
    recorder = communicator.calls
    overdue = partial(_end_rank, communicator, host_calls)
    calls = DeviceCalls(recorder, torch.cuda.Event, communicator.timeout_seconds, overdue)
    communicator.calls = calls
    thread = start_thread(calls.watch, "device calls", cuda=True)
    try:
        yield
    finally:
        calls.close()
        thread.join()
        communicator.calls = recorder


def _end_rank(communicator: CommunicationState, host_calls: HostCalls | None, number: int) -> None:
    """End this process because its GPU has not completed collective call `number` in time. communicator: communication
    state of the process, which has recorded the call. host_calls: flight recorder of the host's ranks, which first
    writes the hang report; None: the launcher writes the report."""
    seen = communicator.calls.read()
    call = next((f"{each.name} at {each.place}" for each in seen.calls if each.number == number), f"call {number}")
    error = RankLost(f"the GPU of rank {seen.rank} did not complete {call} within {communicator.timeout_seconds:g} s")
    end_as_lost(error if host_calls is None else host_calls.report(error))
