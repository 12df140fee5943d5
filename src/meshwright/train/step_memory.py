"""How much memory a training step takes: the growth of a rank from before its trainer was made to the highest moment of
its first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.train.metrics import peak_memory_bytes

STEPS = 3
"""So many are watched; in the first the optimizer has its state made, and what is compiled is."""


class StepMemory:
    """Bytes of one process: resident on a CPU, allocated on CUDA. On a CPU the count begins anew before the first step
    (Linux, proc(5)), so that what loading took does not count; where that cannot be, `peak` stays None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: int | None = None
        """Highest growth in a step so far."""
        self._before: int | None = None
        self._earlier = 0  # the peak before the count began anew
        self._left = 0

    def start(self) -> None:
        """The trainer is about to be made."""
        self._before = _held(self.device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated inside belongs to no step."""
        before = _held(self.device)
        yield
        after = _held(self.device)
        if self._before is not None and before is not None and after is not None:
            self._before += after - before

    def begin(self) -> None:
        """The first step is about to begin."""
        self._earlier = peak_memory_bytes(self.device)
        self._left = STEPS if self._before is not None and _forget_peak(self.device) else 0

    def step_done(self) -> None:
        """A step is over, and nothing has come after it yet."""
        if self._left:
            self._left -= 1
            now = _peak(self.device)
            if now is not None and self._before is not None:
                self.peak = max(self.peak or 0, now - self._before)

    def stop(self) -> None:
        """What comes now takes memory of its own, for which no step is to blame."""
        self._left = 0

    def process_peak(self) -> int:
        """Of this process so far, beginning and end included."""
        return max(self._earlier, peak_memory_bytes(self.device))


def _held(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int | None:
    """A figure of this process in bytes; None where there is no proc(5)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _forget_peak(device: torch.device) -> bool:
    """Begin the count of the peak anew; whether that worked."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
