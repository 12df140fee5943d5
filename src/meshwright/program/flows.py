"""Max-min fair sharing of link bandwidth among concurrent messages.

No rate can increase without decreasing a rate that is not higher. Fair queueing on every link gives these rates, and
long flows under congestion control approach them (Bertsekas and Gallager, *Data Networks*, section 6.5.2).
"""

from __future__ import annotations

import numpy as np

from meshwright.program.network import Floats, Routes
from meshwright.program.order import Integers

_EQUAL = 1 + 1e-12  # shares within this factor differ by rounding only
_MAX_CACHED = 4_000_000  # numbers cached by a FairSharing: 32 MB


def compute_fair_rates(flow: Integers, link: Integers, flows: int, bandwidth: Floats) -> Floats:
    """Return the max-min fair rates, in bytes per second, of several flows (concurrent messages) that share links:
    [flows].

    flow, link: [hops], flow number and link number of each hop of all routes, ordered by flow; every flow has at least
    one hop. flows: number of flows. bandwidth: [all links], bytes per second.

    Progressive filling: the share of a link is its remaining bandwidth divided by its number of flows without a rate.
    Each iteration selects the links that have the lowest share on the routes of all their flows, and fixes the rates of
    these flows.
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
        fills = share <= least_wish * _EQUAL
        settled = np.zeros(flows, np.bool_)
        settled[flow[fills[link]]] = True
        rate[flow[first]] = np.where(settled[flow[first]], lowest, 0.0)
        gone = settled[flow]
        left = np.maximum(left - np.bincount(link[gone], lowest_of_entry[gone], minlength=len(links)), 0.0)
        flow, link = flow[~gone], link[~gone]
    return rate


class FairSharing:
    """Calculator of max-min fair rates of concurrent messages on one network; caches the rates for each combination of
    routes.

    routes: all routes that messages can take. bandwidth: [links], bytes per second.
    """

    def __init__(self, routes: Routes, bandwidth: Floats) -> None:
        """Start with an empty cache; arguments: see the class."""
        self.routes, self.bandwidth = routes, bandwidth
        self._known: dict[bytes, Floats] = {}
        self._numbers = 0

    def compute_rates(self, route: Integers) -> Floats:
        """Return the rate in bytes per second of each of several concurrent messages: [messages].

        route: [messages], index in `routes` of each message's route.
        """
        order = np.argsort(route, kind="stable")
        together = route[order]
        key = together.tobytes()
        sorted_rates = self._known.get(key)
        if sorted_rates is None:
            flow, link = self.routes.select_links(together)
            sorted_rates = compute_fair_rates(flow, link, len(together), self.bandwidth)
            if self._numbers + 2 * len(together) <= _MAX_CACHED:
                self._known[key] = sorted_rates
                self._numbers += 2 * len(together)
        rates = np.empty(len(route))
        rates[order] = sorted_rates
        return rates
