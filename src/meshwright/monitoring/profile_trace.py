"""Chrome traces of a profile: of one rank, and of all ranks on one clock and with the simulated pipeline program."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.monitoring.timed_calls import TimedCall
from meshwright.program.durations import Durations
from meshwright.program.pipeline import COMPUTING, Kind, PipelineProgram
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.program.timeline import WORDS, build_pipeline_timeline
from meshwright.program.trace import build_chrome_trace, make_process_event, make_slice_event, make_thread_events

THREADS = 1000
"""Range of thread numbers of one rank: trace viewers need numbers that are unique over all ranks."""
STEPS, CALLS, OPERATORS = 0, 1, 500
"""First thread number of a rank's steps, of its calls, and of torch's operators with the device's streams."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """Interval in a rank's trace, such as one forward pass.

    kind: word that decides the colour, such as "forward". label: short text. name: full description. start, end:
    nanoseconds since 1970 on the rank's clock. args: further values that the trace viewer shows.
    """

    kind: str
    label: str
    name: str
    start: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Intervals and collective calls recorded on one rank.

    rank: global rank. zero: start of the trace on the rank's clock, in nanoseconds since 1970. spans: intervals of
    steps, phases and passes. calls: collective calls with their times."""

    rank: int
    zero: int
    spans: Sequence[Span]
    calls: Sequence[TimedCall]

    def to_table(self) -> dict[str, Any]:
        """Return this recording of a rank as a dict of JSON types, from which `from_table` builds an equal
        recording."""
        return {
            "rank": self.rank,
            "zero": self.zero,
            "spans": [asdict(span) for span in self.spans],
            "calls": [asdict(call) for call in self.calls],
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> RankSteps:
        """Build a recording from the dict that `to_table` returned; unknown keys are ignored."""
        spans, calls = [Span(**span) for span in table["spans"]], [TimedCall(**call) for call in table["calls"]]
        return cls(table["rank"], table["zero"], spans, calls)


def compute_clock_offset(times: Sequence[Sequence[int]], machines: Sequence[int], rank: int) -> int:
    """Return the nanoseconds by which the clock of `rank` is ahead of rank 0's: the median difference over several
    barriers; 0 if both ranks share a clock.

    times: [barrier][rank], time on the rank's clock, in nanoseconds, at which the rank left the barrier. machines: one
    number per rank, equal for ranks that share a clock.
    """
    if machines[rank] == machines[0]:
        return 0
    return int(statistics.median(of_ranks[rank] - of_ranks[0] for of_ranks in times))


def build_rank_trace(steps: RankSteps, operators: Mapping[str, Any]) -> tuple[dict[str, Any], Events]:
    """Build the Chrome trace of one rank. Return (trace document, GPU events). The GPU events are part of the document;
    they are returned separately for the merged trace of all ranks.

    steps: intervals and collective calls recorded on this rank. operators: the Chrome trace of torch's profiler."""
    threads = _ThreadNumbers(steps.rank, OPERATORS)
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
            name = f"device {event['pid']}, stream {event['tid']}"  # the end of a flow event from a launch
        else:
            continue
        place = {"pid": steps.rank, "tid": threads.number(name), "ts": event["ts"] + shift}
        found.append(event | place)
        if event.get("cat") in ON_DEVICE:
            kernels.append(event | place)
    names = threads.events()
    on_device = [event for event in names if event["tid"] in {kernel["tid"] for kernel in kernels}]
    return _make_chrome_trace([*build_rank_events(steps), *names, *found]), on_device + kernels


def merge_rank_traces(
    parts: Sequence[Mapping[str, Any]], program: PipelineProgram, pipeline_ranks: Mapping[int, int]
) -> dict[str, Any]:
    """Build the Chrome trace document of all ranks, in which each rank is a process. If the pipeline schedule has
    several ranks, the document also shows a simulation of the schedule with the recorded median durations; the
    simulation begins at the first forward pass of the last recorded step.

    parts: for each rank the dict of `RankSteps.to_table`, with its GPU events under "kernels". program: the pipeline
    schedule. pipeline_ranks: global rank -> pipeline rank."""
    ranks = [RankSteps.from_table(part) for part in parts]
    events: Events = []
    for rank, part in zip(ranks, parts, strict=True):
        events += [*build_rank_events(rank), *part["kernels"]]
    if program.ranks > 1:
        events += _simulate_events(ranks, program, pipeline_ranks)
    return _make_chrome_trace(events)


def build_rank_events(steps: RankSteps) -> Events:
    """Build the trace events of one rank: a process with one thread for its steps and threads for its collective
    calls."""
    process, first = steps.rank, steps.rank * THREADS
    events: Events = [make_process_event(process, f"rank {steps.rank}")]
    events += make_thread_events(process, first + STEPS, "steps")
    for span in steps.spans:
        start, length = (span.start - steps.zero) / 1e3, (span.end - span.start) / 1e3
        events.append(
            make_slice_event(
                process, first + STEPS, start, length, span.label, span.kind, {"what": span.name, **span.args}
            )
        )
    calls = sorted((call for call in steps.calls if call.done is not None), key=lambda call: call.posted)
    ends: list[int] = []  # end of the last call on each thread; calls that overlap are drawn on separate threads
    for call in calls:
        done = call.done or 0
        lane = next((lane for lane, end in enumerate(ends) if end <= call.posted), len(ends))
        ends[lane : lane + 1] = [done]
        thread = first + CALLS + lane
        args = {"operation": call.operation, "axis": call.axis, "bytes": call.payload_bytes}
        start = (call.posted - steps.zero) / 1e3
        events.append(make_slice_event(process, thread, start, (done - call.posted) / 1e3, call.site, "call", args))
        if call.waited is not None:
            waits, length = (call.waited - steps.zero) / 1e3, (done - call.waited) / 1e3
            events.append(
                make_slice_event(process, thread, waits, length, "wait", "wait", {"what": f"for {call.site}"})
            )
    for lane in range(len(ends)):
        events += make_thread_events(process, first + CALLS + lane, "calls" if lane == 0 else f"calls, overlap {lane}")
    return events


def _simulate_events(ranks: Sequence[RankSteps], program: PipelineProgram, pipeline_ranks: Mapping[int, int]) -> Events:
    """Simulate the pipeline schedule `program` with the median durations that `ranks` recorded; return the trace events
    of the simulation; no events if the simulation is impossible with these durations. pipeline_ranks: global rank ->
    pipeline rank."""
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    starts: list[float] = []
    for rank in ranks:
        begun = max((span.start for span in rank.spans if span.kind == "step"), default=0)
        for span in rank.spans:
            if "stage" in span.args:
                seen[span.kind, span.args["replica"], span.args["stage"]].append((span.end - span.start) / 1e9)
                if span.start >= begun and pipeline_ranks[rank.rank] == 0:
                    starts.append((span.start - rank.zero) / 1e3)
    table = {kind: np.zeros((program.replicas, program.stages)) for kind in COMPUTING}
    for kind, values in table.items():
        for replica in range(program.replicas):
            for stage in range(program.stages):
                times = seen.get((WORDS[kind], replica, stage))
                values[replica, stage] = statistics.median(times) if times else 0.0
    # For a backward that is not split, its duration is used as that of the input-gradient pass.
    whole = np.where(table[Kind.INPUT_GRADIENT] > 0, table[Kind.INPUT_GRADIENT], table[Kind.BACKWARD])
    try:
        timing = simulate_pipeline(program, Durations(table[Kind.FORWARD], whole, table[Kind.WEIGHT_GRADIENT]))
    except UserError:
        return []
    timeline = build_pipeline_timeline(program, timing)
    process = len(ranks)
    start = min(starts, default=0.0) - 1e6 * float(timing.start[program.steps.kind == Kind.FORWARD].min())
    found = build_chrome_trace(timeline, process=process, first_thread=process * THREADS, start=start)["traceEvents"]
    title = f"{program.name}, simulated with the median times measured here, without transfer time"
    return [make_process_event(process, title), *found[1:]]


class _ThreadNumbers:
    """Assignment of thread numbers to the named threads of one rank in a Chrome trace, in the order in which names
    first occur. Each rank has a range of `THREADS` numbers. rank: global rank. first: offset in this range of the first
    number to assign; lower numbers are used for other threads."""

    def __init__(self, rank: int, first: int) -> None:
        """Start without threads; arguments: see the class."""
        self._rank, self._first, self._numbers = rank, rank * THREADS + first, dict[str, int]()

    def number(self, name: str) -> int:
        """Return the number of the thread called `name`; a new name gets the next unused one."""
        return self._numbers.setdefault(name, self._first + len(self._numbers))

    def events(self) -> Events:
        """Return the trace events that name the threads in the trace viewer."""
        return [
            event for name, number in self._numbers.items() for event in make_thread_events(self._rank, number, name)
        ]


def _make_chrome_trace(events: Events) -> dict[str, Any]:
    """Return a Chrome trace document (JSON dict) with these events."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}
