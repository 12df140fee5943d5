"""The step clock: phases add up, and waiting for other ranks is not work."""

from __future__ import annotations

import time

import pytest
import torch

from meshwright.monitoring.clock import StepClock


def test_repeated_parts_are_summed_in_order_of_first_mark():
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for part in ("data", "forward", "backward", "forward", "backward"):
        time.sleep(0.01)
        clock.mark(part)
    seconds = clock.seconds()
    assert list(seconds) == ["data", "forward", "backward"]
    assert seconds["data"] >= 0.01 and seconds["forward"] >= 0.02 and seconds["backward"] >= 0.02
    assert sum(seconds.values()) == pytest.approx(clock.compute_working_seconds())


def test_new_step_drops_earlier_marks():
    clock = StepClock(torch.device("cpu"))
    clock.start()
    clock.mark("old")
    clock.start()
    clock.mark("new")
    assert list(clock.seconds()) == ["new"]


def test_gpu_times_are_those_of_the_previous_step(monkeypatch: pytest.MonkeyPatch):
    """The host waits for no mark of a step that the GPU has not finished, but for those of the first step."""
    clock, now = StepClock(torch.device("cuda")), iter(range(100))
    waited: list[float] = []

    class Event:
        """A CUDA event that is recorded at a whole number of milliseconds."""

        def __init__(self) -> None:
            self.time = next(now)

        def elapsed_time(self, other: Event) -> float:
            return other.time - self.time

        def synchronize(self) -> None:
            waited.append(self.time)

    monkeypatch.setattr(clock, "_take_time", Event)
    marks = []
    for step in range(3):
        clock.start()
        clock.mark("data")
        for _ in range(step):
            clock.mark("forward")
        working = clock.compute_working_seconds()
        clock.mark("update")
        marks.append(clock.marks)
        expected = {0: 1e-3, 1: 1e-3, 2: 2e-3}[step]
        assert working == pytest.approx(expected)
    assert waited == [1, 2, 6]
    assert clock.seconds() == pytest.approx({"data": 1e-3, "forward": 1e-3, "update": 1e-3})
    forward = [clock.seconds(each).get("forward", 0.0) for each in marks]  # of steps finished at once, or one later
    assert forward == pytest.approx([0.0, 1e-3, 2e-3])


def test_time_spent_waiting_is_not_work():
    waited = [100.0]
    clock = StepClock(torch.device("cpu"), lambda: waited[0])
    clock.start()
    time.sleep(0.05)
    waited[0] += 0.04
    clock.mark("forward")
    assert clock.seconds()["forward"] >= 0.05
    assert clock.compute_working_seconds() == pytest.approx(clock.seconds()["forward"] - 0.04)
