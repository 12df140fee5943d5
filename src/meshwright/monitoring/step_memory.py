"""Memory of a rank's process: its peak, and its growth in the first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.monitoring.memory import read_peak_resident_bytes, read_resident_bytes, reset_peak_rss
from meshwright.monitoring.metrics import read_peak_memory_bytes

STEPS = 3
"""Number of first steps that are measured; the first allocates optimizer state and compiles."""


class StepMemory:
    """Meter of this process's memory: its peak so far, and its growth from the call of `start` to the peak of the first
    training steps. Memory is counted in allocated bytes on CUDA and in resident bytes on a CPU. device: device of this
    rank.

    On a CPU the kernel's peak counter is reset before the first step (Linux, proc(5)), to exclude loading; if the
    counter cannot be reset, `growth_in_first_steps` stays None.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without measurements. device: device of this rank."""
        self.device = device
        self.growth_in_first_steps: int | None = None
        """Growth from before trainer construction to the peak of the first `STEPS` steps."""
        self.resident_before: int | None = None
        """Resident set in bytes before trainer construction: interpreter, libraries, process group."""
        self._before: int | None = None
        self._earlier = 0  # peak before the counter was reset
        self._earlier_resident = 0
        self._left = 0

    def start(self) -> None:
        """Record the current memory, from which growth is measured. Called before the trainer is constructed."""
        self._before = _read_current_bytes(self.device)
        self.resident_before = read_resident_bytes()

    @contextmanager
    def exclude_allocations(self) -> Iterator[None]:
        """Context manager inside which allocations do not count as memory growth of the first training steps."""
        before = _read_current_bytes(self.device)
        yield
        after = _read_current_bytes(self.device)
        if self._before is not None and before is not None and after is not None:
            self._before += after - before

    def begin(self) -> None:
        """Reset the counter of peak memory, which then gives the peak of the first training steps. Called just before
        the first step."""
        self._earlier = read_peak_memory_bytes(self.device)
        self._earlier_resident = read_peak_resident_bytes() or 0
        self._left = STEPS if self._before is not None and _reset_peak(self.device) else 0

    def step_done(self) -> None:
        """Update `growth_in_first_steps` (bytes) after one of the first `STEPS` (3) steps; do nothing after later
        steps. Called after each step, before other allocations."""
        if self._left:
            self._left -= 1
            assert self._before is not None
            growth = read_peak_memory_bytes(self.device) - self._before
            self.growth_in_first_steps = max(self.growth_in_first_steps or 0, growth)

    def stop(self) -> None:
        """Stop measuring the memory growth in the first training steps; later allocations do not belong to steps."""
        self._left = 0

    def read_peak(self) -> int:
        """Return the peak bytes of this process so far: allocated on CUDA, resident on a CPU."""
        return max(self._earlier, read_peak_memory_bytes(self.device))

    def read_allocator_peak(self) -> int | None:
        """Return the peak bytes of CUDA's caching allocator; None on a CPU, whose allocator keeps no count."""
        return self.read_peak() if self.device.type == "cuda" else None

    def peaks_to_json(self) -> dict[str, int | None]:
        """Return {"allocator_peak": bytes, "process_peak": bytes}, the two measured peaks of this rank; None for an
        unknown peak."""
        return {"allocator_peak": self.read_allocator_peak(), "process_peak": self.read_process_peak()}

    def read_process_peak(self) -> int | None:
        """Return the peak resident set size (RSS) of this process in bytes, libraries included; None if the kernel does
        not report it."""
        now = read_peak_resident_bytes()
        return None if now is None else max(self._earlier_resident, now)


def _read_current_bytes(device: torch.device) -> int | None:
    """Return the current memory of this process in bytes: allocated on a CUDA `device`, resident on a CPU (None if
    unknown)."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else read_resident_bytes()


def _reset_peak(device: torch.device) -> bool:
    """Reset the peak counter of a CUDA `device`, or of this process on a CPU; return True if this worked."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return reset_peak_rss()
