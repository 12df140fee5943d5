"""Ranks that make the same calls, and yet do not go on: which one the others wait for. A rank waits for those that have
not entered the call it is in; who waits for nobody, or in a circle, is where to look. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.flight_recorder.call_log import Call, Group, ranks_text
from meshwright.flight_recorder.verdict import (
    Seen,
    Verdict,
    calls_of,
    doing,
    has,
    is_are,
    its_state,
    ranks_,
    waits_since,
)

LATE_SHARE = 0.5  # of the wait: who came later than this has kept the others waiting


def waits(ranks: Mapping[int, Seen], now: float) -> Verdict | None:
    """Follow who waits for whom to those who wait for nobody; None where nobody waits."""
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
        line = f"{ranks_(odd)} {'have' if len(odd) > 1 else 'has'} not come through {stuck.name}, at {stuck.place}"
        line += f"; {ranks_(left)} {waits_since(left, waiting, now)}" if left else ""
        return Verdict(f"{line}; {its_state(first)}", kind, odd, stuck.group, stuck.index)
    earliest = min((waiting[rank] for rank in left), key=lambda call: call.posted)
    left = [rank for rank in left if waiting[rank].group == earliest.group]
    odd = tuple(rank for rank in odd if rank in earliest.group.members and rank in blockers[left[0]])
    of_group = f"of ranks {ranks_text(earliest.group.members)} "
    line = f"{ranks_(odd)} {has(odd)} not entered call {earliest.index} {of_group}({earliest.what}), where "
    line += f"{ranks_(left)} {waits_since(left, waiting, now)} at {earliest.place}"
    return Verdict(f"{line}; {doing(first, now)}; {its_state(first)}", kind, odd, earliest.group, earliest.index)


def _elsewhere(
    absent: list[int], waiting: Mapping[int, Call], blockers: Mapping[int, list[int]], now: float
) -> Verdict:
    left = [rank for rank in sorted(waiting) if set(blockers[rank]) & set(absent)]
    call = waiting[left[0]]
    line = (
        f"{ranks_(left)} {waits_since(left, waiting, now)} in {call.name}, at {call.place}, for {ranks_(absent)}, "
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
        for found in calls_of(ranks[rank])
        if found.group == call.group and found.index == call.index
    }
    first, last = (pick(entered, key=lambda rank: entered[rank].posted) for pick in (min, max))
    late = entered[last].posted - entered[first].posted
    if late > LATE_SHARE * (now - entered[first].posted):
        line = f"rank {last} came to {call.name} {late:.1f} s after rank {first}, at {entered[last].place}"
        return Verdict(f"{line}; {its_state(ranks[last])}", "late", (last,), call.group, call.index)
    line = f"{ranks_(list(entered))} have all entered {call.name}, at {call.place}, and agree about it, but "
    line += f"{ranks_(stuck)} {waits_since(stuck, waiting, now)}: nothing passes between them"
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


# --- where no host waits


def behind(ranks: Mapping[int, Seen], now: float) -> Verdict | None:
    """On CUDA no host waits for a call: it queues it and goes on. When something is wrong, that is a process is stopped
    or has ended, who has made fewer calls of a group than others, and is not itself ahead of somebody, is the one."""
    if not any(seen.dead or seen.stopped or seen.gave_up for seen in ranks.values()):
        return None
    groups = dict.fromkeys(group for seen in ranks.values() if seen.calls for group in seen.calls.counts)
    slower: dict[int, dict[int, list[Group]]] = {}  # rank -> those that are behind it -> in what
    for group in groups:
        members = [rank for rank in group.members if rank in ranks]
        for rank in members:
            for other in members:
                if _count(ranks[other], group) < _count(ranks[rank], group):
                    slower.setdefault(rank, {}).setdefault(other, []).append(group)
    blockers = {rank: list(others) for rank, others in slower.items()}
    ends = list(dict.fromkeys(end for rank in sorted(slower) for end in _ends(rank, blockers)))
    for is_kind, kind in ((_is_stopped, "stopped"), (_is_dead, "dead"), (_is_free, "behind")):
        odd = [rank for rank in ends if is_kind(ranks[rank])]
        if odd:
            return _lagging(ranks, odd, kind, slower, now)
    return None


def _count(seen: Seen, group: Group) -> int:
    return seen.calls.counts.get(group, 0) if seen.calls else 0


def _lagging(
    ranks: Mapping[int, Seen], odd: list[int], kind: str, slower: Mapping[int, Mapping[int, list[Group]]], now: float
) -> Verdict:
    """Of the calls that the first odd rank has not made, the one that others made first."""
    first, missing = odd[0], list[tuple[float, int, Call]]()
    for rank, others in slower.items():
        for group in others.get(first, ()):
            index = _count(ranks[first], group) + 1
            missing += [(c.posted, rank, c) for c in calls_of(ranks[rank]) if c.group == group and c.index >= index][:1]
    if not missing:
        ahead = next(rank for rank, others in slower.items() if first in others)
        group = slower[ahead][first][0]
        made = f"{_count(ranks[first], group):,} calls of ranks {ranks_text(group.members)}"
        line = f"{ranks_([first])} has made {made} and rank {ahead} {_count(ranks[ahead], group):,}"
        return Verdict(f"{line}; {doing(ranks[first], now)}; {its_state(ranks[first])}", kind, (first,), group)
    posted, ahead, call = min(missing, key=lambda found: found[:2])
    alike = tuple(rank for rank in odd if rank in call.group.members and _count(ranks[rank], call.group) < call.index)
    line = f"{ranks_(alike)} {has(alike)} not entered call {call.index} of ranks {ranks_text(call.group.members)} "
    line += f"({call.what}), which rank {ahead} queued {now - posted:.1f} s ago at {call.place}"
    line += f"; {doing(ranks[first], now)}; {its_state(ranks[first])}"
    return Verdict(line, kind, alike, call.group, call.index)


def suspended(ranks: Mapping[int, Seen], now: float) -> Verdict | None:
    """Stopped processes for which no rank waits in a call: others wait for their part of a save, or have ended."""
    odd = tuple(rank for rank, seen in ranks.items() if seen.stopped)
    if not odd:
        return None
    first = ranks[odd[0]]
    return Verdict(f"{ranks_(odd)} {is_are(odd)} {first.state_text}, in no call; {doing(first, now)}", "stopped", odd)
