"""Durations of the steps of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.errors import UserError
from meshwright.program.pipeline import COMPUTING, Component, Kind, PipelineProgram

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Durations:
    """Durations of the steps of a pipeline on one micro-batch. The unit of time is arbitrary, but equal for all fields.
    Each field is one number for all stages, or an array [stages] or [replicas, stages] (replica: copy of the model, two
    in bidirectional schedules).

    Attributes:
        forward, input_gradient, weight_gradient: Compute times of the passes. A full backward takes the sum of input
            gradient and weight gradient.
        transfer: Message time between adjacent stages, in either direction; one number, or an array [stages - 1] with
            one per stage boundary. Transfers between stages of one rank take no time.
        update: Time of the optimizer step on one stage's weights.
        overlapped: Time of a forward and a backward that run together as one group; None: the sum of their times. If
            the two are on different stages, the mean of both stages' values is used.
        parts: Fractions of a pass that attention, dispatch, MLP and combine take, for steps that are split into these
            components. [4]: the same for all passes, except that a weight gradient is divided between attention and MLP
            only, in the ratio of their fractions. [4, 4]: one row each for forward, backward, input gradient and weight
            gradient. In a group, attention and MLP run one after the other, and dispatch and combine overlap with them.
    """

    forward: ArrayLike = 1.0
    input_gradient: ArrayLike = 1.0
    weight_gradient: ArrayLike = 1.0
    transfer: ArrayLike = 0.0
    update: ArrayLike = 0.0
    overlapped: ArrayLike | None = None
    parts: ArrayLike = (0.25, 0.25, 0.25, 0.25)

    @classmethod
    def per_rank(
        cls,
        shape: PipelineProgram | tuple[int, int],
        forward: ArrayLike = 1.0,
        input_gradient: ArrayLike = 1.0,
        weight_gradient: ArrayLike = 1.0,
        transfer: ArrayLike = 0.0,
        update: ArrayLike = 0.0,
        overlapped: ArrayLike | None = None,
    ) -> Durations:
        """Build durations by stage from durations by rank (all stages of a rank together), divided equally among the
        rank's stages.

        shape: the program, or (ranks, stages per rank). forward, input_gradient, weight_gradient, update, overlapped:
        as the fields of `Durations`, but by rank: one number for all ranks, or a list [ranks]. overlapped=None: the sum
        of the times of forward and backward. A list [stages] has the durations of stages and is not divided. transfer:
        message time between adjacent stages, not divided.
        """
        return cls(forward, input_gradient, weight_gradient, transfer, update, overlapped).split(shape)

    def split(self, shape: PipelineProgram | tuple[int, int]) -> Durations:
        """Convert durations by rank (all stages of a rank together) to durations by stage.

        shape: the program, or (ranks, chunks per rank) for cyclic placement (stage s on rank s modulo ranks). In each
        field, a single number and a list with one number per rank are divided by the chunks per rank; a list with one
        number per stage is unchanged. `transfer` is unchanged. Raises UserError for a list of another length.
        """
        if isinstance(shape, tuple):
            ranks, chunks = shape
            placement: Sequence[Sequence[int]] = [[stage % ranks for stage in range(ranks * chunks)]]
        else:
            ranks, chunks, placement = shape.ranks, shape.chunks, shape.placement
        stages = len(placement[0])

        def by_stage(name: str, value: ArrayLike) -> Floats:
            """Convert one field of `Durations` to values by stage: [stages], or [replicas, stages] for values by rank
            and several replicas. A number, or a list by rank, is divided by the stages per rank; a list by stage is
            kept.

            name: field name, for error messages. value: one number, one per rank, or one per stage. Raises UserError
            for another length.
            """
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                return np.full(stages, array / chunks)
            if array.shape == (stages,):
                return array
            if array.shape == (ranks,):
                by_replica = np.asarray(array[np.asarray(placement)] / chunks, np.float64)
                return by_replica if len(placement) > 1 else by_replica[0]
            counts = f"{ranks} (one per rank)" + (f" or {stages} (one per stage)" if stages != ranks else "")
            raise UserError(f"{name}: {array.size} values; expected 1 or {counts}")

        return replace(
            self,
            forward=by_stage("forward", self.forward),
            input_gradient=by_stage("input gradient", self.input_gradient),
            weight_gradient=by_stage("weight gradient", self.weight_gradient),
            update=by_stage("update", self.update),
            overlapped=None if self.overlapped is None else by_stage("overlapped", self.overlapped),
        )

    def tabulate(self, name: str, program: PipelineProgram) -> Floats:
        """Return the field `name`, such as "forward", as an array [replicas, stages] for the program.

        The field "transfer" has the shape [replicas, stages - 1], with one entry per stage boundary. Raises UserError
        for a wrong number of values, and for negative or infinite values.
        """
        array = np.asarray(getattr(self, name), np.float64)
        columns = program.stages - (name == "transfer")
        if (array.ndim and array.shape[-1] != columns) or array.ndim > 2:
            each = "boundary between stages" if name == "transfer" else "stage"
            raise UserError(f"{name.replace('_', ' ')}: {array.size} values; expected 1 or {columns} (one per {each})")
        if not np.isfinite(array).all() or (array < 0).any():
            raise UserError(f"{name.replace('_', ' ')}: durations must be finite and not negative")
        return np.broadcast_to(array, (program.replicas, columns))

    def compute_component_shares(self) -> Floats:
        """Return the fraction of a step's duration that each layer component (attention, dispatch, MLP, combine) takes:
        [step kinds, components], indexed by `Kind` and `Component`; 1 for whole steps. Raises UserError if the field
        `parts` has not the shape [4] or [4, 4]."""
        parts = np.asarray(self.parts, np.float64)
        if parts.shape not in ((4,), (4, 4)):
            raise UserError(f"parts: {parts.size} values; expected 4, or 4 for each of the 4 step kinds")
        shares = np.ones((len(Kind), len(Component)))
        shares[: len(COMPUTING), 1:] = parts
        if parts.ndim == 1:
            with_weights = np.array([1.0, 0.0, 1.0, 0.0]) * parts
            shares[Kind.WEIGHT_GRADIENT, 1:] = with_weights / (with_weights.sum() or 1.0)
        return shares


EQUAL_DURATIONS = Durations()
"""One unit of time each for forward, input gradient and weight gradient; zero for transfers."""

StageDurations: TypeAlias = Callable[[int], Durations | None]
"""Function from a number of stages to the durations of a model split into them, one a stage; None if that is
impossible. Durations for all numbers of stages are in the same unit."""
