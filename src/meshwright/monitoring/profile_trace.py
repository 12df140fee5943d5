"""What ranks did, as trace events: of one rank, and of all on one clock beside the program as it should run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from meshwright.comm.watched_calls import WatchedCall
from meshwright.errors import UserError
from meshwright.program.durations import Durations
from meshwright.program.pipeline import COMPUTING, Kind, PipelineProgram
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.program.timeline import WORDS, pipeline_timeline
from meshwright.program.trace import process_event, slice_event, thread_events, trace_events

THREADS = 1000
"""Threads of one rank; their numbers differ from those of every other, as readers want."""
STEPS, CALLS, OPERATORS = 0, 1, 500
"""The first numbers of a rank's threads: its steps, its calls, torch's operators and a device's streams."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank did, from `start` to `end` (nanoseconds since 1970 on its clock). kind, label, name: as of
    `program.timeline.Span`."""

    kind: str
    label: str
    name: str
    start: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankSteps:
    """What a rank did. zero: the moment 0 of the trace, on its clock."""

    rank: int
    zero: int
    spans: Sequence[Span]
    calls: Sequence[WatchedCall]

    def table(self) -> dict[str, Any]:
        """As JSON takes it; `from_table` reads it."""
        return {
            "rank": self.rank,
            "zero": self.zero,
            "spans": [asdict(span) for span in self.spans],
            "calls": [asdict(call) for call in self.calls],
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> RankSteps:
        """The same from its table, in which there may be more."""
        spans, calls = [Span(**span) for span in table["spans"]], [WatchedCall(**call) for call in table["calls"]]
        return cls(table["rank"], table["zero"], spans, calls)


def clock_offset(times: Sequence[Sequence[int]], machines: Sequence[int], rank: int) -> int:
    """How far the clock of `rank` is ahead of rank 0's. times: by meeting and rank, when each left; machines: ranks of
    one have one clock. The median, as now and then one is held up."""
    if machines[rank] == machines[0]:
        return 0
    return int(statistics.median(of_ranks[rank] - of_ranks[0] for of_ranks in times))


def of_rank(steps: RankSteps, operators: Mapping[str, Any]) -> tuple[dict[str, Any], Events]:
    """The trace of one rank: its steps, its calls, the operators that torch's profiler saw (its trace); and of these
    the events on a device, for the trace of all."""
    threads = _Threads(steps.rank, OPERATORS)
    shift = (int(operators.get("baseTimeNanoseconds", 0)) - steps.zero) / 1e3
    host = {event["pid"] for event in operators["traceEvents"] if event.get("cat") == "cpu_op"}
    found: Events = []
    kernels: Events = []
    for event in operators["traceEvents"]:
        if event["ph"] not in ("X", "s", "f"):
            continue
        if event.get("cat") in ON_DEVICE:
            name = f"device {event['pid']}, stream {event['tid']}"
        elif event["pid"] in host:
            name = f"operators of thread {event['tid']}"
        elif event["ph"] in ("s", "f") and isinstance(event["tid"], int):
            name = f"device {event['pid']}, stream {event['tid']}"  # where a launch arrives
        else:
            continue
        place = {"pid": steps.rank, "tid": threads.number(name), "ts": event["ts"] + shift}
        found.append(event | place)
        if event.get("cat") in ON_DEVICE:
            kernels.append(event | place)
    names = threads.events()
    on_device = [event for event in names if event["tid"] in {kernel["tid"] for kernel in kernels}]
    return _trace([*rank_events(steps), *names, *found]), on_device + kernels


def merged(parts: Sequence[Mapping[str, Any]], program: PipelineProgram, places: Mapping[int, int]) -> dict[str, Any]:
    """The trace of all ranks, a process each, from their `RankSteps.table` with the "kernels" of their devices.

    Where `program` has several ranks it is there as well, simulated with the median times that its steps took here,
    from the moment at which the last step's first forward began. places: the rank of the program that each rank is.
    """
    ranks = [RankSteps.from_table(part) for part in parts]
    events: Events = []
    for rank, part in zip(ranks, parts, strict=True):
        events += [*rank_events(rank), *part["kernels"]]
    if program.ranks > 1:
        events += _simulated(ranks, program, places)
    return _trace(events)


def rank_events(steps: RankSteps) -> Events:
    """The process of a rank, the thread of its steps and those of its calls."""
    process, first = steps.rank, steps.rank * THREADS
    events: Events = [process_event(process, f"rank {steps.rank}")]
    events += thread_events(process, first + STEPS, "steps")
    for span in steps.spans:
        start, length = (span.start - steps.zero) / 1e3, (span.end - span.start) / 1e3
        events.append(
            slice_event(process, first + STEPS, start, length, span.label, span.kind, {"what": span.name, **span.args})
        )
    calls = sorted((call for call in steps.calls if call.done is not None), key=lambda call: call.posted)
    ends: list[int] = []  # of the last call on each thread: those under way at once stand on threads of their own
    for call in calls:
        done = call.done or 0
        lane = next((lane for lane, end in enumerate(ends) if end <= call.posted), len(ends))
        ends[lane : lane + 1] = [done]
        thread = first + CALLS + lane
        args = {"operation": call.operation, "axis": call.axis, "bytes": call.payload_bytes}
        start = (call.posted - steps.zero) / 1e3
        events.append(slice_event(process, thread, start, (done - call.posted) / 1e3, call.site, "call", args))
        if call.waited is not None:
            waits, length = (call.waited - steps.zero) / 1e3, (done - call.waited) / 1e3
            events.append(slice_event(process, thread, waits, length, "wait", "wait", {"what": f"for {call.site}"}))
    for lane in range(len(ends)):
        events += thread_events(process, first + CALLS + lane, "calls" if lane == 0 else f"calls, beside {lane} more")
    return events


def _simulated(ranks: Sequence[RankSteps], program: PipelineProgram, places: Mapping[int, int]) -> Events:
    """The program with the times of these ranks; nothing where some of its steps were not seen."""
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    starts: list[float] = []
    for rank in ranks:
        begun = max((span.start for span in rank.spans if span.kind == "step"), default=0)
        for span in rank.spans:
            if "stage" in span.args:
                seen[span.kind, span.args["replica"], span.args["stage"]].append((span.end - span.start) / 1e9)
                if span.start >= begun and places[rank.rank] == 0:
                    starts.append((span.start - rank.zero) / 1e3)
    table = {kind: np.zeros((program.replicas, program.stages)) for kind in COMPUTING}
    for kind, values in table.items():
        for replica in range(program.replicas):
            for stage in range(program.stages):
                times = seen.get((WORDS[kind], replica, stage))
                values[replica, stage] = statistics.median(times) if times else 0.0
    # Where a stage's backwards are whole, their time stands for both halves.
    whole = np.where(table[Kind.INPUT_GRADIENT] > 0, table[Kind.INPUT_GRADIENT], table[Kind.BACKWARD])
    try:
        timing = simulate_pipeline(program, Durations(table[Kind.FORWARD], whole, table[Kind.WEIGHT_GRADIENT]))
    except UserError:
        return []
    timeline = pipeline_timeline(program, timing)
    process = len(ranks)
    start = min(starts, default=0.0) - 1e6 * float(timing.start[program.steps.kind == Kind.FORWARD].min())
    found = trace_events(timeline, process=process, first_thread=process * THREADS, start=start)["traceEvents"]
    title = f"{program.name}, simulated with the median times of its steps here, transfers in no time"
    return [process_event(process, title), *found[1:]]


class _Threads:
    """Numbers for threads by their names, from `first` on."""

    def __init__(self, rank: int, first: int) -> None:
        self._rank, self._first, self._numbers = rank, rank * THREADS + first, dict[str, int]()

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, self._first + len(self._numbers))

    def events(self) -> Events:
        return [event for name, number in self._numbers.items() for event in thread_events(self._rank, number, name)]


def _trace(events: Events) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms"}
