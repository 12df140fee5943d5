"""Text form of pipeline programs: round trips are exact, and every error is named with its line."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.program.pipeline import Builder, Component, Kind, place_cyclically
from meshwright.program.pipeline_text import format_pipeline, parse_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES
from meshwright.schedules.transfers import with_transfers
from tests.program.pipeline_interpreter import random_program

TEXT = """\
pipeline 1f1b
ranks 2
micro-batches 2
placement 0 1

rank 0
0F0
0SEND_F0
0F1
0SEND_F1 | 0RECV_B0
0B0
0RECV_B1
0B1

rank 1
1RECV_F0
1F0
1RECV_F1
1B0
1SEND_B0
1F1
1B1
1SEND_B1
"""


def test_1f1b_text_matches_its_drawing() -> None:
    program = with_transfers(generate("1f1b", 2, 2))
    assert format_pipeline(program) == TEXT
    assert parse_pipeline(TEXT) == program


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_parsed_back_equal(name: str) -> None:
    for program in (generate(name, 4, 8), with_transfers(generate(name, 4, 8))):
        assert parse_pipeline(format_pipeline(program)) == program


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_any_program_is_parsed_back_equal(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng)
    for each in (program, with_transfers(program)):
        assert parse_pipeline(format_pipeline(each)) == each


def test_components_updates_replicas_and_empty_ranks_round_trip() -> None:
    builder = Builder("two words", 2, 3, (place_cyclically(2), (1, 0)))
    first, _ = builder.ranks
    for part in Component:
        first.add(Kind.FORWARD, 2, component=part)
    with first.overlap():
        first.forward(1, replica=1)
        first.input_gradient(0)
    first.update(2)
    program = builder.build()
    text = format_pipeline(program)
    assert "0F2.attention\n" in text
    assert "1'F1 | 0I0\n" in text
    assert text.endswith("0U2\n\nrank 1\n")
    assert parse_pipeline(text) == program


def test_whitespace_comments_and_rank_order_do_not_matter() -> None:
    header, rank_0, rank_1 = TEXT.split("\n\n")
    loose = f"# as drawn\n\n{header}  # two\n{rank_1}\n\n{rank_0.replace(' | ', '|')}\r\n   \n"
    assert parse_pipeline(loose) == parse_pipeline(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F1", "0X1", '9: "0X1": unknown step "X" (known: F, B, I, W, U, SEND_F, RECV_F, SEND_B, RECV_B)'),
        ("0SEND_F1", "0SEMD_F1", '10: "0SEMD_F1": unknown step "SEMD_F"; did you mean "SEND_F"? (known: F, B'),
        ("0F1", "F1", '9: "F1" is not a step; a step is stage, one of F B I W U SEND_F RECV_F SEND_B RECV_B, and'),
        ("0F1", "0F1 |", '9: "" is not a step; a step is stage'),
        ("0F1", "0F1 0B1", '9: "0F1 0B1" is not a step; a step is stage'),
        ("0F1", "0F-1", '9: "0F-1" is not a step; a step is stage'),
        ("0F1", "0F1.atention", '"0F1.atention": unknown component of a layer "atention"; did you mean "attention"?'),
        ("0F1", "2F1", '9: "2F1": there is no stage 2; stages are 0 to 1'),
        ("0F1", "0F2", '9: "0F2": there is no micro-batch 2; micro-batches are 0 to 1'),
        ("0F1", "0'F1", '9: "0\'F1": there is no replica 1; replicas (lines "placement") are 0 to 0'),
        ("rank 1", "rank 2", "15: there is no rank 2; ranks are 0 to 1"),
        ("rank 1", "rank 0", "15: rank 0 has a section already"),
        ("rank 1", "rank", '15: write "rank NUMBER", not "rank"'),
        ("rank 1", "rank one", '15: "one" is not a number from 0 to 999999999'),
        ("ranks 2\n", "", '3: the line "ranks" must come before "placement"'),
        ("micro-batches 2\n", "", '5: the line "micro-batches" is missing; a program starts with pipeline, ranks'),
        ("placement 0 1\n", "", '5: the line "placement" is missing; a program starts with pipeline, ranks'),
        ("pipeline 1f1b\n", "", '1: a program starts with "pipeline NAME ...", not with "ranks"'),
        ("pipeline 1f1b", "pipeline", '1: write "pipeline NAME ...", not "pipeline"'),
        ("ranks 2", "ranks two", '2: "two" is not a number from 0 to 999999999'),
        ("ranks 2", "ranks 0", '2: "ranks 0": a program has at least 1'),
        ("ranks 2", "ranks 2 3", '2: write "ranks NUMBER", not "ranks 2 3"'),
        ("ranks 2\n", "ranks 2\nranks 2\n", '3: a second line "ranks"'),
        ("ranks 2", "rnaks 2", '2: unknown line "rnaks"; did you mean "ranks"?'),
        ("placement 0 1", "placement 0 2", "4: placement: stage 1 of replica 0 is on rank 2; ranks are 0 to 1"),
        (
            "placement 0 1",
            "placement 0 0",
            "4: placement: rank 1 holds 0 of the 2 stages of replica 0; all 2 ranks must",
        ),
        ("placement 0 1", "placement", '4: write "placement RANK ...", not "placement"'),
        ("placement 0 1", "placement 0 1\nplacement 1", "5: placement: replica 1 has 1 stages, replica 0 has 2"),
        ("rank 0\n", "", '6: "0F0" is above the first line "rank R"; steps belong to a rank'),
    ],
)
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(UserError) as caught:
        parse_pipeline(TEXT.replace(old, new, 1), "my.txt")
    assert str(caught.value).startswith("my.txt, line ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_file_names_missing_part() -> None:
    with pytest.raises(UserError, match='line 2: the line "ranks" is missing'):
        parse_pipeline("pipeline x")


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_corrupted_text_is_refused_or_parses_differently(seed: int) -> None:
    rng = random.Random(seed)
    at = rng.randrange(len(TEXT))
    end = at + rng.randrange(3)
    junk = "".join(rng.choice(string.printable + "é\0\u2028") for _ in range(rng.randrange(3)))
    try:
        program = parse_pipeline(TEXT[:at] + junk + TEXT[end:])
    except UserError as error:
        assert str(error).startswith("program, line ")
        return
    assert parse_pipeline(format_pipeline(program)) == program


def test_a_program_of_many_steps_is_parsed_back_equal() -> None:
    program = generate("1f1b", 32, 512)
    assert len(program.steps) == 2 * 32 * 512
    again = parse_pipeline(format_pipeline(program))
    assert again == program
    assert np.array_equal(again.steps.group_index, program.steps.group_index)


def test_reading_many_placements_takes_linear_time() -> None:
    text = "pipeline x\nranks 1\nmicro-batches 1\n" + "placement 0\n" * 40_000 + "placement 0 0\n\nrank 0\n0F0\n"
    with pytest.raises(UserError, match="line 40004: placement: replica 40000 has 2 stages, replica 0 has 1"):
        parse_pipeline(text)  # quadratic time would exceed the time limit of a test
