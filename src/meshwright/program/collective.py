"""Collective programs: the sends, receives, reductions and copies of every rank, stored as columns.

The vector of an operation is divided into equal chunks. A rank's memory consists of slots of one chunk each: `data`,
one slot for each chunk of the vector; `output`, as many again, for operations that do not work in place (all-to-all);
then `scratch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

from meshwright.errors import UserError
from meshwright.names import OPERATIONS, REDUCTIONS
from meshwright.program.columns import StepColumns, StepProgram, renumber_groups
from meshwright.program.matching import match_steps
from meshwright.program.order import Integers


class Kind(IntEnum):
    """Kind of a step of a collective program: what one rank does with its slots (buffers of one chunk each).

    SEND and RECEIVE transfer slots; REDUCE receives and adds to its slots. COPY and COMBINE (add) are local. SIGNAL and
    WAIT are a send and a receive without data.
    Steps form groups: a rank posts the steps of a group together and waits for all of them before the next group. A
    group has either local steps or transfers. Each step reads slot values from before the group; writes become visible
    after the group. A slot that a receive or a copy writes may be used by no other step of the group. Several
    reductions may target one slot, and sends of the group may read that slot; they send its value from before the
    group.
    The order of steps within a group decides only which messages match (between two ranks, the n-th send with the n-th
    receive) and the rounding order of reductions into one slot.
    """

    SEND = 0
    RECEIVE = 1
    REDUCE = 2
    COPY = 3
    COMBINE = 4
    SIGNAL = 5
    WAIT = 6


SENDING = (Kind.SEND, Kind.SIGNAL)
ARRIVING = (Kind.RECEIVE, Kind.REDUCE, Kind.WAIT)
LOCAL = (Kind.COPY, Kind.COMBINE)

# Text of a step of each kind.
STEP_FORMS: dict[int, str] = {
    Kind.SEND: "send {slots} to {peer}",
    Kind.RECEIVE: "receive {slots} from {peer}",
    Kind.REDUCE: "reduce {slots} from {peer}",
    Kind.COPY: "copy {source} into {slots}",
    Kind.COMBINE: "combine {source} into {slots}",
    Kind.SIGNAL: "signal {peer}",
    Kind.WAIT: "wait for {peer}",
}

# Limits of generated programs: a few gigabytes of memory and half a minute.
MAX_STEPS = 20_000_000
MAX_CHUNKS = 1 << 25  # summed over ranks


@dataclass(frozen=True, eq=False)
class Steps(StepColumns):
    """Steps of a collective program as columns [steps], sorted by rank, then by group.

    Attributes:
        rank: Rank that runs the step.
        group: Number of the step's group, from 0 on each rank; a rank posts the steps of a group together.
        kind: A `Kind`, such as SEND.
        slot: First slot (buffer for one chunk of the vector) that a send reads, or that a step of any other kind
            writes.
        count: Number of consecutive slots; 0 for signal and wait.
        peer: Other rank of a transfer; -1 for local steps.
        source: First slot read by a local step; -1 for transfers.
    """

    slot: Integers  # first slot read (send) or written (all others)
    count: Integers  # slots; 0 for signal and wait
    peer: Integers  # the other rank of a transfer; -1 for local steps
    source: Integers  # first slot read by a local step; -1 for transfers

    @classmethod
    def from_unsorted(cls, **columns: ArrayLike) -> Steps:
        """Return the steps of all ranks, given in any order, sorted by rank and group, with the groups (steps that a
        rank posts together) of each rank renumbered from 0.

        columns: one array [steps] for each field of `Steps`, by name. Group numbers may have gaps; they only need to
        increase in the order in which a rank runs its groups. Steps of one group keep their order.
        """
        arrays = {name: np.asarray(column, np.int64) for name, column in columns.items()}
        order = np.lexsort((arrays["group"], arrays["rank"]))  # stable: steps of a group stay as written
        arrays = {name: column[order] for name, column in arrays.items()}
        arrays["group"] = renumber_groups(arrays["rank"], arrays["group"])
        return cls(**arrays)


@dataclass(frozen=True)
class CollectiveProgram(StepProgram):
    """Algorithm of one collective operation, written out as the steps (send, receive, reduce, copy) of every rank.

    Attributes:
        operation: Such as `all-reduce`.
        algorithm: Such as `ring`.
        ranks: Number of ranks.
        chunks: Number of equal chunks of the vector.
        steps: Steps of all ranks.
        root: Source rank of a broadcast, scatter or send-receive, destination rank of a reduce or gather. (The
            destination of a send-receive is the last rank, or rank 0 if the root is the last.)
        scratch: Number of temporary slots (one chunk each) per rank, in addition to the slots of the vector.
        reduction: `sum`, `mean`, `minimum` or `maximum`.
    """

    operation: str
    algorithm: str
    ranks: int
    chunks: int
    steps: Steps
    root: int = 0
    scratch: int = 0
    reduction: str = "sum"

    def __post_init__(self) -> None:
        """Assert that operation and reduction are known names."""
        assert self.operation in OPERATIONS, self.operation
        assert self.reduction in REDUCTIONS, self.reduction

    @property
    def has_output(self) -> bool:
        """True if the operation writes its result to separate `output` slots (buffers for one chunk), as all-to-all
        does, instead of in place."""
        return self.operation == "all-to-all"

    @property
    def output(self) -> int:
        """Index of the first slot (buffer for one chunk) that holds the operation's result: 0 if it works in place,
        else the first `output` slot."""
        return self.chunks if self.has_output else 0

    @property
    def first_scratch(self) -> int:
        """Index of the first scratch slot (temporary buffer), after the data slots and the output slots."""
        return self.output + self.chunks

    @property
    def slots(self) -> int:
        """Number of slots (buffers of one chunk each) of every rank: data, output if separate, scratch."""
        return self.first_scratch + self.scratch

    def find_owner(self, chunk: ArrayLike) -> Integers:
        """Return the rank that owns each chunk number in `chunk`, in the same shape. Every rank owns a contiguous,
        nearly equal range of the vector's chunks, in rank order: the chunks that the rank holds at the end of a
        reduce-scatter or at the start of an all-gather."""
        return np.asarray(chunk, np.int64) * self.ranks // self.chunks

    def format_slots(self, slot: int, count: int = 1) -> str:
        """Return the text of `count` slots (buffers for one chunk each) from slot number `slot` on, such as `data[3]`,
        `data[0:4]`, `output[2]`, `scratch[0]`.

        A negative number, which is invalid, gives `slot[-1]`.
        """
        if slot < 0:
            return f"slot[{slot}]"
        if slot >= self.first_scratch:
            name, first = "scratch", self.first_scratch
        elif self.has_output and slot >= self.output:
            name, first = "output", self.output
        else:
            name, first = "data", 0
        start = slot - first
        return f"{name}[{start}]" if count == 1 else f"{name}[{start}:{start + count}]"

    def describe(self, step: int) -> str:
        """Return the text of the step with index `step`, such as `send data[3] to 1`."""
        s = self.steps
        return self.format_step(*(int(column[step]) for column in (s.kind, s.slot, s.count, s.peer, s.source)))

    def format_step(self, kind: int, slot: int, count: int, peer: int, source: int) -> str:
        """Return the text of a step, such as `send data[3] to 1`, given its column values.

        kind: a `Kind`. slot, count: first slot (buffer for one chunk) that a send reads or another step writes, and
        number of slots. peer: other rank of a transfer. source: first slot read by a local step.
        """
        form = STEP_FORMS.get(kind, "kind {kind}")
        slots = self.format_slots(slot, count)
        if kind in LOCAL:
            return form.format(source=self.format_slots(source, count), slots=slots)
        return form.format(kind=kind, slots=slots, peer=peer)


@dataclass(frozen=True)
class MatchedCollective:
    """Collective program with each send matched to its receive. It can be simulated, but has not been verified to
    compute the operation.

    program: steps of all ranks. sends, receives: [transfers], indices of the send and receive step of each transfer.
    """

    program: CollectiveProgram
    sends: Integers
    receives: Integers

    @classmethod
    def from_program(cls, program: CollectiveProgram) -> MatchedCollective:
        """Match the sends of a program with its receives, and return the program with the matches. Raises
        `ProgramError` for a send or receive without a counterpart."""
        s = program.steps
        return cls(program, *match_steps(program, s.peer, s.has_kind(SENDING), s.has_kind(ARRIVING)))


@dataclass
class Builder:
    """Builder of a collective program, round by round; arguments may be arrays, to add the steps of many ranks at once.

    program = Builder("all-reduce", "ring", ranks, chunks=ranks)
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=(rank - step) % ranks, reduce=True)
    return program.build()

    operation, algorithm: names. ranks: number of ranks. chunks: number of equal chunks of the vector. root: source or
    destination rank of a rooted operation. scratch: number of temporary slots (one chunk each) per rank. Raises
    UserError if the program exceeds MAX_STEPS steps, or MAX_CHUNKS chunks summed over ranks.
    """

    operation: str
    algorithm: str
    ranks: int
    chunks: int
    root: int = 0
    scratch: int = 0
    _columns: list[Integers] = field(default_factory=list)
    _round: int = -1
    _open: bool = False
    _written: int = 0

    def __post_init__(self) -> None:
        """Raise UserError if the program would have too many chunks; arguments: see the class."""
        if self.ranks * self.chunks > MAX_CHUNKS:
            raise self._make_size_error(
                f"{self.chunks:,} chunks on each rank, {MAX_CHUNKS:,} on all ranks together are the maximum"
            )

    def _make_size_error(self, why: str) -> UserError:
        """Return the `UserError` for a program that exceeds a size limit. why: last part of the message, which names
        the limit."""
        return UserError(f"{self.algorithm} {self.operation} on {self.ranks:,} ranks is too large a program: {why}")

    @contextmanager
    def round(self) -> Iterator[None]:
        """Context manager for one round: all steps added to a rank inside the `with` block form one group, which the
        rank posts together."""
        assert not self._open, "a round inside a round"
        self._round += 1
        self._open = True
        yield
        self._open = False

    def transfer(
        self,
        source: ArrayLike,
        target: ArrayLike,
        chunk: ArrayLike,
        count: ArrayLike = 1,
        into: ArrayLike | None = None,
        reduce: bool = False,
    ) -> None:
        """Add a send of the slots (buffers for one chunk each) [chunk, chunk + count) on rank `source`, and its receive
        on rank `target`; arrays are broadcast against each other and add one transfer per entry.

        count: number of slots. into: first slot written on the target (None: `chunk`). reduce: True to add to those
        slots instead of overwriting them. Transfers from a rank to itself and transfers of 0 slots are dropped.
        """
        columns = _broadcast_columns(source, target, chunk, count, chunk if into is None else into)
        source, target, chunk, count, into = columns[:, (columns[0] != columns[1]) & (columns[3] > 0)]
        self._append_steps(source, Kind.SEND, chunk, count, target, -1)
        self._append_steps(target, Kind.REDUCE if reduce else Kind.RECEIVE, into, count, source, -1)

    def signal(self, source: ArrayLike, target: ArrayLike) -> None:
        """Add a signal (message without data) from rank `source` to rank `target`, which waits for it; arrays are
        broadcast against each other and add one signal per entry."""
        source, target = _broadcast_columns(source, target)
        self._append_steps(source, Kind.SIGNAL, 0, 0, target, -1)
        self._append_steps(target, Kind.WAIT, 0, 0, source, -1)

    def copy(
        self, rank: ArrayLike, source: ArrayLike, into: ArrayLike, count: ArrayLike = 1, combine: bool = False
    ) -> None:
        """Add a copy of the slots (buffers for one chunk) [source, source + count) to the slots from `into` on, within
        rank `rank`; arrays are broadcast against each other and add one copy per entry.

        count: number of slots. combine: True to add to the target slots instead of overwriting them.
        """
        self._append_steps(rank, Kind.COMBINE if combine else Kind.COPY, into, count, -1, source)

    def _append_steps(
        self,
        rank: ArrayLike,
        kind: Kind,
        slot: ArrayLike,
        count: ArrayLike,
        peer: ArrayLike,
        source: ArrayLike,
    ) -> None:
        """Append steps of kind `kind`, one for each entry of the other arguments, which broadcast against each other.

        rank: ranks that run the steps. slot: first slot (buffer for one chunk) that a send reads or another step
        writes. count: number of slots. peer: other rank, -1 for local steps. source: first slot read by a local step,
        -1 for transfers.
        """
        assert self._open, "steps can only be added inside a round"
        columns = _broadcast_columns(rank, self._round, int(kind), slot, count, peer, source)
        self._columns.append(columns)
        self._written += columns.shape[1]
        if self._written > MAX_STEPS:
            raise self._make_size_error(f"more than {MAX_STEPS:,} steps")

    def build(self) -> CollectiveProgram:
        """Return the collective program of all rounds and steps added so far."""
        names = ("rank", "group", "kind", "slot", "count", "peer", "source")
        columns = np.concatenate([np.zeros((len(names), 0), np.int64), *self._columns], axis=1)
        steps = Steps.from_unsorted(**dict(zip(names, columns, strict=True)))
        return CollectiveProgram(
            self.operation, self.algorithm, self.ranks, self.chunks, steps, self.root, self.scratch
        )


def _broadcast_columns(*values: ArrayLike) -> Integers:
    """Broadcast the arrays and scalars `values` to one shape and flatten each: [number of values, steps].

    Takes a tenth of the time of `np.broadcast_arrays`, which matters for programs of thousands of short rounds.
    """
    arrays = [np.asarray(value, np.int64) for value in values]
    shape = np.broadcast(*arrays).shape
    columns = np.empty((len(arrays), *shape), np.int64)
    for number, array in enumerate(arrays):
        columns[number] = array
    return columns.reshape(len(arrays), -1)
