"""Metrics file of a run, `metrics.jsonl`: one JSON object per line, for each step and for events such as a save."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import error_reason
from meshwright.monitoring.memory import read_peak_resident_bytes
from meshwright.monitoring.metrics_tail import parse_metrics_line
from meshwright.untrusted import read_file


class MetricsFile:
    """Writer of `metrics.jsonl`, a file with one JSON object per line. Each line is written completely or not at all; a
    line that could not be written (disk full) is retried with the next line.

    path: the file. resume_step: number of steps done in the checkpoint from which the run resumes, 0 for a fresh run;
    lines and events of later steps are removed first.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file. resume_step: number of steps done in the checkpoint from which the run resumes (0: a fresh
        run); lines of later steps are removed.

        Raises OSError when the file cannot be opened.
        """
        self._waiting = b""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            content = read_file(path, "metrics_bytes")
            kept = _drop_later_steps(content, resume_step)
            self._size = len(kept)
            if not content.startswith(kept):
                os.pwrite(self._descriptor, kept, 0)
            os.ftruncate(self._descriptor, self._size)  # in place: rewriting the file would need free space
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, line: dict[str, Any]) -> str | None:
        """Append one line, with null for floats that are not finite. Return None on success, else the reason of
        failure; the line is then retried with the next write."""
        self._waiting += json.dumps(_replace_non_finite(line)).encode() + b"\n"
        try:
            written = os.pwrite(self._descriptor, self._waiting, self._size)
        except OSError as error:
            return error_reason(error)
        if written < len(self._waiting):  # the disk is full
            os.ftruncate(self._descriptor, self._size)
            return "no space left on device"
        self._size, self._waiting = self._size + written, b""
        return None

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines of the metrics file `path` as dicts. A last line left incomplete by a killed process is
    skipped.

    Raises OSError if the file cannot be read or has more than `limits.LIMITS["metrics_bytes"]` bytes.
    """
    parsed = (parse_metrics_line(line) for line in read_file(path, "metrics_bytes").splitlines())
    return [line for line in parsed if line is not None]


def _drop_later_steps(content: bytes, resume_step: int) -> bytes:
    """Return the content of a metrics file without incomplete lines and lines of steps after `resume_step`. An event
    may follow lines of later steps than its own, as the stall of a save on a GPU is known only then."""
    return b"".join(
        line
        for line in content.splitlines(keepends=True)
        if line.endswith(b"\n") and (parse_metrics_line(line) or {}).get("step", 0) <= resume_step
    )


class SlowRankWatch:
    """Detector of a rank whose own work takes longer than the work of the other ranks, evaluated over windows of
    `window` steps.

    The time of a rank is the median, over the window, of its seconds of work per step (without waiting). The slowest
    rank is reported if its time exceeds `factor` times the median time of the other ranks. ranks: number of ranks.
    """

    def __init__(self, ranks: int, factor: float, window: int = 10) -> None:
        """Start a window without steps; arguments: see the class."""
        self.factor, self.window = factor, window
        self._ranks = ranks
        self._steps: list[Sequence[float]] = []

    def add(self, seconds: Sequence[float]) -> tuple[int, float] | None:
        """Add one step's seconds of work, one value per rank. At the end of a window, return (slow rank, its time
        divided by the median time of the other ranks); None if no rank is slow or the window is not complete."""
        assert len(seconds) == self._ranks
        self._steps.append(seconds)
        if len(self._steps) < self.window or self._ranks < 2:
            self._steps = self._steps[-self.window :]
            return None
        times, self._steps = [statistics.median(rank) for rank in zip(*self._steps, strict=True)], []
        slowest = max(range(len(times)), key=times.__getitem__)
        others = statistics.median(times[:slowest] + times[slowest + 1 :])
        ratio = times[slowest] / others if others > 0 else 1.0
        return (slowest, ratio) if ratio > self.factor else None

    @property
    def between_windows(self) -> bool:
        """True if no window is in progress: no step was added yet, or the last step completed a window (a number of
        consecutive steps)."""
        return not self._steps


def read_peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far in bytes: allocated memory on a CUDA `device`, resident memory on a
    CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (resident := read_peak_resident_bytes()) is not None:
        return resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _replace_non_finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities replaced by None, also inside nested dicts."""
    if isinstance(value, dict):
        return {key: _replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and value - value != 0.0:  # NaN or infinite
        return None
    return value
