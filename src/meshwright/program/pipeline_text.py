"""Text form of pipeline schedules.

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
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshwright.names import unknown
from meshwright.program.pipeline import LETTERS, Component, PipelineProgram, build_program, find_placement_error
from meshwright.program.text_form import ProgramParser

_KINDS = {letters: int(kind) for kind, letters in LETTERS.items()}
_COMPONENTS = {"": 0} | {f".{part.name.lower()}": int(part) for part in Component if part}
_STEP = re.compile(r"([0-9]{1,9})('*)([A-Z_]+)([0-9]{1,9})(\.[a-z]+)?")
_STEP_FORM = f"a step is stage, one of {' '.join(_KINDS)}, and micro-batch: 0F3, 2'B5, 0SEND_F3"


def format_pipeline(program: PipelineProgram) -> str:
    """Return a pipeline schedule in text form, from which `parse_pipeline` builds an equal one: a header, then for each
    rank steps such as `0F3` (stage 0, forward, micro-batch 3)."""
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
    """Parse the text form of a pipeline schedule: a header, then for each rank steps such as `0F3` (stage 0, forward,
    micro-batch 3).

    where: prefix of error messages, such as the file's name. Raises `UserError` with the line number, the invalid text,
    and a valid alternative.
    """
    return _Parser(where).parse(text)


class _Parser(ProgramParser):
    """Parser of the text form of a pipeline schedule.

    where: prefix of error messages, such as the file's name.
    """

    forms = {
        "pipeline": "pipeline NAME ...", "ranks": "ranks NUMBER", "micro-batches": "micro-batches NUMBER",
        "placement": "placement RANK ...",
    }  # fmt: skip
    repeated = ("placement",)

    def __init__(self, where: str) -> None:
        """Start without header values; arguments: see the class."""
        super().__init__(where)
        self.name = ""
        self.placement: list[tuple[int, ...]] = []

    def parse(self, text: str) -> PipelineProgram:
        """Parse the text form of a pipeline schedule and return it; raises `UserError` with the line number."""
        rows = array("q")  # seven numbers a step, the columns of `build_program`
        for rank, line in self.read_steps(text):
            stages, replicas, micro_batches = len(self.placement[0]), len(self.placement), self.numbers["micro-batches"]
            for step in line.split("|"):
                found = _STEP.fullmatch(step.strip())
                if not found:
                    raise self.make_error(f'"{step.strip()}" is not a step; {_STEP_FORM}')
                stage_word, ticks, letters, number, part = found.groups("")
                kind, component = _KINDS.get(letters), _COMPONENTS.get(part)
                if kind is None or component is None:
                    raise self.make_error(self._describe_unknown_word(step.strip(), letters if kind is None else part))
                stage, micro_batch, replica = int(stage_word), int(number), len(ticks)
                if stage >= stages or micro_batch >= micro_batches or replica >= replicas:
                    raise self.make_error(self._describe_out_of_range(step.strip(), stage, replica, micro_batch))
                rows.extend((rank, self.line, kind, stage, replica, micro_batch, component))
        return build_program(
            self.name, self.numbers["ranks"], self.numbers["micro-batches"], tuple(self.placement), rows
        )

    def _describe_unknown_word(self, step: str, word: str) -> str:
        """Return the error message for `word`, which is neither a step kind nor a layer component, in the step text
        `step`."""
        if word.startswith("."):
            return f'"{step}": {unknown("component of a layer", word[1:], [part[1:] for part in _COMPONENTS if part])}'
        return f'"{step}": {unknown("step", word, _KINDS)}'

    def _describe_out_of_range(self, step: str, stage: int, replica: int, micro_batch: int) -> str:
        """Return the error message for the step text `step`, whose stage, replica or micro-batch does not exist."""
        for what, several, number, size in (
            ("stage", "stages", stage, len(self.placement[0])),
            ("micro-batch", "micro-batches", micro_batch, self.numbers["micro-batches"]),
            ("replica", 'replicas (lines "placement")', replica, len(self.placement)),
        ):
            if number >= size:
                return f'"{step}": there is no {what} {number}; {several} are 0 to {size - 1}'
        raise AssertionError(step)

    def is_step(self, word: str) -> bool:
        """Return True if `word` is a step, such as `0F3`."""
        return _STEP.fullmatch(word) is not None

    def store_header(self, name: str, words: Sequence[str]) -> None:
        """Store the value of the header line `name`, such as `ranks`. words: the words after the name. Raises
        `UserError` for an invalid value."""
        if name == "pipeline":
            self.name = " ".join(words)
        elif name == "placement":
            if "ranks" not in self.numbers:
                raise self.make_error('the line "ranks" must come before "placement"')
            self.placement.append(tuple(map(self.parse_number, words)))
            if error := find_placement_error(self.placement, self.numbers["ranks"], len(self.placement) - 1):
                raise self.make_error(f"placement: {error[1]}")
        else:
            self.numbers[name] = self.parse_number(words[0])
            if not self.numbers[name]:
                raise self.make_error(f'"{name} 0": a program has at least 1')
