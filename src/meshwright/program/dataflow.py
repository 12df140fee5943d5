"""Data flow of training in a pipeline schedule: which step reads the values that another step produces.

A forward reads the output of the previous stage; a backward or input gradient reads the gradient from the next stage
and the saved activations of its own forward; a weight gradient reads what its input gradient queued. Where steps are
components of layers, a forward runs attention, dispatch, MLP, combine, and a backward the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.program.order import Integers, Mask
from meshwright.program.pipeline import COMPUTING, Component, Kind, PipelineProgram

# Value that a compute step produces: an output, an input gradient, a weight gradient. A full backward produces both
# gradients; other steps read only the input gradient.
OUTPUT, GRADIENT, WEIGHTS = 0, 1, 2
_MAKES = np.array([OUTPUT, GRADIENT, GRADIENT, WEIGHTS])


@dataclass(frozen=True)
class ValueReads:
    """Reads of activations and gradients by the steps of a pipeline schedule, as columns with one entry per read.

    Attributes:
        reader: Index of the step that reads the value.
        maker: Index of the step that computes the value, -1 if no step does.
        what: Kind of the value: OUTPUT (0, the activation that a forward computes) or GRADIENT (1, an input gradient).
        stage: Stage of the step that computes the value.
        between_stages: True if the value comes from another stage, which may be on another rank.
    """

    reader: Integers
    maker: Integers
    what: Integers  # OUTPUT or GRADIENT
    stage: Integers  # of the maker
    between_stages: Mask  # True if the value is sent between stages, and so perhaps between ranks

    def __len__(self) -> int:
        """Return the number of reads."""
        return len(self.reader)


@dataclass(frozen=True)
class Dataflow:
    """Data flow of a pipeline schedule: which step produces each value, and which steps read it.

    A value is the output, the input gradient or the weight gradient of one micro-batch in one stage of one replica.
    program: the schedule. Stages, replicas and micro-batches of all its steps must be in range.
    """

    program: PipelineProgram

    @cached_property
    def computing(self) -> Integers:
        """Step indices of the compute steps (forward, backward, input gradient, weight gradient)."""
        return np.flatnonzero(self.program.steps.kind <= max(COMPUTING))

    def compute_value_index(
        self, what: Integers | int, replica: Integers, stage: Integers, micro_batch: Integers
    ) -> Integers:
        """Return the index of a value in arrays over all values, such as `last_step`. A value is the output, input
        gradient or weight gradient of one micro-batch in one stage of one replica (copy of the model); its index is
        row-major over (what, replica, stage, micro_batch).

        what: OUTPUT (0), GRADIENT (1: input gradient) or WEIGHTS (2: weight gradient). replica, stage, micro_batch:
        where and for which micro-batch the value is produced. Arguments are broadcast against each other; the result
        has their shape.
        """
        p = self.program
        return ((what * p.replicas + replica) * p.stages + stage) * p.micro_batches + micro_batch

    def index_values(self, what: Integers | int, steps: Integers) -> Integers:
        """Return the index, in arrays over all values such as `last_step`, of one value for each step: the value of
        kind `what` with the step's replica, stage and micro-batch.

        what: OUTPUT (0), GRADIENT (1: input gradient) or WEIGHTS (2: weight gradient). steps: step indices.
        """
        s = self.program.steps
        return self.compute_value_index(what, s.replica[steps], s.stage[steps], s.micro_batch[steps])

    @cached_property
    def produced(self) -> Integers:
        """Value (output or gradient) that each compute step produces, as an index into arrays over all values: [compute
        steps]. The steps of a pass that is split into layer components produce one value together."""
        return self.index_values(_MAKES[self.program.steps.kind[self.computing]], self.computing)

    @cached_property
    def _ordered_components(self) -> tuple[Integers, Mask, Mask]:
        """Return the compute steps, sorted by the value (output or gradient) that they compute, then by layer component
        (attention, dispatch, MLP, combine) in execution order. Three arrays [compute steps]: step index; mask of the
        first component of each value; mask of the last component of each value."""
        s, c, made = self.program.steps, self.computing, self.produced
        part = np.where(s.kind[c] == Kind.FORWARD, s.component[c], -s.component[c])
        order = np.lexsort((part, made)) if part.any() else np.argsort(made, kind="stable")
        differs = np.diff(made[order]) != 0
        return c[order], np.append(True, differs)[: len(c)], np.append(differs, True)[: len(c)]

    @cached_property
    def first_step(self) -> Integers:
        """Index of the first step that works on each value (output or gradient): [values], in the order of
        `compute_value_index`; -1 for a value that no step computes."""
        return self._tabulate_steps(1)

    @cached_property
    def last_step(self) -> Integers:
        """Index of the step that completes each value (output or gradient): [values], in the order of
        `compute_value_index`; -1 for a value that no step computes."""
        return self._tabulate_steps(2)

    def _tabulate_steps(self, which: int) -> Integers:
        """Return, for each value (output or gradient), the first or the last step that computes it: step indices
        [values] in the order of `compute_value_index`; -1 for a value that no step computes. which: 1 for the first
        step, 2 for the last."""
        p = self.program
        table = np.full(3 * p.replicas * p.stages * p.micro_batches, -1, np.int64)
        order, chosen = self._ordered_components[0], self._ordered_components[which]
        steps = order[chosen]
        table[self.index_values(_MAKES[p.steps.kind[steps]], steps)] = steps
        return table

    @cached_property
    def reads(self) -> ValueReads:
        """All reads of outputs and gradients by compute steps, in no particular order."""
        p, s = self.program, self.program.steps
        order, is_first, _ = self._ordered_components
        kind = s.kind[order]
        is_weights = kind == Kind.WEIGHT_GRADIENT

        # Each component of a value reads the one before; weight gradients of components are independent.
        later = np.flatnonzero(~is_first & ~is_weights)
        own = _MAKES[s.kind[order[later]]]
        found = [(order[later], order[later - 1], own, s.stage[order[later]], np.zeros(len(later), np.bool_))]

        def reads(reader: Integers, what: int, ahead: int = 0) -> None:
            """Record that each step of `reader` (step indices) reads a value of its own micro-batch and replica.

            what: kind of value, OUTPUT or GRADIENT. ahead: stage that produces the value minus stage of the reader: -1,
            0 or 1.
            """
            stage = s.stage[reader] + ahead
            maker = self.last_step[self.compute_value_index(what, s.replica[reader], stage, s.micro_batch[reader])]
            if what == GRADIENT and not ahead and s.component.any():
                maker = self._find_same_component(reader, maker)
            found.append((reader, maker, np.full(len(reader), what), stage, np.full(len(reader), ahead != 0)))

        forward = order[is_first & (kind == Kind.FORWARD)]
        reads(forward[s.stage[forward] > 0], OUTPUT, -1)
        backward = order[is_first & (kind != Kind.FORWARD) & ~is_weights]
        reads(backward, OUTPUT)
        reads(backward[s.stage[backward] < p.stages - 1], GRADIENT, +1)
        reads(order[is_weights], GRADIENT)
        return ValueReads(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def _find_same_component(self, weights: Integers, whole: Integers) -> Integers:
        """Return, for each weight-gradient step, the index of the step whose gradients it reads: the input-gradient or
        full backward step of the same replica, stage, micro-batch and layer component (attention or MLP). weights:
        indices of the weight-gradient steps. whole: [weights], for each of them the step that computes the input
        gradients of all components at once; it is returned where no step computes the component alone."""
        s, c = self.program.steps, self.computing
        gradients = c[np.isin(s.kind[c], (Kind.BACKWARD, Kind.INPUT_GRADIENT))]
        table = np.full(
            (3 * self.program.replicas * self.program.stages * self.program.micro_batches, len(Component)), -1
        )
        table[self.index_values(GRADIENT, gradients), s.component[gradients]] = gradients
        found = table[self.index_values(GRADIENT, weights), s.component[weights]]
        return np.where(found < 0, whole, found)
