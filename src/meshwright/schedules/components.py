"""Cuts the steps of a schedule into the parts of their layers, so that one direction's all-to-all hides behind the
other direction's computation (DeepSeek-V3 report, arXiv 2412.19437, section 3.2.1, figure 4).

A layer with experts runs attention, dispatch, MLP, combine; its backward runs them the other way round. Attention and
MLP compute; dispatch and combine are all-to-all. A rank has a stream for each. The steps of a group are under way
together: those that compute one after the other, and the all-to-all beside them; the next group starts when both
streams are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.program.durations import Durations, Floats
from meshwright.program.pipeline import Component, Kind, PipelineProgram, build_program
from meshwright.program.simulate_pipeline import PipelineTiming, simulate_pipeline

_FORWARD = (Component.ATTENTION, Component.DISPATCH, Component.MLP, Component.COMBINE)
_BACKWARD = _FORWARD[::-1]
_WEIGHTS = (Component.MLP, Component.ATTENTION)  # the parts that have weights, in the order of the backward
_PARTS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.INPUT_GRADIENT: _BACKWARD,
    Kind.WEIGHT_GRADIENT: _WEIGHTS,
}
_ALL_TO_ALL = (Component.DISPATCH, Component.COMBINE)

_Step = tuple[int, int, int, int, int]  # kind, stage, replica, micro-batch, component


def with_components(program: PipelineProgram) -> PipelineProgram:
    """The same program with every whole computing step cut into its parts.

    A step that stands alone becomes one group a part: nothing hides its all-to-all. A forward and a backward that
    overlap become four groups, in each of which the one computes while the other communicates:

        forward     attention   dispatch   MLP        combine
        backward    combine     MLP        dispatch   attention

    A stage of many layers stands for the parts of its layers together. What is cut already, sends, receives and updates
    stay as they are.
    """
    s = program.steps
    columns = (s.rank, s.group, s.kind, s.stage, s.replica, s.micro_batch, s.component)
    groups: dict[tuple[int, int], list[_Step]] = {}
    for rank, group, *step in np.stack(columns, axis=1).tolist():
        groups.setdefault((rank, group), []).append(tuple(step))
    cut = [(rank, parts) for (rank, _), steps in groups.items() for parts in _cut(steps)]
    rows = [(rank, number, *step) for number, (rank, parts) in enumerate(cut) for step in parts]
    return build_program(program.name, program.ranks, program.micro_batches, program.placement, rows)


def _cut(group: list[_Step]) -> Iterator[tuple[_Step, ...]]:
    """The groups that take the place of one."""
    whole = [step for step in group if step[0] in _PARTS and step[4] == Component.WHOLE]
    if len(whole) < len(group):
        yield tuple(step for step in group if step not in whole)
    cut = [[(*step[:4], int(part)) for part in _PARTS[Kind(step[0])]] for step in whole]
    together = [parts for parts in cut if len(parts) == len(_FORWARD)]  # a weight gradient comes after its backward
    yield from zip(*together, strict=True)
    yield from ((step,) for parts in cut if len(parts) < len(_FORWARD) for step in parts)


@dataclass(frozen=True)
class ComponentDurations:
    """How long the parts of one stage last on one micro-batch, in any unit of time.

    forward, input_gradient: of attention, dispatch, MLP, combine. weight_gradient: of attention and MLP. A full
    backward lasts its input gradient and its weight gradient. transfer: as in `Durations`.
    """

    forward: tuple[float, float, float, float]
    input_gradient: tuple[float, float, float, float]
    weight_gradient: tuple[float, float]
    transfer: float = 0.0

    def by_kind(self) -> Floats:
        """Duration by [forward, backward, input gradient, weight gradient] and [attention, dispatch, MLP, combine]."""
        weights = np.array([self.weight_gradient[0], 0.0, self.weight_gradient[1], 0.0])
        inputs = np.array(self.input_gradient)
        return np.array([self.forward, inputs + weights, inputs, weights], np.float64)

    @property
    def one_after_the_other(self) -> float:
        """F + B: a forward and a full backward, all-to-all included, if nothing overlaps."""
        return float(self.by_kind()[:2].sum())

    @property
    def overlapped(self) -> float:
        """F&B: the four groups of a pair, each as long as its longer stream."""
        forward, backward = self.by_kind()[:2]
        return float(np.maximum(forward, backward[::-1]).sum())

    def durations(self) -> Durations:
        """For programs whole or cut; a pair that is not cut takes `overlapped`."""
        table = self.by_kind()
        whole = table.sum(axis=1)
        shares = table / np.where(whole > 0, whole, 1.0)[:, np.newaxis]
        forward, _, inputs, weights = (float(each) for each in whole)
        return Durations(forward, inputs, weights, self.transfer, overlapped=self.overlapped, parts=shares)


@dataclass(frozen=True, eq=False)
class ComponentTiming:
    """When the parts run. timing: by group. start, end: by step, on its stream. exposed: time that each rank waits
    inside its groups for all-to-all that nothing hides, and all_to_all: time that its all-to-all takes."""

    timing: PipelineTiming
    start: Floats
    end: Floats
    exposed: Floats
    all_to_all: Floats


def simulate_components(program: PipelineProgram, durations: ComponentDurations) -> ComponentTiming:
    """Run a program, cut or whole, on a clock with two streams a rank. Raises what `simulate_pipeline` raises."""
    cut = with_components(program)
    timing = simulate_pipeline(cut, durations.durations())
    s = cut.steps
    lasts = np.zeros(len(s))
    parts = s.component > 0
    lasts[parts] = durations.by_kind()[s.kind[parts], s.component[parts] - 1]
    beside = np.isin(s.component, _ALL_TO_ALL)
    start = timing.start.copy()
    # What computes in a group takes turns; so would several all-to-alls.
    for stream in (parts & beside, parts & ~beside):
        steps = np.flatnonzero(stream)
        turns = np.cumsum(lasts[steps]) - lasts[steps]
        first = np.searchsorted(s.group_index[steps], s.group_index[steps])
        start[steps] += turns - turns[first]
    end = np.where(parts, start + lasts, timing.end)
    groups = len(s.group_rank)
    computes = np.bincount(s.group_index[parts & ~beside], lasts[parts & ~beside], groups)
    communicates = np.bincount(s.group_index[beside], lasts[beside], groups)
    uncovered = np.maximum(communicates - computes, 0.0)
    exposed, all_to_all = (
        np.bincount(s.group_rank, each, program.ranks).astype(np.float64) for each in (uncovered, communicates)
    )
    return ComponentTiming(timing, start, end, exposed, all_to_all)
