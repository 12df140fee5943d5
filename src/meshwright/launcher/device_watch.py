"""Watch over the collective calls that a rank has queued on its GPU: a hang is reported before NCCL aborts the
processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from meshwright.comm.device_thread import start_thread
from meshwright.comm.mesh import Communicator
from meshwright.errors import RankLost
from meshwright.flight_recorder.device_calls import DeviceCalls
from meshwright.launcher.host_calls import HostCalls
from meshwright.launcher.rank_process import end_as_lost


@contextmanager
def watch_device_calls(communicator: Communicator, host_calls: HostCalls | None) -> Iterator[None]:
    """Context manager in which the communicator's calls on a GPU are recorded as complete when the GPU is through them,
    and one that takes longer than the time limit ends this process as RankLost does. No effect on CPUs.

    host_calls: flight recorder of the host's ranks, which writes the report; None: the launcher writes it.
    """
    if communicator.device.type != "cuda":
        yield
        return
    recorder = communicator.calls
    overdue = partial(_end_rank, communicator, host_calls)
    calls = DeviceCalls(recorder, torch.cuda.Event, communicator.timeout_seconds, overdue)
    communicator.calls = calls  # type: ignore[assignment]
    thread = start_thread(calls.watch, "device calls", cuda=True)
    try:
        yield
    finally:
        calls.close()
        thread.join()
        communicator.calls = recorder


def _end_rank(communicator: Communicator, host_calls: HostCalls | None, number: int) -> None:
    """End this process, whose GPU has not been through the call with this number in time, after the report if that is
    ours to write."""
    seen = communicator.calls.read()
    call = next((f"{each.name} at {each.place}" for each in seen.calls if each.number == number), f"call {number}")
    error = RankLost(f"the GPU of rank {seen.rank} was not through {call} within {communicator.timeout_seconds:g} s")
    end_as_lost(error if host_calls is None else host_calls.report(error))
