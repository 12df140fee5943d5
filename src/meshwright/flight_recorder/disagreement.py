"""Which rank is the odd one out, told from the calls that each of them wrote. Free of torch.

Calls are compared within a group (all its ranks make the same calls in the same order), never across groups: ranks of
different stages do different things. What ranks that agree wait for is in waiting.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.flight_recorder.call_log import Call, Group, ranks_text
from meshwright.flight_recorder.verdict import Seen, Verdict, calls_of, has, is_are, ranks_, waits_since
from meshwright.flight_recorder.waiting import behind, suspended, waits

LOOK_AHEAD = 16  # calls: a rank that has skipped no more than so many is called one that skipped

_Signature = tuple[str, ...]


def diagnose(seen: Sequence[Seen], now: float) -> Verdict | None:
    """The odd one out among the ranks seen at the time `now` (monotonic, seconds); None where none disagrees
    with another, none waits, none is behind others while something is wrong, and none is stopped."""
    ranks = {each.rank: each for each in seen if each.calls is not None}
    return _mismatch(ranks, now) or waits(ranks, now) or behind(ranks, now) or suspended(ranks, now)


def _mismatch(ranks: Mapping[int, Seen], now: float) -> Verdict | None:
    """The first call, of any group, that two of its ranks do not make alike."""
    found = [divergence for group in _groups(ranks) if (divergence := _divergence(ranks, group)) is not None]
    return min(found, key=lambda divergence: divergence.began).verdict(ranks, now) if found else None


def _groups(ranks: Mapping[int, Seen]) -> list[Group]:
    return list(dict.fromkeys(call.group for seen in ranks.values() for call in calls_of(seen) if call.group.ranks))


def _divergence(ranks: Mapping[int, Seen], group: Group) -> _Divergence | None:
    by_rank = {
        rank: {call.index: call for call in calls_of(ranks[rank]) if call.group == group}
        for rank in group.members
        if rank in ranks
    }
    by_rank = {rank: calls for rank, calls in by_rank.items() if calls}
    if len(by_rank) < 2:
        return None
    for index in range(min(map(min, by_rank.values())), max(map(max, by_rank.values())) + 1):
        here = _known({rank: calls[index] for rank, calls in by_rank.items() if index in calls})
        for rank, call in here.items():
            by_rank[rank][index] = call
        if len({_signature(call) for call in here.values()}) > 1:
            return _Divergence(group, index, here, by_rank)
    return None


def _known(here: dict[int, Call]) -> dict[int, Call]:
    """Names that found no room on a rank's heap (`?`, or no shape) are like any other: the call is then taken for what
    most others make that may be the same; without the ranks of which nobody can say."""
    if all(call.form and call.operation != "?" for call in here.values()):
        return here
    whole = [call for call in here.values() if call.form and call.operation != "?"]
    found = {}
    for rank, call in here.items():
        like = [c for c in whole if call.operation == "?" or (c.operation, c.site) == (call.operation, call.site)]
        votes = Counter(map(_signature, like)).most_common(2)
        if call in whole or (call.operation != "?" and not like):
            found[rank] = call
        elif votes and (len(votes) == 1 or votes[0][1] > votes[1][1]):
            same = next(c for c in like if _signature(c) == votes[0][0])
            found[rank] = replace(call, operation=same.operation, site=same.site, axis=same.axis, form=same.form)
    return found


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
            each = ", ".join(f"rank {r} makes {c.what} {c.form} at {c.place}" for r, c in self.here.items())
            line = f"ranks disagree about call {self.index}{of_group}: {each}"
            return Verdict(line, "disagree", tuple(self.here), self.group, self.index)
        odd = tuple(rank for rank, call in self.here.items() if _signature(call) != expected)
        right = [rank for rank in self.here if rank not in odd]
        wrong, first = self.here[odd[0]], odd[0]
        if right:
            due, where = self.here[right[0]].what, f", at {self.here[right[0]].place}"
        else:
            due, where = f"{expected[0]} {expected[1]}", ""
        who = f"{ranks_(odd)} {has(odd)}"
        if wrong.site == expected[1] and wrong.operation == expected[0]:
            others = f" where {ranks_(right)} {'pass' if len(right) > 1 else 'passes'} {expected[2]}" if right else ""
            verb = "pass" if len(odd) > 1 else "passes"
            name = f"call {self.index}{of_group} ({wrong.what})"
            line = f"{ranks_(odd)} {verb} {wrong.form} to {name}{others}, at {wrong.place}"
            kind = "shape"
        elif self._comes_later(first, expected):
            line = f"{who} skipped call {self.index}{of_group} ({due}){where} and {is_are(odd)} in {wrong.what}, at "
            line, kind = line + wrong.place, "skipped"
        elif self._had_one_more(first, expected):
            line = (
                f"{who} made a call more, call {self.index}{of_group} ({wrong.what}), at {wrong.place}; due was {due}"
            )
            kind = "extra"
        else:
            line = (
                f"{ranks_(odd)} {is_are(odd)} in {wrong.what} in place of call {self.index}{of_group} ({due}){where}; "
            )
            line, kind = f"{line}it is at {wrong.place}", "other"
        stuck = [rank for rank in right if self.here[rank].waiting]
        if stuck:
            line += f"; {ranks_(stuck)} {waits_since(stuck, self.here, now)}"
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
