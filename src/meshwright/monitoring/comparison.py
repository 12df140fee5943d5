"""Predicted and measured figures of a run side by side: memory by category, step time by phase, bytes sent by mesh
axis."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from meshwright.collectives.quantities import format_bytes
from meshwright.monitoring.step_memory import StepMemory
from meshwright.planner.cost.step_time import StepTime
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.memory.states import CATEGORY_OF_STATE

WARM_UP = 2
"""Number of first steps that are left out: they compile, and touch memory for the first time."""
KEPT = 1000
"""Number of last steps over which the median is computed."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Predicted peak resident set size (RSS) of rank 0's process. items: {item such as "libraries", "model states" or
    "step tensors": bytes}."""

    items: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Predicted peak resident set in bytes: the sum over `items` (libraries, model states ...)."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted memory, step time and traffic of one rank; None for values that could not be predicted.

    Attributes:
        memory: Bytes of tensors at the memory peak by category ("parameters" ...), and their sum, "peak". Two
            categories are not in the sum: "framework" (CUDA context, or interpreter and libraries), and "unexplained"
            (bytes by which earlier runs exceeded their predictions).
        time: Seconds of a step by phase.
        sent_by_axis: Bytes sent in a step by mesh axis.
        machine: The hardware profile (measured machine speeds).
        compiled: True if layers run under torch.compile.
        notes: Further console lines.
        process: Peak RSS by item; None on CUDA.
        fullest: Predicted memory of the rank with the largest peak: {"rank": its number, "memory_bytes": bytes of
            tensors by category, "process_memory_bytes": peak RSS by item}.
    """

    memory: Mapping[str, int] | None
    time: StepTime | None
    sent_by_axis: Mapping[str, int] | None
    machine: Cluster | None
    compiled: bool
    notes: tuple[str, ...] = ()
    process: ProcessMemory | None = None
    fullest: Mapping[str, Any] | None = None

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of this rank in bytes, 0 if unknown. On CPUs this is the peak of the process (RSS); on
        GPUs the peak of the tensor allocator."""
        if self.process is not None:
            return self.process.peak
        return 0 if self.memory is None else _compute_expected_peak(self.memory)

    def memory_to_json(self) -> dict[str, Any]:
        """Return this rank's predicted memory as a JSON object; values are None if unknown. Keys: "memory_bytes": {key:
        bytes}, whose keys are the categories of tensors, "allocator_peak" and "process_peak"; "process_memory_bytes":
        {item of the process's memory: bytes of the peak RSS}."""
        return {
            "memory_bytes": None if self.memory is None else {**self.memory, **self._get_peak_entries()},
            "process_memory_bytes": None if self.process is None else dict(self.process.items),
        }

    def to_json_dict(self) -> dict[str, Any]:
        """Return the entry `predicted` of the result document: seconds of a step, bytes of memory by category, bytes
        sent by mesh axis, device; None for what was not predicted."""
        time, machine = self.time, self.machine
        calibration = None if machine is None else machine.calibration
        return {
            **self.memory_to_json(),
            "fullest_rank": None if self.fullest is None else dict(self.fullest),
            "step_seconds": None if time is None else time.seconds,
            "step_seconds_low": None if time is None else time.low,
            "step_seconds_high": None if time is None else time.high,
            "seconds_by_part": None if time is None else dict(time.breakdown),
            "seconds_by_kind": None
            if time is None
            else _split_waiting(time.seconds, _sum_waiting_seconds(time.breakdown)),
            "sent_bytes_by_axis": None if self.sent_by_axis is None else dict(self.sent_by_axis),
            "device": None if machine is None else machine.device.name,
            "calibration": None if calibration is None else calibration.table(),
            "compile": self.compiled,
        }

    def _get_peak_entries(self) -> dict[str, int | None]:
        """Return {"allocator_peak": bytes, "process_peak": bytes}, the predicted peaks of the tensor allocator and of
        the process (RSS). "process_peak" is None if it is not predicted, as always on CUDA."""
        assert self.memory is not None
        process = self.process
        return {"allocator_peak": self.memory["peak"], "process_peak": None if process is None else process.peak}

    def format_lines(self) -> list[str]:
        """Format the prediction as console lines: step time, memory, traffic, notes."""
        parts = []
        if self.time is not None:
            found = None if self.machine is None else self.machine.calibration
            note = "" if found is None else f"; calibrated by {found.runs} run{'s' if found.runs > 1 else ''}"
            if self.machine is not None and self.machine.measured is not None and self.machine.measured.disturbed:
                note += "; upper bound: the machine as busy as when it was measured"
            bounds = f"{_format_seconds(self.time.low)} to {_format_seconds(self.time.high)}{note}"
            parts.append(f"{_format_seconds(self.time.seconds)} a step ({bounds})")
        parts += _format_fullest(self.fullest or {"rank": 0, **self.memory_to_json()})
        if self.sent_by_axis is not None:
            parts.append(f"{_format_traffic(self.sent_by_axis)} sent a step")
        return [*([f"predicted: {'; '.join(parts)}"] if parts else []), *self.notes]


def _format_fullest(fullest: Mapping[str, Any]) -> list[str]:
    """Format the predicted memory of the rank with the largest peak as one console text. Return a list that contains
    this text, or an empty list if the memory is unknown. fullest: {"rank": its number, "memory_bytes": bytes of tensors
    by category, "process_memory_bytes": peak RSS by item}."""
    memory, process, rank = fullest["memory_bytes"], fullest["process_memory_bytes"], fullest["rank"]
    if memory is None:
        return []
    if process is not None:
        items = f"{format_bytes(memory['process_peak'])} ({_format_largest(process)})"
        return [f"process peak of rank {rank} {items}, of which tensors {format_bytes(memory['peak'])}"]
    sums = "peak", "framework", "allocator_peak", "process_peak"
    sizes = {name: size for name, size in memory.items() if name not in sums}
    return [f"allocator peak of rank {rank} {format_bytes(_compute_expected_peak(memory))} ({_format_largest(sizes)})"]


class _StepTime(NamedTuple):
    """Measured duration of one step. seconds: duration of the whole step. parts: {phase: seconds}. waited: seconds that
    the host waited in collective calls."""

    seconds: float
    parts: Mapping[str, float]
    waited: float


class StepTimes:
    """Durations of the latest `KEPT` (1,000) training steps of this process, except its first `WARM_UP` (2) steps."""

    def __init__(self) -> None:
        """Start without steps."""
        self._steps: deque[_StepTime] = deque(maxlen=KEPT)
        self._warming = WARM_UP

    def add(self, seconds: float, parts: Mapping[str, float], waited: float) -> None:
        """Add the duration of a step that was applied (not skipped). seconds: duration of the whole step; parts:
        {phase: seconds}; waited: seconds spent waiting in collective calls."""
        if self._warming:
            self._warming -= 1
        else:
            self._steps.append(_StepTime(seconds, parts, waited))

    def find_median_step(self) -> _StepTime | None:
        """Return the measured times of the stored step that has the median duration; None if no step is stored."""
        return sorted(self._steps, key=lambda step: step.seconds)[(len(self._steps) - 1) // 2] if self._steps else None

    def to_json_dict(self, device: torch.device) -> dict[str, Any]:
        """Return the measured duration of a step for the result document. Keys: "step_seconds" (median),
        "seconds_by_part" ({phase: seconds}), "seconds_by_kind" ({"working": seconds, "waiting": seconds}),
        "waiting_seconds". "seconds_by_kind" and "waiting_seconds" are None on CUDA; all values are None before any step
        is stored. device: device of this rank."""
        step = self.find_median_step()
        if step is None:
            return dict.fromkeys(("step_seconds", "seconds_by_part", "seconds_by_kind", "waiting_seconds"))
        known = device.type == "cpu"  # on CUDA the device waits, not the host
        return {
            "step_seconds": statistics.median(each.seconds for each in self._steps),
            "seconds_by_part": dict(step.parts),
            "seconds_by_kind": _split_waiting(step.seconds, step.waited) if known else None,
            "waiting_seconds": step.waited if known else None,
        }


WORKING_PARTS = "compute", "optimizer"
"""Parts of a predicted step in which its rank works; in all others it waits."""


def _sum_waiting_seconds(breakdown: Mapping[str, float]) -> float:
    """Return the seconds of a predicted step in which this rank waits for other ranks: the sum over all phases except
    "compute" and "optimizer" (`WORKING_PARTS`). breakdown: phase -> seconds."""
    return sum(seconds for part, seconds in breakdown.items() if part not in WORKING_PARTS)


def _split_waiting(seconds: float, waiting: float) -> dict[str, float]:
    """Split the duration of a step into {"working": seconds, "waiting": seconds}. Predicted and measured steps have
    different phases, but can be compared by these two numbers. seconds: duration of the step. waiting: seconds of the
    step in which this rank waits for other ranks."""
    return {"working": max(0.0, seconds - waiting), "waiting": waiting}


def collect_measured_memory(
    states: Mapping[str, int], memory: StepMemory, prediction: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the measured memory of rank 0 in bytes, None for unknown values.

    Keys: each category of model states ("parameters" ...); "peak": growth from before the trainer's construction to the
    peak of the first steps; "allocator_peak"; "process_peak" (RSS); "unexplained": measured minus predicted peak.
    "unexplained" compares the peaks of the allocator on CUDA, and the peaks of the process on a CPU, where the
    correction that the prediction learnt from earlier runs is removed first.

    states: bytes by kind, from `Trainer.memory`. memory: meter of the peaks. prediction: entry `predicted` of the
    result document."""
    found: dict[str, Any] = {}
    for kind, size in states.items():
        found[CATEGORY_OF_STATE[kind]] = found.get(CATEGORY_OF_STATE[kind], 0) + size
    predicted = prediction.get("memory_bytes") or {}
    found |= {"peak": memory.growth_in_first_steps, **memory.peaks_to_json()}
    if memory.device.type == "cpu":
        measured, expected = found["process_peak"], predicted.get("process_peak")
        calibrated = (prediction.get("process_memory_bytes") or {}).get("unexplained", 0)
    else:
        measured, expected, calibrated = found["allocator_peak"], predicted.get("peak"), 0
    found["unexplained"] = None if measured is None or expected is None else measured - (expected - calibrated)
    return found


def format_comparison(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> str | None:
    """Format measured step time, memory and traffic, with the error of each prediction, as one console line; None if
    nothing was measured. predicted, measured: the entries of these names of the result document."""
    parts = []
    before, after = predicted.get("step_seconds"), measured.get("step_seconds")
    if after is not None:
        error = f" (predicted {_format_seconds(before)}, error {before / after - 1:+.1%})" if before else ""
        parts.append(f"{_format_seconds(after)} a step{error}")
    parts += _format_peak(predicted.get("fullest_rank"), measured.get("fullest_rank"))
    if measured.get("sent_bytes_by_axis") is not None:
        parts.append(f"{_format_traffic(measured['sent_bytes_by_axis'])} sent a step")
    return f"measured: {'; '.join(parts)}" if parts else None


def _format_peak(predicted: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> list[str]:
    """Format the peak memory of two ranks as console text: the rank with the largest measured peak, and the rank with
    the largest predicted peak. Return a list that contains this text, or an empty list if nothing was measured.
    predicted, measured: entries "fullest_rank" of the result document's figures; None if unknown."""
    if measured is None:
        return []
    found, expected = measured["memory_bytes"], (predicted or {}).get("memory_bytes")
    # On CUDA the device's memory is the limit, on a CPU that of the processes.
    name = "process peak" if found["allocator_peak"] is None else "allocator peak"
    key = name.replace(" ", "_")
    if found[key] is None:
        return []
    error = ""
    peak = None if not expected else expected[key] if key == "process_peak" else _compute_expected_peak(expected)
    if peak:
        other = predicted["rank"] if predicted else 0
        rank = "" if other == measured["rank"] else f" for rank {other}"
        error = f" (predicted {format_bytes(peak)}{rank}, error {peak / found[key] - 1:+.1%})"
    return [f"{name} of rank {measured['rank']} {format_bytes(found[key])}{error}"]


def _compute_expected_peak(memory: Mapping[str, int]) -> int:
    """Return the predicted peak bytes of the tensor allocator: the predicted tensor bytes ("peak") plus the bytes by
    which earlier runs exceeded their predictions ("unexplained"). memory: predicted bytes by category."""
    return memory["peak"] + memory["unexplained"]


def _format_seconds(seconds: float) -> str:
    """Format a duration given in seconds with three significant digits: in milliseconds below 0.1 s, else in
    seconds."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _format_traffic(axes: Mapping[str, int]) -> str:
    """Format the bytes sent in a step: the sum over all mesh axes, and the three axes with the most bytes. axes: {mesh
    axis: bytes}."""
    return f"{format_bytes(sum(axes.values()))} ({_format_largest(axes)})" if axes else "nothing"


def _format_largest(sizes: Mapping[str, int]) -> str:
    """Format the three largest entries of `sizes` (name -> bytes)."""
    return ", ".join(
        f"{name} {format_bytes(size)}" for name, size in sorted(sizes.items(), key=lambda one: -one[1])[:3]
    )
