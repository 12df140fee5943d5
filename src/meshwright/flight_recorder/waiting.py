"""Diagnosis of ranks that make the same calls but hang: find the rank that the others wait for. Torch-free.

A rank in a call waits for the ranks that have not entered the call, and these may wait in other calls. The rank at the
end of such a chain, or a cycle of ranks, is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from meshwright.flight_recorder.call_log import Call, Group
from meshwright.flight_recorder.verdict import (
    RankState,
    Verdict,
    choose_has,
    choose_is,
    describe_activity,
    describe_process,
    format_wait,
    list_calls,
    name_ranks,
)

LATE_SHARE = 0.5  # share of the wait: a rank that entered the call later than this caused the wait


def find_awaited_ranks(ranks: Mapping[int, RankState], now: float) -> Verdict | None:
    """Find the ranks for which other ranks wait in calls, by following the chains "rank waits for rank" to their ends.
    Return the verdict that blames the ranks at the ends, or the ranks of a cycle; None if no rank waits.

    ranks: rank -> its state. now: seconds of the monotonic clock.
    """
    waiting = {rank: call for rank, seen in ranks.items() if seen.calls and (call := seen.calls.waiting)}
    waiting = {rank: call for rank, call in waiting.items() if not ranks[rank].dead}
    if not waiting:
        return None
    blockers = {rank: _list_missing_ranks(ranks, call) for rank, call in waiting.items()}
    ends = list(dict.fromkeys(end for rank in sorted(waiting) for end in _find_chain_ends(rank, blockers)))
    if not ends:
        return _blame_cycle(waiting, blockers, now)
    # A rank that died or was stopped inside a call has entered it, but the others still wait for it.
    stuck = [other for end in ends if end in waiting for other in waiting[end].group.members if other in ranks]
    ends = list(dict.fromkeys([*ends, *(other for other in stuck if ranks[other].dead or ranks[other].stopped)]))
    absent = sorted(rank for rank in ends if rank not in ranks)
    for kind in ("dead", "stopped", "behind"):
        blamed = tuple(rank for rank in ends if rank in ranks and ranks[rank].blame == kind)
        if blamed:
            return _blame_missing(ranks, blamed, waiting, blockers, now)
    if absent:
        return _blame_unreadable(absent, waiting, blockers, now)
    return _blame_late_or_link(ranks, [rank for rank in ends if rank in waiting], waiting, now)


def _list_missing_ranks(ranks: Mapping[int, RankState], call: Call) -> list[int]:
    """Return the ranks for which `call` waits: the ranks of the call's group that have not entered the call. Ranks
    whose calls cannot be read are returned only if all other ranks of the group have entered the call. ranks: {rank:
    its state}, without ranks whose calls cannot be read."""

    def entered(rank: int) -> bool:
        """Return True if rank `rank` is known to have entered `call`; False if it has not, or if its calls cannot be
        read."""
        calls = ranks[rank].calls if rank in ranks else None
        return calls is not None and calls.counts.get(call.group, 0) >= call.index

    missing = [rank for rank in call.group.members if not entered(rank)]
    known = [rank for rank in missing if rank in ranks]
    return known or missing


def _find_chain_ends(rank: int, blockers: Mapping[int, list[int]]) -> Iterator[int]:
    """Follow the chains "rank waits for rank" that begin at `rank`; yield the ranks at their ends, which wait for no
    other rank. blockers: rank -> ranks for which it waits."""
    reached, ahead = {rank}, [rank]
    while ahead:
        at = ahead.pop()
        if not blockers.get(at):
            yield at
        for other in blockers.get(at, ()):
            if other not in reached:
                reached.add(other)
                ahead.append(other)


def _blame_missing(
    ranks: Mapping[int, RankState],
    blamed: tuple[int, ...],
    waiting: Mapping[int, Call],
    blockers: Mapping[int, list[int]],
    now: float,
) -> Verdict:
    """Return the verdict that blames the ranks `blamed`, which wait for no rank while other ranks wait for them in a
    call.

    ranks: rank -> its state; waiting: rank -> call in which it waits; blockers: rank -> ranks for which it waits; now:
    seconds of the monotonic clock.
    """
    first = ranks[blamed[0]]
    left = [rank for rank in sorted(waiting) if blamed[0] in blockers[rank]]
    if not left:  # it has entered the call in which the others wait
        stuck = waiting.get(blamed[0]) or (first.calls.last if first.calls else None)
        assert stuck is not None
        left = [rank for rank, call in waiting.items() if call.group == stuck.group and rank not in blamed]
        line = f"{name_ranks(blamed)} {choose_has(blamed)} not completed {stuck.name}, at {stuck.place}"
        line += f"; {name_ranks(left)} {format_wait(left, waiting, now)}" if left else ""
        return Verdict(f"{line}; {describe_process(first)}", first.blame, blamed, stuck.group, stuck.index)
    earliest = min((waiting[rank] for rank in left), key=lambda call: call.posted)
    left = [rank for rank in left if waiting[rank].group == earliest.group]
    blamed = tuple(rank for rank in blamed if rank in earliest.group.members and rank in blockers[left[0]])
    of_group = f"of {earliest.group.name} "
    line = f"{name_ranks(blamed)} {choose_has(blamed)} not entered call {earliest.index} {of_group}"
    line += f"({earliest.description}), where {name_ranks(left)} {format_wait(left, waiting, now)} at {earliest.place}"
    line += f"; {describe_activity(first, now)}; {describe_process(first)}"
    return Verdict(line, first.blame, blamed, earliest.group, earliest.index)


def _blame_unreadable(
    absent: list[int], waiting: Mapping[int, Call], blockers: Mapping[int, list[int]], now: float
) -> Verdict:
    """Return the verdict that blames the ranks `absent`. Other ranks wait for these ranks, whose calls cannot be read
    because they run on other hosts.

    waiting: rank -> call in which it waits; blockers: rank -> ranks for which it waits; now: seconds of the monotonic
    clock.
    """
    left = [rank for rank in sorted(waiting) if set(blockers[rank]) & set(absent)]
    call = waiting[left[0]]
    line = (
        f"{name_ranks(left)} {format_wait(left, waiting, now)} in {call.name}, at {call.place}, "
        f"for {name_ranks(absent)}, whose calls cannot be read on this host (their host reports them)"
    )
    return Verdict(line, "behind", tuple(absent), call.group, call.index)


def _blame_late_or_link(
    ranks: Mapping[int, RankState], stuck: list[int], waiting: Mapping[int, Call], now: float
) -> Verdict:
    """Return the verdict on a call that all ranks of its group have entered but that is not complete: one rank entered
    the call late, or the network carries no data. The last rank to enter is late if its delay after the first rank
    exceeds the fraction `LATE_SHARE` of the time since the first rank entered.

    ranks: rank -> its state. stuck: ranks that wait in the call. waiting: rank -> call in which it waits. now: seconds
    of the monotonic clock.
    """
    call = waiting[stuck[0]]
    entered = {
        rank: found
        for rank in call.group.members
        if rank in ranks
        for found in list_calls(ranks[rank])
        if found.group == call.group and found.index == call.index
    }
    first, last = (pick(entered, key=lambda rank: entered[rank].posted) for pick in (min, max))
    late = entered[last].posted - entered[first].posted
    if late > LATE_SHARE * (now - entered[first].posted):
        line = f"rank {last} entered {call.name} {late:.1f} s after rank {first}, at {entered[last].place}"
        return Verdict(f"{line}; {describe_process(ranks[last])}", "late", (last,), call.group, call.index)
    line = f"{name_ranks(list(entered))} have all entered {call.name}, at {call.place}, with equal arguments, but "
    line += f"{name_ranks(stuck)} {format_wait(stuck, waiting, now)}: the network carries no data between them"
    return Verdict(line, "link", (), call.group, call.index)


def _blame_cycle(waiting: Mapping[int, Call], blockers: Mapping[int, list[int]], now: float) -> Verdict:
    """Return the verdict on ranks that wait for each other in a cycle.

    waiting: rank -> call in which it waits; blockers: rank -> ranks for which it waits; now: seconds of the monotonic
    clock.
    """
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


# --- hosts that do not wait (CUDA), and stopped processes


def find_lagging_ranks(ranks: Mapping[int, RankState], now: float) -> Verdict | None:
    """Find the ranks that have made fewer calls in a group than other ranks; return the verdict that blames them. On
    CUDA only this shows the cause of a hang, because hosts queue calls and do not block in them.

    Return None if no rank lags. Ranks also lag in normal operation, so return None too if no process has died, timed
    out or been stopped (SIGSTOP). If rank A is behind rank B, and B behind C, only A is blamed. ranks: rank -> its
    state. now: seconds of the monotonic clock."""
    if not any(seen.dead or seen.stopped or seen.gave_up for seen in ranks.values()):
        return None
    groups = dict.fromkeys(group for seen in ranks.values() if seen.calls for group in seen.calls.counts)
    slower: dict[int, dict[int, list[Group]]] = {}  # rank -> ranks behind it -> groups in which they are
    for group in groups:
        members = [rank for rank in group.members if rank in ranks]
        for rank in members:
            for other in members:
                if _count_calls(ranks[other], group) < _count_calls(ranks[rank], group):
                    slower.setdefault(rank, {}).setdefault(other, []).append(group)
    blockers = {rank: list(others) for rank, others in slower.items()}
    ends = list(dict.fromkeys(end for rank in sorted(slower) for end in _find_chain_ends(rank, blockers)))
    for kind in ("stopped", "dead", "behind"):
        blamed = [rank for rank in ends if ranks[rank].blame == kind]
        if blamed:
            return _blame_lagging(ranks, blamed, kind, slower, now)
    return None


def _count_calls(seen: RankState, group: Group) -> int:
    """Return the number of calls that a rank has made in a group so far; 0 if its calls are unknown. seen: the rank's
    state."""
    return seen.calls.counts.get(group, 0) if seen.calls else 0


def _blame_lagging(
    ranks: Mapping[int, RankState],
    blamed: list[int],
    kind: str,
    slower: Mapping[int, Mapping[int, list[Group]]],
    now: float,
) -> Verdict:
    """Return the verdict that blames ranks which have made fewer calls than other ranks. The verdict names the earliest
    call that the first blamed rank has not made.

    ranks: rank -> its state. blamed: the ranks to blame. kind: why they are behind: "dead", "stopped" or "behind"
    (running other code). slower: {rank A: {rank B: groups in which B has made fewer calls than A}}. now: seconds of the
    monotonic clock.
    """
    first, missing = blamed[0], list[tuple[float, int, Call]]()
    for rank, others in slower.items():
        for group in others.get(first, ()):
            index = _count_calls(ranks[first], group) + 1
            later = (c for c in list_calls(ranks[rank]) if c.group == group and c.index >= index)
            missing += [(call.posted, rank, call) for call in islice(later, 1)]
    if not missing:
        ahead = next(rank for rank, others in slower.items() if first in others)
        group = slower[ahead][first][0]
        made = f"{_count_calls(ranks[first], group):,} calls of {group.name}"
        line = f"{name_ranks([first])} has made {made} and rank {ahead} {_count_calls(ranks[ahead], group):,}"
        line += f"; {describe_activity(ranks[first], now)}; {describe_process(ranks[first])}"
        return Verdict(line, kind, (first,), group)
    posted, ahead, call = min(missing, key=lambda found: found[:2])
    alike = tuple(
        rank for rank in blamed if rank in call.group.members and _count_calls(ranks[rank], call.group) < call.index
    )
    of_group = f"of {call.group.name} "
    line = f"{name_ranks(alike)} {choose_has(alike)} not entered call {call.index} {of_group}"
    line += f"({call.description}), which rank {ahead} queued {now - posted:.1f} s ago at {call.place}"
    line += f"; {describe_activity(ranks[first], now)}; {describe_process(ranks[first])}"
    return Verdict(line, kind, alike, call.group, call.index)


def find_stopped_ranks(ranks: Mapping[int, RankState], now: float) -> Verdict | None:
    """Find the ranks whose process is suspended (SIGSTOP or debugger) outside a call, for example during a checkpoint
    save. Return the verdict that blames these ranks, or None if there are none. Called after `find_awaited_ranks`,
    which handles suspended ranks for which other ranks wait. ranks: rank -> its state. now: seconds of the monotonic
    clock."""
    blamed = tuple(rank for rank, seen in ranks.items() if seen.stopped)
    if not blamed:
        return None
    first = ranks[blamed[0]]
    line = f"{name_ranks(blamed)} {choose_is(blamed)} {first.state_text}, in no call; {describe_activity(first, now)}"
    return Verdict(line, "stopped", blamed)
