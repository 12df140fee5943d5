"""Detection of slow ranks and nodes. Free of torch.

A measurement point is one matrix product or memory pass at one size. A rank's ratio is its time divided by the median
of the other ranks' times, as the median over all measurement points. A rank is slow if its ratio exceeds `THRESHOLD`.
Nodes are compared in the same way, by the median time of their ranks. The ranks of a slow node are compared only with
each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLD = 1.25


@dataclass(frozen=True, slots=True)
class SlowRank:
    """Rank or host that is slower than the other ranks or hosts.

    what: kind of measurement, "products" (matrix products) or "memory" (passes over memory). host: host name. rank:
    global rank; None for a whole host. ratio: time of the rank or host divided by the median time of the other ranks or
    hosts.
    """

    what: str
    host: str
    rank: int | None
    ratio: float

    @property
    def line(self) -> str:
        """One-line warning for the user about the slow rank or host."""
        named = f"node {self.host}" if self.rank is None else f"rank {self.rank} (on {self.host})"
        doing = "matrix products take" if self.what == "products" else "memory passes take"
        return f"{named} is slow: its {doing} {self.ratio:.2f} times as long as the others' (limit {THRESHOLD:g})"


def find_slow(what: str, seconds: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[SlowRank]:
    """Find the hosts and ranks that need more than `THRESHOLD` times the time of the other hosts or ranks.

    what: kind of measurement, "products" or "memory". seconds: duration of each measurement (a matrix product or memory
    pass of one size), [rank][measurement]. hosts: host name of each rank."""
    names = list(dict.fromkeys(hosts))
    of_host = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    nodes = [
        [statistics.median(point) for point in zip(*(seconds[r] for r in ranks), strict=True)] for ranks in of_host
    ]
    slow_nodes = [(name, ratio) for name, ratio in zip(names, compute_ratios(nodes), strict=True) if ratio > THRESHOLD]
    if not any(len(ranks) > 1 for ranks in of_host):  # one rank per node
        return [SlowRank(what, name, None, ratio) for name, ratio in slow_nodes]
    found = [SlowRank(what, name, None, ratio) for name, ratio in slow_nodes]
    named = {name for name, _ in slow_nodes}
    sound = [rank for rank, host in enumerate(hosts) if host not in named]
    for ranks in (sound, *(ranks for name, ranks in zip(names, of_host, strict=True) if name in named)):
        for rank, ratio in zip(ranks, compute_ratios([seconds[rank] for rank in ranks]), strict=True):
            if ratio > THRESHOLD:
                found.append(SlowRank(what, hosts[rank], rank, ratio))
    return found


def compute_ratios(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Compute the slowdown of each of n ranks (or hosts) relative to the other ranks (or hosts): ratios [n], about 1
    for usual speed.

    seconds: duration of each measurement (a matrix product or memory pass of one size), [rank][measurement]. The ratio
    of a rank is the median, over all measurements, of the rank's time divided by the median time of the other ranks; 1
    if n is 1.
    """
    if len(seconds) < 2:
        return [1.0] * len(seconds)
    points = list(zip(*seconds, strict=True))
    return [
        statistics.median(point[at] / statistics.median(point[:at] + point[at + 1 :]) for point in points)
        for at in range(len(seconds))
    ]
