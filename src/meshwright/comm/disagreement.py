"""Which rank is the odd one out, told from the calls that each of them wrote. Free of torch.

Calls are compared within a group (all its ranks make the same calls in the same order), never across groups: ranks of
different stages do different things. A rank waits for those that have not entered the call it is in; who waits for
nobody, or in a circle, is where to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.comm.call_log import Call, Group, RankCalls, ranks_text

LOOK_AHEAD = 16  # calls: a rank that has skipped no more than so many is called one that skipped
LATE_SHARE = 0.5  # of the wait: who came later than this has kept the others waiting

_Signature = tuple[str, ...]
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


def diagnose(seen: Sequence[Seen], now: float) -> Verdict | None:
    """The odd one out among the ranks seen at the time `now` (monotonic, seconds); None where no rank waits and none
    disagrees with another."""
    ranks = {each.rank: each for each in seen if each.calls is not None}
    return _mismatch(ranks, now) or _waits(ranks, now)


def position(seen: Seen) -> str:
    """Where a rank is, to end a sentence: `in call 57 (...)`, `after call 56 (...)`; empty where nobody knows."""
    calls = seen.calls
    if calls is None or calls.last is None:
        return ""
    return f"in {calls.waiting.name}" if calls.waiting else f"after {calls.last.name}"


# --- ranks that make different calls


def _mismatch(ranks: Mapping[int, Seen], now: float) -> Verdict | None:
    """The first call, of any group, that two of its ranks do not make alike."""
    found = [divergence for group in _groups(ranks) if (divergence := _divergence(ranks, group)) is not None]
    return min(found, key=lambda divergence: divergence.began).verdict(ranks, now) if found else None


def _groups(ranks: Mapping[int, Seen]) -> list[Group]:
    return list(dict.fromkeys(call.group for seen in ranks.values() for call in _calls(seen) if call.group.ranks))


def _calls(seen: Seen) -> tuple[Call, ...]:
    return () if seen.calls is None else seen.calls.calls


def _divergence(ranks: Mapping[int, Seen], group: Group) -> _Divergence | None:
    by_rank = {
        rank: {call.index: call for call in _calls(ranks[rank]) if call.group == group}
        for rank in group.members
        if rank in ranks
    }
    by_rank = {rank: calls for rank, calls in by_rank.items() if calls}
    if len(by_rank) < 2:
        return None
    for index in range(min(map(min, by_rank.values())), max(map(max, by_rank.values())) + 1):
        here = {rank: calls[index] for rank, calls in by_rank.items() if index in calls}
        if len({_signature(call) for call in here.values()}) > 1:
            return _Divergence(group, index, here, by_rank)
    return None


def _signature(call: Call) -> _Signature:
    """What all ranks of a group must have in common. The parts of an all-to-all may be of any length, those of a
    reduce-scatter make a whole of one size."""
    form = call.form
    if call.operation in ("all_to_all", "reduce_scatter"):
        dtype, _, shape = form.partition("[")
        rest = shape.rstrip("]").split(", ")[1:]
        form = f"{dtype}[{', '.join(['...', *rest])}]"
    if call.operation == "reduce_scatter":
        form += f" of {call.payload_bytes:,} bytes"
    return call.operation, call.site, form


@dataclass(frozen=True, slots=True)
class _Divergence:
    """Call `index` of a group, which those in `here` do not make alike; `calls`: all that is known of the group."""

    group: Group
    index: int
    here: Mapping[int, Call]
    calls: Mapping[int, Mapping[int, Call]]

    @property
    def began(self) -> float:
        return min(call.posted for call in self.here.values())

    def verdict(self, ranks: Mapping[int, Seen], now: float) -> Verdict:
        expected = self._expected()
        of_group = f" of ranks {ranks_text(self.group.members)}"
        if expected is None:
            each = ", ".join(f"{_rank(ranks[r])} makes {c.what} {c.form} at {c.place}" for r, c in self.here.items())
            line = f"ranks disagree about call {self.index}{of_group}: {each}"
            return Verdict(line, "disagree", tuple(self.here), self.group, self.index)
        odd = tuple(rank for rank, call in self.here.items() if _signature(call) != expected)
        right = [rank for rank in self.here if rank not in odd]
        wrong, first = self.here[odd[0]], odd[0]
        if right:
            due, where = self.here[right[0]].what, f", at {self.here[right[0]].place}"
        else:
            due, where = f"{expected[0]} {expected[1]}", ""
        who = f"{_ranks(odd)} {_has(odd)}"
        if wrong.site == expected[1] and wrong.operation == expected[0]:
            others = f" where {_ranks(right)} {'pass' if len(right) > 1 else 'passes'} {expected[2]}" if right else ""
            verb = "pass" if len(odd) > 1 else "passes"
            name = f"call {self.index}{of_group} ({wrong.what})"
            line = f"{_ranks(odd)} {verb} {wrong.form} to {name}{others}, at {wrong.place}"
            kind = "shape"
        elif self._comes_later(first, expected):
            line = f"{who} skipped call {self.index}{of_group} ({due}){where} and {_is(odd)} in {wrong.what}, at "
            line, kind = line + wrong.place, "skipped"
        elif self._had_one_more(first, expected):
            line = (
                f"{who} made a call more, call {self.index}{of_group} ({wrong.what}), at {wrong.place}; due was {due}"
            )
            kind = "extra"
        else:
            line = f"{_ranks(odd)} {_is(odd)} in {wrong.what} in place of call {self.index}{of_group} ({due}){where}; "
            line, kind = f"{line}it is at {wrong.place}", "other"
        stuck = [rank for rank in right if self.here[rank].waiting]
        if stuck:
            line += f"; {_ranks(stuck)} {_waits_since(stuck, self.here, now)}"
        return Verdict(line, kind, odd, self.group, self.index)

    def _expected(self) -> _Signature | None:
        """What call `index` should have been: what most ranks make; among as many of each, what the calls before it
        were followed by earlier."""
        votes = Counter(map(_signature, self.here.values())).most_common()
        if votes[0][1] > votes[1][1]:
            return votes[0][0]
        return self._followed([], among=dict(votes))

    def _before(self) -> list[_Signature]:
        """The calls that all had in common."""
        longest = max(self.calls.values(), key=lambda calls: sum(at < self.index for at in calls))
        return [_signature(longest[at]) for at in sorted(longest) if at < self.index]

    def _followed(self, then: list[_Signature], among: Container[_Signature] | None = None) -> _Signature | None:
        """What came next (of those in `among`) after the longest run of calls that ended as the calls up to here, and
        `then`, do; None where there was none or it was now this, now that."""
        history = [*self._before(), *then]
        best, follower = 0, None
        for end in range(1, len(history)):
            if among is not None and history[end] not in among:
                continue
            length = 0
            while length < end and history[end - 1 - length] == history[-1 - length]:
                length += 1
            if length >= best and length:
                follower = history[end] if length > best or follower == history[end] else None
                best = length
        return follower

    def _comes_later(self, rank: int, expected: _Signature) -> bool:
        """Whether what the rank makes is what others make, or should, a little later."""
        wrong = _signature(self.here[rank])
        for calls in self.calls.values():
            later = (calls.get(self.index + ahead) for ahead in range(1, LOOK_AHEAD))
            at = calls.get(self.index)
            if at is not None and _signature(at) == expected and any(c and _signature(c) == wrong for c in later):
                return True
        then = [expected]
        for _ in range(LOOK_AHEAD):
            following = self._followed(then)
            if following is None or following == wrong:
                return following is not None
            then.append(following)
        return False

    def _had_one_more(self, rank: int, expected: _Signature) -> bool:
        after = self.calls[rank].get(self.index + 1)
        return after is not None and _signature(after) == expected


# --- ranks that wait


def _waits(ranks: Mapping[int, Seen], now: float) -> Verdict | None:
    """Follow who waits for whom to those who wait for nobody."""
    waiting = {rank: call for rank, seen in ranks.items() if seen.calls and (call := seen.calls.waiting)}
    waiting = {rank: call for rank, call in waiting.items() if not ranks[rank].dead}
    if not waiting:
        return None
    blockers = {rank: _not_entered(ranks, call) for rank, call in waiting.items()}
    ends = list(dict.fromkeys(end for rank in sorted(waiting) for end in _ends(rank, blockers)))
    if not ends:
        return _circle(ranks, waiting, blockers, now)
    # A rank that died or was stopped in a call has entered it, and yet the others wait for it.
    stuck = [other for end in ends if end in waiting for other in waiting[end].group.members if other in ranks]
    ends = list(dict.fromkeys([*ends, *(other for other in stuck if ranks[other].dead or ranks[other].stopped)]))
    absent = sorted(rank for rank in ends if rank not in ranks)
    for is_kind in (_is_dead, _is_stopped, _is_free):
        odd = tuple(rank for rank in ends if rank in ranks and is_kind(ranks[rank]))
        if odd:
            return _behind(ranks, odd, waiting, blockers, now)
    if absent:
        return _elsewhere(absent, waiting, blockers, now)
    return _all_entered(ranks, [rank for rank in ends if rank in waiting], waiting, now)


def _is_dead(seen: Seen) -> bool:
    return seen.dead


def _is_stopped(seen: Seen) -> bool:
    return seen.stopped


def _is_free(seen: Seen) -> bool:
    return seen.calls is None or seen.calls.waiting is None


def _not_entered(ranks: Mapping[int, Seen], call: Call) -> list[int]:
    """The ranks that have not come to a call; those whose ring cannot be read may not have."""

    def entered(rank: int) -> bool:
        calls = ranks[rank].calls if rank in ranks else None
        return calls is not None and calls.counts.get(call.group, 0) >= call.index

    missing = [rank for rank in call.group.members if not entered(rank)]
    known = [rank for rank in missing if rank in ranks]
    return known or missing


def _ends(rank: int, blockers: Mapping[int, list[int]]) -> Iterator[int]:
    """Those who wait for nobody at the end of every chain from `rank`."""
    reached, ahead = {rank}, [rank]
    while ahead:
        at = ahead.pop()
        if not blockers.get(at):
            yield at
        for other in blockers.get(at, ()):
            if other not in reached:
                reached.add(other)
                ahead.append(other)


def _behind(
    ranks: Mapping[int, Seen],
    odd: tuple[int, ...],
    waiting: Mapping[int, Call],
    blockers: Mapping[int, list[int]],
    now: float,
) -> Verdict:
    """Ranks that others wait for, and that wait for nobody."""
    first = ranks[odd[0]]
    kind = "dead" if first.dead else "stopped" if first.stopped else "behind"
    left = [rank for rank in sorted(waiting) if odd[0] in blockers[rank]]
    if not left:  # it has entered what the others wait in
        stuck = waiting.get(odd[0]) or (first.calls.last if first.calls else None)
        assert stuck is not None
        left = [rank for rank, call in waiting.items() if call.group == stuck.group and rank not in odd]
        line = f"{_ranks(odd)} {'have' if len(odd) > 1 else 'has'} not come through {stuck.name}, at {stuck.place}"
        line += f"; {_ranks(left)} {_waits_since(left, waiting, now)}" if left else ""
        return Verdict(f"{line}; {_its_state(first)}", kind, odd, stuck.group, stuck.index)
    earliest = min((waiting[rank] for rank in left), key=lambda call: call.posted)
    left = [rank for rank in left if waiting[rank].group == earliest.group]
    odd = tuple(rank for rank in odd if rank in earliest.group.members and rank in blockers[left[0]])
    of_group = f"of ranks {ranks_text(earliest.group.members)} "
    line = f"{_ranks(odd)} {_has(odd)} not entered call {earliest.index} {of_group}({earliest.what}), where "
    line += f"{_ranks(left)} {_waits_since(left, waiting, now)} at {earliest.place}"
    return Verdict(f"{line}; {_doing(first, now)}; {_its_state(first)}", kind, odd, earliest.group, earliest.index)


def _elsewhere(
    absent: list[int], waiting: Mapping[int, Call], blockers: Mapping[int, list[int]], now: float
) -> Verdict:
    left = [rank for rank in sorted(waiting) if set(blockers[rank]) & set(absent)]
    call = waiting[left[0]]
    line = (
        f"{_ranks(left)} {_waits_since(left, waiting, now)} in {call.name}, at {call.place}, for {_ranks(absent)}, "
        "whose calls cannot be read from here (another host reports its own ranks)"
    )
    return Verdict(line, "behind", tuple(absent), call.group, call.index)


def _all_entered(ranks: Mapping[int, Seen], stuck: list[int], waiting: Mapping[int, Call], now: float) -> Verdict:
    """Everybody is in the same call: somebody came late, or nothing passes between them."""
    call = waiting[stuck[0]]
    entered = {
        rank: found
        for rank in call.group.members
        if rank in ranks
        for found in _calls(ranks[rank])
        if found.group == call.group and found.index == call.index
    }
    first, last = (pick(entered, key=lambda rank: entered[rank].posted) for pick in (min, max))
    late = entered[last].posted - entered[first].posted
    if late > LATE_SHARE * (now - entered[first].posted):
        line = f"rank {last} came to {call.name} {late:.1f} s after rank {first}, at {entered[last].place}"
        return Verdict(f"{line}; {_its_state(ranks[last])}", "late", (last,), call.group, call.index)
    line = f"{_ranks(list(entered))} have all entered {call.name}, at {call.place}, and agree about it, but "
    line += f"{_ranks(stuck)} {_waits_since(stuck, waiting, now)}: nothing passes between them"
    return Verdict(line, "link", (), call.group, call.index)


def _circle(
    ranks: Mapping[int, Seen], waiting: Mapping[int, Call], blockers: Mapping[int, list[int]], now: float
) -> Verdict:
    path = [min(waiting)]
    while blockers[path[-1]][0] not in path:
        path.append(blockers[path[-1]][0])
    path = path[path.index(blockers[path[-1]][0]) :]
    each = ", ".join(
        f"rank {rank} in {waiting[rank].name} for rank {blockers[rank][0]} (at {waiting[rank].place})" for rank in path
    )
    longest = now - min(waiting[rank].posted for rank in path)
    call = waiting[path[0]]
    line = f"ranks have been waiting for each other for {longest:.1f} s: {each}"
    return Verdict(line, "circle", tuple(path), call.group, call.index)


# --- words


def _rank(seen: Seen) -> str:
    return f"rank {seen.rank}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(sorted(ranks)).replace(',', ', ')}"


def _has(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _is(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _waits_since(ranks: Sequence[int], calls: Mapping[int, Call], now: float) -> str:
    longest = now - min(calls[rank].waited or calls[rank].posted for rank in ranks)
    return f"{_has(ranks)} been waiting for {longest:.1f} s"


def _doing(seen: Seen, now: float) -> str:
    if seen.calls is not None and seen.calls.waiting is not None:
        return f"it is in {seen.calls.waiting.name}, at {seen.calls.waiting.place}"
    last = seen.calls.last_done if seen.calls else None
    if last is None or last.done is None:
        return "it has not been through any call"
    return f"its last was {last.name}, {now - last.done:.1f} s ago, at {last.place}"


def _its_state(seen: Seen) -> str:
    return f"it {seen.ended or 'has died'}" if seen.dead else f"its process is {seen.state_text}"
