"""What every collective call site did: calls and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class SiteRecord:
    """Totals of one call site since the record was last cleared. Bytes are this rank's."""

    site: str
    operation: str
    axis: str
    calls: int = 0
    payload_bytes: int = 0  # the whole vector: what is reduced, or what a gather makes
    sent_bytes: int = 0  # what this rank puts on the wire


class Record:
    """Counts the collective calls of one process, by site and operation. Noting a call costs a dictionary look-up."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, str], SiteRecord] = {}

    def note(self, site: str, operation: str, axis: str, payload_bytes: int, sent_bytes: int) -> None:
        """Count one call."""
        entry = self.sites.get((site, operation))
        if entry is None:
            entry = self.sites[(site, operation)] = SiteRecord(site, operation, axis)
        entry.calls += 1
        entry.payload_bytes += payload_bytes
        entry.sent_bytes += sent_bytes

    def clear(self) -> None:
        """Forget the totals."""
        self.sites.clear()

    def sent_bytes(self) -> int:
        """Bytes this rank has put on the wire since the last `clear`."""
        return sum(entry.sent_bytes for entry in self.sites.values())

    def sent_by_site(self) -> dict[str, int]:
        """The same by call site; those that sent nothing are left out."""
        sent: dict[str, int] = {}
        for entry in self.sites.values():
            if entry.sent_bytes:
                sent[entry.site] = sent.get(entry.site, 0) + entry.sent_bytes
        return sent

    def sent_since(self, before: Mapping[str, int]) -> dict[str, int]:
        """What has been added to an earlier `sent_by_site`."""
        sent = {site: size - before.get(site, 0) for site, size in self.sent_by_site().items()}
        return {site: size for site, size in sent.items() if size}

    def table(self) -> list[dict[str, str | int]]:
        """One JSON-able line per call site and operation, in the order of their first call."""
        return [
            {
                "site": entry.site,
                "operation": entry.operation,
                "axis": entry.axis,
                "calls": entry.calls,
                "payload_bytes": entry.payload_bytes,
                "sent_bytes": entry.sent_bytes,
            }
            for entry in self.sites.values()
        ]
