"""When every transfer of a collective program starts and ends on a network whose links are shared.

A group's transfers start when both ends have posted them. A message first takes the latency of its route, then its
bytes at the rate that max-min fair sharing gives it over all links of the route; rates change whenever a message starts
or ends. Messages of one group that leave by the same link start one after the other, the network's gap apart. A group
ends when all of its messages have; then the rank posts its next group. Everything that happens at one moment is handled
at once, so that a symmetric round of 512 ranks costs about as much as one of 8.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import numpy as np

from meshwright.program.collective import ARRIVING, SENDING, CollectiveProgram, Kind
from meshwright.program.flows import FairSharing
from meshwright.program.network import Floats, Network, totals
from meshwright.program.order import Integers, concatenate_ranges, match_transfers

_SAME_TIME = 1e-11  # moments that differ by less, relative to the time since the start, are one moment


class Meetings(Protocol):
    """A program whose sends have met their receives: what the check gives, of which timing needs no more."""

    @property
    def program(self) -> CollectiveProgram: ...
    @property
    def sends(self) -> Integers: ...
    @property
    def receives(self) -> Integers: ...


@dataclass(frozen=True)
class Unchecked:
    """A program that is timed on trust, as one of the library's when many are compared."""

    program: CollectiveProgram
    sends: Integers
    receives: Integers

    @classmethod
    def of(cls, program: CollectiveProgram) -> Unchecked:
        """Match sends and receives, and prove nothing."""
        s = program.steps
        return cls(program, *match_transfers(s.rank, s.peer, s.has_kind(SENDING), s.has_kind(ARRIVING)))


@dataclass(frozen=True)
class CollectiveTiming:
    """When things happened, in seconds from the start.

    start, end: of each transfer, in the order of the checked program's `sends`: start is when both ends had posted it,
    end when its last byte had arrived. bytes_sent: per rank. link_bytes: per link of the network.
    """

    seconds: float
    start: Floats
    end: Floats
    bytes_sent: Floats
    link_bytes: Floats
    network: Network

    @cached_property
    def link_busy(self) -> Floats:
        """Seconds that each link needs for its bytes at full rate."""
        return self.link_bytes / self.network.bandwidth

    @property
    def busiest_link(self) -> int | None:
        """The link that needs longest for its bytes: what no better order of the same messages could do without."""
        return int(self.link_busy.argmax()) if self.link_bytes.any() else None


def simulate_collective(
    checked: Meetings, network: Network, total_bytes: float, reduce_bytes_per_second: float = np.inf
) -> CollectiveTiming:
    """Run a checked program on a network. total_bytes: the full vector. reduce_bytes_per_second: how fast a rank
    reduces what has arrived (unless said, in no time); it does so at the end of the group, before its next one."""
    return CollectiveSimulator(checked, network, reduce_bytes_per_second).run(total_bytes)


class CollectiveSimulator:
    """One program on one network, laid out once, to be run for several sizes."""

    def __init__(self, checked: Meetings, network: Network, reduce_bytes_per_second: float = np.inf) -> None:
        program, steps = checked.program, checked.program.steps
        assert program.ranks == network.ranks, f"{program.ranks} ranks on a network of {network.ranks}"
        self.network, self.chunks, self.ranks = network, program.chunks, program.ranks
        groups = len(steps.group_rank)

        # Messages: what one group of a rank sends to one group of another goes together.
        sender, receiver = steps.group_index[checked.sends], steps.group_index[checked.receives]
        key, self._message = np.unique(sender * groups + receiver, return_inverse=True)
        self._sender, self._receiver = np.divmod(key, max(groups, 1))
        self._send_chunks = totals(self._message, steps.count[checked.sends], len(key))
        self._source = steps.group_rank[self._sender]
        pairs, self._route = np.unique(
            self._source * program.ranks + steps.group_rank[self._receiver], return_inverse=True
        )
        self._routes = network.find_routes(pairs // program.ranks, pairs % program.ranks)
        self._latency = self._routes.sum(network.latency)[self._route]
        self._latency = self._latency * (1 + network.gap * self._place_in_line(checked))
        self._sharing = FairSharing(self._routes, network.bandwidth)

        # Groups: their messages, what follows, how much is reduced at the end.
        ends = np.concatenate([self._sender, self._receiver])
        self._of_group = np.argsort(ends, kind="stable") % max(len(key), 1)
        self._messages_in = np.bincount(ends, minlength=groups)
        self._first = np.concatenate([[0], np.cumsum(self._messages_in)])
        self._is_last = np.diff(steps.group_rank, append=-1) != 0
        self._starts = np.flatnonzero(np.diff(steps.group_rank, prepend=-1) != 0)
        reduces = steps.has_kind((Kind.REDUCE, Kind.COMBINE))
        reduced = totals(steps.group_index[reduces], steps.count[reduces], groups)
        self._local_chunk_seconds = reduced / reduce_bytes_per_second

    def _place_in_line(self, checked: Meetings) -> Integers:
        """How many messages of its group leave by the same link before each message, as the steps are written."""
        first_step = np.full(len(self._route), len(checked.program.steps))
        np.minimum.at(first_step, self._message, checked.sends)
        line = self._sender * self.network.links + self._routes.link[self._routes.first[self._route]]
        order = np.lexsort((first_step, line))
        new = np.flatnonzero(np.diff(line[order], prepend=-1) != 0)
        place = np.empty(len(line), np.int64)
        place[order] = np.arange(len(line)) - np.repeat(new, np.diff(np.append(new, len(line))))
        return place

    def run(self, total_bytes: float) -> CollectiveTiming:
        """Simulate with a full vector of `total_bytes`."""
        chunk_bytes = total_bytes / self.chunks
        message_bytes = self._send_chunks * chunk_bytes
        start, end, seconds = _Run(self, message_bytes, self._local_chunk_seconds * chunk_bytes).play()
        on_route = totals(self._route, message_bytes, len(self._routes))
        on_link = totals(self._routes.link, on_route[self._routes.route], self.network.links)
        sent = totals(self._source, message_bytes, self.ranks)
        return CollectiveTiming(float(seconds), start[self._message], end[self._message], sent, on_link, self.network)


def _distinct(numbers: Integers) -> Integers:
    """Each number once, ascending; for the few of an event several times as quick as `np.unique`."""
    numbers = np.sort(numbers)
    return numbers[np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True))] if len(numbers) > 1 else numbers


class _What(IntEnum):
    """What a moment in the future brings."""

    GROUPS_END = 0
    BYTES_FLOW = 1


class _Run:
    """The state of one simulation: what has been posted, what is under way, what comes when."""

    def __init__(self, plan: CollectiveSimulator, message_bytes: Floats, local_seconds: Floats) -> None:
        self.plan, self.bytes, self.local_seconds = plan, message_bytes, local_seconds
        self.start, self.end = np.full(len(message_bytes), np.nan), np.full(len(message_bytes), np.nan)
        self.ends_posted = np.zeros(len(message_bytes), np.int64)
        self.open_messages = plan._messages_in.copy()
        self.now = self.last = 0.0
        self.future: list[tuple[float, int, _What, Integers]] = []  # moment, a number that is never equal, what, which
        self.pushed = 0
        self.flowing = np.zeros(0, np.int64)
        self.left, self.rate = np.zeros(0), np.zeros(0)

    def play(self) -> tuple[Floats, Floats, float]:
        """Start and end of each message, and when the last rank is done."""
        self._post(self.plan._starts)
        while self.future or len(self.flowing):
            lasts = self.left / self.rate
            soonest = self.now + lasts.min(initial=np.inf)
            moment = min(soonest, self.future[0][0]) if self.future else soonest
            horizon = moment * (1 + _SAME_TIME)
            arrived = lasts <= horizon - self.now
            self.left -= self.rate * (moment - self.now)
            self.now = moment
            done = [self.flowing[arrived]]
            starting: list[Integers] = []
            groups: list[Integers] = []
            while self.future and self.future[0][0] <= horizon:
                _, _, what, which = heapq.heappop(self.future)
                (groups if what == _What.GROUPS_END else starting).append(which)
            if starting:
                new = np.concatenate(starting)
                empty = self.bytes[new] == 0
                done.append(new[empty])
                new = new[~empty]
            else:
                new = np.zeros(0, np.int64)
            if len(new) or arrived.any():
                self.flowing = np.concatenate([self.flowing[~arrived], new])
                self.left = np.concatenate([self.left[~arrived], self.bytes[new]])
                self.rate = self.plan._sharing.rates(self.plan._route[self.flowing])
            for which in groups:
                self._groups_end(which)
            self._messages_end(np.concatenate(done))
        assert not np.isnan(self.end).any(), "a checked program came to a halt"
        return self.start, self.end, self.last

    def _messages_end(self, messages: Integers) -> None:
        if len(messages) == 0:
            return
        self.end[messages] = self.now
        ends = np.concatenate([self.plan._sender[messages], self.plan._receiver[messages]])
        np.subtract.at(self.open_messages, ends, 1)
        self._groups_finish(_distinct(ends[self.open_messages[ends] == 0]))

    def _groups_finish(self, groups: Integers) -> None:
        """Groups whose messages are all here end when what arrived has been reduced."""
        local = self.local_seconds[groups]
        at_once = local == 0
        self._groups_end(groups[at_once])
        self._schedule(groups[~at_once], local[~at_once], _What.GROUPS_END)

    def _groups_end(self, groups: Integers) -> None:
        if len(groups):
            self.last = self.now
            self._post(groups[~self.plan._is_last[groups]] + 1)

    def _post(self, groups: Integers) -> None:
        """Ranks post their groups now: messages whose other end was there start, local groups are worked on."""
        if len(groups) == 0:
            return
        plan = self.plan
        messages = plan._of_group[concatenate_ranges(plan._first[groups], plan._first[groups + 1])]
        np.add.at(self.ends_posted, messages, 1)
        starting = _distinct(messages[self.ends_posted[messages] == 2])
        self.start[starting] = self.now
        self._schedule(starting, plan._latency[starting], _What.BYTES_FLOW)
        alone = groups[plan._messages_in[groups] == 0]
        self._schedule(alone, self.local_seconds[alone], _What.GROUPS_END)

    def _schedule(self, which: Integers, delay: Floats, what: _What) -> None:
        if len(which) and (delay == delay[0]).all():
            self._push(float(delay[0]), what, which)
            return
        values, index = np.unique(delay, return_inverse=True)
        for number, value in enumerate(values.tolist()):
            self._push(value, what, which[index == number])

    def _push(self, delay: float, what: _What, which: Integers) -> None:
        self.pushed += 1
        heapq.heappush(self.future, (self.now + delay, self.pushed, what, which))
