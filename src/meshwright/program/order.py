"""Matching of sends with receives, and the order in which groups can be posted, for both kinds of programs.

The steps of a rank form groups. A rank posts a group together, waits for all of its transfers, then posts the next
group. A transfer completes when both ends have posted it, as if sends were synchronous (`MPI_Ssend`): a program that
ends under this rule ends with any amount of buffering.
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
    """Error for a program that is incorrect or would deadlock; its message names rank, step and reason.

    rank, group: rank of the incorrect step, and number of its group (steps that run together) on that rank. step: text
    of the step. reason: what is wrong.
    """

    def __init__(self, rank: int, group: int, step: str, reason: str) -> None:
        """Compose the message; arguments: see the class."""
        super().__init__(f"rank {rank}, step {group} ({step}): {reason}")
        self.rank, self.group, self.step, self.reason = rank, group, step, reason


@dataclass(frozen=True)
class UnmatchedTransfer(Exception):
    """Error for a send or receive that has no counterpart. step: index of the send or receive. is_send: True if the
    step is a send."""

    step: int
    is_send: bool


def match_transfers(rank: Integers, peer: Integers, is_send: Mask, is_receive: Mask) -> tuple[Integers, Integers]:
    """Match the k-th send from rank a to rank b with the k-th receive of rank b from rank a, for all pairs of ranks.

    rank: [steps], rank of each step, ascending. peer: [steps], rank at the other end. is_send, is_receive: [steps],
    masks of sends and receives.
    Returns (step indices of all sends, step indices of their receives), in the order of the sends. Raises
    `UnmatchedTransfer`.
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
        # The other side has no transfer left on the channel with the lower number.
        if at >= len(b) or (at < len(a) and a[at] < b[at]):
            raise UnmatchedTransfer(int(sends[by_send[at]]), True)
        raise UnmatchedTransfer(int(receives[by_receive[at]]), False)
    partner = np.empty(len(sends), np.int64)
    partner[by_send] = receives[by_receive]
    return sends, partner


@dataclass(frozen=True)
class PostingOrder:
    """Order in which the groups (steps that a rank posts together) of a program can be posted.

    Attributes:
        level: [groups], dependency level: length of the longest chain of groups that must be posted before the group. A
            group depends only on groups of lower levels.
        rounds: [groups], the largest number of transfers in any such chain.
        depth: Number of rounds of the program: the largest number of transfers in any chain.
    """

    level: Integers
    rounds: Integers
    depth: int


@dataclass(frozen=True)
class Deadlock(Exception):
    """Error for groups (steps posted together) that wait for each other in a cycle. groups: indices of these groups in
    the order of the cycle: each waits for the group after it in the tuple, the last for the first."""

    groups: tuple[int, ...]


def find_posting_order(rank: Integers, group_a: Integers, group_b: Integers) -> PostingOrder:
    """Compute the order in which the groups (steps posted together) of all ranks can be posted with synchronous sends
    (a topological sort).

    rank: [groups], rank of each group; groups are numbered rank by rank, in posting order. group_a, group_b:
    [transfers], group indices of the two ends of each transfer. Raises `Deadlock` with the cycle.
    """
    count = len(rank)
    has_transfer = np.zeros(count, np.bool_)
    has_transfer[group_a] = has_transfer[group_b] = True
    # A group waits for its predecessor on the rank, and for every group that exchanges with that predecessor.
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
        edges = concatenate_ranges(first[ready], first[ready + 1])
        targets = after[edges]
        np.maximum.at(rounds, targets, np.repeat(rounds[ready], first[ready + 1] - first[ready]) + weight[edges])
        np.subtract.at(waiting, targets, 1)
        candidates = np.unique(targets)
        ready = candidates[waiting[candidates] == 0]
    if done < count:
        raise Deadlock(_find_cycle(before[order], after, waiting > 0))
    deepest = np.maximum(rounds[group_a], rounds[group_b]).max(initial=-1)
    return PostingOrder(level, rounds, int(deepest) + 1)


def expand_ranges(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """List the integers starts[i] .. ends[i] - 1 of all ranges, one range after the other.

    Returns two arrays with one entry per integer: the index of its range, and the integer.
    """
    return np.repeat(np.arange(len(starts)), ends - starts), concatenate_ranges(starts, ends)


def concatenate_ranges(starts: Integers, ends: Integers) -> Integers:
    """Return the integers starts[i] .. ends[i] - 1 of all ranges, concatenated: starts [3, 7], ends [5, 8] give [3, 4,
    7]."""
    lengths = ends - starts
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return offsets + np.arange(int(lengths.sum()))


def _find_cycle(before: Integers, after: Integers, stuck: Mask) -> tuple[int, ...]:
    """Return a cycle in the dependency graph of groups (steps posted together), as group indices: each group waits for
    the next, the last group for the first.

    before, after: [edges], awaited group and waiting group. stuck: [groups], True for groups that can never be posted.
    """
    inside = stuck[before] & stuck[after]
    waits_for = dict(zip(after[inside].tolist(), before[inside].tolist(), strict=True))
    walked: dict[int, int] = {}
    group = next(iter(waits_for))
    while group not in walked:
        walked[group] = len(walked)
        group = waits_for[group]
    path = list(walked)
    return tuple(path[walked[group] :])
