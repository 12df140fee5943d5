"""Runs a collective program on random integers in a random interleaving, as unkind as the rules allow: a transfer takes
place at any moment while both of its groups are under way, and is read only then; or the send is buffered. Copies,
combines and reductions of a group take place in a random order, slot by slot.

It shares nothing with the check but the columns of the program.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from meshwright.program.collective import CollectiveProgram, Kind

MASK = (1 << 61) - 1


class Stuck(Exception):
    """Error: some ranks wait forever."""


@dataclass
class Rank:
    groups: list[list[int]]
    memory: list[int]
    at: int = -1
    open: set[int] = field(default_factory=set)  # pending steps of the group
    staged: dict[int, list[int]] = field(default_factory=dict)  # values received for the group's reductions


@dataclass
class Interpreter:
    """inputs: [rank][chunk]. frozen: a rank that never starts. buffered: how likely a send is over once posted."""

    program: CollectiveProgram
    inputs: list[list[int]]
    random: random.Random
    frozen: int = -1
    buffered: float = 0.0

    def __post_init__(self) -> None:
        p = self.program
        self.columns = list(
            zip(*(getattr(p.steps, name).tolist() for name in ("kind", "slot", "count", "peer", "source")), strict=True)
        )
        self.ranks = []
        for rank in range(p.ranks):
            groups: dict[int, list[int]] = defaultdict(list)
            for step in p.steps.of_rank(rank):
                groups[int(p.steps.group[step])].append(step)
            memory = [self.random.getrandbits(60) for _ in range(p.slots)]  # random values in slots not yet written
            for chunk in range(p.chunks):
                if holds(p, rank, chunk):
                    memory[chunk] = self.inputs[rank][chunk]
            self.ranks.append(Rank([groups[group] for group in sorted(groups)], memory))
        self.buffer: dict[int, list[int]] = {}
        self.posted: dict[tuple[bool, int, int], list[int]] = defaultdict(list)  # by sender and receiver, in order
        self.done: dict[tuple[int, int], int] = defaultdict(int)  # completed transfers of a pair

    def run(self) -> list[list[int]]:
        """Return the memory of every rank at the end; raises `Stuck` if a rank does not end."""
        while True:
            events = [(rank, None) for rank in range(len(self.ranks)) if self._can_start(rank)]
            events += [(sender, receiver) for sender, receiver in list(self.done) if self._can_move(sender, receiver)]
            if not events:
                break
            one, other = self.random.choice(events)
            if other is None:
                self._start(one)
            else:
                self._move(one, other)
        if any(not self.finished(rank) for rank in range(len(self.ranks))):
            raise Stuck
        return [rank.memory for rank in self.ranks]

    def finished(self, rank: int) -> bool:
        return self.ranks[rank].at == len(self.ranks[rank].groups)

    def _can_start(self, number: int) -> bool:
        rank = self.ranks[number]
        return number != self.frozen and not rank.open and rank.at < len(rank.groups)

    def _start(self, number: int) -> None:
        """Post the next group; local steps run now, in random order."""
        rank = self.ranks[number]
        rank.at += 1
        if rank.at == len(rank.groups):
            return
        moves: list[tuple[int, int, bool]] = []  # source, target, adds
        for step in rank.groups[rank.at]:
            kind, slot, count, peer, source = self.columns[step]
            if kind in (Kind.COPY, Kind.COMBINE):
                moves += [(source + i, slot + i, kind == Kind.COMBINE) for i in range(count)]
                continue
            sends = kind in (Kind.SEND, Kind.SIGNAL)
            pair = (number, peer) if sends else (peer, number)
            self.posted[sends, *pair].append(step)
            self.done[pair] += 0
            if sends and self.random.random() < self.buffered:
                self.buffer[step] = rank.memory[slot : slot + count]
            else:
                rank.open.add(step)
        for source, target, adds in self.random.sample(moves, len(moves)):
            self._write(rank, target, [rank.memory[source]], adds)

    def _can_move(self, sender: int, receiver: int) -> bool:
        done = self.done[sender, receiver]
        return all(len(self.posted[sends, sender, receiver]) > done for sends in (True, False))

    def _move(self, sender: int, receiver: int) -> None:
        done = self.done[sender, receiver]
        self.done[sender, receiver] += 1
        send, receive = (self.posted[sends, sender, receiver][done] for sends in (True, False))
        kind, slot, count, _, _ = self.columns[send]
        values = self.buffer.get(send, self.ranks[sender].memory[slot : slot + count])
        there, slot, room, _, _ = self.columns[receive]
        if (kind == Kind.SEND) != (there != Kind.WAIT) or count != room:
            raise Stuck
        if there == Kind.REDUCE:
            self.ranks[receiver].staged[receive] = values
        elif there == Kind.RECEIVE:
            self._write(self.ranks[receiver], slot, values, adds=False)
        for rank, step in ((self.ranks[sender], send), (self.ranks[receiver], receive)):
            if step not in rank.open:
                continue
            rank.open.remove(step)
            if not rank.open:
                for reduction in self.random.sample(sorted(rank.staged), len(rank.staged)):
                    self._write(rank, self.columns[reduction][1], rank.staged[reduction], adds=True)
                rank.staged = {}

    def _write(self, rank: Rank, slot: int, values: list[int], adds: bool) -> None:
        for i, value in enumerate(values):
            rank.memory[slot + i] = (rank.memory[slot + i] + value) & MASK if adds else value


def holds(p: CollectiveProgram, rank: int, chunk: int) -> bool:
    """Return True if a rank holds a chunk at the start."""
    if p.operation in ("all-gather", "gather"):
        return chunk * p.ranks // p.chunks == rank
    return rank == p.root if p.operation in ("broadcast", "scatter", "send-receive") else True


def random_inputs(p: CollectiveProgram, source: random.Random) -> list[list[int]]:
    return [[source.getrandbits(60) for _ in range(p.chunks)] for _ in range(p.ranks)]


def wrong(p: CollectiveProgram, inputs: list[list[int]], memory: list[list[int]]) -> str:
    """Return a description of the first wrong result; empty if all are as the operation requires."""
    share = max(1, p.chunks // p.ranks)
    for rank in range(p.ranks):
        for chunk in range(p.chunks):
            owner = chunk * p.ranks // p.chunks
            total = sum(inputs[other][chunk] for other in range(p.ranks)) & MASK
            receiver = p.ranks - 1 if p.root != p.ranks - 1 else 0
            slot, wanted = chunk, None
            match p.operation:
                case "all-reduce":
                    wanted = total
                case "reduce":
                    wanted = total if rank == p.root else None
                case "reduce-scatter":
                    wanted = total if rank == owner else None
                case "all-gather":
                    wanted = inputs[owner][chunk]
                case "gather":
                    wanted = inputs[owner][chunk] if rank == p.root else None
                case "broadcast":
                    wanted = inputs[p.root][chunk]
                case "scatter":
                    wanted = inputs[p.root][chunk] if rank == owner else None
                case "send-receive":
                    wanted = inputs[p.root][chunk] if rank == receiver else None
                case "all-to-all":
                    slot, wanted = p.chunks + chunk, inputs[chunk // share][rank * share + chunk % share]
            if wanted is not None and memory[rank][slot] != wanted:
                return f"rank {rank}, slot {slot}"
    return ""


def failure(p: CollectiveProgram, seed: int) -> str:
    """Return the first failure with blocking and with partly buffered sends; empty for a correct program."""
    source = random.Random(seed)
    inputs = random_inputs(p, source)
    for buffered in (0.0, 0.5):
        try:
            memory = Interpreter(p, inputs, source, buffered=buffered).run()
        except Stuck:
            return "stuck"
        if p.operation != "barrier" and (where := wrong(p, inputs, memory)):
            return where
    for absent in range(p.ranks * (p.operation == "barrier")):  # no rank leaves before every rank has arrived
        run = Interpreter(p, inputs, source, frozen=absent, buffered=1.0)
        try:
            run.run()
        except Stuck:
            pass
        early = [rank for rank in range(p.ranks) if rank != absent and run.finished(rank)]
        if early:
            return f"rank {early[0]} left without rank {absent}"
    return ""
