"""Signals during a run are recorded, and previous handlers are restored."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from meshwright.launcher import stopping
from meshwright.launcher.stopping import StopRequest


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def python_answers_interrupts():
    """Background jobs of a shell ignore interrupts, and tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_recorded_and_previous_handler_restored(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop.requested
        send(number)
        assert stop.requested and stop.interrupted == (number == signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_second_interrupt_raises_keyboard_interrupt(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    with StopRequest() as stop:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        now[0] += 0.1
        send(signal.SIGINT)  # the same one, forwarded twice
        assert stop.requested and stop.interrupted
        now[0] += 2.0
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_ignored_interrupts_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a rank of the launcher
    try:
        with StopRequest() as stop:
            send(signal.SIGINT)
            assert not stop.requested
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_training_in_thread_works_without_signal_handlers():
    seen = []

    def run() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
