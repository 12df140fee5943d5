"""How messages that are under way together share links: max-min fairness.

Nobody's rate can be raised without lowering that of somebody who has no more. It is what fair queueing in every link
gives, and near what long flows under congestion control settle at (Bertsekas and Gallager, *Data Networks*, 6.5.2).
"""

from __future__ import annotations

import numpy as np

from meshwright.program.network import Floats, Routes
from meshwright.program.order import Integers

_SAME = 1 + 1e-12  # shares that differ by less are the same number, rounded differently
_REMEMBERED = 4_000_000  # numbers kept by a FairSharing: 32 MB


def fair_rates(flow: Integers, link: Integers, flows: int, bandwidth: Floats) -> Floats:
    """Rate of each flow in bytes a second, by filling the links.

    flow, link: one entry for each link on each flow's route, ordered by flow; every flow has one at least. bandwidth:
    of all links, bytes a second.

    A link's share is what it has left, divided by the flows on it whose rate is still open. Shares only grow while
    flows get rates no higher than them, so a link that has the lowest share on the way of all of its open flows fills
    up at just that share: all such links at once.
    """
    links, link = np.unique(link, return_inverse=True)
    left = bandwidth[links]
    rate = np.zeros(flows)
    while len(flow):
        share = left / np.maximum(np.bincount(link, minlength=len(links)), 1)
        first = np.flatnonzero(np.diff(flow, prepend=-1))
        lowest = np.minimum.reduceat(share[link], first)
        lowest_of_entry = np.repeat(lowest, np.diff(np.append(first, len(flow))))
        least_wish = np.full(len(links), np.inf)
        np.minimum.at(least_wish, link, lowest_of_entry)
        fills = share <= least_wish * _SAME
        settled = np.zeros(flows, np.bool_)
        settled[flow[fills[link]]] = True
        rate[flow[first]] = np.where(settled[flow[first]], lowest, 0.0)
        gone = settled[flow]
        left = np.maximum(left - np.bincount(link[gone], lowest_of_entry[gone], minlength=len(links)), 0.0)
        flow, link = flow[~gone], link[~gone]
    return rate


class FairSharing:
    """Rates for sets of routes on one network; a set that comes again, as in each round of a ring, is looked up."""

    def __init__(self, routes: Routes, bandwidth: Floats) -> None:
        self.routes, self.bandwidth = routes, bandwidth
        self._known: dict[bytes, Floats] = {}
        self._numbers = 0

    def rates(self, route: Integers) -> Floats:
        """Rate of each flow that is under way, given its route's number."""
        order = np.argsort(route, kind="stable")
        together = route[order]
        key = together.tobytes()
        sorted_rates = self._known.get(key)
        if sorted_rates is None:
            flow, link = self.routes.entries(together)
            sorted_rates = fair_rates(flow, link, len(together), self.bandwidth)
            if self._numbers + 2 * len(together) <= _REMEMBERED:
                self._known[key] = sorted_rates
                self._numbers += 2 * len(together)
        rates = np.empty(len(route))
        rates[order] = sorted_rates
        return rates
