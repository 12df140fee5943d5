"""Which rank or node is slower than the others. Free of torch.

A rank is compared with the others point by point (a product of one shape, a pass over one size): its time over the
median of theirs. The median of these ratios over all points is the rank's; it is slow when that is above `THRESHOLD`.
A node's time at a point is the median of its ranks', and is compared likewise. Where a node is slow, its ranks are
compared among themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLD = 1.25


@dataclass(frozen=True, slots=True)
class Slow:
    """What is slower than the others by `ratio`, at "products" or "memory". `rank` is None where it is a whole node."""

    what: str
    host: str
    rank: int | None
    ratio: float

    @property
    def line(self) -> str:
        """One line for a person."""
        named = f"node {self.host}" if self.rank is None else f"rank {self.rank} (on {self.host})"
        doing = "matrix products take" if self.what == "products" else "passes over memory take"
        return f"{named} is slow: its {doing} {self.ratio:.2f} times as long as the others' (limit {THRESHOLD:g})"


def find_slow(what: str, seconds: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[Slow]:
    """The slow nodes and ranks, from each rank's seconds at the same points and the host that it is on."""
    names = list(dict.fromkeys(hosts))
    of_host = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    nodes = [
        [statistics.median(point) for point in zip(*(seconds[r] for r in ranks), strict=True)] for ranks in of_host
    ]
    slow_nodes = [(name, ratio) for name, ratio in zip(names, ratios(nodes), strict=True) if ratio > THRESHOLD]
    if not any(len(ranks) > 1 for ranks in of_host):  # then a rank is its node
        return [Slow(what, name, None, ratio) for name, ratio in slow_nodes]
    found = [Slow(what, name, None, ratio) for name, ratio in slow_nodes]
    named = {name for name, _ in slow_nodes}
    sound = [rank for rank, host in enumerate(hosts) if host not in named]
    for ranks in (sound, *(ranks for name, ranks in zip(names, of_host, strict=True) if name in named)):
        for rank, ratio in zip(ranks, ratios([seconds[rank] for rank in ranks]), strict=True):
            if ratio > THRESHOLD:
                found.append(Slow(what, hosts[rank], rank, ratio))
    return found


def ratios(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Of each of several, the median over the points of its time over the median of the others'; 1 of one alone."""
    if len(seconds) < 2:
        return [1.0] * len(seconds)
    points = list(zip(*seconds, strict=True))
    return [
        statistics.median(point[at] / statistics.median(point[:at] + point[at + 1 :]) for point in points)
        for at in range(len(seconds))
    ]
