"""What is known of each rank when something is wrong, what comes of it, and the words for both. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.flight_recorder.call_log import Call, Group, RankCalls, ranks_text

_DEAD, _STOPPED = ("Z", "X"), ("T", "t")
_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped (state T)", "t": "stopped by a debugger",
    "Z": "ended", "X": "ended", "I": "idle",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a rank at one moment. calls: None where its ring cannot be read (it is on another host, or has
    not begun). state: its process's letter in /proc, empty where there is none. ended: how its process died, where that
    is known: "was killed by signal 9 (SIGKILL)"."""

    rank: int
    calls: RankCalls | None = None
    state: str = ""
    ended: str = ""

    @property
    def dead(self) -> bool:
        return bool(self.ended) or (self.state in _DEAD and not self.gave_up)

    @property
    def running(self) -> bool:
        return not self.ended and not self.gave_up and self.state not in ("", *_DEAD, *_STOPPED)

    @property
    def gave_up(self) -> bool:
        return self.calls is not None and self.calls.gave_up

    @property
    def stopped(self) -> bool:
        return self.state in _STOPPED

    @property
    def state_text(self) -> str:
        """`stopped (state T)`, `sleeping`; how it ended where it did."""
        return self.ended or ("gave up" if self.gave_up else "") or _STATES.get(self.state, "state unknown")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome. line: one sentence. odd: the ranks that it blames. group: whose calls show it; index: which call of
    them. kind: dead, stopped, behind, skipped, extra, other, shape, disagree, circle, late, link."""

    line: str
    kind: str
    odd: tuple[int, ...] = ()
    group: Group | None = None
    index: int = 0

    @property
    def of_calls(self) -> bool:
        """Whether ranks made different calls: then that is the cause of all else."""
        return self.kind in ("skipped", "extra", "other", "shape", "disagree")


def position(seen: Seen) -> str:
    """Where a rank is, to end a sentence: `in call 57 (...)`, `after call 56 (...)`; empty where nobody knows."""
    calls = seen.calls
    if calls is None or calls.last is None:
        return ""
    return f"in {calls.waiting.name}" if calls.waiting else f"after {calls.last.name}"


def calls_of(seen: Seen) -> tuple[Call, ...]:
    """The calls that can be read of a rank."""
    return () if seen.calls is None else seen.calls.calls


# --- words


def ranks_(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3`."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(sorted(ranks)).replace(',', ', ')}"


def has(ranks: Sequence[int]) -> str:
    """The verb behind `ranks_`."""
    return "have" if len(ranks) > 1 else "has"


def is_are(ranks: Sequence[int]) -> str:
    """The verb behind `ranks_`."""
    return "are" if len(ranks) > 1 else "is"


def waits_since(ranks: Sequence[int], calls: Mapping[int, Call], now: float) -> str:
    """For how long the longest of them has waited."""
    longest = now - min(calls[rank].waited or calls[rank].posted for rank in ranks)
    return f"{has(ranks)} been waiting for {longest:.1f} s"


def doing(seen: Seen, now: float) -> str:
    """The call that it is in, or was last through."""
    if seen.calls is not None and seen.calls.waiting is not None:
        return f"it is in {seen.calls.waiting.name}, at {seen.calls.waiting.place}"
    last = seen.calls.last_done if seen.calls else None
    if last is None or last.done is None:
        return "it has not been through any call"
    return f"its last was {last.name}, {now - last.done:.1f} s ago, at {last.place}"


def its_state(seen: Seen) -> str:
    """How its process is, or how it died."""
    return f"it {seen.ended or 'has died'}" if seen.dead else f"its process is {seen.state_text}"
