"""Pass that splits steps into layer components, to hide all-to-all behind the other direction's computation
(DeepSeek-V3 report, arXiv 2412.19437, section 3.2.1, figure 4).

A mixture-of-experts layer runs attention, dispatch, MLP, combine; its backward runs them in reverse. Attention and MLP
compute; dispatch and combine are all-to-all. A rank has one stream for each. In a group, compute components run one
after the other, with all-to-all overlapped; the next group starts when both streams are done.
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
_WEIGHTS = (Component.MLP, Component.ATTENTION)  # components with weights, in backward order
_PARTS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.INPUT_GRADIENT: _BACKWARD,
    Kind.WEIGHT_GRADIENT: _WEIGHTS,
}
_ALL_TO_ALL = (Component.DISPATCH, Component.COMBINE)

_Step = tuple[int, int, int, int, int]  # kind, stage, replica, micro-batch, component


def with_components(program: PipelineProgram) -> PipelineProgram:
    """Return the program with every whole compute step split into its layer components (attention, dispatch, MLP,
    combine).

    A single step becomes one group (steps that run together) per component, so its all-to-all is exposed. An overlapped
    forward and backward become four groups, in each of which one computes while the other communicates:

        forward     attention   dispatch   MLP        combine
        backward    combine     MLP        dispatch   attention

    If a stage has several layers, one step stands for the component in all layers of the stage. Steps that are split
    already, transfers and updates are unchanged.
    """
    s = program.steps
    columns = (s.rank, s.group, s.kind, s.stage, s.replica, s.micro_batch, s.component)
    groups: dict[tuple[int, int], list[_Step]] = {}
    for rank, group, *step in np.stack(columns, axis=1).tolist():
        groups.setdefault((rank, group), []).append(tuple(step))
    cut = [(rank, parts) for (rank, _), steps in groups.items() for parts in _split_group(steps)]
    rows = [(rank, number, *step) for number, (rank, parts) in enumerate(cut) for step in parts]
    return build_program(program.name, program.ranks, program.micro_batches, program.placement, rows)


def _split_group(group: list[_Step]) -> Iterator[tuple[_Step, ...]]:
    """Split the steps of one group (steps that a rank runs together) into their layer components (attention, dispatch,
    MLP, combine). Yield the groups of components that replace the group.

    group: steps (kind, stage, replica, micro-batch, component), each a whole pass. Each component of an overlapped
    forward is paired with one of the backward; each pair is a group."""
    whole = [step for step in group if step[0] in _PARTS and step[4] == Component.WHOLE]
    if len(whole) < len(group):
        yield tuple(step for step in group if step not in whole)
    cut = [[(*step[:4], int(part)) for part in _PARTS[Kind(step[0])]] for step in whole]
    together = [parts for parts in cut if len(parts) == len(_FORWARD)]  # a weight gradient comes after its backward
    yield from zip(*together, strict=True)
    yield from ((step,) for parts in cut if len(parts) < len(_FORWARD) for step in parts)


@dataclass(frozen=True)
class ComponentDurations:
    """Durations of the layer components of one stage on one micro-batch, in any unit of time.

    forward, input_gradient: (attention, dispatch, MLP, combine); dispatch and combine are all-to-alls. weight_gradient:
    (attention, MLP). A full backward takes the sum of input gradient and weight gradient. transfer: time of a message
    between adjacent stages.
    """

    forward: tuple[float, float, float, float]
    input_gradient: tuple[float, float, float, float]
    weight_gradient: tuple[float, float]
    transfer: float = 0.0

    def tabulate(self) -> Floats:
        """Return the durations as a table [4, 4], in the unit of the fields.

        Rows: forward, full backward, input gradient, weight gradient. Columns: attention, dispatch, MLP, combine."""
        weights = np.array([self.weight_gradient[0], 0.0, self.weight_gradient[1], 0.0])
        inputs = np.array(self.input_gradient)
        return np.array([self.forward, inputs + weights, inputs, weights], np.float64)

    @property
    def overlapped(self) -> float:
        """Time of an overlapped forward and backward (F&B), in the unit of all fields: the sum over four pairs of
        components that run at the same time (attention with combine, dispatch with MLP ...), each pair as long as the
        longer of its two components."""
        forward, backward = self.tabulate()[:2]
        return float(np.maximum(forward, backward[::-1]).sum())

    def to_durations(self) -> Durations:
        """Convert to the `Durations` that `simulate_pipeline` takes, for whole steps and for steps split into
        components.

        A whole forward or backward takes the sum of its components' times; a forward and a backward that run overlapped
        take `self.overlapped` together. `parts` of the result: [4, 4], fraction of the time of each pass (rows:
        forward, backward, input gradient, weight gradient) that each component takes (columns: attention, dispatch,
        MLP, combine).
        """
        table = self.tabulate()
        whole = table.sum(axis=1)
        shares = table / np.where(whole > 0, whole, 1.0)[:, np.newaxis]
        forward, _, inputs, weights = (float(each) for each in whole)
        return Durations(forward, inputs, weights, self.transfer, overlapped=self.overlapped, parts=shares)


@dataclass(frozen=True, eq=False)
class ComponentTiming:
    """Simulated times of a pipeline schedule whose steps are split into layer components (attention, dispatch, MLP,
    combine), in the unit of the component durations.

    Attributes:
        timing: Result of the simulation of whole groups: all steps of a group (that run together on a rank) start and
            end together.
        start, end: [steps], times of each single step within its group.
        exposed: [ranks], exposed all-to-all time, during which the rank does not compute.
        all_to_all: [ranks], total all-to-all time.
    """

    timing: PipelineTiming
    start: Floats
    end: Floats
    exposed: Floats
    all_to_all: Floats


def simulate_components(program: PipelineProgram, durations: ComponentDurations) -> ComponentTiming:
    """Simulate the pipeline schedule `program` on two streams per rank, one for computation and one for the all-to-alls
    of mixture-of-experts layers (dispatch and combine).

    durations: times of the layer components (attention, dispatch, MLP, combine) of one stage. Steps that are not split
    into components are split first. Raises the errors of `simulate_pipeline`.
    """
    cut = with_components(program)
    timing = simulate_pipeline(cut, durations.to_durations())
    s = cut.steps
    lasts = np.zeros(len(s))
    parts = s.component > 0
    lasts[parts] = durations.tabulate()[s.kind[parts], s.component[parts] - 1]
    is_all_to_all = np.isin(s.component, _ALL_TO_ALL)
    start = timing.start.copy()
    # Steps of one stream in a group run one after the other.
    for stream in (parts & is_all_to_all, parts & ~is_all_to_all):
        steps = np.flatnonzero(stream)
        turns = np.cumsum(lasts[steps]) - lasts[steps]
        first = np.searchsorted(s.group_index[steps], s.group_index[steps])
        start[steps] += turns - turns[first]
    end = np.where(parts, start + lasts, timing.end)
    groups = len(s.group_rank)
    computes = np.bincount(s.group_index[parts & ~is_all_to_all], lasts[parts & ~is_all_to_all], groups)
    communicates = np.bincount(s.group_index[is_all_to_all], lasts[is_all_to_all], groups)
    uncovered = np.maximum(communicates - computes, 0.0)
    exposed, all_to_all = (
        np.bincount(s.group_rank, each, program.ranks).astype(np.float64) for each in (uncovered, communicates)
    )
    return ComponentTiming(timing, start, end, exposed, all_to_all)
