"""Watch over calls on a GPU: it ends with the work; an overdue call ends the process after the report is written."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.comm.mesh import CommunicationState
from meshwright.errors import RankLost
from meshwright.flight_recorder import device_calls
from meshwright.flight_recorder.call_ring import CallWriter
from meshwright.launcher import device_watch
from meshwright.launcher.device_watch import watch_device_calls


def test_device_watch_has_no_effect_on_cpu():
    communicator = CommunicationState("cpu")
    calls = communicator.calls
    with watch_device_calls(communicator, None):
        assert communicator.calls is calls


@pytest.mark.parametrize("started_by_others", [False, True])
def test_overdue_call_ends_the_process_after_the_report(monkeypatch: pytest.MonkeyPatch, started_by_others: bool):
    monkeypatch.setattr(device_calls, "LOOK_SECONDS", 0.001)
    communicator = CommunicationState("cuda", timeout_seconds=0.01)
    communicator.calls = recorder = CallWriter()
    ended: list[Any] = []
    host_calls = mock.Mock(**{"report.side_effect": lambda error: RankLost(f"reported: {error}")})
    over = threading.Event()
    monkeypatch.setattr(device_watch, "end_as_lost", lambda error: (ended.append(error), over.set()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", ended.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda: mock.Mock(**{"query.return_value": False}))
    with watch_device_calls(communicator, host_calls if started_by_others else None):
        calls = communicator.calls
        number = calls.post(calls.register_group((0, 1)), "data.gradients", "all_reduce", "data", 16, "float32", (4,))
        calls.done(number)
        assert over.wait(10)
    assert ended[0] == 0, "the thread uses the rank's GPU"
    prefix = "reported: " * started_by_others
    assert str(ended[1]).startswith(
        f"{prefix}the GPU of rank 0 did not complete call 1 (all_reduce data.gradients over data) at "
    ) and str(ended[1]).endswith(" within 0.01 s")
    assert recorder.read().gave_up and communicator.calls is recorder
