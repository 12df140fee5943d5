"""What both dialects of programs share: which send meets which receive, and in which order groups can be posted.

The steps of a rank come in groups. A group is posted at once and done when all of its transfers are; the rank then
posts its next group. A transfer takes place when both ends have posted it, as if sends blocked until they are received:
what runs to its end under this rule runs to its end with any buffering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import CheckFailed

Integers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Reals: TypeAlias = NDArray[np.float64]


class ProgramError(CheckFailed):
    """A program that does not do what its operation promises, or that would not end: rank, step and reason."""

    def __init__(self, rank: int, group: int, step: str, reason: str) -> None:
        super().__init__(f"rank {rank}, step {group} ({step}): {reason}")
        self.rank, self.group, self.step, self.reason = rank, group, step, reason


@dataclass(frozen=True)
class Unmatched(Exception):
    """The first end of a transfer whose other end is missing: index of the step, and whether it is a send."""

    step: int
    is_send: bool


def match(rank: Integers, peer: Integers, is_send: Mask, is_receive: Mask) -> tuple[Integers, Integers]:
    """Pair the k-th send from rank a to rank b with b's k-th receive from a.

    All arguments have one entry a step, steps in the order of their rank. Returns the indices of sends and of their
    receives, in the order of the sends. Raises `Unmatched`.
    """
    sends, receives = np.flatnonzero(is_send), np.flatnonzero(is_receive)
    ranks = int(max(rank.max(initial=0), peer.max(initial=0))) + 1
    send_channel = rank[sends].astype(np.int64) * ranks + peer[sends]
    receive_channel = peer[receives].astype(np.int64) * ranks + rank[receives]
    by_send, by_receive = np.argsort(send_channel, kind="stable"), np.argsort(receive_channel, kind="stable")
    a, b = send_channel[by_send], receive_channel[by_receive]
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    if len(differs) or len(a) != len(b):
        at = int(differs[0]) if len(differs) else shorter
        # The channel with the lower number has run out on the other side.
        if at >= len(b) or (at < len(a) and a[at] < b[at]):
            raise Unmatched(int(sends[by_send[at]]), True)
        raise Unmatched(int(receives[by_receive[at]]), False)
    partner = np.empty(len(sends), np.int64)
    partner[by_send] = receives[by_receive]
    return sends, partner


@dataclass(frozen=True)
class Schedule:
    """When groups can be posted, counted two ways; one entry a group.

    `level`: the longest chain of groups before it, so that everything a group depends on has a lower level.
    `rounds`: the longest chain of transfers before it. `depth`: the longest chain of transfers in the whole program.
    """

    level: Integers
    rounds: Integers
    depth: int


@dataclass(frozen=True)
class Deadlock(Exception):
    """Groups that wait for each other in a circle: each for the next, the last for the first."""

    groups: tuple[int, ...]


def post_order(rank: Integers, group_a: Integers, group_b: Integers) -> Schedule:
    """When each group can be posted, under blocking sends.

    rank: of each group; groups are numbered rank by rank, in the order of posting. group_a, group_b: the groups of the
    two ends of every transfer. Raises `Deadlock` with the circle.
    """
    count = len(rank)
    has_transfer = np.zeros(count, np.bool_)
    has_transfer[group_a] = has_transfer[group_b] = True
    # A group waits for the one before it on its rank, and for every group that one exchanges with.
    follows = np.flatnonzero(rank[1:] == rank[:-1]) + 1
    one = np.concatenate([group_a, group_b])
    other = np.concatenate([group_b, group_a])
    has_next = np.zeros(count + 1, np.bool_)
    has_next[follows - 1] = True
    kept = has_next[one]
    before = np.concatenate([follows - 1, other[kept]])
    after = np.concatenate([follows, one[kept] + 1])
    weight = np.concatenate([has_transfer[follows - 1].astype(np.int64), np.ones(int(kept.sum()), np.int64)])

    order = np.argsort(before, kind="stable")
    after, weight = after[order], weight[order]
    first = np.searchsorted(before[order], np.arange(count + 1))
    waiting = np.bincount(after, minlength=count)
    level, rounds = np.zeros(count, np.int64), np.zeros(count, np.int64)
    ready, number, done = np.flatnonzero(waiting == 0), 0, 0
    while len(ready):
        level[ready] = number
        number, done = number + 1, done + len(ready)
        edges = ranges(first[ready], first[ready + 1])
        targets = after[edges]
        np.maximum.at(rounds, targets, np.repeat(rounds[ready], first[ready + 1] - first[ready]) + weight[edges])
        np.subtract.at(waiting, targets, 1)
        candidates = np.unique(targets)
        ready = candidates[waiting[candidates] == 0]
    if done < count:
        raise Deadlock(_circle(before[order], after, waiting > 0))
    deepest = np.maximum(rounds[group_a], rounds[group_b]).max(initial=-1)
    return Schedule(level, rounds, int(deepest) + 1)


def ranges(starts: Integers, ends: Integers) -> Integers:
    """Concatenation of arange(start, end)."""
    lengths = ends - starts
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return offsets + np.arange(int(lengths.sum()))


def _circle(before: Integers, after: Integers, stuck: Mask) -> tuple[int, ...]:
    """Walk backwards from any group that cannot be posted until one comes again."""
    inside = stuck[before] & stuck[after]
    waits_for = dict(zip(after[inside].tolist(), before[inside].tolist(), strict=True))
    walked: dict[int, int] = {}
    group = next(iter(waits_for))
    while group not in walked:
        walked[group] = len(walked)
        group = waits_for[group]
    path = list(walked)
    return tuple(path[walked[group] :])
