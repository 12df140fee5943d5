"""Collective programs: what every rank sends, receives, reduces and copies, as columns of numbers.

The vector of an operation is cut into equal chunks. A rank's memory is a row of slots of one chunk each: `data`, one
slot a chunk of the vector; `output`, as many again, where the operation's result does not take the place of its input
(all-to-all); then `scratch`.
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
from meshwright.program.columns import Columns, numbered_groups
from meshwright.program.order import Integers


class Kind(IntEnum):
    """What a step does.

    The steps of a group are simultaneous: each reads what its slots held before the group, and their writes become
    visible after it. A slot that a receive or a copy writes belongs to that step alone. Reductions (reduce, combine)
    accumulate: several may go into one slot, which the group's sends may read; the value sent is the one from before
    the group. Copy and combine are local and stand in groups without transfers. Signal and wait are a send and a
    receive of nothing.

    The order in which a group's steps are written decides which messages meet (between two ranks, the n-th sent is the
    n-th received) and in which order reductions into one slot are rounded, and nothing else.
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

# The largest programs that are written: as much as some gigabytes of memory and half a minute can hold.
MOST_STEPS = 20_000_000
MOST_CHUNKS = 1 << 25  # of all ranks together


@dataclass(frozen=True, eq=False)
class Steps(Columns):
    """Columns with one entry a step, ordered by rank, then group (numbered from 0 on each rank), then as written."""

    slot: Integers  # first slot read (send) or written (all others)
    count: Integers  # slots; 0 for signal and wait
    peer: Integers  # the other rank of a transfer; -1 for local steps
    source: Integers  # first slot read by a local step; -1 for transfers

    @classmethod
    def arranged(cls, **columns: ArrayLike) -> Steps:
        """Sort steps by rank and group (any increasing numbers) and number the groups of each rank from 0."""
        arrays = {name: np.asarray(column, np.int64) for name, column in columns.items()}
        order = np.lexsort((arrays["group"], arrays["rank"]))  # stable: steps of a group stay as written
        arrays = {name: column[order] for name, column in arrays.items()}
        arrays["group"] = numbered_groups(arrays["rank"], arrays["group"])
        return cls(**arrays)


@dataclass(frozen=True)
class CollectiveProgram:
    """One collective operation, written out for every rank.

    `chunks`: into how many equal parts the vector is cut. `root`: the rank that holds what is sent out, or gets what is
    collected (send-receive: the sender; the receiver is the last other rank). `scratch`: slots beside the vector.
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
        assert self.operation in OPERATIONS, self.operation
        assert self.reduction in REDUCTIONS, self.reduction

    @property
    def has_output(self) -> bool:
        """Whether the result lies beside the input."""
        return self.operation == "all-to-all"

    @property
    def output(self) -> int:
        """First slot of the result."""
        return self.chunks if self.has_output else 0

    @property
    def first_scratch(self) -> int:
        return self.output + self.chunks

    @property
    def slots(self) -> int:
        """Slots of a rank's memory."""
        return self.first_scratch + self.scratch

    def owner(self, chunk: ArrayLike) -> Integers:
        """The rank whose share of the vector a chunk is: shares are contiguous, in the order of ranks."""
        return np.asarray(chunk, np.int64) * self.ranks // self.chunks

    def slot_name(self, slot: int, count: int = 1) -> str:
        """`data[3]`, `data[0:4]`, `output[2]`, `scratch[0]`. Below the first slot: `slot[-1]`."""
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
        """One step in the words of the text form: `send data[3] to 1`."""
        s = self.steps
        return self.words(*(int(column[step]) for column in (s.kind, s.slot, s.count, s.peer, s.source)))

    def words(self, kind: int, slot: int, count: int, peer: int, source: int) -> str:
        """A step, column by column, in words."""
        match kind:
            case Kind.SEND:
                return f"send {self.slot_name(slot, count)} to {peer}"
            case Kind.RECEIVE:
                return f"receive {self.slot_name(slot, count)} from {peer}"
            case Kind.REDUCE:
                return f"reduce {self.slot_name(slot, count)} from {peer}"
            case Kind.COPY:
                return f"copy {self.slot_name(source, count)} into {self.slot_name(slot, count)}"
            case Kind.COMBINE:
                return f"combine {self.slot_name(source, count)} into {self.slot_name(slot, count)}"
            case Kind.SIGNAL:
                return f"signal {peer}"
            case Kind.WAIT:
                return f"wait for {peer}"
            case _:
                return f"kind {kind}"


@dataclass
class Builder:
    """Writes a collective program round by round, for many ranks at a time: every argument may be an array.

    program = Builder("all-reduce", "ring", ranks, chunks=ranks)
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=(rank - step) % ranks, reduce=True)
    return program.build()

    Raises UserError where the program would be too large.
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
        if self.ranks * self.chunks > MOST_CHUNKS:
            raise self._too_large(f"{self.chunks:,} chunks on each rank, {MOST_CHUNKS:,} on all are the most")

    def _too_large(self, why: str) -> UserError:
        return UserError(f"{self.algorithm} {self.operation} on {self.ranks:,} ranks is too large a program: {why}")

    @contextmanager
    def round(self) -> Iterator[None]:
        """Everything that a rank does within it forms one group of that rank."""
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
        """Rank `source` sends slots chunk .. chunk + count to rank `target`, which takes them into `into` (unless said:
        the same slots), or with `reduce` adds them to what is there. Transfers of a rank to itself are left out."""
        columns = _columns(source, target, chunk, count, chunk if into is None else into)
        source, target, chunk, count, into = columns[:, (columns[0] != columns[1]) & (columns[3] > 0)]
        self._add(source, Kind.SEND, chunk, count, target, -1)
        self._add(target, Kind.REDUCE if reduce else Kind.RECEIVE, into, count, source, -1)

    def signal(self, source: ArrayLike, target: ArrayLike) -> None:
        """Rank `source` tells rank `target`, which waits for it, that it has come this far."""
        source, target = _columns(source, target)
        self._add(source, Kind.SIGNAL, 0, 0, target, -1)
        self._add(target, Kind.WAIT, 0, 0, source, -1)

    def copy(
        self, rank: ArrayLike, source: ArrayLike, into: ArrayLike, count: ArrayLike = 1, combine: bool = False
    ) -> None:
        """Copy slots source .. source + count of a rank into `into` (with `combine`: add them to what is there)."""
        self._add(rank, Kind.COMBINE if combine else Kind.COPY, into, count, -1, source)

    def _add(
        self,
        rank: ArrayLike,
        kind: Kind,
        slot: ArrayLike,
        count: ArrayLike,
        peer: ArrayLike,
        source: ArrayLike,
    ) -> None:
        assert self._open, "steps are written within a round"
        columns = _columns(rank, self._round, int(kind), slot, count, peer, source)
        self._columns.append(columns)
        self._written += columns.shape[1]
        if self._written > MOST_STEPS:
            raise self._too_large(f"more than {MOST_STEPS:,} steps")

    def build(self) -> CollectiveProgram:
        """The program."""
        names = ("rank", "group", "kind", "slot", "count", "peer", "source")
        columns = np.concatenate([np.zeros((len(names), 0), np.int64), *self._columns], axis=1)
        steps = Steps.arranged(**dict(zip(names, columns, strict=True)))
        return CollectiveProgram(
            self.operation, self.algorithm, self.ranks, self.chunks, steps, self.root, self.scratch
        )


def _columns(*values: ArrayLike) -> Integers:
    """[values, steps]: single numbers and arrays of any shape, each repeated to the shape of all of them and laid flat.

    A tenth of the time of `np.broadcast_arrays`, which counts where a program is thousands of short rounds.
    """
    arrays = [np.asarray(value, np.int64) for value in values]
    shape = np.broadcast(*arrays).shape
    columns = np.empty((len(arrays), *shape), np.int64)
    for number, array in enumerate(arrays):
        columns[number] = array
    return columns.reshape(len(arrays), -1)
