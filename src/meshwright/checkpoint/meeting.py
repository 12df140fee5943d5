"""Synchronization of the ranks of one save through marker files, and the outcomes of the last saves.

Files, because a save runs beside training and must not interfere with its collectives.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.checkpoint.catalogue import LAST_SAVE
from meshwright.checkpoint.files import replace_file, to_json_bytes
from meshwright.untrusted import read_json

_OUTCOMES_KEPT = 8
_BEGIN = ".begin"


class SaveMarkers:
    """Marker files of the save `attempt`, written and read by one rank.

    partial: the hidden directory. outcomes: on rank 0, the outcome of each save of the run, extended by
    `record_outcome`. Methods raise `OSError` if a file cannot be written or read, unless stated otherwise.
    """

    def __init__(self, partial: Path, attempt: str, rank: int, ranks: int, outcomes: dict[str, str]) -> None:
        self.partial, self.attempt, self.rank, self.ranks, self.outcomes = partial, attempt, rank, ranks, outcomes

    def begin(self) -> None:
        """Allow the other ranks to write (rank 0)."""
        replace_file(self.partial / _BEGIN, self.attempt.encode(), sync=False)

    def begun_ranks(self) -> set[int]:
        """Return {0} if rank 0 has begun this very save, else an empty set. Never raises."""
        try:
            return {0} if (self.partial / _BEGIN).read_text() == self.attempt else set()
        except OSError:
            return set()

    def marker_name(self, what: str) -> str:
        """Return the name of this rank's marker `what`."""
        return f".{what}-{self.rank}"

    def mark(self, what: str, content: Any) -> None:
        """Leave this rank's marker `what`, with JSON content for rank 0."""
        replace_file(self.partial / self.marker_name(what), json.dumps(content).encode(), sync=False)

    def read(self, what: str, rank: int) -> Any:
        """Read the content of another rank's marker."""
        return json.loads((self.partial / f".{what}-{rank}").read_bytes())

    def ranks_with(self, what: str) -> set[int]:
        """Return the ranks that have left the marker `what`."""
        prefix = f".{what}-"
        names = [name for name in os.listdir(self.partial) if name.startswith(prefix)]
        return {int(name.removeprefix(prefix)) for name in names if name.removeprefix(prefix).isdecimal()}

    def fail(self, line: str) -> None:
        """Leave a failure marker with the reason. Never raises: the directory may be gone, or the disk full."""
        marker = self.partial / self.marker_name("failed")
        with suppress(OSError):
            replace_file(marker, line.encode(), sync=False)
        with suppress(OSError):
            marker.touch()  # an empty file may still fit on a full disk

    def find_failure(self) -> tuple[int, str] | None:
        """Return another rank that failed, and its reason (perhaps empty), or None. Never raises."""
        with suppress(OSError):  # the directory is gone, or not there yet
            if failed := self.ranks_with("failed") - {self.rank}:
                return min(failed), (self.partial / f".failed-{min(failed)}").read_text()
        return None

    def record_outcome(self, outcome: str) -> None:
        """Record the outcome of this save for the other ranks (rank 0), beside those of the last saves."""
        self.outcomes[self.attempt] = outcome
        if self.ranks > 1:
            last = {attempt: self.outcomes[attempt] for attempt in [*self.outcomes][-_OUTCOMES_KEPT:]}
            replace_file(self.partial.parent / LAST_SAVE, to_json_bytes(last), sync=False)

    def read_outcome(self) -> str | None:
        """Return the recorded outcome: "done" or the reason of failure; None if there is none yet. Never raises."""
        try:
            outcomes: dict[str, str] = read_json(self.partial.parent / LAST_SAVE)
        except (OSError, ValueError):
            return None
        return outcomes.get(self.attempt)
