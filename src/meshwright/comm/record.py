"""Records of collective calls: number of calls and bytes by call site."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class SiteRecord:
    """Totals of the collective calls of one call site on one mesh axis, since the last `Record.clear`.

    site: label of the calls. operation: such as "all_reduce". axis: name of the mesh axis. calls: number of calls.
    payload_bytes: bytes of the whole vectors (input of a reduction, result of a gather). sent_bytes: bytes that this
    rank has sent."""

    site: str
    operation: str
    axis: str
    calls: int = 0
    payload_bytes: int = 0  # of the whole vector: input of a reduction, output of a gather
    sent_bytes: int = 0  # by this rank

    def add(self, calls: int, payload_bytes: int, sent_bytes: int) -> None:
        """Add `calls` further calls to the totals. payload_bytes: bytes of their vectors, sent_bytes: bytes that this
        rank has sent, both summed over these calls."""
        self.calls += calls
        self.payload_bytes += payload_bytes
        self.sent_bytes += sent_bytes


class Record:
    """Call counters: numbers and bytes of the collective calls of one process, by call site, operation and axis."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, str, str], SiteRecord] = {}

    def count_call(
        self, site: str, operation: str, axis: str, payload_bytes: int, sent_bytes: int, calls: int = 1
    ) -> None:
        """Count `calls` collective calls. site: label of the calls. operation: such as "all_reduce". axis: name of the
        mesh axis. payload_bytes: bytes of their whole vectors. sent_bytes: bytes that this rank sends."""
        entry = self.sites.setdefault((site, operation, axis), SiteRecord(site, operation, axis))
        entry.add(calls, payload_bytes, sent_bytes)

    def clear(self) -> None:
        """Reset all counters of collective calls to zero."""
        self.sites.clear()

    def sent_by_site(self) -> dict[str, int]:
        """Return {call site: bytes that this rank has sent since the last `clear`}, without sites that sent nothing."""
        return self._sum_sent_bytes(lambda entry: entry.site)

    def sent_by_axis(self) -> dict[str, int]:
        """Return {mesh axis: bytes that this rank has sent over it since the last `clear`}, without axes over which
        nothing was sent. Calls on a sub-axis, such as "tp/2" (blocks of 2 ranks of tp), count for its axis, "tp"."""
        return self._sum_sent_bytes(lambda entry: re.split(r"[/[]", entry.axis, maxsplit=1)[0])

    def _sum_sent_bytes(self, key_of: Callable[[SiteRecord], str]) -> dict[str, int]:
        """Return {key: bytes sent} summed over call sites with equal keys, without keys whose sum is 0. key_of: returns
        the key of a call site's totals, such as its site or its axis.
        """
        sent: Counter[str] = Counter()
        for entry in self.sites.values():
            sent[key_of(entry)] += entry.sent_bytes
        return dict(+sent)

    def table(self) -> list[dict[str, str | int]]:
        """Return the totals as JSON-able dicts, one per call site and operation, in the order of their first calls. The
        keys are the fields of `SiteRecord`. If a site calls over several axes, its totals are summed, and "axis" is the
        axis of its first call.
        """
        lines: dict[tuple[str, str], SiteRecord] = {}
        for entry in self.sites.values():
            key = entry.site, entry.operation
            line = lines.setdefault(key, SiteRecord(*key, entry.axis))
            line.add(entry.calls, entry.payload_bytes, entry.sent_bytes)
        return [asdict(line) for line in lines.values()]


def count_sent_between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the increases of byte counters from `before` to `after` (both: key -> bytes), without keys that have not
    increased."""
    sent = {key: size - before.get(key, 0) for key, size in after.items()}
    return {key: size for key, size in sent.items() if size}
