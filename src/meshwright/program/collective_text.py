"""Text form of collective programs.

    collective all-reduce ring
    ranks 2
    chunks 2

    rank 0
    send data[0] to 1 | reduce data[1] from 1
    send data[1] to 1 | receive data[0] from 1

    rank 1
    ...

Each line below `rank R` is one group of that rank's steps. `#` starts a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from meshwright.errors import UserError
from meshwright.names import OPERATIONS, unknown
from meshwright.program.collective import CollectiveProgram, Kind, Steps
from meshwright.program.contract import check_header

_HEADER = ("collective", "ranks", "chunks", "root", "scratch", "reduction")
_MEMORY = ("data", "output", "scratch")
_STEPS = {
    "send": (Kind.SEND, "to"),
    "receive": (Kind.RECEIVE, "from"),
    "reduce": (Kind.REDUCE, "from"),
    "copy": (Kind.COPY, "into"),
    "combine": (Kind.COMBINE, "into"),
    "signal": (Kind.SIGNAL, ""),
    "wait": (Kind.WAIT, "for"),
}
_STEP_EXAMPLES = {
    "send": "send data[3] to 1",
    "receive": "receive data[3] from 0",
    "reduce": "reduce data[0:4] from 0",
    "copy": "copy data[3] into scratch[0]",
    "combine": "combine scratch[0] into data[3]",
    "signal": "signal 1",
    "wait": "wait for 0",
}
_NUMBER = re.compile(r"[0-9]{1,9}")
_SLOTS = re.compile(r"([a-z]+)\[([0-9]{1,9})(?::([0-9]{1,9}))?\]")

Row = tuple[int, int, int, int, int, int, int]  # rank, group, kind, slot, count, peer, source


def format_collective(program: CollectiveProgram) -> str:
    """Return the text form of a collective program (header, then lines such as `send data[0] to 1` by rank), from which
    `parse_collective` builds an equal program."""
    lines = [
        f"collective {program.operation} {program.algorithm}",
        f"ranks {program.ranks}",
        f"chunks {program.chunks}",
    ]
    for name, value, usual in (("root", program.root, 0), ("scratch", program.scratch, 0)):
        if value != usual:
            lines.append(f"{name} {value}")
    if program.reduction != "sum":
        lines.append(f"reduction {program.reduction}")
    s = program.steps
    columns = (s.kind, s.slot, s.count, s.peer, s.source)
    words = [program.format_step(*step) for step in zip(*(column.tolist() for column in columns), strict=True)]
    group = s.group.tolist()
    for rank in range(program.ranks):
        lines += ["", f"rank {rank}"]
        last = -1
        for step in s.of_rank(rank):
            if group[step] == last:
                lines[-1] += f" | {words[step]}"
            else:
                lines.append(words[step])
            last = group[step]
    return "\n".join(lines) + "\n"


def parse_collective(text: str, where: str = "program") -> CollectiveProgram:
    """Parse the text form of a collective program (header, then lines such as `send data[0] to 1` by rank).

    where: prefix of error messages, such as the file's name. Raises `UserError` with the line number, the invalid text,
        and a valid alternative.
    """
    return _Parser(where).parse(text)


class _Parser:
    """Parser of the text form of a collective program; keeps header and current line number.

    where: prefix of error messages, such as the file's name.
    """

    def __init__(self, where: str) -> None:
        self.where, self.line = where, 0
        self.header: dict[str, tuple[str, ...]] = {}
        self.operation, self.algorithm, self.reduction = "", "", "sum"
        self.numbers = {"ranks": 0, "chunks": 0, "root": 0, "scratch": 0}
        self.memory: dict[str, tuple[int, int]] = {}  # first slot and number of slots
        self.known: dict[str, tuple[int, int, int, int, int]] = {}  # steps seen before

    def parse(self, text: str) -> CollectiveProgram:
        """Parse the text form of a collective program and return it; raises `UserError` with the line number."""
        rows: list[Row] = []
        rank, seen = -1, set[int]()
        for self.line, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            if line.split(None, 1)[0] == "rank":
                if not self.memory:
                    self._finish_header()
                rank = self._parse_rank(line.split()[1:])
                if rank in seen:
                    raise self._make_error(f"rank {rank} has a section already")
                seen.add(rank)
            elif rank < 0:
                self._parse_header(line.split())
            else:
                for step in line.split("|"):
                    rows.append((rank, self.line, *self._parse_step(step.strip())))
        self.line += 1
        if not self.memory:
            self._finish_header()
        names = ("rank", "group", "kind", "slot", "count", "peer", "source")
        columns = np.array(rows, np.int64).reshape(-1, 7).T
        steps = Steps.from_unsorted(**dict(zip(names, columns, strict=True)))
        n = self.numbers
        return CollectiveProgram(
            self.operation, self.algorithm, n["ranks"], n["chunks"], steps, n["root"], n["scratch"], self.reduction
        )

    def _parse_header(self, words: Sequence[str]) -> None:
        """Store the value of one header line, given the line's words, such as `ranks 8`."""
        name = words[0]
        if name not in _HEADER:
            if name in _STEPS:
                raise self._make_error(
                    f'"{" ".join(words)}" stands before the first line "rank R"; steps belong to a rank'
                )
            raise self._make_error(unknown("line", name, (*_HEADER, "rank")))
        if name in self.header:
            raise self._make_error(f'a second line "{name}"')
        if not self.header and name != "collective":
            raise self._make_error(f'a program starts with "collective OPERATION ALGORITHM", not with "{name}"')
        self.header[name] = tuple(words)
        if name == "collective":
            if len(words) < 3:
                raise self._make_error(f'write "collective OPERATION ALGORITHM", not "{" ".join(words)}"')
            self.operation, self.algorithm = words[1], " ".join(words[2:])
            if self.operation not in OPERATIONS:
                raise self._make_error(unknown("operation", self.operation, OPERATIONS))
        elif len(words) != 2:
            raise self._make_error(f'write "{name}" and one word, not "{" ".join(words)}"')
        elif name == "reduction":
            self.reduction = words[1]
        else:
            self.numbers[name] = self._parse_number(words[1])

    def _finish_header(self) -> None:
        """Raise `UserError` unless the header is complete and valid; then compute where data, output and scratch slots
        begin."""
        for name in ("collective", "ranks", "chunks"):
            if name not in self.header:
                raise self._make_error(f'the line "{name} ..." is missing before the first rank')
        n = self.numbers
        where = f"{self.where}, line {self.line}"
        check_header(self.operation, n["ranks"], n["chunks"], n["root"], n["scratch"], self.reduction, where)
        both = self.operation == "all-to-all"
        self.memory["data"] = (0, n["chunks"])
        if both:
            self.memory["output"] = (n["chunks"], n["chunks"])
        self.memory["scratch"] = (n["chunks"] * (1 + both), n["scratch"])

    def _parse_step(self, text: str) -> tuple[int, int, int, int, int]:
        """Parse one step such as `send data[3] to 1` into (kind, first slot, count, peer, source); cached, as most
        steps recur."""
        if text not in self.known:
            self.known[text] = self._parse_step_words(text.split())
        return self.known[text]

    def _parse_step_words(self, words: Sequence[str]) -> tuple[int, int, int, int, int]:
        """Parse the words of one step into (kind, first slot, number of slots, peer rank, source slot); -1 for unused
        fields."""
        if not words:
            raise self._make_error('a step is missing beside "|"')
        if words[0] not in _STEPS:
            if words[0] in _HEADER:
                raise self._make_error(f'"{" ".join(words)}" belongs before the first line "rank R"')
            raise self._make_error(unknown("step", words[0], _STEPS))
        kind, link = _STEPS[words[0]]
        form = _STEP_EXAMPLES[words[0]].split()
        if len(words) != len(form):
            raise self._make_error(f'"{" ".join(words)}" is not of the form "{_STEP_EXAMPLES[words[0]]}"')
        if link and words[-2] != link:
            raise self._make_error(f'"{words[-2]}" in "{" ".join(words)}" should be "{link}"')
        if kind in (Kind.SIGNAL, Kind.WAIT):
            return int(kind), 0, 0, self._parse_rank(words[-1:]), -1
        slot, count = self._parse_slots(words[1])
        if kind not in (Kind.COPY, Kind.COMBINE):
            return int(kind), slot, count, self._parse_rank(words[-1:]), -1
        target, room = self._parse_slots(words[3])
        if room != count:
            raise self._make_error(f"{words[1]} has {count} slots and {words[3]} has {room}; they have to be as many")
        return int(kind), target, count, -1, slot

    def _parse_slots(self, word: str) -> tuple[int, int]:
        """Return (first slot number, number of slots) for a word such as `data[3]` or `data[0:4]`."""
        found = _SLOTS.fullmatch(word)
        if not found:
            raise self._make_error(f'"{word}" should be slots such as data[3] or data[0:4]')
        name, start, end = found[1], int(found[2]), int(found[3] or int(found[2]) + 1)
        if name not in self.memory:
            if name in _MEMORY:
                raise self._make_error(
                    f'"{word}": {self.operation} has no {name}; its result takes the place of its data'
                )
            raise self._make_error(unknown("memory", name, self.memory))
        first, room = self.memory[name]
        if start >= end:
            raise self._make_error(f'"{word}" has no slots: the end has to be greater than the start')
        if end > room:
            has = f"{name}[0:{room}]" if room else f"no {name}"
            hint = ' (the line "scratch N" makes room)' if name == "scratch" else ""
            raise self._make_error(f'"{word}" is beyond the slots of a rank, which has {has}{hint}')
        return first + start, end - start

    def _parse_rank(self, words: Sequence[str]) -> int:
        """Return the rank that a line such as `rank 3` begins, given the words after `rank`.

        Raises UserError if there is no such rank.
        """
        if len(words) != 1:
            raise self._make_error(f'write "rank R", not "{" ".join(["rank", *words])}"')
        rank, ranks = self._parse_number(words[0]), self.numbers["ranks"]
        if rank >= ranks:
            raise self._make_error(f"there is no rank {rank}; ranks are 0 to {ranks - 1}")
        return rank

    def _parse_number(self, word: str) -> int:
        """Return the non-negative integer of up to 9 digits that `word` spells; raise UserError for any other word."""
        if not _NUMBER.fullmatch(word):
            raise self._make_error(f'"{word}" should be a number')
        return int(word)

    def _make_error(self, reason: str) -> UserError:
        """Return a UserError with the message `reason` about the current line."""
        return UserError(f"{self.where}, line {self.line}: {reason}")
