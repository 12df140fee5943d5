"""Step time by phase, measured by the host clock on CPU and by events on CUDA, without waiting for the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

Marks = list[tuple[str, float | torch.cuda.Event, float]]
"""Marks of a step: name of the phase that ends, its end (seconds of the host clock or an event), seconds that the
process has spent waiting in collective calls until then."""

IN_GRAPH = "forward and backward"
"""Name of the phase of forward and backward that are launched together, as a CUDA graph."""


class StepClock:
    """Clock of the phases of a training step, such as "forward". The caller marks the end of each phase.

    device: device of this rank. On CUDA a mark records an event on the current stream, whose time is read later, so
    that the host does not wait for the GPU. waited: function that returns the seconds that this process has spent
    waiting in collective calls since its start.
    """

    def __init__(self, device: torch.device, waited: Callable[[], float] = lambda: 0.0) -> None:
        """Start without marks; arguments: see the class."""
        self.cuda = device.type == "cuda"
        self._waited = waited
        self.marks: Marks = []
        """Marks of the step that was started last."""
        self._previous = self.marks
        self.listener: Callable[[str], None] | None = None
        """Called with the name of each mark ("" for `start`) while a profile is recorded."""

    def start(self) -> None:
        """Start to time a step. The marks of the previous step are kept, as on CUDA their times are read during this
        step."""
        self._previous, self.marks = self.marks, []
        self.mark("")

    def mark(self, part: str) -> None:
        """Record that the phase called `part`, such as "forward", ends now. The phase began at the previous mark. The
        seconds of several phases with the same name are summed."""
        self.marks.append((part, self._take_time(), self._waited()))
        if self.listener is not None:
            self.listener(part)

    def seconds(self, marks: Marks | None = None) -> dict[str, float]:
        """Return {phase: seconds} of a step, in the order in which its phases first ended. On CUDA the host waits until
        the GPU has ended the step. marks: the attribute `marks` after the step's last mark; None: the step that was
        started last, on CUDA the one before."""
        if marks is None:
            marks = (self._previous or self.marks) if self.cuda else self.marks
        if self.cuda:
            marks[-1][1].synchronize()  # type: ignore[union-attr]
        parts: dict[str, float] = {}
        for (_, before, _), (part, after, _) in pairwise(marks):
            gap = before.elapsed_time(after) / 1e3 if self.cuda else after - before  # type: ignore
            parts[part] = parts.get(part, 0.0) + gap
        return parts

    def compute_working_seconds(self) -> float:
        """Return the seconds from `start()` to the last mark, less the seconds spent waiting in collective calls.

        On CUDA the waiting time is unknown, because the device waits and not the host. The result is then the seconds
        of the phases "data", "forward" and "backward" (in a CUDA graph together) of the previous step, which come
        before the reduction of gradients (under ZeRO-2 and 3 they include some waiting).
        """
        if self.cuda:
            seconds = self.seconds()
            return sum(seconds.get(part, 0.0) for part in ("data", "forward", "backward", IN_GRAPH))
        (_, begun, waited_before), (_, ended, waited_after) = self.marks[0], self.marks[-1]
        return ended - begun - (waited_after - waited_before)  # type: ignore[operator]

    def compute_waiting_seconds(self, marks: Marks | None = None) -> float:
        """Return the seconds that this process waited in collective calls between `start()` and the last mark. marks:
        as `seconds` takes them; None: the step that was started last."""
        marks = marks or self.marks
        return marks[-1][2] - marks[0][2]

    def _take_time(self) -> float | torch.cuda.Event:
        """Return the present time, which marks the end of a phase: seconds of the host clock, or on CUDA an event
        recorded on the current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
