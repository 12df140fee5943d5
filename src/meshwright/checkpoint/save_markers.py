"""Synchronization of the ranks of one save through marker files, and the outcomes of the last saves.

Files, because a save runs concurrently with training and must not interfere with its collectives.
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
    """Marker files by which the ranks of one save synchronize, in the hidden directory of the unfinished checkpoint.
    Each rank has one object, which writes the rank's own markers and reads the markers of other ranks.

    partial: the hidden directory. attempt: unique id of the save. rank, ranks: number of this rank, and number of
    ranks. outcomes: on rank 0, save id -> "done" or the error of each earlier save of the run; `record_outcome` extends
    it. Methods raise `OSError` if a file cannot be written or read, unless stated otherwise.
    """

    def __init__(self, partial: Path, attempt: str, rank: int, ranks: int, outcomes: dict[str, str]) -> None:
        self.partial, self.attempt, self.rank, self.ranks, self.outcomes = partial, attempt, rank, ranks, outcomes

    def begin(self) -> None:
        """Write the marker file that shows that the unfinished checkpoint's hidden directory exists. The other ranks
        may then write into it. Only rank 0 calls this."""
        replace_file(self.partial / _BEGIN, self.attempt.encode(), sync=False)

    def begun_ranks(self) -> set[int]:
        """Return {0} if rank 0 has called `begin` for this save, else an empty set. `Save` polls this method in the
        same way as `ranks_with`. Never raises.
        """
        try:
            return {0} if (self.partial / _BEGIN).read_text() == self.attempt else set()
        except OSError:
            return set()

    def marker_name(self, phase: str) -> str:
        """Return the name of this rank's marker file for a phase of the save, such as ".written-3" on rank 3. phase:
        "written", "hashed" or "failed".
        """
        return f".{phase}-{self.rank}"

    def mark(self, phase: str, content: Any) -> None:
        """Write the marker file that this rank has completed a phase of the save. phase: "written" or "hashed".
        content: JSON value for rank 0 to read.
        """
        replace_file(self.partial / self.marker_name(phase), json.dumps(content).encode(), sync=False)

    def read(self, phase: str, rank: int) -> Any:
        """Return the JSON content of the marker file of rank `rank` for a phase of the save. phase: "written" or
        "hashed".
        """
        return json.loads((self.partial / f".{phase}-{rank}").read_bytes())

    def ranks_with(self, phase: str) -> set[int]:
        """Return the ranks that have written a marker file for a phase of the save. phase: "written", "hashed" or
        "failed".
        """
        prefix = f".{phase}-"
        names = [name for name in os.listdir(self.partial) if name.startswith(prefix)]
        return {int(name.removeprefix(prefix)) for name in names if name.removeprefix(prefix).isdecimal()}

    def fail(self, line: str) -> None:
        """Write the marker file that reports to the other ranks that the save failed on this rank. line: the reason.
        Never raises, since the checkpoint's hidden directory may be gone or the disk full."""
        marker = self.partial / self.marker_name("failed")
        with suppress(OSError):
            replace_file(marker, line.encode(), sync=False)
        with suppress(OSError):
            marker.touch()  # an empty file may still fit on a full disk

    def find_failure(self) -> tuple[int, str] | None:
        """Return (rank, reason) of the lowest other rank that has reported a failure by a marker file; None if no other
        rank has. The reason is empty if the rank's disk was full. Never raises."""
        with suppress(OSError):  # the directory is deleted, or not yet created
            if failed := self.ranks_with("failed") - {self.rank}:
                return min(failed), (self.partial / f".failed-{min(failed)}").read_text()
        return None

    def record_outcome(self, outcome: str) -> None:
        """Write the outcome of this save to a file that the other ranks read. outcome: "done" or the reason of failure.
        The file also has the outcomes of the last few saves. Only rank 0 calls this."""
        self.outcomes[self.attempt] = outcome
        if self.ranks > 1:
            last = {attempt: self.outcomes[attempt] for attempt in [*self.outcomes][-_OUTCOMES_KEPT:]}
            replace_file(self.partial.parent / LAST_SAVE, to_json_bytes(last), sync=False)

    def read_outcome(self) -> str | None:
        """Return the recorded outcome of this save, "done" or the reason of failure; None if rank 0 has not recorded it
        yet. Never raises."""
        try:
            outcomes: dict[str, str] = read_json(self.partial.parent / LAST_SAVE)
        except (OSError, ValueError):
            return None
        return outcomes.get(self.attempt)
