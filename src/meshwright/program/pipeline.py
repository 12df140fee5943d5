"""Pipeline programs: which micro-batch every rank computes when, and what it sends on, as columns of numbers.

A model is cut into stages. A *replica* is one whole copy of the stages; a bidirectional schedule has two, laid out over
the ranks in opposite directions, and sends each micro-batch through one of them. Which rank computes a stage is data:
`placement[replica][stage]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from meshwright.program.columns import Columns, numbered_groups
from meshwright.program.order import Integers

Placement = tuple[tuple[int, ...], ...]


class Kind(IntEnum):
    """What a step does. A backward is an input gradient and a weight gradient in one."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    UPDATE = 4  # from here on, forwards use the version made of the gradients up to the step's micro-batch
    SEND_FORWARD = 5  # an activation, to the next stage
    RECEIVE_FORWARD = 6
    SEND_BACKWARD = 7  # a gradient, to the stage before
    RECEIVE_BACKWARD = 8


LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT_GRADIENT: "I",
    Kind.WEIGHT_GRADIENT: "W",
    Kind.UPDATE: "U",
    Kind.SEND_FORWARD: "SEND_F",
    Kind.RECEIVE_FORWARD: "RECV_F",
    Kind.SEND_BACKWARD: "SEND_B",
    Kind.RECEIVE_BACKWARD: "RECV_B",
}
# As plain numbers: programs have tens of thousands of steps, and members of an enumeration are slow to come by.
_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _UPDATE = range(5)
COMPUTING = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
SENDING = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
ARRIVING = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


class Component(IntEnum):
    """Part of a layer that a step stands for, where a schedule overlaps computation with all-to-all (DualPipe)."""

    WHOLE = 0
    ATTENTION = 1
    DISPATCH = 2
    MLP = 3
    COMBINE = 4


@dataclass(frozen=True, eq=False)
class Steps(Columns):
    """Columns with one entry a step, in the order in which each rank takes them, rank by rank.

    Steps of one group happen together: transfers are posted at once, a forward and a backward overlap.
    """

    stage: Integers
    replica: Integers
    micro_batch: Integers  # an update: of the last micro-batch whose gradients it applies
    component: Integers


@dataclass(frozen=True)
class PipelineProgram:
    """One training step (asynchronous schedules: several) of a pipeline, written out for every rank.

    micro_batches: of all replicas together, numbered from 0; each runs through every stage of one replica.
    """

    name: str
    ranks: int
    micro_batches: int
    placement: Placement
    steps: Steps

    @property
    def replicas(self) -> int:
        return len(self.placement)

    @property
    def stages(self) -> int:
        """Stages of one replica."""
        return len(self.placement[0])

    @property
    def chunks(self) -> int:
        """Stages that a rank holds of one replica; a stage is 1/chunks of a rank's share of the model."""
        return self.stages // self.ranks

    @property
    def places(self) -> list[list[int]]:
        """The stages of each rank; of several replicas all."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for replica in self.placement:
            for stage, rank in enumerate(replica):
                found[rank].append(stage)
        return found

    @property
    def asynchronous(self) -> bool:
        """Whether weights change while micro-batches are under way."""
        return bool((self.steps.kind == Kind.UPDATE).any())

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives are written out (`schedules.transfers.with_transfers` adds them)."""
        return bool((self.steps.kind >= Kind.SEND_FORWARD).any())

    def peer(self, step: int) -> int:
        """The other rank of a send or a receive; the same rank where the two stages live together."""
        kind = int(self.steps.kind[step])
        ahead = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
        stage = int(self.steps.stage[step]) + (1 if ahead else -1)
        return self.placement[int(self.steps.replica[step])][stage]

    def describe(self, step: int) -> str:
        """One step as PyTorch writes it, stage first: `2F5`, `0SEND_F3`; of the second replica `2'F5`."""
        s = self.steps
        tick = "'" * int(s.replica[step])
        part = f".{Component(int(s.component[step])).name.lower()}" if s.component[step] else ""
        return f"{s.stage[step]}{tick}{LETTERS[Kind(int(s.kind[step]))]}{s.micro_batch[step]}{part}"


def straight(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages in turn: with 2 chunks on 4 ranks 0 1 2 3 0 1 2 3."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Stages down the ranks and up again: the first rank holds the first and the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass
class RankBuilder:
    """Writes one rank's steps in their order. `stage` need not be said where the rank holds one stage of a replica."""

    rank: int
    held: tuple[tuple[int, ...], ...]  # stages on this rank, by replica
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    _group: int = 0
    _together: bool = False
    _columns: Integers | None = None

    def forward(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        self.add(_FORWARD, micro_batch, stage, replica)

    def backward(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        self.add(_BACKWARD, micro_batch, stage, replica)

    def input_gradient(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        self.add(_INPUT_GRADIENT, micro_batch, stage, replica)

    def weight_gradient(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        self.add(_WEIGHT_GRADIENT, micro_batch, stage, replica)

    def update(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        self.add(_UPDATE, micro_batch, stage, replica)

    def add(
        self,
        kind: int,
        micro_batch: int,
        stage: int | None = None,
        replica: int = 0,
        component: int = 0,
    ) -> None:
        if stage is None:
            (stage,) = self.held[replica]
        self.rows.append((self._group, kind, stage, replica, micro_batch, component))
        self._group += not self._together

    def take(self, group: Integers, kind: Integers, stage: Integers, replica: Integers, micro_batch: Integers) -> None:
        """All steps of the rank at once, as columns; `group`: the same number for those of one group."""
        assert not self.rows, "a rank is written step by step, or at once"
        self._columns = np.column_stack([group, kind, stage, replica, micro_batch, np.zeros(len(kind), np.int64)])

    def written(self) -> Integers:
        """Group, kind, stage, replica, micro-batch and component [steps, 6]."""
        if self._columns is not None:
            return self._columns
        return np.fromiter(chain.from_iterable(self.rows), np.int64, 6 * len(self.rows)).reshape(-1, 6)

    @contextmanager
    def together(self) -> Iterator[None]:
        """The steps written within it form one group: a forward and a backward that overlap."""
        self._together = True
        yield
        self._together = False
        self._group += 1


class Builder:
    """Writes a pipeline program rank by rank.

    program = Builder("gpipe", ranks, micro_batches, (straight(ranks),))
    for rank in program.ranks:
        for m in range(micro_batches):
            rank.forward(m)
        for m in range(micro_batches):
            rank.backward(m)
    return program.build()
    """

    def __init__(self, name: str, ranks: int, micro_batches: int, placement: Placement) -> None:
        self.name, self.micro_batches, self.placement = name, micro_batches, placement
        held: list[list[list[int]]] = [[[] for _ in placement] for _ in range(ranks)]
        for replica, stages in enumerate(placement):
            for stage, home in enumerate(stages):
                held[home][replica].append(stage)
        self.ranks = [RankBuilder(rank, tuple(map(tuple, mine))) for rank, mine in enumerate(held)]

    def build(self) -> PipelineProgram:
        """The program."""
        written = [rank.written() for rank in self.ranks]
        numbers = np.repeat(np.arange(len(written)), [len(each) for each in written])
        rows = np.column_stack([numbers, np.concatenate(written)])
        return program_of(self.name, len(self.ranks), self.micro_batches, self.placement, rows)


def program_of(name: str, ranks: int, micro_batches: int, placement: Placement, rows: ArrayLike) -> PipelineProgram:
    """The program of rows (rank, group, kind, stage, replica, micro-batch, component), in the order of each rank;
    groups are numbered afresh from 0 on each rank."""
    table = np.asarray(rows, np.int64).reshape(-1, 7)
    table = table[np.argsort(table[:, 0], kind="stable")]
    rank = table[:, 0]
    group = numbered_groups(rank, table[:, 1])
    columns = [np.ascontiguousarray(table[:, i]) for i in range(2, 7)]
    return PipelineProgram(name, ranks, micro_batches, placement, Steps(rank.copy(), group, *columns))
