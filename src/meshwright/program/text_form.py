"""Base of the parsers of both text forms of programs: header lines, sections `rank R`, comments, numbered errors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from meshwright.errors import UserError
from meshwright.names import unknown

_NUMBER = re.compile(r"[0-9]{1,9}")


class ProgramParser(ABC):
    """Base class of the parsers of the text forms of programs; stores the header's numbers and the current line number.

    forms: name of a header line -> its syntax, such as `ranks NUMBER`. optional: names of header lines that may be
    missing. repeated: names of header lines that may occur several times. where: prefix of error messages, such as the
    file's name. A subclass sets the first three as class attributes.
    """

    forms: Mapping[str, str]
    """Header line -> its form, such as `ranks NUMBER`; `...`: more words may follow. The first begins a program."""
    optional: tuple[str, ...] = ()
    """Header lines that may be missing."""
    repeated: tuple[str, ...] = ()
    """Header lines that may occur several times."""

    def __init__(self, where: str) -> None:
        """Start before the first line; arguments: see the class."""
        self.where, self.line = where, 0
        self.numbers: dict[str, int] = {}
        self._given: set[str] = set()

    def read_steps(self, text: str) -> Iterator[tuple[int, str]]:
        """Parse the header and the sections `rank R` of the text form `text` of a program; yield (rank, line) for every
        line with steps, without comments. Raises `UserError` with the line number for an invalid header or section."""
        rank, seen = -1, set[int]()
        for self.line, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            if line.startswith("rank") and line.split(None, 1)[0] == "rank":
                if not seen:
                    self.finish_header()
                rank = self.parse_rank(line.split()[1:])
                if rank in seen:
                    raise self.make_error(f"rank {rank} has a section already")
                seen.add(rank)
            elif rank < 0:
                self._parse_header(line.split())
            else:
                yield rank, line
        self.line += 1
        if not seen:
            self.finish_header()

    @abstractmethod
    def is_step(self, word: str) -> bool:
        """Return True if `word` begins a step, such as `send`, and so cannot begin a header line."""

    @abstractmethod
    def store_header(self, name: str, words: Sequence[str]) -> None:
        """Store the value of the header line `name`, such as `ranks`. words: the words after the name; their number is
        already checked."""

    def _parse_header(self, words: Sequence[str]) -> None:
        """Check one header line and store its value. words: words of the line, such as `ranks`, `8`. Raises `UserError`
        for an unknown, repeated or incomplete line."""
        name, line = words[0], " ".join(words)
        first = next(iter(self.forms))
        if name not in self.forms:
            if self.is_step(name):
                raise self.make_error(f'"{line}" is above the first line "rank R"; steps belong to a rank')
            raise self.make_error(unknown("line", name, (*self.forms, "rank")))
        if not self._given and name != first:
            raise self.make_error(f'a program starts with "{self.forms[first]}", not with "{name}"')
        if name in self._given and name not in self.repeated:
            raise self.make_error(f'a second line "{name}"')
        form = self.forms[name].split()
        is_open = form[-1] == "..."
        if len(words) < len(form) - is_open or (len(words) > len(form) and not is_open):
            raise self.make_error(f'write "{self.forms[name]}", not "{line}"')
        self._given.add(name)
        self.store_header(name, words[1:])

    def finish_header(self) -> None:
        """Raise `UserError` unless all required header lines have been read."""
        required = [name for name in self.forms if name not in self.optional]
        for name in required:
            if name not in self._given:
                raise self.make_error(f'the line "{name}" is missing; a program starts with {", ".join(required)}')

    def parse_rank(self, words: Sequence[str]) -> int:
        """Return the rank of a line `rank R`. words: the words after `rank`. Raises `UserError` if they are not the
        number of a rank of the program."""
        if len(words) != 1:
            raise self.make_error(f'write "rank NUMBER", not "{" ".join(["rank", *words])}"')
        rank, ranks = self.parse_number(words[0]), self.numbers["ranks"]
        if rank >= ranks:
            raise self.make_error(f"there is no rank {rank}; ranks are 0 to {ranks - 1}")
        return rank

    def parse_number(self, word: str) -> int:
        """Return `word`, a non-negative integer of up to 9 digits, as a number; raise `UserError` for other words."""
        if not _NUMBER.fullmatch(word):
            raise self.make_error(f'"{word}" is not a number from 0 to 999999999')
        return int(word)

    def make_error(self, reason: str) -> UserError:
        """Return a `UserError` with the message `reason` about the current line."""
        return UserError(f"{self.where}, line {self.line}: {reason}")
