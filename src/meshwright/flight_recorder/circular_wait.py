"""Check of NCCL's rule that all ranks post the kernels of several communicators in a consistent order: replay of the
ranks' recorded calls on devices that run one kernel at a time, in posted order. Torch-free.

Kernels of two communicators may keep each other from starting on a device, so ranks that post them in different orders
may wait for each other in a circle. If the replay completes, the recorded calls cannot do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from meshwright.flight_recorder.call_log import Call, Group, RankCalls

_Key = tuple[Group, int]  # a call, the same for all ranks that take part in it


def find_circular_wait(ranks: Sequence[RankCalls], earlier: Sequence[RankCalls] = ()) -> str | None:
    """Replay the recorded calls of `ranks` as kernels on one device per rank, and return text on the first violation of
    NCCL's ordering rule; None if there is none. earlier: records of the same ranks before a run, to replay the run's
    calls alone.

    Violations: ranks of a communicator make different calls at one position; ranks wait for each other in a circle.
    Messages that are posted as one group run as one kernel; all other kernels of a rank run one after the other. Calls
    that are no longer in the ring buffers of all members are left out.
    """
    ended = {each.rank: each.last.number for each in earlier if each.last is not None}
    ranks = [replace(each, calls=tuple(c for c in each.calls if c.number > ended.get(each.rank, 0))) for each in ranks]
    first = _find_first_common_calls(ranks)
    kernels = {each.rank: _list_kernels(each, first) for each in ranks}
    at, left = dict.fromkeys(kernels, -1), dict.fromkeys(kernels, 0)
    entered: dict[_Key, dict[int, Call]] = {}
    starting = list(kernels)
    while starting:
        rank = starting.pop()
        at[rank] += 1
        if at[rank] == len(kernels[rank]):
            continue
        left[rank] = len(kernels[rank][at[rank]])
        for call in kernels[rank][at[rank]]:
            here = entered.setdefault((call.group, call.index), {})
            for other, theirs in here.items():
                if (theirs.operation, theirs.site) != (call.operation, call.site):
                    return (
                        f"ranks of one communicator make different calls: rank {other} {_describe(theirs)}, "
                        f"rank {rank} {_describe(call)}"
                    )
            here[rank] = call
            if len(here) == len(set(call.group.members)):
                for member in here:
                    left[member] -= 1
                    if not left[member]:
                        starting.append(member)
    stuck = {rank: kernels[rank][place] for rank, place in at.items() if place < len(kernels[rank])}
    return _blame_cycle(stuck, entered) if stuck else None


def _find_first_common_calls(ranks: Sequence[RankCalls]) -> dict[Group, int]:
    """Return for each group the index of its earliest call that all of its ranks still have in their ring buffers; the
    index after its last call, if a rank has none of them left."""
    first: dict[Group, int] = {}
    for each in ranks:
        kept: dict[Group, int] = {}
        for call in each.calls:
            kept.setdefault(call.group, call.index)
        for group in {**each.counts, **kept}:
            index = kept[group] if group in kept else each.counts[group] + 1
            first[group] = max(first.get(group, 0), index)
    return first


def _list_kernels(rank: RankCalls, first: dict[Group, int]) -> list[list[Call]]:
    """Return a rank's calls in posted order as kernels: messages posted as one group form one kernel, every other call
    another. first: group -> index of its first call to include."""
    calls = [call for call in rank.calls if call.index >= first[call.group] and len(set(call.group.members)) > 1]
    together = groupby(calls, lambda call: (call.group.pair is None, call.posted, call.group.pair and call.axis))
    return [kernel for key, found in together for kernel in ([[c] for c in found] if key[0] else [list(found)])]


def _blame_cycle(stuck: dict[int, list[Call]], entered: dict[_Key, dict[int, Call]]) -> str:
    """Return text on ranks that wait for each other, or for a rank that makes no such call. stuck: rank -> kernel (list
    of calls) in which it waits. entered: (group, index) of a call -> rank that has entered it -> its record of the
    call."""
    waits: dict[int, tuple[Call, int]] = {}
    for rank, kernel in stuck.items():
        for call in kernel:
            missing = [each for each in call.group.members if each not in entered[call.group, call.index]]
            if missing:
                waits[rank] = call, next((each for each in missing if each in stuck), missing[0])
                break
    path = [min(waits)]
    while path[-1] in waits and waits[path[-1]][1] not in path:
        path.append(waits[path[-1]][1])
    if path[-1] not in waits:
        call, absent = waits[path[-2]]
        return f"rank {path[-2]} waits in {_describe(call)} for rank {absent}, which makes no such call"
    circle = path[path.index(waits[path[-1]][1]) :]
    steps = [f"rank {rank} in {_describe(waits[rank][0])} for rank {waits[rank][1]}" for rank in circle]
    return f"circular wait: {'; '.join(steps)}"


def _describe(call: Call) -> str:
    """Return text on a call: its name, the ranks of its communicator, and the code location."""
    return f"{call.name} of ranks {call.group.to_text()} at {call.place}"
