"""How long the steps of a pipeline program last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.errors import UserError
from meshwright.program.pipeline import COMPUTING, Component, Kind, PipelineProgram

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Durations:
    """How long steps last, in any unit of time, on one micro-batch.

    Each is one number for all stages, one a stage, or one a replica and stage [replicas, stages].
    forward, input_gradient, weight_gradient: a full backward lasts the sum of the last two.
    transfer: from a stage to the next one and back; one number, or one a boundary (stages - 1). Between two stages of
        one rank it takes no time.
    update: of one stage's weights. overlapped: a forward and a backward in one group (None: the sum of both); where
        they are of two stages, the mean of the stages' values.
    parts: the shares of attention, dispatch, MLP and combine in a step whose layers are cut: four numbers, of which a
        weight gradient has those of attention and MLP, in their proportion; or four for each of forward, backward,
        input gradient and weight gradient [4, 4]. In a group, attention and MLP run one after the other while dispatch
        and combine are under way beside them.
    """

    forward: ArrayLike
    input_gradient: ArrayLike
    weight_gradient: ArrayLike
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
        """Durations of a rank's whole share of the model, of which a chunk takes 1/chunks.

        shape: the program, or (ranks, chunks) of one whose stages follow the ranks in turn. Each duration is one
        number, one a rank, or one a stage, which is taken as it is; where a rank holds one stage of a replica, the
        list goes by stage. transfer: as in `Durations`. Raises UserError for a list of another length.
        """
        if isinstance(shape, tuple):
            ranks, chunks = shape
            placement: Sequence[Sequence[int]] = [[stage % ranks for stage in range(ranks * chunks)]]
        else:
            ranks, chunks, placement = shape.ranks, shape.chunks, shape.placement
        stages = len(placement[0])

        def by_stage(name: str, value: ArrayLike) -> Floats:
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                return np.full(stages, array / chunks)
            if array.shape == (stages,):
                return array
            if array.shape == (ranks,):
                by_replica = np.asarray(array[np.asarray(placement)] / chunks, np.float64)
                return by_replica if len(placement) > 1 else by_replica[0]
            counts = f"{ranks} (one a rank)" + (f" or {stages} (one a stage)" if stages != ranks else "")
            raise UserError(f"{name}: {array.size} values; right is 1 or {counts}")

        return cls(
            by_stage("forward", forward),
            by_stage("input gradient", input_gradient),
            by_stage("weight gradient", weight_gradient),
            transfer,
            by_stage("update", update),
            None if overlapped is None else by_stage("overlapped", overlapped),
        )

    def table(self, name: str, program: PipelineProgram) -> Floats:
        """One duration by [replica, stage]; of `transfer`, by boundary [replica, stages - 1]."""
        array = np.asarray(getattr(self, name), np.float64)
        columns = program.stages - (name == "transfer")
        if (array.ndim and array.shape[-1] != columns) or array.ndim > 2:
            each = "boundary between stages" if name == "transfer" else "stage"
            raise UserError(f"{name.replace('_', ' ')}: {array.size} values; right is 1 or {columns} (one a {each})")
        if not np.isfinite(array).all() or (array < 0).any():
            raise UserError(f"{name.replace('_', ' ')}: a duration is a finite number that is not negative")
        return np.broadcast_to(array, (program.replicas, columns))

    def shares(self) -> Floats:
        """Share of a whole step that a part of it takes, by [kind, component]; 1 for the whole."""
        parts = np.asarray(self.parts, np.float64)
        if parts.shape not in ((4,), (4, 4)):
            raise UserError(f"parts: {parts.size} values; right is 4, or 4 for each of the 4 kinds of steps")
        shares = np.ones((len(Kind), len(Component)))
        shares[: len(COMPUTING), 1:] = parts
        if parts.ndim == 1:
            with_weights = np.array([1.0, 0.0, 1.0, 0.0]) * parts
            shares[Kind.WEIGHT_GRADIENT, 1:] = with_weights / (with_weights.sum() or 1.0)
        return shares


StageDurations: TypeAlias = Callable[[int], Durations | None]
"""How long the steps of a model last that is cut into so many stages, one duration a stage; None: it cannot be cut so.
Durations of all numbers of stages are in one unit."""
