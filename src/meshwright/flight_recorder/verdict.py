"""State of each rank at a hang, the verdict on which rank caused it, and the wording of both. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.flight_recorder.call_log import Call, Group, RankCalls, format_ranks

_DEAD, _STOPPED = ("Z", "X"), ("T", "t")
_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped (state T)", "t": "stopped by a debugger",
    "Z": "ended", "X": "ended", "I": "idle",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankState:
    """State of a rank when a hang is diagnosed.

    Attributes:
        rank: Global rank.
        calls: Latest collective calls of the rank; None if its ring buffer cannot be read (the rank is on another host,
            or has not started).
        state: Process state letter of /proc, such as "S" (sleeping) or "T" (stopped); empty without /proc.
        ended: How the rank's process died, if known, such as "was killed by signal 9 (SIGKILL)"; else empty.
    """

    rank: int
    calls: RankCalls | None = None
    state: str = ""
    ended: str = ""

    @property
    def dead(self) -> bool:
        """True if the process is known to have died, or has ended without recording that a call timed out."""
        return bool(self.ended) or (self.state in _DEAD and not self.gave_up)

    @property
    def running(self) -> bool:
        """True if the process exists, is not suspended (SIGSTOP or debugger) and has not recorded a timeout."""
        return not self.ended and not self.gave_up and self.state not in ("", *_DEAD, *_STOPPED)

    @property
    def gave_up(self) -> bool:
        """True if the rank has recorded that one of its calls timed out, which ends the rank's process."""
        return self.calls is not None and self.calls.gave_up

    @property
    def stopped(self) -> bool:
        """True if the process is suspended by SIGSTOP or a debugger; it has not ended."""
        return self.state in _STOPPED

    @property
    def blame(self) -> str:
        """Reason why other ranks wait for this rank, as a `kind` of `Verdict`: "dead" (its process died), "stopped"
        (its process is suspended) or "behind" (it runs other code, or its calls are unknown). Empty if the rank itself
        waits in a call."""
        if self.dead or self.stopped:
            return "dead" if self.dead else "stopped"
        return "behind" if self.calls is None or self.calls.waiting is None else ""

    @property
    def state_text(self) -> str:
        """State of the process as text: `stopped (state T)`, `sleeping`, or how the process ended."""
        return self.ended or ("timed out" if self.gave_up else "") or _STATES.get(self.state, "state unknown")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Diagnosis of a hang.

    Attributes:
        line: One sentence for the user.
        kind: Cause of the hang. "dead": a process died; "stopped": a process is suspended (SIGSTOP); "behind": a rank
            has not entered a call that other ranks have entered; "skipped", "extra", "other": a rank left out a call,
            made one call too many, or made a different call; "shape": dtype or shape differs; "disagree": ranks differ
            without majority; "circle": ranks wait for each other; "late": a rank entered a call late; "link": the
            network carries no data.
        blamed: Global ranks that caused the hang.
        group, index: Group of the call that shows the cause, and position of this call among the group's calls, from 1;
            None and 0 if no call shows the cause.
    """

    line: str
    kind: str
    blamed: tuple[int, ...] = ()
    group: Group | None = None
    index: int = 0

    @property
    def is_call_mismatch(self) -> bool:
        """True if ranks made different calls at the same index of a group; this is then the root cause of the hang."""
        return self.kind in ("skipped", "extra", "other", "shape", "disagree")


def describe_position(seen: RankState) -> str:
    """Describe where a rank is in its sequence of calls: `in call 57 (...)` if the rank waits in a call, else `after
    call 56 (...)`. Empty if the rank has made no call or its calls are unknown. seen: the rank's state."""
    calls = seen.calls
    if calls is None or calls.last is None:
        return ""
    return f"in {calls.waiting.name}" if calls.waiting else f"after {calls.last.name}"


def list_calls(seen: RankState) -> tuple[Call, ...]:
    """Return the latest recorded calls of a rank, oldest first; empty if its record cannot be read. seen: the rank's
    state."""
    return () if seen.calls is None else seen.calls.calls


# --- wording


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as the subject of a sentence: `rank 2`, `ranks 0-3`."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(sorted(ranks)).replace(',', ', ')}"


def choose_has(ranks: Sequence[int]) -> str:
    """Return "has" for one rank, "have" for several, as the verb of a sentence on `ranks`."""
    return "have" if len(ranks) > 1 else "has"


def choose_is(ranks: Sequence[int]) -> str:
    """Return "is" for one rank, "are" for several, as the verb of a sentence on `ranks`."""
    return "are" if len(ranks) > 1 else "is"


def format_wait(ranks: Sequence[int], calls: Mapping[int, Call], now: float) -> str:
    """Format the longest wait of any of `ranks` as the predicate of a sentence: `have been waiting for 12.3 s`. calls:
    rank -> call in which it waits. now: seconds of the monotonic clock."""
    longest = now - min(calls[rank].waited or calls[rank].posted for rank in ranks)
    return f"{choose_has(ranks)} been waiting for {longest:.1f} s"


def describe_activity(seen: RankState, now: float) -> str:
    """Describe what a rank is doing, as a clause such as "it is in call 57 (...), at ...". A rank that waits in no call
    is described by its last completed call. seen: the rank's state. now: seconds of the monotonic clock."""
    if seen.calls is not None and seen.calls.waiting is not None:
        return f"it is in {seen.calls.waiting.name}, at {seen.calls.waiting.place}"
    last = seen.calls.last_done if seen.calls else None
    if last is None or last.done is None:
        return "it has completed no call"
    return f"its last completed call was {last.name}, {now - last.done:.1f} s ago, at {last.place}"


def describe_process(seen: RankState) -> str:
    """Describe in a clause the state of a rank's process, such as "its process is sleeping" or "it was killed by signal
    9 (SIGKILL)". seen: the rank's state."""
    return f"it {seen.ended or 'has died'}" if seen.dead else f"its process is {seen.state_text}"
