"""What a rank's ring of calls says once it has been read. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose calls keep one order: a process group, or `pair` (from, to) within one, for messages."""

    ranks: tuple[int, ...]
    pair: tuple[int, int] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part in a call."""
        return self.ranks if self.pair is None else self.pair

    def to_text(self) -> str:
        """`0-3`, `0-6/2`, `1,5,6`, `0-3:2>3`; `from_text` reads it."""
        pair = "" if self.pair is None else f":{self.pair[0]}>{self.pair[1]}"
        return f"{ranks_text(self.ranks)}{pair}"

    @classmethod
    def from_text(cls, text: str) -> Group:
        """The group that `to_text` wrote; one without ranks for anything else."""
        ranks, _, pair = text.partition(":")
        try:
            first, _, second = pair.partition(">")
            return cls(_ranks(ranks), (int(first), int(second)) if pair else None)
        except ValueError:
            return cls(())


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a person reads them: `0-3`, `0-6/2` (every second one), `1,5,6`."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def _ranks(text: str) -> tuple[int, ...]:
    if "-" not in text:
        return tuple(int(rank) for rank in text.split(","))
    span, _, step = text.partition("/")
    first, _, last = span.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Times are seconds of the machine's monotonic clock, which all its processes share.

    number: among all calls of the rank, from 1. index: among those of the group, from 1. form: dtype and shape. place:
    in the code. posted: when it was made; waited: since when the process waits for it; done: when it was through.
    """

    number: int
    site: str
    operation: str
    axis: str
    group: Group
    index: int
    payload_bytes: int
    form: str
    place: str
    posted: float
    waited: float | None = None
    done: float | None = None

    @property
    def what(self) -> str:
        """`all_reduce data.gradients over data`."""
        return f"{self.operation} {self.site} over {self.axis}"

    @property
    def name(self) -> str:
        """`call 57 (all_reduce data.gradients over data)`; the number is that of the group."""
        return f"call {self.index} ({self.what})"

    @property
    def waiting(self) -> bool:
        """Whether the process waits for it."""
        return self.waited is not None and self.done is None


@dataclass(frozen=True, slots=True)
class RankCalls:
    """The last calls of a rank, without gaps, oldest first; how many there were in each group; how many records were
    just being written; whether it has given up, because it waited in vain."""

    rank: int
    ranks: int
    process: int
    calls: tuple[Call, ...] = ()
    counts: dict[Group, int] = field(default_factory=dict)
    torn: int = 0
    gave_up: bool = False

    @property
    def last(self) -> Call | None:
        """The newest call."""
        return self.calls[-1] if self.calls else None

    @property
    def waiting(self) -> Call | None:
        """The call that the process waits for; None while it does something else."""
        return next((call for call in reversed(self.calls) if call.waiting), None)

    @property
    def last_done(self) -> Call | None:
        """The newest call that has come through."""
        return next((call for call in reversed(self.calls) if call.done is not None), None)
