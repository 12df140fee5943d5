"""Diagnosis of a hang from the recorded calls, first part: find the rank that made a different call than the others.
Torch-free.

Calls are compared within a group, whose ranks must all make the same calls in the same order, never across groups.
Hangs of ranks whose calls agree are diagnosed in waiting.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.flight_recorder.call_log import Call, Group
from meshwright.flight_recorder.verdict import (
    RankState,
    Verdict,
    choose_has,
    choose_is,
    format_wait,
    list_calls,
    name_ranks,
)
from meshwright.flight_recorder.waiting import find_awaited_ranks, find_lagging_ranks, find_stopped_ranks

LOOK_AHEAD = 16  # maximum number of skipped calls that are recognized as such

_Signature = tuple[str, ...]


def diagnose(seen: Sequence[RankState], now: float) -> Verdict | None:
    """Diagnose a hang: return which ranks caused the hang and why, or None if no cause is found. seen: state of each
    rank, read at time `now` (seconds of the monotonic clock).

    Causes are searched in this order. (1) Ranks made different calls. (2) Ranks wait in a call. (3) A rank has made
    fewer calls than other ranks, while some process has died, timed out or been stopped. (4) A process is stopped
    (SIGSTOP).
    """
    ranks = {each.rank: each for each in seen if each.calls is not None}
    return (
        _find_mismatch(ranks, now)
        or find_awaited_ranks(ranks, now)
        or find_lagging_ranks(ranks, now)
        or find_stopped_ranks(ranks, now)
    )


def _find_mismatch(ranks: Mapping[int, RankState], now: float) -> Verdict | None:
    """Find the earliest call in which the ranks of a group differ by operation, site, dtype or shape; return the
    verdict on this call, or None if all calls agree. ranks: rank -> its state. now: seconds of the monotonic clock."""
    found = [divergence for group in _list_groups(ranks) if (divergence := _find_divergence(ranks, group)) is not None]
    return min(found, key=lambda divergence: divergence.began).make_verdict(now) if found else None


def _list_groups(ranks: Mapping[int, RankState]) -> list[Group]:
    """Return the distinct groups (process groups, or pairs that exchange messages) of all recorded calls. ranks: rank
    -> its state."""
    return list(dict.fromkeys(call.group for seen in ranks.values() for call in list_calls(seen) if call.group.ranks))


def _find_divergence(ranks: Mapping[int, RankState], group: Group) -> _Divergence | None:
    """Return the first call of a group in which its ranks differ by operation, site, dtype or shape; None if all calls
    agree. ranks: rank -> its state."""
    by_rank = {
        rank: {call.index: call for call in list_calls(ranks[rank]) if call.group == group}
        for rank in group.members
        if rank in ranks
    }
    by_rank = {rank: calls for rank, calls in by_rank.items() if calls}
    if len(by_rank) < 2:
        return None
    for index in range(min(map(min, by_rank.values())), max(map(max, by_rank.values())) + 1):
        at_index = _fill_unknown_names({rank: calls[index] for rank, calls in by_rank.items() if index in calls})
        for rank, call in at_index.items():
            by_rank[rank][index] = call
        if len({_make_signature(call) for call in at_index.values()}) > 1:
            return _Divergence(group, index, at_index, by_rank)
    return None


def _fill_unknown_names(calls: dict[int, Call]) -> dict[int, Call]:
    """Fill in the missing texts (operation, site or shape) of recorded calls; texts are missing if the recorder's text
    area was full. They are copied from another rank's complete call at the same index: the most common complete call
    that does not contradict the texts that are present.

    calls: {rank: its call at one index of a group}. Returns {rank: complete call}. A call is left out if no single
    complete call is the most common."""
    if all(call.form and call.operation != "?" for call in calls.values()):
        return calls
    whole = [call for call in calls.values() if call.form and call.operation != "?"]
    found = {}
    for rank, call in calls.items():
        like = [c for c in whole if call.operation == "?" or (c.operation, c.site) == (call.operation, call.site)]
        votes = Counter(map(_make_signature, like)).most_common(2)
        if call in whole or (call.operation != "?" and not like):
            found[rank] = call
        elif votes and (len(votes) == 1 or votes[0][1] > votes[1][1]):
            same = next(c for c in like if _make_signature(c) == votes[0][0])
            found[rank] = replace(call, operation=same.operation, site=same.site, axis=same.axis, form=same.form)
    return found


def _make_signature(call: Call) -> _Signature:
    """Return the properties of a call that must be equal on all ranks of the group: (operation, site, dtype and shape
    as text).

    For all-to-all and reduce-scatter, whose first dim may differ between ranks, that dim is replaced by "..."; for
    reduce-scatter the total bytes, which must be equal, are added.
    """
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
    """First call of a group in which its ranks differ.

    group: ranks that must make equal calls. index: position of the differing call among the group's calls, from 1.
    differing: {rank: its call at `index`}. calls: {rank: {index: call}}, all recorded calls of the group.
    """

    group: Group
    index: int
    differing: Mapping[int, Call]
    calls: Mapping[int, Mapping[int, Call]]

    @property
    def began(self) -> float:
        """Time at which the first rank entered the differing call, in seconds of the monotonic clock."""
        return min(call.posted for call in self.differing.values())

    def make_verdict(self, now: float) -> Verdict:
        """Return the verdict that blames the ranks whose call differs from the expected one. If the expected call
        cannot be determined, the verdict says that the ranks disagree. now: seconds of the monotonic clock."""
        expected = self._find_expected()
        of_group = f" of {self.group.name}"
        if expected is None:
            each = ", ".join(f"rank {r} makes {c.description} {c.form} at {c.place}" for r, c in self.differing.items())
            line = f"ranks disagree about call {self.index}{of_group}: {each}"
            return Verdict(line, "disagree", tuple(self.differing), self.group, self.index)
        blamed = tuple(rank for rank, call in self.differing.items() if _make_signature(call) != expected)
        right = [rank for rank in self.differing if rank not in blamed]
        wrong, first = self.differing[blamed[0]], blamed[0]
        if right:
            due, where = self.differing[right[0]].description, f", at {self.differing[right[0]].place}"
        else:
            due, where = f"{expected[0]} {expected[1]}", ""
        who = f"{name_ranks(blamed)} {choose_has(blamed)}"
        if wrong.site == expected[1] and wrong.operation == expected[0]:
            others = (
                f" where {name_ranks(right)} {'pass' if len(right) > 1 else 'passes'} {expected[2]}" if right else ""
            )
            verb = "pass" if len(blamed) > 1 else "passes"
            name = f"call {self.index}{of_group} ({wrong.description})"
            line = f"{name_ranks(blamed)} {verb} {wrong.form} to {name}{others}, at {wrong.place}"
            kind = "shape"
        elif self._has_skipped_call(first, expected):
            line = f"{who} skipped call {self.index}{of_group} ({due}){where} and {choose_is(blamed)} in "
            line, kind = f"{line}{wrong.description}, at {wrong.place}", "skipped"
        elif self._has_extra_call(first, expected):
            extra = f"call {self.index}{of_group} ({wrong.description}), at {wrong.place}"
            line, kind = f"{who} made an extra call: {extra}; expected: {due}", "extra"
        else:
            line = f"{name_ranks(blamed)} {choose_is(blamed)} in {wrong.description} instead of call {self.index}"
            line, kind = f"{line}{of_group} ({due}){where}; its call is at {wrong.place}", "other"
        stuck = [rank for rank in right if self.differing[rank].waiting]
        if stuck:
            line += f"; {name_ranks(stuck)} {format_wait(stuck, self.differing, now)}"
        return Verdict(line, kind, blamed, self.group, self.index)

    def _find_expected(self) -> _Signature | None:
        """Return the signature (operation, site, dtype and shape) that the differing call should have: the signature on
        most ranks. A tie is decided by the signature that `_predict_next` predicts from the group's earlier calls; None
        if it predicts none of the signatures."""
        votes = Counter(map(_make_signature, self.differing.values())).most_common()
        if votes[0][1] > votes[1][1]:
            return votes[0][0]
        return self._predict_next([], allowed=dict(votes))

    def _list_common_calls(self) -> list[_Signature]:
        """Return the signatures (operation, site, dtype and shape) of the group's calls before the divergence, oldest
        first."""
        longest = max(self.calls.values(), key=lambda calls: sum(at < self.index for at in calls))
        return [_make_signature(longest[at]) for at in sorted(longest) if at < self.index]

    def _predict_next(
        self, assumed: list[_Signature], allowed: Container[_Signature] | None = None
    ) -> _Signature | None:
        """Predict the signature (operation, site, dtype and shape) of the group's next call, from the fact that
        training repeats the same calls in every step. The method finds the longest run of latest calls that also
        occurred earlier, and returns the signature of the call that followed the earlier occurrence.

        assumed: signatures of calls that are assumed to follow the calls before the divergence; the call after these is
        predicted. allowed: signatures that may be predicted; None: all signatures. Returns None if the latest call did
        not occur earlier, or if several longest runs were followed by calls with different signatures."""
        history = [*self._list_common_calls(), *assumed]
        best, follower = 0, None
        for end in range(1, len(history)):
            if allowed is not None and history[end] not in allowed:
                continue
            length = 0
            while length < end and history[end - 1 - length] == history[-1 - length]:
                length += 1
            if length >= best and length:
                follower = history[end] if length > best or follower == history[end] else None
                best = length
        return follower

    def _has_skipped_call(self, rank: int, expected: _Signature) -> bool:
        """Return True if `rank` seems to have left out the expected call and made a later call instead: other ranks
        make a call like that of `rank`, or are predicted to make it, within `LOOK_AHEAD` calls after the expected call.
        expected: signature of the expected call (operation, site, dtype and shape)."""
        wrong = _make_signature(self.differing[rank])
        for calls in self.calls.values():
            later = (calls.get(self.index + ahead) for ahead in range(1, LOOK_AHEAD))
            at = calls.get(self.index)
            if (
                at is not None
                and _make_signature(at) == expected
                and any(c and _make_signature(c) == wrong for c in later)
            ):
                return True
        assumed = [expected]
        for _ in range(LOOK_AHEAD):
            following = self._predict_next(assumed)
            if following is None or following == wrong:
                return following is not None
            assumed.append(following)
        return False

    def _has_extra_call(self, rank: int, expected: _Signature) -> bool:
        """Return True if `rank` made one call too many: the rank's call after the differing call has the `expected`
        signature (operation, site, dtype and shape)."""
        after = self.calls[rank].get(self.index + 1)
        return after is not None and _make_signature(after) == expected
