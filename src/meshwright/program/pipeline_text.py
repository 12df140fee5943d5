"""Text form of pipeline programs.

    pipeline 1f1b
    ranks 2
    micro-batches 2
    placement 0 1

    rank 0
    0F0
    0SEND_F0
    ...

A line `placement` lists the rank of each stage of one replica; a bidirectional program has two. Each line below `rank
R` is one group of that rank's steps: stage, kind, micro-batch. `2'F5` is on the second replica, `0F3.attention` a
component of the layers, `0F3 | 4B1` an overlapped pair. `#` starts a comment.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from itertools import pairwise

import numpy as np

from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.program.pipeline import LETTERS, Component, PipelineProgram, build_program

_HEADER = ("pipeline", "ranks", "micro-batches", "placement")
_KINDS = {letters: int(kind) for kind, letters in LETTERS.items()}
_COMPONENTS = {"": 0} | {f".{part.name.lower()}": int(part) for part in Component if part}
_NUMBER = re.compile(r"[0-9]{1,9}")
_STEP = re.compile(r"([0-9]{1,9})('*)([A-Z_]+)([0-9]{1,9})(\.[a-z]+)?")
_STEP_FORM = f"a step is stage, one of {' '.join(_KINDS)}, and micro-batch: 0F3, 2'B5, 0SEND_F3"


def format_pipeline(program: PipelineProgram) -> str:
    """Return the text form of a pipeline program (header, then lines such as `0F3`, stage 0 forward micro-batch 3, by
    rank), from which `parse_pipeline` builds an equal program."""
    s = program.steps
    lines = [
        f"pipeline {_format_name(program.name)}",
        f"ranks {program.ranks}",
        f"micro-batches {program.micro_batches}",
        *(f"placement {' '.join(map(str, stages))}" for stages in program.placement),
    ]
    middle = {(r, k): "'" * r + letters for r in range(program.replicas) for k, letters in LETTERS.items()}
    part = {number: word for word, number in _COMPONENTS.items()}
    columns = (s.stage, s.replica, s.kind, s.micro_batch, s.component)
    words = [
        f"{stage}{middle[replica, kind]}{micro_batch}{part[component]}"
        for stage, replica, kind, micro_batch, component in zip(*(c.tolist() for c in columns), strict=True)
    ]
    starts = np.diff(s.group_index, prepend=-1) != 0
    first = [*np.flatnonzero(starts).tolist(), len(words)]
    groups = [" | ".join(words[a:b]) for a, b in pairwise(first)]
    bounds = np.searchsorted(s.group_rank, np.arange(program.ranks + 1)).tolist()
    for rank in range(program.ranks):
        lines += ["", f"rank {rank}", *groups[bounds[rank] : bounds[rank + 1]]]
    return "\n".join(lines) + "\n"


def _format_name(name: str) -> str:
    """Return a program's name on one line and without `#` (comment character), as the text form requires."""
    return " ".join(name.replace("#", " ").split()) or "unnamed"


def parse_pipeline(text: str, where: str = "program") -> PipelineProgram:
    """Parse the text form of a pipeline program (header, then lines such as `0F3`, stage 0 forward micro-batch 3, by
    rank).

    where: prefix of error messages, such as the file's name. Raises `UserError` with the line number, the invalid text,
        and a valid alternative.
    """
    return _Parser(where).parse(text)


class _Parser:
    """Parser of the text form of a pipeline program; keeps header and current line number.

    where: prefix of error messages, such as the file's name.
    """

    def __init__(self, where: str) -> None:
        self.where, self.line = where, 0
        self.name = ""
        self.numbers: dict[str, int] = {}
        self.placement: list[tuple[int, ...]] = []

    def parse(self, text: str) -> PipelineProgram:
        """Parse the text form of a pipeline program and return it; raises `UserError` with the line number."""
        rows = array("q")  # seven numbers a step, the columns of `build_program`
        rank, seen = -1, set[int]()
        stages = replicas = micro_batches = 0
        for self.line, line in enumerate(text.splitlines(), 1):
            if "#" in line:
                line = line.partition("#")[0]
            line = line.strip()
            if not line:
                continue
            if line.startswith("rank") and line.split(None, 1)[0] == "rank":
                if not seen:
                    self._finish_header()
                    stages, replicas = len(self.placement[0]), len(self.placement)
                    micro_batches = self.numbers["micro-batches"]
                rank = self._parse_rank(line.split()[1:])
                if rank in seen:
                    raise self._make_error(f"rank {rank} has a section already")
                seen.add(rank)
                continue
            if rank < 0:
                self._parse_header(line.split())
                continue
            for step in line.split("|"):
                found = _STEP.fullmatch(step.strip())
                if not found:
                    raise self._make_error(f'"{step.strip()}" is not a step; {_STEP_FORM}')
                stage_word, ticks, letters, number, part = found.groups("")
                kind, component = _KINDS.get(letters), _COMPONENTS.get(part)
                if kind is None or component is None:
                    raise self._make_error(self._describe_unknown_word(step.strip(), letters if kind is None else part))
                stage, micro_batch, replica = int(stage_word), int(number), len(ticks)
                if stage >= stages or micro_batch >= micro_batches or replica >= replicas:
                    raise self._make_error(self._describe_out_of_range(step.strip(), stage, replica, micro_batch))
                rows.extend((rank, self.line, kind, stage, replica, micro_batch, component))
        self.line += 1
        if not seen:
            self._finish_header()
        return build_program(
            self.name, self.numbers["ranks"], self.numbers["micro-batches"], tuple(self.placement), rows
        )

    def _describe_unknown_word(self, step: str, word: str) -> str:
        """Return the error message for `word`, which is no kind or component, in the step text `step`."""
        if word.startswith("."):
            return f'"{step}": {unknown("part of a layer", word[1:], [part[1:] for part in _COMPONENTS if part])}'
        return f'"{step}": {unknown("step", word, _KINDS)}'

    def _describe_out_of_range(self, step: str, stage: int, replica: int, micro_batch: int) -> str:
        """Return the error message for the step text `step`, whose stage, replica or micro-batch does not exist."""
        stages, micro_batches = len(self.placement[0]), self.numbers["micro-batches"]
        if stage >= stages:
            return f'"{step}": there is no stage {stage}; the placement has {_format_count("stage", stages)}'
        if micro_batch >= micro_batches:
            counted = _format_count("micro-batch", micro_batches)
            return f'"{step}": there is no micro-batch {micro_batch}; the program has {counted}'
        has = f'the program has {len(self.placement)}, one for each line "placement"'
        return f'"{step}": there is no replica {replica}; {has}'

    def _parse_header(self, words: list[str]) -> None:
        """Store the value of one header line, given the line's words, such as `micro-batches 8`."""
        name = words[0]
        if name not in _HEADER:
            if _STEP.fullmatch(name):
                raise self._make_error(
                    f'"{" ".join(words)}" stands before the first line "rank R"; steps belong to a rank'
                )
            raise self._make_error(unknown("line", name, (*_HEADER, "rank")))
        if not self.name and name != "pipeline":
            raise self._make_error(f'a program starts with "pipeline NAME", not with "{name}"')
        if name == "placement":
            if "ranks" not in self.numbers:
                raise self._make_error('the line "ranks" comes before "placement"')
            self.placement.append(tuple(self._parse_number(word) for word in words[1:]))
            self._check_placement(self.placement[-1])
            return
        if name in self.numbers or (name == "pipeline" and self.name):
            raise self._make_error(f'a second line "{name}"')
        if len(words) < 2 or (len(words) > 2 and name != "pipeline"):
            raise self._make_error(f'write "{name}" and one word, not "{" ".join(words)}"')
        if name == "pipeline":
            self.name = " ".join(words[1:])
            return
        self.numbers[name] = self._parse_number(words[1])
        if not self.numbers[name]:
            raise self._make_error(f'"{name} 0": a program has at least 1')

    def _check_placement(self, stages: tuple[int, ...]) -> None:
        """Raise `UserError` unless `stages` (rank of each stage of one replica) has as many stages as the first
        replica, only existing ranks, and each of them equally often."""
        ranks = self.numbers["ranks"]
        if len(stages) != len(self.placement[0]):
            counts = f"{_format_count('stage', len(stages))}, the line before has {len(self.placement[0])}"
            raise self._make_error(f"placement: {counts}")
        for rank in stages:
            if rank >= ranks:
                raise self._make_error(f"placement: there is no rank {rank}; {_format_count('rank', ranks)}")
        held = Counter(stages)
        if len(held) < ranks or len(set(held.values())) > 1:
            raise self._make_error(f"placement: every one of the {ranks} ranks holds as many stages as the others")

    def _finish_header(self) -> None:
        """Raise `UserError` if the program's header lacks a required line, such as `ranks`."""
        for name in _HEADER:
            there = {"pipeline": self.name, "placement": self.placement}.get(name, self.numbers.get(name))
            if not there:
                raise self._make_error(f'the line "{name}" is missing; a program starts with {", ".join(_HEADER)}')

    def _parse_rank(self, words: list[str]) -> int:
        """Return the rank that a line such as `rank 3` begins, given the words after `rank`.

        Raises UserError if there is no such rank.
        """
        if len(words) != 1:
            raise self._make_error(f'write "rank" and its number, not "{" ".join(["rank", *words])}"')
        rank = self._parse_number(words[0])
        if rank >= self.numbers["ranks"]:
            raise self._make_error(f"there is no rank {rank}; ranks are 0 to {self.numbers['ranks'] - 1}")
        return rank

    def _parse_number(self, word: str) -> int:
        """Return the non-negative integer of up to 9 digits that `word` spells; raise UserError for any other word."""
        if not _NUMBER.fullmatch(word):
            raise self._make_error(f'"{word}" is not a number from 0 to 999999999')
        return int(word)

    def _make_error(self, reason: str) -> UserError:
        """Return a UserError with the message `reason` about the current line."""
        return UserError(f"{self.where}, line {self.line}: {reason}")


def _format_count(what: str, count: int) -> str:
    """Return a count with its index range, such as `4 stages (0 to 3)`. what: noun in the singular, such as `stage`."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count} {what if count == 1 else plural} (0{f' to {count - 1}' if count > 1 else ''})"
