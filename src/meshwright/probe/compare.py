"""Detection of slow ranks and nodes. Free of torch.

A measurement point is one matrix product or memory pass at one size. At each, a rank's time is divided by the median of
the other ranks' times; the rank's ratio is the median over all points, and it is slow above `THRESHOLD`. Nodes are
compared likewise, by the median time of their ranks. The ranks of a slow node are compared with one another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLD = 1.25


@dataclass(frozen=True, slots=True)
class SlowRank:
    """Rank or host that is slower than the others.

    what: measured work, "products" (matrix products) or "memory" (passes over memory). host: its name. rank: global
    rank, None for a whole host. ratio: its time divided by the others' median time.
    """

    what: str
    host: str
    rank: int | None
    ratio: float

    @property
    def line(self) -> str:
        """Warning about the slow rank or host for the user, one line."""
        named = f"node {self.host}" if self.rank is None else f"rank {self.rank} (on {self.host})"
        doing = "matrix products take" if self.what == "products" else "memory passes take"
        return f"{named} is slow: its {doing} {self.ratio:.2f} times as long as the others' (limit {THRESHOLD:g})"


def find_slow(what: str, seconds: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[SlowRank]:
    """Return the hosts and ranks whose time is more than `THRESHOLD` times that of the others.

    what: kind of measurement, "products" or "memory". seconds: duration of each measurement point on each rank,
    [ranks][points]. hosts: name of each rank's host, [ranks].
    """
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
    """Compute how much slower each of n ranks or hosts is; return ratios [n], 1 for a usual one.

    seconds: [n][points], duration of each measurement point. A ratio is the median over the points of its time divided
    by the median of the others' times; 1 if n is 1.
    """
    if len(seconds) < 2:
        return [1.0] * len(seconds)
    points = list(zip(*seconds, strict=True))
    return [
        statistics.median(point[at] / statistics.median(point[:at] + point[at + 1 :]) for point in points)
        for at in range(len(seconds))
    ]
