"""Text form of collective programs: round trips are exact, and every error is named with its line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.collective_text import format_collective, parse_collective
from meshwright.program.json_form import from_json_dict, to_json_dict
from tests.program.example_collectives import programs

SWAP = """\
collective all-reduce by-hand   # two ranks exchange and add
ranks 2
chunks 2
scratch 1

rank 1
  send data[0:2] to 0 | reduce data[0:2] from 0

rank 0
  reduce data[0:2] from 1 | send data[0:2] to 1
  copy data[1] into scratch[0]
"""


def every_kind() -> CollectiveProgram:
    program = Builder("all-to-all", "some steps", 4, chunks=4, root=3, scratch=2)
    rank = np.arange(4)
    with program.round():
        program.transfer(rank, (rank + 1) % 4, chunk=0, count=3, into=4)
        program.transfer(0, 2, chunk=3, reduce=True)
    with program.round():
        program.copy(rank, source=0, into=8, count=2)
        program.copy(1, source=8, into=1, combine=True)
    with program.round():
        program.signal([0, 1, 2], [1, 2, 0])
    return dataclasses.replace(program.build(), reduction="maximum")


def test_printing_and_reading_gives_an_equal_program() -> None:
    for program in (every_kind(), *programs()):
        assert parse_collective(format_collective(program)) == program
        assert from_json_dict(to_json_dict(program)) == program


def test_collective_text_has_documented_form() -> None:
    assert format_collective(every_kind()).splitlines()[:12] == [
        "collective all-to-all some steps",
        "ranks 4",
        "chunks 4",
        "root 3",
        "scratch 2",
        "reduction maximum",
        "",
        "rank 0",
        "send data[0:3] to 1 | receive output[0:3] from 3 | send data[3] to 2",
        "copy data[0:2] into scratch[0:2]",
        "signal 1 | wait for 2",
        "",
    ]


def test_spaces_comments_and_order_of_ranks_do_not_matter() -> None:
    tidy = "\n".join(line.split("#")[0] for line in SWAP.splitlines())
    halves = tidy.split("rank 0")
    head, one = halves[0].split("rank 1")
    assert parse_collective(SWAP) == parse_collective(f"{head}rank 0{halves[1]}\nrank 1{one}")


def test_ranks_without_steps_may_be_left_out() -> None:
    assert len(parse_collective("collective all-reduce none\nranks 1\nchunks 4\n").steps) == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("collective", "colective", 1, 'unknown line "colective"; did you mean "collective"?'),
        ("all-reduce", "all-redcue", 1, 'unknown operation "all-redcue"; did you mean "all-reduce"?'),
        ("ranks 2\n", "ranks two\n", 2, '"two" is not a number from 0 to 999999999'),
        ("ranks 2\n", "ranks 0\n", 6, "ranks is 0; it must be at least 1"),
        ("ranks 2\n", "ranks 2 2\n", 2, 'write "ranks NUMBER", not "ranks 2 2"'),
        ("ranks 2\n", "ranks 999999999\n", 6, "too many to check"),
        ("chunks 2\n", "", 5, 'the line "chunks" is missing; a program starts with collective, ranks, chunks'),
        ("scratch 1", "root 2", 6, "root is 2; ranks are 0 to 1"),
        ("scratch 1", "chunks 2", 4, 'a second line "chunks"'),
        ("scratch 1", "reduction som", 6, 'unknown reduction "som"; did you mean "sum"?'),
        ("scratch 1", "send data[0] to 1", 4, 'is above the first line "rank R"'),
        ("rank 0", "rank 2", 9, "there is no rank 2; ranks are 0 to 1"),
        ("rank 0", "rank 1", 9, "rank 1 has a section already"),
        ("rank 0", "rank", 9, 'write "rank NUMBER", not "rank"'),
        ("send data[0:2] to 0", "sned data[0:2] to 0", 7, 'unknown step "sned"; did you mean "send"?'),
        ("send data[0:2] to 0", "send data[0:2] from 0", 7, '"from" in "send data[0:2] from 0" should be "to"'),
        ("send data[0:2] to 0", "send data[0:2] to 7", 7, "there is no rank 7; ranks are 0 to 1"),
        ("send data[0:2] to 0", "send data[0:2]", 7, '"send data[0:2]" is not of the form "send data[3] to 1"'),
        ("send data[0:2] to 0", "send dta[0:2] to 0", 7, 'unknown memory "dta"; did you mean "data"?'),
        ("send data[0:2] to 0", "send data[0:3] to 0", 7, '"data[0:3]" is beyond the slots of a rank, which has'),
        ("send data[0:2] to 0", "send data[1:1] to 0", 7, '"data[1:1]" has no slots'),
        ("send data[0:2] to 0", "send data[-1] to 0", 7, '"data[-1]" should be slots such as data[3] or data[0:4]'),
        ("send data[0:2] to 0", "send output[0] to 0", 7, "all-reduce works in place and has no output"),
        ("to 0 |", "to 0 | |", 7, 'a step is missing before or after "|"'),
        ("into scratch[0]", "into scratch[1]", 11, 'has scratch[0:1] (add the line "scratch NUMBER")'),
        ("copy data[1]", "copy data[0:2]", 11, "data[0:2] has 2 slots and scratch[0] has 1"),
        ("copy data[1] into scratch[0]", "chunks 3", 11, '"chunks 3" belongs above the first line "rank R"'),
    ],
)  # fmt: skip
def test_text_mistake_is_named_with_line_and_correction(old: str, new: str, line: int, message: str) -> None:
    assert old in SWAP
    with pytest.raises(UserError) as caught:
        parse_collective(SWAP.replace(old, new, 1), "mine.txt")
    assert str(caught.value).startswith(f"mine.txt, line {line}: ")
    assert message in str(caught.value)


def test_empty_text_error_shows_program_header() -> None:
    with pytest.raises(UserError, match='the line "collective" is missing'):
        parse_collective("# nothing\n")


@given(
    st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from("ad[]0:9| \n#-²x")), max_size=4)
)
@settings(max_examples=100)
def test_no_text_breaks_the_reader(number: int, edits: list[tuple[int, str]]) -> None:
    text = format_collective(programs()[number % len(programs())])
    for place, letter in edits:
        at = place % len(text)
        text = text[:at] + letter + text[at + place % 2 :]
    try:
        program = parse_collective(text)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert parse_collective(format_collective(program)) == program
