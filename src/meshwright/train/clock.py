"""Where the time of a step goes: named parts, by host clock on CPU and by events on CUDA (no extra synchronisation)."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Marks the end of each part of a step; `seconds()` sums the parts by name.

    On CUDA a mark records an event on the current stream, read only after the step has synchronised anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """The part that just ended; several marks of one name add up."""
        self._marks.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by part since `start()`, in the order of their first marks."""
        if self.cuda:
            self._marks[-1][1].synchronize()  # type: ignore[union-attr]
        parts: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            gap = before.elapsed_time(after) / 1e3 if self.cuda else after - before  # type: ignore[union-attr, operator]
            parts[part] = parts.get(part, 0.0) + gap
        return parts

    def _now(self) -> float | torch.cuda.Event:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
