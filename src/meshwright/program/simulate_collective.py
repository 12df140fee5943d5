"""Simulation of collective programs on a network with shared links: start and end of every transfer.

The transfers of a group start when both ends have posted them. A message first takes the latency of its route, then
transmits its bytes at its max-min fair rate over the links of the route; rates change whenever a message starts or
ends. Messages of one group over the same first link start the network's gap apart. A group ends when all of its
messages have arrived; then the rank posts its next group. Simultaneous events are handled together, so that a symmetric
round of 512 ranks costs about as much as one of 8.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from meshwright.program.collective import Kind, MatchedCollective
from meshwright.program.columns import count_in_runs
from meshwright.program.flows import FairSharing
from meshwright.program.network import Floats, Network, sum_by_index
from meshwright.program.order import Integers, concatenate_ranges

_SAME_TIME = 1e-11  # relative tolerance within which events are simultaneous


@dataclass(frozen=True)
class CollectiveTiming:
    """Result of the simulation of a collective program on a network; all times in seconds since the start.

    Attributes:
        seconds: End of the last step.
        start, end: [transfers], in the order of the program's `sends`: time at which both ends are posted, and at which
            the last byte has arrived.
        bytes_sent: [ranks], bytes that each rank sends.
        link_bytes: [links of the network], bytes over each link.
        network: Network of the simulation.
    """

    seconds: float
    start: Floats
    end: Floats
    bytes_sent: Floats
    link_bytes: Floats
    network: Network

    @cached_property
    def link_busy(self) -> Floats:
        """Seconds that each link would need, at its full bandwidth, for the bytes sent over the link: [links]."""
        return self.link_bytes / self.network.bandwidth

    @property
    def busiest_link(self) -> int | None:
        """Index of the link that would need the longest for its bytes at full bandwidth; None if nothing is sent."""
        return int(self.link_busy.argmax()) if self.link_bytes.any() else None


def simulate_collective(
    checked: MatchedCollective, network: Network, total_bytes: float, reduce_bytes_per_second: float = np.inf
) -> CollectiveTiming:
    """Simulate a collective program on a network with shared links; return start and end of every transfer.

    checked: program with matched sends and receives. total_bytes: size of the operation's full vector in bytes.
    reduce_bytes_per_second: rate of local reductions (default: infinite, so that they take no time). Local reductions
    run at the end of each group (steps that a rank posts together).
    """
    return CollectiveSimulator(checked, network, reduce_bytes_per_second).run(total_bytes)


class CollectiveSimulator:
    """Simulator of one collective program on one network. The constructor prepares everything that does not depend on
    the vector's size; `run` then simulates one size.

    checked: program with matched sends and receives. network: network with links that messages share.
    reduce_bytes_per_second: rate of local reductions (default: infinite). Local reductions run at the end of each group
    (steps that a rank posts together).
    """

    def __init__(self, checked: MatchedCollective, network: Network, reduce_bytes_per_second: float = np.inf) -> None:
        """Find messages, routes and local reductions of the program; arguments: see the class."""
        program, steps = checked.program, checked.program.steps
        assert program.ranks == network.ranks, f"{program.ranks} ranks on a network of {network.ranks}"
        self.network, self.chunks, self.ranks = network, program.chunks, program.ranks
        groups = len(steps.group_rank)

        # A message joins all transfers from one group to another.
        sender, receiver = steps.group_index[checked.sends], steps.group_index[checked.receives]
        key, self._message = np.unique(sender * groups + receiver, return_inverse=True)
        self._sender, self._receiver = np.divmod(key, max(groups, 1))
        self._send_chunks = sum_by_index(self._message, steps.count[checked.sends], len(key))
        self._source = steps.group_rank[self._sender]
        pairs, self._route = np.unique(
            self._source * program.ranks + steps.group_rank[self._receiver], return_inverse=True
        )
        self._routes = network.find_routes(pairs // program.ranks, pairs % program.ranks)
        self._latency = self._routes.sum_over_links(network.latency)[self._route]
        self._latency = self._latency * (1 + network.gap * self._count_messages_ahead(checked))
        self._sharing = FairSharing(self._routes, network.bandwidth)

        # For each group: its messages, its successor, and the bytes that it reduces at the end.
        ends = np.concatenate([self._sender, self._receiver])
        self._of_group = np.argsort(ends, kind="stable") % max(len(key), 1)
        self._messages_in = np.bincount(ends, minlength=groups)
        self._first = np.concatenate([[0], np.cumsum(self._messages_in)])
        self._is_last = np.diff(steps.group_rank, append=-1) != 0
        self._starts = np.flatnonzero(np.diff(steps.group_rank, prepend=-1) != 0)
        reduces = steps.has_kind((Kind.REDUCE, Kind.COMBINE))
        reduced = sum_by_index(steps.group_index[reduces], steps.count[reduces], groups)
        self._local_chunk_seconds = reduced / reduce_bytes_per_second

    def _count_messages_ahead(self, checked: MatchedCollective) -> Integers:
        """Return, for each message, how many messages precede it in the queue of its first network link: [messages].
        Each preceding message delays it by the network's gap.

        A group is the steps that a rank posts together. A message is all transfers from one group to another. Only
        messages sent by the same group on the same link queue; they start in program order. checked: program with
        matched sends and receives."""
        first_step = np.full(len(self._route), len(checked.program.steps))
        np.minimum.at(first_step, self._message, checked.sends)
        line = self._sender * self.network.links + self._routes.link[self._routes.first[self._route]]
        order = np.lexsort((first_step, line))
        ahead = np.empty(len(line), np.int64)
        ahead[order] = count_in_runs(np.diff(line[order], prepend=-1) != 0)
        return ahead

    def run(self, total_bytes: float) -> CollectiveTiming:
        """Simulate the collective program for a full vector of `total_bytes` bytes; return start and end of every
        transfer."""
        chunk_bytes = total_bytes / self.chunks
        message_bytes = self._send_chunks * chunk_bytes
        start, end, seconds = _SimulationState(self, message_bytes, self._local_chunk_seconds * chunk_bytes).simulate()
        on_route = sum_by_index(self._route, message_bytes, len(self._routes))
        on_link = sum_by_index(self._routes.link, on_route[self._routes.route], self.network.links)
        sent = sum_by_index(self._source, message_bytes, self.ranks)
        return CollectiveTiming(float(seconds), start[self._message], end[self._message], sent, on_link, self.network)


def _sort_unique(numbers: Integers) -> Integers:
    """Return the distinct numbers in ascending order; several times faster than `np.unique` on short arrays."""
    numbers = np.sort(numbers)
    return numbers[np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True))] if len(numbers) > 1 else numbers


class _EventKind(IntEnum):
    """Kind of a simulation event. GROUPS_END: some groups (steps that a rank posts together) have finished their local
    copies and reductions, and end. BYTES_FLOW: the latency of some messages is over, and their bytes start to flow."""

    GROUPS_END = 0
    BYTES_FLOW = 1


class _SimulationState:
    """State of one simulation of a collective program: posted groups (steps that a rank starts together), messages in
    flight, queue of events.

    plan: simulator with program, network and routes. message_bytes: [messages], size of each message. local_seconds:
    [groups], time of each group's local reductions.
    """

    def __init__(self, plan: CollectiveSimulator, message_bytes: Floats, local_seconds: Floats) -> None:
        """Start at time 0 with no group posted; arguments: see the class."""
        self.plan, self.bytes, self.local_seconds = plan, message_bytes, local_seconds
        self.start, self.end = np.full(len(message_bytes), np.nan), np.full(len(message_bytes), np.nan)
        self.ends_posted = np.zeros(len(message_bytes), np.int64)
        self.open_messages = plan._messages_in.copy()
        self.now = self.last = 0.0
        self.events: list[
            tuple[float, int, _EventKind, Integers]
        ] = []  # time, unique number (to break ties), kind, indices
        self.pushed = 0
        self.in_flight = np.zeros(0, np.int64)
        self.bytes_left, self.rate = np.zeros(0), np.zeros(0)

    def simulate(self) -> tuple[Floats, Floats, float]:
        """Run all events; return start and end of each message in seconds [messages], and the end of the last group
        (steps that a rank posts together)."""
        self._post_groups(self.plan._starts)
        while self.events or len(self.in_flight):
            lasts = self.bytes_left / self.rate
            soonest = self.now + lasts.min(initial=np.inf)
            moment = min(soonest, self.events[0][0]) if self.events else soonest
            horizon = moment * (1 + _SAME_TIME)
            arrived = lasts <= horizon - self.now
            self.bytes_left -= self.rate * (moment - self.now)
            self.now = moment
            done = [self.in_flight[arrived]]
            starting: list[Integers] = []
            groups: list[Integers] = []
            while self.events and self.events[0][0] <= horizon:
                _, _, kind, which = heapq.heappop(self.events)
                (groups if kind == _EventKind.GROUPS_END else starting).append(which)
            if starting:
                new = np.concatenate(starting)
                empty = self.bytes[new] == 0
                done.append(new[empty])
                new = new[~empty]
            else:
                new = np.zeros(0, np.int64)
            if len(new) or arrived.any():
                self.in_flight = np.concatenate([self.in_flight[~arrived], new])
                self.bytes_left = np.concatenate([self.bytes_left[~arrived], self.bytes[new]])
                self.rate = self.plan._sharing.compute_rates(self.plan._route[self.in_flight])
            for which in groups:
                self._finish_groups(which)
            self._finish_messages(np.concatenate(done))
        assert not np.isnan(self.end).any(), "a checked program stalled"
        return self.start, self.end, self.last

    def _finish_messages(self, messages: Integers) -> None:
        """Mark the messages with indices `messages` as arrived at the current time. Groups (steps that a rank posts
        together) whose messages have now all arrived start their local reductions."""
        if len(messages) == 0:
            return
        self.end[messages] = self.now
        ends = np.concatenate([self.plan._sender[messages], self.plan._receiver[messages]])
        np.subtract.at(self.open_messages, ends, 1)
        self._reduce_groups(_sort_unique(ends[self.open_messages[ends] == 0]))

    def _reduce_groups(self, groups: Integers) -> None:
        """Start the local reductions of the groups (steps that a rank posts together) with indices `groups`, whose
        messages have all arrived.

        A group without reductions ends at once.
        """
        local = self.local_seconds[groups]
        is_zero = local == 0
        self._finish_groups(groups[is_zero])
        self._schedule_events(groups[~is_zero], local[~is_zero], _EventKind.GROUPS_END)

    def _finish_groups(self, groups: Integers) -> None:
        """End the groups (steps that a rank posts together) with indices `groups` at the current time. For each of
        them, post the next group of the same rank, if there is one."""
        if len(groups):
            self.last = self.now
            self._post_groups(groups[~self.plan._is_last[groups]] + 1)

    def _post_groups(self, groups: Integers) -> None:
        """Post the groups (steps that a rank starts together) with indices `groups` at the current time. A message
        starts if the group at its other end is posted already. A group without messages starts its local reductions."""
        if len(groups) == 0:
            return
        plan = self.plan
        messages = plan._of_group[concatenate_ranges(plan._first[groups], plan._first[groups + 1])]
        np.add.at(self.ends_posted, messages, 1)
        starting = _sort_unique(messages[self.ends_posted[messages] == 2])
        self.start[starting] = self.now
        self._schedule_events(starting, plan._latency[starting], _EventKind.BYTES_FLOW)
        alone = groups[plan._messages_in[groups] == 0]
        self._schedule_events(alone, self.local_seconds[alone], _EventKind.GROUPS_END)

    def _schedule_events(self, which: Integers, delay: Floats, kind: _EventKind) -> None:
        """Schedule one event for each index in `which`; indices with equal delay share an event.

        which: indices of groups (steps that a rank posts together) if kind is GROUPS_END, of messages if kind is
        BYTES_FLOW. delay: [len(which)], seconds from the current time.
        """
        if len(which) and (delay == delay[0]).all():
            self._push_event(float(delay[0]), kind, which)
            return
        values, index = np.unique(delay, return_inverse=True)
        for number, value in enumerate(values.tolist()):
            self._push_event(value, kind, which[index == number])

    def _push_event(self, delay: float, kind: _EventKind, which: Integers) -> None:
        """Add one event to the queue, `delay` seconds from now.

        kind: GROUPS_END or BYTES_FLOW. which: indices of the groups (steps that a rank posts together) that end, or of
        the messages whose bytes start to flow.
        """
        self.pushed += 1
        heapq.heappush(self.events, (self.now + delay, self.pushed, kind, which))
