"""The report about a rank that was lost: the verdict, what each rank was doing, the calls on which they part. Free of
torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.flight_recorder.call_log import Call, Group, ranks_text
from meshwright.flight_recorder.call_ring import read_calls
from meshwright.flight_recorder.disagreement import diagnose
from meshwright.flight_recorder.verdict import Seen, Verdict

MOST_RANKS = 64  # whose lines are printed
STACK_LINES = 12
AROUND = 3  # calls before the one on which ranks part


def process_state(process: int) -> str:
    """The letter that /proc has for a process ("T": stopped); "X" when it is gone, empty where there is no /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if Path("/proc/self/stat").exists() else ""
    except (OSError, IndexError):
        return ""


@dataclass
class Snapshot:
    """All ranks at one moment: `now` on the monotonic clock, `when` for people. stacks: the lines of those that said
    where they are."""

    seen: list[Seen]
    now: float = field(default_factory=time.monotonic)
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    stacks: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def take(cls, rings: Mapping[int, int], ended: Mapping[int, str] | None = None) -> Snapshot:
        """Read the rings (descriptor by rank) and look up their processes. ended: how those died that did."""
        seen = []
        for rank, descriptor in sorted(rings.items()):
            calls, how = read_calls(descriptor), (ended or {}).get(rank, "")
            seen.append(Seen(rank, calls, process_state(calls.process) if calls is not None and not how else "", how))
        return cls(seen)

    @property
    def verdict(self) -> Verdict | None:
        """Who is the odd one out, if anyone waits or disagrees."""
        return diagnose(self.seen, self.now)

    @property
    def busy(self) -> list[Seen]:
        """The ranks that are to blame, are alive and are in no call: only they know what they are doing."""
        odd = self.verdict.odd if self.verdict is not None else ()
        return [
            each
            for each in self.seen
            if each.rank in odd and each.calls is not None and each.calls.waiting is None and each.running
        ]

    @property
    def told(self) -> bool:
        """Whether any rank has made a call."""
        return any(each.calls is not None and each.calls.last is not None for each in self.seen)

    def text(self, first_line: str) -> str:
        """The whole report: `first_line` (what it comes to), a paragraph for each rank, the calls where they part."""
        verdict = self.verdict
        lines = [first_line, "", f"{self.when}, what each rank was doing:", ""]
        shown = _chosen([each.rank for each in self.seen], verdict)
        for each in self.seen:
            if each.rank in shown:
                lines += self._rank(each, verdict is not None and each.rank in verdict.odd)
        if len(shown) < len(self.seen):
            lines.append(f"... and {len(self.seen) - len(shown)} ranks more")
        if verdict is not None and verdict.group is not None:
            lines += ["", *self._calls(verdict.group, verdict.index, set(shown))]
        return "\n".join(lines) + "\n"

    def _rank(self, seen: Seen, odd: bool) -> list[str]:
        calls = seen.calls
        mark = ">" if odd else " "
        if calls is None:
            return [f"{mark} rank {seen.rank} ({seen.state_text}): has made no call"]
        head = f"{mark} rank {seen.rank} (process {calls.process}, {seen.state_text}): "
        waiting = calls.waiting
        if waiting is not None:
            lines = [
                f"{head}has been waiting for {self._ago(waiting.waited)} in {_described(waiting)}",
                f"    at {waiting.place}",
            ]
        else:
            lines = [f"{head}{'has made' if calls.last is None else 'waits in'} no call"]
        stack = self.stacks.get(seen.rank, [])
        lines += ["    where it is, innermost first:"] if stack else []
        lines += [f"      {line}" for line in stack[:STACK_LINES]]
        done = calls.last_done
        if done is not None:
            lines.append(f"    last done, {self._ago(done.done)} ago: {_described(done)}")
            if done.place != (waiting.place if waiting else ""):
                lines.append(f"    at {done.place}")
        under_way = [call for call in calls.calls if call.done is None and call is not waiting and call.waited is None]
        if under_way:
            lines.append(f"    under way: {len(under_way)}, the oldest {_described(under_way[0])}")
        return lines

    def _ago(self, moment: float | None) -> str:
        return f"{self.now - (moment or self.now):.1f} s"

    def _calls(self, group: Group, index: int, shown: set[int]) -> list[str]:
        """The calls of a group around `index`, a line each, with the ranks that made it so."""
        made: dict[int, dict[str, list[int]]] = {}
        members = [each for each in self.seen if each.rank in group.members and each.calls is not None]
        for each in members:
            for call in each.calls.calls if each.calls else ():
                if call.group == group and index - AROUND <= call.index <= index + AROUND:
                    made.setdefault(call.index, {}).setdefault(f"{call.what} {call.form}", []).append(each.rank)
        if not made:
            return []
        lines = [f"calls of ranks {ranks_text(group.members)}{' (messages)' if group.pair else ''}:"]
        for at in sorted(made):
            missing = [each.rank for each in members if at > (each.calls.counts.get(group, 0) if each.calls else 0)]
            parts = [f"{what} ({_who(ranks, members)})" for what, ranks in made[at].items()]
            if missing:
                parts.append(f"not entered ({_who(missing, members)})")
            lines.append(f"{'>' if at == index else ' '} {at:>7}  " + "; ".join(parts))
        return lines


def _described(call: Call) -> str:
    size = f", {call.form}, {call.payload_bytes:,} bytes"
    return f"call {call.index} of ranks {ranks_text(call.group.members)} ({call.what}{size})"


def _who(ranks: Sequence[int], members: Sequence[Seen]) -> str:
    return "all" if len(ranks) == len(members) else f"rank{'s' * (len(ranks) > 1)} {ranks_text(sorted(ranks))}"


def _chosen(ranks: list[int], verdict: Verdict | None) -> list[int]:
    """The ranks whose lines are printed: all, or those of the group, the odd ones first."""
    if len(ranks) <= MOST_RANKS:
        return ranks
    wanted = [*verdict.odd, *(verdict.group.members if verdict.group else ())] if verdict else []
    return sorted(dict.fromkeys([*wanted, *ranks]), key=[*dict.fromkeys([*wanted, *ranks])].index)[:MOST_RANKS]


def write_report(path: Path, text: str) -> bool:
    """Write the report, whole or not at all; whether that was possible."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
        return True
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        return False
