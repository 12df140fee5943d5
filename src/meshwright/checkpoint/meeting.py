"""Where the ranks of one save meet: marker files in its hidden directory, and beside it how the last saves ended.

Files, because a save runs beside training, whose collective calls it may not disturb.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.checkpoint.catalogue import LAST_SAVE
from meshwright.checkpoint.files import json_bytes, replace_file
from meshwright.untrusted import read_json

_TOLD_SAVES = 8
_BEGIN = ".begin"


class Meeting:
    """The markers of the save `attempt`, as one rank leaves and reads them.

    partial: the hidden directory. outcomes: on rank 0, how each save of the run so far ended; `tell` adds to it.
    Methods raise `OSError` where a file cannot be written or read, unless they say otherwise.
    """

    def __init__(self, partial: Path, attempt: str, rank: int, ranks: int, outcomes: dict[str, str]) -> None:
        self.partial, self.attempt, self.rank, self.ranks, self.outcomes = partial, attempt, rank, ranks, outcomes

    def begin(self) -> None:
        """Rank 0: the others may write."""
        replace_file(self.partial / _BEGIN, self.attempt.encode(), sync=False)

    def begun(self) -> set[int]:
        """Rank 0, if it has begun this save and not an older one. Never raises."""
        try:
            return {0} if (self.partial / _BEGIN).read_text() == self.attempt else set()
        except OSError:
            return set()

    def name(self, what: str) -> str:
        """The file in which this rank says `what`."""
        return f".{what}-{self.rank}"

    def mark(self, what: str, content: Any) -> None:
        """This rank has got so far; `content` (JSON) is for rank 0."""
        replace_file(self.partial / self.name(what), json.dumps(content).encode(), sync=False)

    def read(self, what: str, rank: int) -> Any:
        """What another rank said there."""
        return json.loads((self.partial / f".{what}-{rank}").read_bytes())

    def marked(self, what: str) -> set[int]:
        """The ranks that have got so far."""
        prefix = f".{what}-"
        names = [name for name in os.listdir(self.partial) if name.startswith(prefix)]
        return {int(name.removeprefix(prefix)) for name in names if name.removeprefix(prefix).isdecimal()}

    def fail(self, line: str) -> None:
        """This rank cannot go on, and why. Never raises: the directory may be gone, the disk may take nothing."""
        marker = self.partial / self.name("failed")
        with suppress(OSError):
            replace_file(marker, line.encode(), sync=False)
        with suppress(OSError):
            marker.touch()  # an empty file may still fit on a full disk

    def failure(self) -> tuple[int, str] | None:
        """Another rank that cannot go on, and why, which may be empty. Never raises."""
        with suppress(OSError):  # the directory is gone, or not there yet
            if failed := self.marked("failed") - {self.rank}:
                return min(failed), (self.partial / f".failed-{min(failed)}").read_text()
        return None

    def tell(self, outcome: str) -> None:
        """Rank 0: how this save ended, for the others; beside the saves before, for those who have not looked yet."""
        self.outcomes[self.attempt] = outcome
        if self.ranks > 1:
            last = {attempt: self.outcomes[attempt] for attempt in [*self.outcomes][-_TOLD_SAVES:]}
            replace_file(self.partial.parent / LAST_SAVE, json_bytes(last), sync=False)

    def outcome(self) -> str | None:
        """How rank 0 said that this save ended: "done", or why not; None: not yet. Never raises."""
        try:
            outcomes: dict[str, str] = read_json(self.partial.parent / LAST_SAVE)
        except (OSError, ValueError):
            return None
        return outcomes.get(self.attempt)
