"""Pipeline schedules: the forward, backward, update and communication steps of every pipeline rank, stored as columns.

The model is split into stages. A *replica* is one complete set of stages with its own mapping to ranks: a bidirectional
schedule (DualPipe, Chimera) has two replicas that run over the ranks in opposite directions, and each micro-batch runs
through one of them. `placement[replica][stage]` is the rank of a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

from meshwright.program.columns import StepColumns, StepProgram, renumber_groups
from meshwright.program.order import Integers

Placement = tuple[tuple[int, ...], ...]


class Kind(IntEnum):
    """Kind of a step of a pipeline schedule: a compute pass, an optimizer step (UPDATE), or one end of a transfer.

    BACKWARD computes input gradient and weight gradient in one step. UPDATE applies the gradients of all micro-batches
    up to and including the step's micro-batch; later forwards use the new weights. SEND_FORWARD and RECEIVE_FORWARD
    transfer an activation to the next stage, SEND_BACKWARD and RECEIVE_BACKWARD a gradient to the previous stage.
    """

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    UPDATE = 4  # optimizer step with the gradients up to the step's micro-batch; later forwards use the new weights
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
# Plain integers, because programs have tens of thousands of steps and access to enumeration members is slow.
_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _UPDATE = range(5)
COMPUTING = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
SENDING = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
ARRIVING = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


class Component(IntEnum):
    """Part of transformer layers that a step computes, in schedules that overlap computation with all-to-all
    (DualPipe): WHOLE (the step computes its whole stage), ATTENTION, DISPATCH, MLP or COMBINE.

    DISPATCH and COMBINE are the all-to-alls of mixture-of-experts layers.
    """

    WHOLE = 0
    ATTENTION = 1
    DISPATCH = 2
    MLP = 3
    COMBINE = 4


@dataclass(frozen=True, eq=False)
class Steps(StepColumns):
    """Compute steps, updates and transfers of a pipeline schedule as columns [steps], sorted by rank, in execution
    order.

    Attributes:
        rank: Rank that runs the step.
        group: Number of the step's group, from 0 on each rank. Steps of one group run together: transfers are posted at
            once, a forward and a backward overlap.
        kind: A `Kind`, such as FORWARD.
        stage, replica, micro_batch: Stage, replica and micro-batch that the step works on; an update applies the
            gradients of all micro-batches up to this one.
        component: A `Component`: 0 for a whole step, else attention, dispatch, MLP or combine.
    """

    stage: Integers
    replica: Integers
    micro_batch: Integers  # of an update: the last micro-batch whose gradients it applies
    component: Integers


@dataclass(frozen=True)
class PipelineProgram(StepProgram):
    """Pipeline schedule of one training step (of several steps if asynchronous), written out as steps for every rank.

    Attributes:
        name: Such as `1f1b`.
        ranks: Number of pipeline ranks.
        micro_batches: Total over all replicas, numbered from 0; each runs through every stage of one replica.
        placement: Rank of each stage, indexed by replica (copy of the model; bidirectional schedules have two replicas,
            other schedules one), then by stage.
        steps: Steps of all ranks.
    """

    name: str
    ranks: int
    micro_batches: int
    placement: Placement
    steps: Steps

    @property
    def replicas(self) -> int:
        """Number of model replicas in the pipeline: 1, or 2 for a bidirectional schedule."""
        return len(self.placement)

    @property
    def stages(self) -> int:
        """Number of pipeline stages of one replica (copy of the model), over all ranks."""
        return len(self.placement[0])

    @property
    def chunks(self) -> int:
        """Number of model chunks (virtual pipeline stages) per rank: stages of one replica (copy of the model) on each
        rank."""
        return self.stages // self.ranks

    @property
    def stages_by_rank(self) -> list[list[int]]:
        """List of the stages on each rank, indexed by rank; if there are two replicas, the stages of both are in one
        list."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for replica in self.placement:
            for stage, rank in enumerate(replica):
                found[rank].append(stage)
        return found

    @property
    def asynchronous(self) -> bool:
        """True if weights are updated while micro-batches are in flight (PipeDream)."""
        return bool((self.steps.kind == Kind.UPDATE).any())

    @property
    def has_transfers(self) -> bool:
        """True if sends and receives are explicit steps (`schedules.transfers.with_transfers` adds them)."""
        return bool((self.steps.kind >= Kind.SEND_FORWARD).any())

    def find_peer(self, step: int) -> int:
        """Return the rank at the other end of the send or receive with index `step`.

        Equals the step's own rank if both stages are on one rank.
        """
        kind = int(self.steps.kind[step])
        ahead = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
        stage = int(self.steps.stage[step]) + (1 if ahead else -1)
        return self.placement[int(self.steps.replica[step])][stage]

    def describe(self, step: int) -> str:
        """Return the text of the step with index `step` in PyTorch's notation: stage, kind, micro-batch.

        Examples: `2F5`, `0SEND_F3`; `2'F5` on the second replica; `2F5.attention` for a layer component.
        """
        s = self.steps
        kind, component = int(s.kind[step]), int(s.component[step])
        if kind not in LETTERS or not 0 <= component < len(Component):
            return f"kind {kind}, component {component}"
        part = f".{Component(component).name.lower()}" if component else ""
        tick = "'" * int(s.replica[step])
        return f"{s.stage[step]}{tick}{LETTERS[Kind(kind)]}{s.micro_batch[step]}{part}"


def find_placement_error(placement: Sequence[Sequence[int]], ranks: int, first: int = 0) -> tuple[int, str] | None:
    """Check a placement of pipeline stages; return (rank, reason) of the first error, or None if there is no error.

    Each stage must be on an existing rank, all replicas (copies of the model) must have equally many stages, and all
    ranks must hold equally many stages of each replica. placement: [replica][stage], rank of each stage. ranks: number
    of ranks. first: index of the first replica to check; earlier replicas have been checked already.
    """
    for replica in range(first, len(placement)):
        homes = placement[replica]
        for stage, rank in enumerate(homes):
            if not 0 <= rank < ranks:
                return rank, f"stage {stage} of replica {replica} is on rank {rank}; ranks are 0 to {ranks - 1}"
        stages = len(placement[0])
        if len(homes) != stages:
            return homes[-1] if homes else 0, f"replica {replica} has {len(homes)} stages, replica 0 has {stages}"
        held = Counter(homes)  # not a table by rank: a file may claim any number of ranks
        if len(held) < ranks or len(set(held.values())) > 1:
            rank = next(rank for rank in range(ranks) if not held[rank] or held[rank] != held[0])
            counts = f"rank {rank} holds {held[rank]} of the {stages} stages of replica {replica}"
            return rank, f"{counts}; all {ranks} ranks must hold equally many"
    return None


def place_cyclically(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage [ranks x chunks] if stage s is on rank s modulo `ranks`: `0 1 2 3 0 1 2 3`.

    chunks: stages per rank.
    """
    return tuple(range(ranks)) * chunks


def place_in_v_shape(ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage [2 x ranks] in a V: `0 1 2 3 3 2 1 0`; rank 0 has the first and the last stage."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass
class RankBuilder:
    """Builder of one rank's steps of a pipeline schedule, in execution order. In all methods `stage` may be omitted if
    the rank has only one stage of the replica (copy of the model; bidirectional schedules have two replicas, other
    schedules one).

    rank: number of the rank. stages: [replica], stages on this rank. rows: of each appended step the group, kind,
    stage, replica, micro-batch and component; steps with equal group number run overlapped. The component is a
    `Component` (part of the layers that the step computes), 0 for a whole step.
    """

    rank: int
    stages: tuple[tuple[int, ...], ...]  # of this rank, by replica
    rows: list[int] = field(default_factory=list)
    _group: int = 0
    _overlapping: bool = False
    _table: Integers | None = None

    def forward(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        """Append the forward of micro-batch number `micro_batch` to the rank's steps. stage: number of the stage; None:
        the only stage of the replica on this rank. replica: index of the model copy: 0, or 1 for the second copy in a
        bidirectional schedule."""
        self.add(_FORWARD, micro_batch, stage, replica)

    def backward(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        """Append the full backward (input and weight gradients) of micro-batch number `micro_batch` to the rank's
        steps. stage: number of the stage; None: the only stage of the replica on this rank. replica: index of the model
        copy: 0, or 1 for the second copy in a bidirectional schedule."""
        self.add(_BACKWARD, micro_batch, stage, replica)

    def input_gradient(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        """Append the input-gradient pass (B) of micro-batch number `micro_batch` to the rank's steps. stage: number of
        the stage; None: the only stage of the replica on this rank. replica: index of the model copy: 0, or 1 for the
        second copy in a bidirectional schedule."""
        self.add(_INPUT_GRADIENT, micro_batch, stage, replica)

    def weight_gradient(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        """Append the weight-gradient pass (W) of micro-batch number `micro_batch` to the rank's steps. stage: number of
        the stage; None: the only stage of the replica on this rank. replica: index of the model copy: 0, or 1 for the
        second copy in a bidirectional schedule."""
        self.add(_WEIGHT_GRADIENT, micro_batch, stage, replica)

    def update(self, micro_batch: int, stage: int | None = None, replica: int = 0) -> None:
        """Append an optimizer step on one stage, which applies the gradients of all micro-batches up to and including
        `micro_batch`. stage: number of the stage; None: the only stage of the replica on this rank. replica: index of
        the model copy: 0, or 1 for the second copy in a bidirectional schedule."""
        self.add(_UPDATE, micro_batch, stage, replica)

    def add(
        self,
        kind: int,
        micro_batch: int,
        stage: int | None = None,
        replica: int = 0,
        component: int = 0,
    ) -> None:
        """Append a step of kind `kind` (a `Kind`, such as FORWARD) on micro-batch number `micro_batch` to the rank's
        steps.

        stage: number of the stage; None: the only stage of the replica on this rank. replica: index of the model copy:
        0, or 1 for the second copy in a bidirectional schedule. component: a `Component` (part of the layers), 0 for a
        whole step.
        """
        if stage is None:
            (stage,) = self.stages[replica]
        self.rows.extend((self._group, kind, stage, replica, micro_batch, component))
        self._group += not self._overlapping

    def set_steps(
        self, group: Integers, kind: Integers, stage: Integers, replica: Integers, micro_batch: Integers
    ) -> None:
        """Set all steps of the rank at once, instead of appending them one by one. Arguments are columns [steps], in
        execution order.

        group: steps with equal numbers run together. kind: values of `Kind`. stage, replica, micro_batch: indices from
        0.
        """
        assert not self.rows, "steps are appended one by one or set together, not both"
        self._table = np.column_stack([group, kind, stage, replica, micro_batch, np.zeros(len(kind), np.int64)])

    def alternate(self, forwards: Integers, backwards: Integers, warm_up: int, put_off: int | None = None) -> None:
        """Set all steps of the rank: `warm_up` forwards, then a forward and a backward in turn, at last backwards only.
        forwards, backwards: [passes, 2], micro-batch and stage of each pass in execution order. put_off: number of
        weight gradients that wait while input gradients run: weight gradient k follows input gradient k + `put_off`,
        and the last ones follow all others; None: backwards are not split."""
        turn = np.arange(len(forwards))
        passes = [(_FORWARD, forwards, 3 * np.maximum(turn - warm_up, -1))]
        if put_off is None:
            passes.append((_BACKWARD, backwards, 3 * turn + 1))
        else:
            passes.append((_INPUT_GRADIENT, backwards, 3 * turn + 1))
            passes.append((_WEIGHT_GRADIENT, backwards, 3 * (turn + put_off) + 2))
        order = np.argsort(np.concatenate([place for _, _, place in passes]), kind="stable")
        micro_batch, stage = np.concatenate([rows for _, rows, _ in passes])[order].T
        kind = np.repeat([kind for kind, _, _ in passes], len(turn))[order]
        self.set_steps(np.arange(len(order)), kind, stage, np.zeros_like(stage), micro_batch)

    def to_table(self) -> Integers:
        """Return the rank's steps as a table [steps, 6]: group (steps that run together), kind, stage, replica,
        micro-batch, component."""
        if self._table is not None:
            return self._table
        return np.array(self.rows, np.int64).reshape(-1, 6)

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Context manager; steps appended to the rank inside the `with` block form one group. The steps of a group run
        together, such as a forward and a backward that overlap."""
        self._overlapping = True
        yield
        self._overlapping = False
        self._group += 1


class Builder:
    """Builder of a pipeline schedule, rank by rank.

    program = Builder("gpipe", ranks, micro_batches, (place_cyclically(ranks),))
    for rank in program.ranks:
        for m in range(micro_batches):
            rank.forward(m)
        for m in range(micro_batches):
            rank.backward(m)
    return program.build()

    name: name of the schedule. ranks: number of ranks; the attribute `ranks` is a list with a `RankBuilder` for each.
    micro_batches: number of micro-batches. placement: rank of each stage, indexed by replica of the model, then by
    stage.
    """

    def __init__(self, name: str, ranks: int, micro_batches: int, placement: Placement) -> None:
        """Create one `RankBuilder` per rank; arguments: see the class."""
        self.name, self.micro_batches, self.placement = name, micro_batches, placement
        stages: list[list[list[int]]] = [[[] for _ in placement] for _ in range(ranks)]  # [rank][replica]
        for replica, ranks_by_stage in enumerate(placement):
            for stage, rank in enumerate(ranks_by_stage):
                stages[rank][replica].append(stage)
        self.ranks = [RankBuilder(rank, tuple(map(tuple, by_replica))) for rank, by_replica in enumerate(stages)]

    def build(self) -> PipelineProgram:
        """Return the pipeline schedule of all steps appended to the rank builders in `ranks`."""
        tables = [rank.to_table() for rank in self.ranks]
        rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        rows = np.column_stack([rank, np.concatenate(tables)])
        return build_program(self.name, len(self.ranks), self.micro_batches, self.placement, rows)


def build_program(name: str, ranks: int, micro_batches: int, placement: Placement, rows: ArrayLike) -> PipelineProgram:
    """Build a pipeline schedule from a table of steps. The steps are sorted by rank, and the groups (steps run
    together) renumbered from 0 on each rank.

    name: name of the schedule. ranks, micro_batches: numbers of ranks and micro-batches. placement: rank of each stage,
    indexed by replica, then by stage. rows: [steps, 7]: rank, group, kind, stage, replica, micro-batch, component;
    steps of one rank in execution order, ranks in any order.
    """
    table = np.asarray(rows, np.int64).reshape(-1, 7)
    table = table[np.argsort(table[:, 0], kind="stable")]
    rank = table[:, 0]
    group = renumber_groups(rank, table[:, 1])
    columns = [np.ascontiguousarray(table[:, i]) for i in range(2, 7)]
    return PipelineProgram(name, ranks, micro_batches, placement, Steps(rank.copy(), group, *columns))
