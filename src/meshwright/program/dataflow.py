"""Which step of a pipeline program reads what another one made: the one place that knows the data flow of training.

A forward reads the output of the stage before; a backward or an input gradient reads the gradient of the stage after
it and what its own forward kept; a weight gradient reads what its input gradient queued. Where steps are parts of
layers, the parts of a forward run attention, dispatch, MLP, combine, and those of a backward the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.program.order import Integers, Mask
from meshwright.program.pipeline import COMPUTING, Kind, PipelineProgram

# What a computing step makes: an output, a gradient of its input, a gradient of its weights. A backward makes both
# gradients; others read only the first of them.
OUTPUT, GRADIENT, WEIGHTS = 0, 1, 2
_MAKES = np.array([OUTPUT, GRADIENT, GRADIENT, WEIGHTS])
_PARTS = 5


@dataclass(frozen=True)
class Needs:
    """One entry for every value that a step reads: the step that reads it, and the one that made it (-1: none)."""

    reader: Integers
    maker: Integers
    what: Integers  # OUTPUT or GRADIENT
    stage: Integers  # of the maker
    between_stages: Mask  # whether the value passes from one stage to the next, and so perhaps between ranks

    def __len__(self) -> int:
        return len(self.reader)


@dataclass(frozen=True)
class Dataflow:
    """The values of a program and who reads them. Assumes that stages, replicas and micro-batches are in range."""

    program: PipelineProgram

    @cached_property
    def computing(self) -> Integers:
        """Indices of the computing steps."""
        return np.flatnonzero(self.program.steps.kind <= max(COMPUTING))

    def key(self, what: Integers | int, replica: Integers, stage: Integers, micro_batch: Integers) -> Integers:
        """The number of a value."""
        p = self.program
        return ((what * p.replicas + replica) * p.stages + stage) * p.micro_batches + micro_batch

    @cached_property
    def made(self) -> Integers:
        """Number of the value that each computing step makes (or makes a part of)."""
        s, c = self.program.steps, self.computing
        return self.key(_MAKES[s.kind[c]], s.replica[c], s.stage[c], s.micro_batch[c])

    @cached_property
    def _parts(self) -> tuple[Integers, Mask, Mask]:
        """Computing steps so that the parts of a value stand together, in the order in which they run; whether each
        is the first and the last of its value."""
        s, c, made = self.program.steps, self.computing, self.made
        part = np.where(s.kind[c] == Kind.FORWARD, s.component[c], -s.component[c])
        order = np.lexsort((part, made)) if part.any() else np.argsort(made, kind="stable")
        differs = np.diff(made[order]) != 0
        return c[order], np.append(True, differs)[: len(c)], np.append(differs, True)[: len(c)]

    @cached_property
    def first(self) -> Integers:
        """By value: the first step that makes a part of it; -1 where no step does."""
        return self._table(1)

    @cached_property
    def last(self) -> Integers:
        """By value: the step after which it is whole; -1 where no step makes it."""
        return self._table(2)

    def _table(self, which: int) -> Integers:
        p = self.program
        table = np.full(3 * p.replicas * p.stages * p.micro_batches, -1, np.int64)
        order, chosen = self._parts[0], self._parts[which]
        steps, s = order[chosen], p.steps
        table[self.key(_MAKES[s.kind[steps]], s.replica[steps], s.stage[steps], s.micro_batch[steps])] = steps
        return table

    @cached_property
    def needs(self) -> Needs:
        """Every reading of a value, in no particular order."""
        p, s = self.program, self.program.steps
        order, is_first, _ = self._parts
        kind = s.kind[order]
        is_weights = kind == Kind.WEIGHT_GRADIENT

        # Parts of one value, one after the other; the weight gradients of its parts do not read each other.
        later = np.flatnonzero(~is_first & ~is_weights)
        own = _MAKES[s.kind[order[later]]]
        found = [(order[later], order[later - 1], own, s.stage[order[later]], np.zeros(len(later), np.bool_))]

        def reads(reader: Integers, what: int, ahead: int = 0) -> None:
            stage = s.stage[reader] + ahead
            maker = self.last[self.key(what, s.replica[reader], stage, s.micro_batch[reader])]
            if what == GRADIENT and not ahead and s.component.any():
                maker = self._same_part(reader, maker)
            found.append((reader, maker, np.full(len(reader), what), stage, np.full(len(reader), ahead != 0)))

        forward = order[is_first & (kind == Kind.FORWARD)]
        reads(forward[s.stage[forward] > 0], OUTPUT, -1)
        backward = order[is_first & (kind != Kind.FORWARD) & ~is_weights]
        reads(backward, OUTPUT)
        reads(backward[s.stage[backward] < p.stages - 1], GRADIENT, +1)
        reads(order[is_weights], GRADIENT)
        return Needs(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def _same_part(self, weights: Integers, whole: Integers) -> Integers:
        """The input gradient of the same part of a layer, or the whole one where that is not cut."""
        s, c = self.program.steps, self.computing
        gradients = c[np.isin(s.kind[c], (Kind.BACKWARD, Kind.INPUT_GRADIENT))]
        have = self.key(GRADIENT, s.replica[gradients], s.stage[gradients], s.micro_batch[gradients]) * _PARTS
        have = have + s.component[gradients]
        want = self.key(GRADIENT, s.replica[weights], s.stage[weights], s.micro_batch[weights]) * _PARTS
        want = want + s.component[weights]
        by_number = np.argsort(have, kind="stable")
        at = np.searchsorted(have[by_number], want)
        found = (at < len(have)) & (have[by_number[np.minimum(at, len(have) - 1)]] == want) if len(have) else at < 0
        result = whole.copy()
        result[found] = gradients[by_number[at[found]]]
        return result
