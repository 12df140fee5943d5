"""Hang report: the verdict, the activity of each rank, and the calls on which the ranks differ. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.flight_recorder.call_log import Call, Group, format_ranks
from meshwright.flight_recorder.call_ring import read_calls
from meshwright.flight_recorder.disagreement import diagnose
from meshwright.flight_recorder.verdict import RankState, Verdict

MAX_RANKS = 64  # maximum number of ranks printed
STACK_LINES = 12
CALLS_AROUND = 3  # calls printed before and after the one on which ranks differ


def read_process_state(process: int) -> str:
    """Return the state letter of a process from /proc, such as "S" (sleeping) or "T" (stopped); "X" if the process has
    ended; empty without /proc. process: process id."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else ""
    except (OSError, IndexError):
        return ""


@dataclass
class Snapshot:
    """State of all ranks at one time, from which the hang report is made.

    Attributes:
        seen: State of each rank.
        now: Time of the snapshot in seconds of the monotonic clock.
        when: Date and time as text.
        stacks: {rank: lines of its Python stack dump}, for ranks whose stack was dumped.
    """

    seen: list[RankState]
    now: float = field(default_factory=time.monotonic)
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    stacks: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def take(cls, rings: Mapping[int, int], ended: Mapping[int, str] | None = None) -> Snapshot:
        """Read the state of all ranks and their processes now; return the snapshot.

        rings: {rank: file descriptor of its ring buffer of calls}. ended: {rank: how its process died}, for ranks known
        to have died, such as {2: "was killed by signal 9 (SIGKILL)"}; None: no rank is known to have died.
        """
        seen = []
        for rank, descriptor in sorted(rings.items()):
            calls, how = read_calls(descriptor), (ended or {}).get(rank, "")
            seen.append(
                RankState(rank, calls, read_process_state(calls.process) if calls is not None and not how else "", how)
            )
        return cls(seen)

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on which ranks caused the hang; None if `diagnose` finds no cause."""
        return diagnose(self.seen, self.now)

    @property
    def busy_ranks(self) -> list[RankState]:
        """States of the ranks that are blamed for the hang and run their own code outside any call; only a dump of
        their Python stacks can show what they do."""
        blamed = self.verdict.blamed if self.verdict is not None else ()
        return [
            each
            for each in self.seen
            if each.rank in blamed and each.calls is not None and each.calls.waiting is None and each.running
        ]

    @property
    def has_calls(self) -> bool:
        """True if any rank has made a call."""
        return any(each.calls is not None and each.calls.last is not None for each in self.seen)

    def format_report(self, first_line: str) -> str:
        """Format the hang report as text: `first_line` (the conclusion), a paragraph on each rank, and the call that
        shows the cause with the calls just before and after it in the same group of ranks."""
        verdict = self.verdict
        lines = [first_line, "", f"{self.when}, activity of each rank:", ""]
        shown = _choose_ranks([each.rank for each in self.seen], verdict)
        for each in self.seen:
            if each.rank in shown:
                lines += self._format_rank(each, verdict is not None and each.rank in verdict.blamed)
        if len(shown) < len(self.seen):
            lines.append(f"... and {len(self.seen) - len(shown)} more ranks")
        if verdict is not None and verdict.group is not None:
            lines += ["", *self._format_calls(verdict.group, verdict.index)]
        return "\n".join(lines) + "\n"

    def _format_rank(self, seen: RankState, blamed: bool) -> list[str]:
        """Format the report's lines on one rank: process, call that it waits in, stack, last completed call, calls in
        flight. seen: the rank's state. blamed: True if the rank is blamed for the hang."""
        calls = seen.calls
        mark = ">" if blamed else " "
        if calls is None:
            return [f"{mark} rank {seen.rank} ({seen.state_text}): has made no call"]
        head = f"{mark} rank {seen.rank} (process {calls.process}, {seen.state_text}): "
        waiting = calls.waiting
        if waiting is not None:
            lines = [
                f"{head}has been waiting for {self._format_ago(waiting.waited)} in {_describe_call(waiting)}",
                f"    at {waiting.place}",
            ]
        else:
            lines = [f"{head}{'has made' if calls.last is None else 'waits in'} no call"]
        stack = self.stacks.get(seen.rank, [])
        lines += ["    stack, innermost frame first:"] if stack else []
        lines += [f"      {line}" for line in stack[:STACK_LINES]]
        done = calls.last_done
        if done is not None:
            lines.append(f"    last completed, {self._format_ago(done.done)} ago: {_describe_call(done)}")
            if done.place != (waiting.place if waiting else ""):
                lines.append(f"    at {done.place}")
        in_flight = [call for call in calls.calls if call.done is None and call is not waiting and call.waited is None]
        if in_flight:
            lines.append(f"    calls in flight: {len(in_flight)}, the oldest {_describe_call(in_flight[0])}")
        return lines

    def _format_ago(self, moment: float | None) -> str:
        """Format the time from `moment` (seconds of the monotonic clock) to the snapshot, such as `12.3 s`; `0.0 s` if
        `moment` is None."""
        return f"{self.now - (moment or self.now):.1f} s"

    def _format_calls(self, group: Group, index: int) -> list[str]:
        """Format the calls of a group just before and after its call number `index` (from 1), one line each, with the
        ranks that made them; return the lines."""
        made: dict[int, dict[str, list[int]]] = {}
        members = [each for each in self.seen if each.rank in group.members and each.calls is not None]
        for each in members:
            for call in each.calls.calls if each.calls else ():
                if call.group == group and index - CALLS_AROUND <= call.index <= index + CALLS_AROUND:
                    made.setdefault(call.index, {}).setdefault(f"{call.description} {call.form}", []).append(each.rank)
        if not made:
            return []
        lines = [f"calls of {group.name}{' (messages)' if group.pair else ''}:"]
        for at in sorted(made):
            missing = [each.rank for each in members if at > (each.calls.counts.get(group, 0) if each.calls else 0)]
            parts = [f"{what} ({_format_who(ranks, members)})" for what, ranks in made[at].items()]
            if missing:
                parts.append(f"not entered ({_format_who(missing, members)})")
            lines.append(f"{'>' if at == index else ' '} {at:>7}  " + "; ".join(parts))
        return lines


def _describe_call(call: Call) -> str:
    """Describe a call by its number, group, operation, dtype, shape and bytes: `call 57 of ranks 0-3 (...)`."""
    size = f", {call.form}, {call.payload_bytes:,} bytes"
    return f"call {call.index} of {call.group.name} ({call.description}{size})"


def _format_who(ranks: Sequence[int], members: Sequence[RankState]) -> str:
    """Format `ranks`, some ranks of a group, as text such as "ranks 0-3"; return "all" if they are all ranks of the
    group. members: states of all ranks of the group."""
    return "all" if len(ranks) == len(members) else f"rank{'s' * (len(ranks) > 1)} {format_ranks(sorted(ranks))}"


def _choose_ranks(ranks: list[int], verdict: Verdict | None) -> list[int]:
    """Choose at most `MAX_RANKS` of the ranks `ranks` for the report: first the blamed ranks, then other ranks of their
    group. verdict: diagnosis of the hang; None if no cause was found."""
    if len(ranks) <= MAX_RANKS:
        return ranks
    wanted = [*verdict.blamed, *(verdict.group.members if verdict.group else ())] if verdict else []
    return [*dict.fromkeys([*wanted, *ranks])][:MAX_RANKS]


def write_hang_report(path: Path, text: str) -> bool:
    """Write the text of a hang report to `path` atomically; return False if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
        return True
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
