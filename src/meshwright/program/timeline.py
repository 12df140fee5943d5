"""Timelines of simulated programs for drawings: the steps as spans on tracks, one track per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.program.collective import SENDING as COLLECTIVE_SENDING
from meshwright.program.collective import CollectiveProgram
from meshwright.program.collective import Kind as CollectiveKind
from meshwright.program.order import Integers, Reals
from meshwright.program.pipeline import LETTERS, SENDING, Component, Kind, PipelineProgram

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
    Kind.UPDATE: "update",
}

COMPONENT_WORDS = {
    Component.ATTENTION: "attention",
    Component.DISPATCH: "dispatch",
    Component.MLP: "MLP",
    Component.COMBINE: "combine",
}
ALL_TO_ALL = (Component.DISPATCH, Component.COMBINE)


@dataclass(frozen=True, slots=True)
class Span:
    """One step of a program in a drawn timeline: a box on a track from time `start` to `end`, in any unit of time.

    Attributes:
        track: Index of the track (a rank).
        kind: Kind of step, which determines the colour, such as `forward`.
        label: A few letters to write on the box.
        name: Full description.
        shade: 0 (dark) for the first model chunk of a rank to 1 for its last.
        mirrored: True for the second replica (copy of the model) of a bidirectional schedule.
        lanes: Number of horizontal strips into which the track is divided at this span, because spans overlap in time.
        lane: Index of the strip in which this span is drawn.
    """

    track: int
    start: float
    end: float
    kind: str
    label: str
    name: str
    shade: float = 0.0
    mirrored: bool = False
    lane: int = 0
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Arrow:
    """Transfer in a drawn timeline, which leaves track `source` at time `start` and arrives on track `target` at `end`.

    source, target: track indices. name: full description.
    """

    source: int
    start: float
    target: int
    end: float
    name: str


@dataclass(frozen=True)
class Timeline:
    """Simulated program ready to draw: spans (steps) on tracks (ranks), and arrows (transfers) between them.

    Attributes:
        title: Heading.
        tracks: Title of each track.
        spans, arrows: Steps and transfers.
        levels: {track index: curve of a quantity over time, as pairs (time, value from that time on)}.
        level_name: Name of the quantity of `levels`, such as `activations`.
        notes: One text per track, drawn next to it.
        letters: {last letter of a label: its meaning}, for the legend; empty if labels have no such letter.
        time_title: Title of the time axis, such as its unit.
    """

    title: str
    tracks: tuple[str, ...]
    spans: Sequence[Span]
    arrows: Sequence[Arrow] = ()
    levels: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    level_name: str = ""
    notes: tuple[str, ...] = ()  # one per track, drawn next to it
    letters: Mapping[str, str] = field(default_factory=dict)
    time_title: str = "time"

    @property
    def end(self) -> float:
        """Latest end time of a span of the timeline; 0.0 without spans."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def highest_level(self) -> float:
        """Highest value of the curves of all tracks; 0.0 without curves."""
        return max((value for curve in self.levels.values() for _, value in curve), default=0.0)


class SimulatedTimes(Protocol):
    """Protocol of a simulation's result: start and end time of every step of a program."""

    @property
    def start(self) -> Reals:
        """Start time of each step of the program: [steps], in the time unit of the simulation."""

    @property
    def end(self) -> Reals:
        """End time of each step of the program: [steps], in the time unit of the simulation."""


def build_pipeline_timeline(
    program: PipelineProgram,
    timing: SimulatedTimes,
    notes: Sequence[str] = (),
    levels: Mapping[int, Sequence[tuple[float, float]]] | None = None,
) -> Timeline:
    """Return the compute steps of a simulated pipeline schedule as a timeline, one track per rank. Overlapped steps
    share the track's height; explicit sends are arrows.

    program: the schedule. timing: start and end time of every step. notes: one text per rank, drawn next to its track.
    levels: {rank: curve of its saved activations, as pairs (time, value from that time on)}; None for no curves.
    """
    s = program.steps
    columns = [c.tolist() for c in (s.rank, s.kind, s.stage, s.replica, s.micro_batch, s.component, s.group_index)]
    start, end = timing.start.tolist(), timing.end.tolist()
    members: dict[int, list[int]] = {}
    for index, (kind, group) in enumerate(zip(columns[1], columns[6], strict=True)):
        if kind <= Kind.UPDATE:
            members.setdefault(group, []).append(index)
    names = StepNames(program)
    spans = []
    for steps in members.values():
        for lane, index in enumerate(steps):
            rank, kind, stage, replica, micro_batch, part, _ = (column[index] for column in columns)
            label, name = names.describe_step(kind, stage, replica, micro_batch, part)
            spans.append(
                Span(
                    rank,
                    start[index],
                    end[index],
                    "all-to-all" if part in ALL_TO_ALL else WORDS[Kind(kind)],
                    label,
                    name,
                    shade=0.0 if part in ALL_TO_ALL else names.find_chunk(stage, replica) / max(1, program.chunks - 1),
                    mirrored=replica > 0,
                    lane=lane,
                    lanes=len(steps),
                )
            )
    arrows = []
    for index in s.has_kind(SENDING).nonzero()[0].tolist():
        rank, peer = columns[0][index], program.find_peer(index)
        if rank != peer:
            arrows.append(Arrow(rank, start[index], peer, end[index], program.describe(index)))
    tracks = tuple(f"rank {rank}" for rank in range(program.ranks))
    chunks = f", {program.chunks} chunks per rank" if program.chunks > 1 else ""
    title = f"{program.name}, {program.ranks} ranks, {program.micro_batches} micro-batches{chunks}"
    letters = {_find_letter(part): COMPONENT_WORDS[Component(part)] for part in sorted(set(columns[5]) - {0})}
    return Timeline(title, tracks, spans, arrows, levels or {}, "activations", tuple(notes), letters)


class StepNames:
    """Generator of labels and descriptions of the compute steps of a pipeline schedule, for drawings and traces.

    program: the schedule.
    """

    def __init__(self, program: PipelineProgram) -> None:
        """Number the stages of each rank; arguments: see the class."""
        self._replicas = program.replicas
        self._chunks: list[dict[int, int]] = []  # by replica: the number of a stage among those of its rank
        for stages in program.placement:
            seen: dict[int, int] = {}
            number = {}
            for stage, rank in enumerate(stages):
                number[stage] = seen.get(rank, 0)
                seen[rank] = number[stage] + 1
            self._chunks.append(number)

    def find_chunk(self, stage: int, replica: int) -> int:
        """Return the model-chunk number of a stage on its rank: the index, from 0, among the stages of the same replica
        on that rank."""
        return self._chunks[replica][stage]

    def describe_step(self, kind: int, stage: int, replica: int, micro_batch: int, part: int = 0) -> tuple[str, str]:
        """Return (short label, full description) of a step, such as (`F3`, `forward of micro-batch 3, stage 1`).

        kind: a `Kind`. stage, replica, micro_batch: indices of what the step works on. part: a `Component` of the
        layers, 0 for a whole step. The label is in lower case (`f3`) for all but the first stage of a rank.
        """
        letter, word = LETTERS[Kind(kind)], WORDS[Kind(kind)]
        if self.find_chunk(stage, replica):
            letter = letter.lower()
        label = letter + str(micro_batch) + (_find_letter(part) if part else "")
        name = f"{word} of micro-batch {micro_batch}, stage {stage}"
        if part:
            name = f"{COMPONENT_WORDS[Component(part)]} in the {name}"
        return label, name + (f" of replica {replica}" if self._replicas > 1 else "")


def _find_letter(part: int) -> str:
    """Return the last letter of the label of a step that computes one component of its layers. part: a `Component`."""
    return COMPONENT_WORDS[Component(part)][0].lower()


def build_collective_timeline(
    program: CollectiveProgram, sends: Integers, receives: Integers, start: Reals, end: Reals
) -> Timeline:
    """Return the transfers of a simulated collective program as a timeline, each a span on the track of its sender.

    Concurrent transfers share the track's height. sends, receives: [transfers], step indices of the two ends. start,
    end: [transfers], in seconds.
    """
    s = program.steps
    assert set(s.kind[sends].tolist()) <= set(COLLECTIVE_SENDING)
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(s.group_index[sends].tolist()):
        groups.setdefault(group, []).append(row)
    spans, arrows = [], []
    for rows in groups.values():
        for lane, row in enumerate(rows):
            send, receive = int(sends[row]), int(receives[row])
            source, target = int(s.rank[send]), int(s.rank[receive])
            word = "reduce" if s.kind[receive] == CollectiveKind.REDUCE else "send"
            begins, ends = float(start[row]), float(end[row])
            slot = program.format_slots(int(s.slot[send]), int(s.count[send]))
            name = f"{program.describe(send)}: there, {program.describe(receive)}"
            spans.append(Span(source, begins, ends, word, f"{slot}>{target}", name, lane=lane, lanes=len(rows)))
            arrows.append(Arrow(source, begins, target, ends, name))
    tracks = tuple(f"rank {rank}" for rank in range(program.ranks))
    return Timeline(f"{program.operation} {program.algorithm}, {program.ranks} ranks", tracks, spans, arrows)
