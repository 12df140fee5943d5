"""Oracle independent of the check: runs a collective program on random integers and knows the expected results.

Ranks take turns. A group's sends and receives are posted together; a rank moves on when its whole group is done, and a
send is done when its receive is posted (blocking sends).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import numpy as np

from meshwright.program.collective import CollectiveProgram, Kind
from meshwright.program.order import find_posting_order, match_transfers

JUNK = -(10**12)  # content of slots that are not yet written


def inputs(program: CollectiveProgram, seed: int = 0) -> np.ndarray:
    """Return random integers [ranks, chunks]: the vector of each rank."""
    return np.random.default_rng(seed).integers(1, 10**6, (program.ranks, program.chunks))


def run(program: CollectiveProgram, vectors: np.ndarray) -> np.ndarray:
    """Return the memory of every rank at the end, [ranks, slots]; fails for a deadlock or a race in a group."""
    n, chunk = program.ranks, np.arange(program.chunks)
    memory = np.full((n, program.slots), JUNK)
    match program.operation:
        case "all-gather" | "gather":
            memory[program.find_owner(chunk), chunk] = vectors[program.find_owner(chunk), chunk]
        case "broadcast" | "scatter" | "send-receive":
            memory[program.root, : program.chunks] = vectors[program.root]
        case _:
            memory[:, : program.chunks] = vectors
    s = program.steps
    table = list(
        zip(s.kind.tolist(), s.slot.tolist(), s.count.tolist(), s.peer.tolist(), s.source.tolist(), strict=True)
    )
    groups: list[deque[list[tuple[int, ...]]]] = [deque() for _ in range(n)]
    last = (-1, -1)
    for rank, group, step in zip(s.rank.tolist(), s.group.tolist(), table, strict=True):
        if (rank, group) != last:
            groups[rank].append([])
            last = (rank, group)
        groups[rank][-1].append(step)
    mail: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
    taken: dict[tuple[int, int], int] = defaultdict(int)  # number of messages received from a sender
    sent: dict[tuple[int, int], int] = defaultdict(int)
    posted: list[list[tuple[int, int]] | None] = [
        None
    ] * n  # (receiver, message number) for which the group's sends wait
    received = [False] * n
    while any(groups):
        moved = False
        for rank in range(n):
            if not groups[rank]:
                continue
            group = groups[rank][0]
            if posted[rank] is None:
                _no_race(group)
                posted[rank] = []
                for kind, slot, count, peer, source in group:
                    if kind in (Kind.SEND, Kind.SIGNAL):
                        mail[rank, peer].append(memory[rank, slot : slot + count].copy())
                        sent[rank, peer] += 1
                        posted[rank].append((peer, sent[rank, peer]))
                    elif kind in (Kind.COPY, Kind.COMBINE):
                        values = memory[rank, source : source + count].copy()
                        assert (values != JUNK).all()
                        memory[rank, slot : slot + count] = values + (
                            memory[rank, slot : slot + count] if kind == Kind.COMBINE else 0
                        )
                moved = True
            if not received[rank]:
                arriving = [step for step in group if step[0] in (Kind.RECEIVE, Kind.REDUCE, Kind.WAIT)]
                wanted: dict[int, int] = defaultdict(int)
                for step in arriving:
                    wanted[step[3]] += 1
                if all(len(mail[peer, rank]) >= number for peer, number in wanted.items()):
                    for kind, slot, count, peer, _ in arriving:
                        values = mail[peer, rank].popleft()
                        taken[peer, rank] += 1
                        assert len(values) == count and (values != JUNK).all()
                        if kind == Kind.REDUCE:
                            assert (memory[rank, slot : slot + count] != JUNK).all()
                            memory[rank, slot : slot + count] += values
                        else:
                            memory[rank, slot : slot + count] = values
                    received[rank] = moved = True
            if received[rank] and all(taken[rank, peer] >= number for peer, number in posted[rank] or []):
                groups[rank].popleft()
                posted[rank], received[rank], moved = None, False, True
        assert moved, f"{[rank for rank in range(n) if groups[rank]]} wait for each other"
    assert not any(mail.values()), "unreceived messages"
    return memory


def _no_race(group: list[tuple[int, ...]]) -> None:
    """No slot that a receive or a copy writes is touched by another step of the group, and none that a combine writes
    is read by another; local steps stand alone."""
    local = [step[0] in (Kind.COPY, Kind.COMBINE) for step in group]
    assert all(local) or not any(local)
    exclusive, combined, read, touched = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for kind, slot, count, _, source in group:
        reads = {Kind.SEND: slot, Kind.COPY: source, Kind.COMBINE: source}.get(Kind(kind))
        if reads is not None:
            read.update(range(reads, reads + count))
        if kind != Kind.SEND:
            touched.update(range(slot, slot + count))
            (combined if kind in (Kind.REDUCE, Kind.COMBINE) else exclusive).update(range(slot, slot + count))
    touched += read
    assert all(touched[slot] == 1 for slot in exclusive)
    assert not any(local) or read.keys().isdisjoint(combined)


def assert_right(program: CollectiveProgram, seed: int = 0) -> None:
    """Assert that the program computes its operation."""
    vectors = inputs(program, seed)
    n, chunks = vectors.shape
    memory = run(program, vectors)
    data, total, chunk = memory[:, :chunks], vectors.sum(0), np.arange(chunks)
    owner = program.find_owner(chunk)
    match program.operation:
        case "all-reduce":
            assert (data == total).all()
        case "reduce-scatter":
            assert (data[owner, chunk] == total).all()
        case "reduce":
            assert (data[program.root] == total).all()
        case "all-gather":
            assert (data == vectors[owner, chunk]).all()
        case "gather":
            assert (data[program.root] == vectors[owner, chunk]).all()
        case "broadcast":
            assert (data == vectors[program.root]).all()
        case "scatter":
            assert (data[owner, chunk] == vectors[program.root, chunk]).all()
        case "all-to-all":
            output = memory[:, chunks : 2 * chunks].reshape(n, n, -1)
            assert (output == vectors.reshape(n, n, -1).swapaxes(0, 1)).all()
        case "send-receive":
            receiver = n - 1 if program.root != n - 1 else 0
            assert (data[receiver] == vectors[program.root]).all()
        case "barrier":
            assert heard(program).all()
        case other:
            raise AssertionError(other)


def heard(program: CollectiveProgram) -> np.ndarray:
    """Return a mask [ranks, ranks]: True if a rank at its end has a signal, direct or indirect, from the other."""
    s, n = program.steps, program.ranks
    sends, receives = match_transfers(s.rank, s.peer, s.kind == Kind.SIGNAL, s.kind == Kind.WAIT)
    schedule = find_posting_order(s.group_rank, s.group_index[sends], s.group_index[receives])
    knows = np.eye(n, dtype=bool)
    level = np.maximum(schedule.level[s.group_index[sends]], schedule.level[s.group_index[receives]])
    for now in np.unique(level):
        before = knows.copy()
        for i in np.flatnonzero(level == now):
            knows[s.rank[receives[i]]] |= before[s.rank[sends[i]]]
    return knows


def rounds(program: CollectiveProgram) -> int:
    """Return the length of the longest chain of dependent transfers."""
    s = program.steps
    sending = np.isin(s.kind, (Kind.SEND, Kind.SIGNAL))
    sends, receives = match_transfers(s.rank, s.peer, sending, np.isin(s.kind, (Kind.RECEIVE, Kind.REDUCE, Kind.WAIT)))
    return find_posting_order(s.group_rank, s.group_index[sends], s.group_index[receives]).depth


def sent(program: CollectiveProgram) -> np.ndarray:
    """Return the fraction of the vector that each rank sends: [ranks]."""
    s = program.steps
    sending = s.kind == Kind.SEND
    return np.bincount(s.rank[sending], s.count[sending], minlength=program.ranks) / program.chunks
