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

from meshwright.names import OPERATIONS, unknown
from meshwright.program.collective import CollectiveProgram, Kind, Steps
from meshwright.program.contract import check_header
from meshwright.program.text_form import ProgramParser

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
_SLOTS = re.compile(r"([a-z]+)\[([0-9]{1,9})(?::([0-9]{1,9}))?\]")

Row = tuple[int, int, int, int, int, int, int]  # rank, group, kind, slot, count, peer, source


def format_collective(program: CollectiveProgram) -> str:
    """Return a collective program in text form, from which `parse_collective` builds an equal one: a header, then for
    each rank lines such as `send data[0] to 1`."""
    lines = [
        f"collective {program.operation} {program.algorithm}",
        f"ranks {program.ranks}",
        f"chunks {program.chunks}",
    ]
    for name, value in (("root", program.root), ("scratch", program.scratch)):
        if value:
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
    """Parse the text form of a collective program: a header, then for each rank lines such as `send data[0] to 1`.

    where: prefix of error messages, such as the file's name. Raises `UserError` with the line number, the invalid text,
    and a valid alternative.
    """
    return _Parser(where).parse(text)


class _Parser(ProgramParser):
    """Parser of the text form of a collective program.

    where: prefix of error messages, such as the file's name.
    """

    forms = {
        "collective": "collective OPERATION ALGORITHM ...", "ranks": "ranks NUMBER", "chunks": "chunks NUMBER",
        "root": "root NUMBER", "scratch": "scratch NUMBER", "reduction": "reduction OPERATOR",
    }  # fmt: skip
    optional = ("root", "scratch", "reduction")

    def __init__(self, where: str) -> None:
        """Start without header values; arguments: see the class."""
        super().__init__(where)
        self.operation, self.algorithm, self.reduction = "", "", "sum"
        self.numbers = {"root": 0, "scratch": 0}
        self.memory: dict[str, tuple[int, int]] = {}  # first slot and number of slots
        self.known: dict[str, tuple[int, int, int, int, int]] = {}  # parsed steps

    def parse(self, text: str) -> CollectiveProgram:
        """Parse the text form of a collective program and return it; raises `UserError` with the line number."""
        rows: list[Row] = []
        for rank, line in self.read_steps(text):
            rows += [(rank, self.line, *self._parse_step(step.strip())) for step in line.split("|")]
        names = ("rank", "group", "kind", "slot", "count", "peer", "source")
        columns = np.array(rows, np.int64).reshape(-1, 7).T
        steps = Steps.from_unsorted(**dict(zip(names, columns, strict=True)))
        return CollectiveProgram(
            operation=self.operation, algorithm=self.algorithm, steps=steps, reduction=self.reduction, **self.numbers
        )

    def is_step(self, word: str) -> bool:
        """Return True if `word` is the first word of a step, such as `send`."""
        return word in _STEPS

    def store_header(self, name: str, words: Sequence[str]) -> None:
        """Store the value of the header line `name`, such as `ranks`. words: the words after the name. Raises
        `UserError` for an unknown operation or an invalid number."""
        if name == "collective":
            self.operation, self.algorithm = words[0], " ".join(words[1:])
            if self.operation not in OPERATIONS:
                raise self.make_error(unknown("operation", self.operation, OPERATIONS))
        elif name == "reduction":
            self.reduction = words[0]
        else:
            self.numbers[name] = self.parse_number(words[0])

    def finish_header(self) -> None:
        """Called after the last header line: raise `UserError` unless the header is complete and valid. Then set
        `self.memory` to {buffer name: (number of its first slot, number of its slots)}. The buffers are "data",
        "output" (in an all-to-all only) and "scratch"; slots hold one chunk each and are numbered through all buffers.
        """
        super().finish_header()
        where, chunks = f"{self.where}, line {self.line}", self.numbers["chunks"]
        check_header(self.operation, reduction=self.reduction, where=where, **self.numbers)
        has_output = self.operation == "all-to-all"
        self.memory["data"] = (0, chunks)
        if has_output:
            self.memory["output"] = (chunks, chunks)
        self.memory["scratch"] = (chunks * (1 + has_output), self.numbers["scratch"])

    def _parse_step(self, text: str) -> tuple[int, int, int, int, int]:
        """Parse one step such as `send data[3] to 1` into (kind, first slot, number of slots, peer rank, source slot),
        where a slot is a buffer for one chunk; cached, as most steps recur."""
        if text not in self.known:
            self.known[text] = self._parse_step_words(text.split())
        return self.known[text]

    def _parse_step_words(self, words: Sequence[str]) -> tuple[int, int, int, int, int]:
        """Parse the words of one step into (kind, first slot, number of slots, peer rank, source slot), where a slot is
        a buffer for one chunk; -1 for unused fields. Raises `UserError` for an invalid step."""
        if not words:
            raise self.make_error('a step is missing before or after "|"')
        if words[0] not in _STEPS:
            if words[0] in self.forms:
                raise self.make_error(f'"{" ".join(words)}" belongs above the first line "rank R"')
            raise self.make_error(unknown("step", words[0], _STEPS))
        kind, link = _STEPS[words[0]]
        form = _STEP_EXAMPLES[words[0]].split()
        if len(words) != len(form):
            raise self.make_error(f'"{" ".join(words)}" is not of the form "{_STEP_EXAMPLES[words[0]]}"')
        if link and words[-2] != link:
            raise self.make_error(f'"{words[-2]}" in "{" ".join(words)}" should be "{link}"')
        if kind in (Kind.SIGNAL, Kind.WAIT):
            return int(kind), 0, 0, self.parse_rank(words[-1:]), -1
        slot, count = self._parse_slots(words[1])
        if kind not in (Kind.COPY, Kind.COMBINE):
            return int(kind), slot, count, self.parse_rank(words[-1:]), -1
        target, room = self._parse_slots(words[3])
        if room != count:
            raise self.make_error(f"{words[1]} has {count} slots and {words[3]} has {room}; the numbers must be equal")
        return int(kind), target, count, -1, slot

    def _parse_slots(self, word: str) -> tuple[int, int]:
        """Parse a range of slots (buffers for one chunk each) such as `data[3]` or `data[0:4]` into (first slot number,
        number of slots). Raises `UserError` for an invalid range."""
        found = _SLOTS.fullmatch(word)
        if not found:
            raise self.make_error(f'"{word}" should be slots such as data[3] or data[0:4]')
        name, start, end = found[1], int(found[2]), int(found[3] or int(found[2]) + 1)
        if name not in self.memory:
            if name in _MEMORY:
                raise self.make_error(f'"{word}": {self.operation} works in place and has no {name}')
            raise self.make_error(unknown("memory", name, self.memory))
        first, room = self.memory[name]
        if start >= end:
            raise self.make_error(f'"{word}" has no slots: the end must be greater than the start')
        if end > room:
            has = f"{name}[0:{room}]" if room else f"no {name}"
            hint = ' (add the line "scratch NUMBER")' if name == "scratch" else ""
            raise self.make_error(f'"{word}" is beyond the slots of a rank, which has {has}{hint}')
        return first + start, end - start
