"""The memory that a rank takes: its process's highest resident set, and the growth in its first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.monitoring.memory import peak_resident_bytes, reset_peak_rss, resident_bytes
from meshwright.monitoring.metrics import peak_memory_bytes

STEPS = 3
"""So many are watched; in the first the optimizer has its state made, and what is compiled is."""


class StepMemory:
    """Bytes of one process: resident on a CPU, allocated on CUDA. On a CPU the count begins anew before the first step
    (Linux, proc(5)), so that what loading took does not count; where that cannot be, `growth_in_first_steps`
    stays None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.growth_in_first_steps: int | None = None
        """Growth from before trainer construction to the peak of the first `STEPS` steps."""
        self.resident_before: int | None = None
        """Resident set of the process when the trainer was about to be made: interpreter, libraries, process group."""
        self._before: int | None = None
        self._earlier = 0  # the peak before the count began anew
        self._earlier_resident = 0
        self._left = 0

    def start(self) -> None:
        """The trainer is about to be made."""
        self._before = _held(self.device)
        self.resident_before = resident_bytes()

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
        self._earlier_resident = peak_resident_bytes() or 0
        self._left = STEPS if self._before is not None and _reset_peak(self.device) else 0

    def step_done(self) -> None:
        """A step is over, and nothing has come after it yet."""
        if self._left:
            self._left -= 1
            now = _peak(self.device)
            if now is not None and self._before is not None:
                self.growth_in_first_steps = max(self.growth_in_first_steps or 0, now - self._before)

    def stop(self) -> None:
        """What comes now takes memory of its own, for which no step is to blame."""
        self._left = 0

    def peak_bytes(self) -> int:
        """Peak bytes of this process so far: allocated on CUDA, RSS on a CPU."""
        return max(self._earlier, peak_memory_bytes(self.device))

    def allocator_peak(self) -> int | None:
        """Highest sum of tensors so far, of the allocator on CUDA; None on a CPU, whose allocator does not count."""
        return self.peak_bytes() if self.device.type == "cuda" else None

    def process_peak(self) -> int | None:
        """Highest resident set of this process so far, libraries included: what `top`, a container's limit and the
        kernel's out-of-memory killer see. None where the kernel does not say."""
        now = peak_resident_bytes()
        return None if now is None else max(self._earlier_resident, now)


def _held(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def _reset_peak(device: torch.device) -> bool:
    """Begin the count of the peak anew; whether that worked."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return reset_peak_rss()
