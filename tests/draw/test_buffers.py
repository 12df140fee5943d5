"""Drawings of buffers: cells as in textbooks, and every program ends with the required contents."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from meshwright.draw.buffers import draw_buffers
from meshwright.draw.buffers_text import draw_buffers_text
from meshwright.errors import UserError
from meshwright.program.buffer_frames import Frame, build_frames, format_slot_label
from meshwright.program.check_collective import check_collective
from meshwright.program.collective import Steps
from tests.program.example_collectives import all_to_one_and_back, programs, ring, star_barrier

ROUNDS_OF_FOUR = """
round 1 of 6
  0 → 1 adds data[0]   1 → 2 adds data[1]   2 → 3 adds data[2]   3 → 0 adds data[3]
           data[0]   data[1]   data[2]   data[3]
rank 0 a   a0        a1        a2       [a3+d3]
rank 1 b  [a0+b0]    b1        b2        b3
rank 2 c   c0       [b1+c1]    c2        c3
rank 3 d   d0        d1       [c2+d2]    d3

round 2 of 6
  0 → 1 adds data[3]   1 → 2 adds data[0]   2 → 3 adds data[1]   3 → 0 adds data[2]
           data[0]     data[1]     data[2]     data[3]
rank 0 a   a0          a1         [a2+c2+d2]   a3+d3
rank 1 b   a0+b0       b1          b2         [a3+b3+d3]
rank 2 c  [a0+b0+c0]   b1+c1       c2          c3
rank 3 d   d0         [b1+c1+d1]   c2+d2       d3

round 3 of 6
  0 → 1 adds data[2]   1 → 2 adds data[3]   2 → 3 adds data[0]   3 → 0 adds data[1]
           data[0]     data[1]     data[2]     data[3]
rank 0 a   a0         [Σ1]         a2+c2+d2    a3+d3
rank 1 b   a0+b0       b1         [Σ2]         a3+b3+d3
rank 2 c   a0+b0+c0    b1+c1       c2         [Σ3]
rank 3 d  [Σ0]         b1+c1+d1    c2+d2       d3
"""


def test_ring_all_reduce_drawing_on_four_ranks_matches_textbooks() -> None:
    text = draw_buffers_text(check_collective(ring(4)))
    assert text.startswith("all-reduce ring on 4 ranks: a is rank 0, d rank 3; a0 is rank 0's part of chunk 0; ")
    assert ROUNDS_OF_FOUR in text
    assert text.count("round ") == 6


def test_sends_of_a_round_are_wrapped_between_each_other():
    text = draw_buffers_text(check_collective(ring(4)), width=60)
    sends = [line for line in text.splitlines() if "→" in line]
    assert max(map(len, sends)) <= 60 and len(sends) > 6
    assert "  0 → 1 adds data[0]   1 → 2 adds data[1]\n  2 → 3 adds data[2]   3 → 0 adds data[3]\n" in text


def shown(frame: Frame) -> list[list[str]]:
    return [[cell.label for cell in cells] for cells in frame.cells]


def test_local_steps_get_their_own_frame() -> None:
    drawn = build_frames(check_collective(all_to_one_and_back(3)))
    assert [frame.title for frame in drawn] == [
        "start",
        "round 1 of 2",
        "before round 2 of 2: on each rank",
        "round 2 of 2",
    ]
    assert shown(drawn[1]) == [["Σ0", "Σ1", "", ""], ["b0", "b1", "", ""], ["c0", "c1", "", ""]]
    assert shown(drawn[2])[0] == ["Σ0", "Σ1", "Σ0", "Σ1"]
    assert [cell.fresh for cell in drawn[2].cells[0]] == [True, False, True, True]
    assert shown(drawn[3])[2] == ["Σ0", "Σ1", "", ""]


def test_local_steps_after_last_round_are_drawn_at_end() -> None:
    program = ring(2)
    columns = {name: getattr(program.steps, name).tolist() for name in Steps.__dataclass_fields__}
    for name, value in {"rank": 1, "group": 9, "kind": 3, "slot": 2, "count": 1, "peer": -1, "source": 0}.items():
        columns[name].append(value)
    checked = check_collective(dataclasses.replace(program, steps=Steps.from_unsorted(**columns), scratch=1))
    last = build_frames(checked)[-1]
    assert last.title == "at the end: on each rank"
    assert shown(last) == [["Σ0", "Σ1", ""], ["Σ0", "Σ1", "Σ0"]]


def test_barrier_drawing_shows_signals_received_by_each_rank() -> None:
    start, gathered, end = build_frames(check_collective(star_barrier(4)))
    assert shown(start) == [["a"], ["b"], ["c"], ["d"]]
    assert shown(gathered) == [["all"], ["b"], ["c"], ["d"]]
    assert shown(end) == [["all"]] * 4


def test_many_parts_are_written_shortly() -> None:
    program = ring(8)
    assert format_slot_label(program, 3, (0, 1)) == "a3+b3"
    assert format_slot_label(program, 3, (0, 1, 2, 3, 4)) == "a…e3"
    assert format_slot_label(program, 3, (0, 1, 3, 4, 5, 7)) == "a3+b3+d…f3+h3"
    assert format_slot_label(program, 3, tuple(range(8))) == "Σ3"
    assert format_slot_label(program, -1, ()) == ""
    assert format_slot_label(ring(16), 3, (0, 2, 4, 6, 8)) == "5 parts of 3"
    assert format_slot_label(star_barrier(16), 0, (0, 2, 4, 6, 8)) == "5 ranks"


def test_drawing_has_one_frame_per_round_and_correct_end() -> None:
    for program in programs()[::3]:
        checked = check_collective(program)
        drawn = build_frames(checked)
        assert sum(frame.title.startswith("round") for frame in drawn) == checked.rounds
        held = sum(cell.whole for cells in drawn[-1].cells for cell in cells)
        n, c = program.ranks, program.chunks
        promised = {"reduce": c, "gather": c, "reduce-scatter": c, "scatter": c, "send-receive": c, "barrier": n}
        assert held == promised.get(program.operation, n * c), (program.operation, program.algorithm, n)
        # Slots that a round does not write are unchanged.
        for before, after in pairwise(drawn):
            for old, new in zip(before.cells, after.cells, strict=True):
                assert all(a.label == b.label for a, b in zip(old, new, strict=True) if not b.fresh)


class Tags(HTMLParser):
    """Parser that collects unclosed tags and attributes with external references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elsewhere += [name for name, value in attrs if name in ("src", "href") and str(value)[:1] != "#"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_pictures_are_self_contained_and_show_every_cell() -> None:
    program = dataclasses.replace(ring(5), algorithm="<ring> & more")
    page = draw_buffers(check_collective(program))
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.elsewhere == []
    assert "<ring>" not in page and "&lt;ring&gt; &amp; more" in page
    assert page.count("<svg") == 1 + 8 + 1  # the start, one per round, and shared definitions
    # Every cell shows its contributing ranks, and each pattern is defined once.
    used, there = re.findall(r'href="#(\S+)"', page), re.findall(r'id="(\S+)"', page)
    assert len(used) == 9 * 25 and set(used) == set(there) and len(there) == len(set(there))
    assert {"parts-c", "parts-bc", "parts-abcde"} <= set(there)
    assert page.count('class="whole') + page.count('class="part') == 9 * 25
    assert page.count('class="head"') == 8 * 5
    assert page.count(">Σ4</text>") == sum(
        row.count("Σ4") for f in build_frames(check_collective(program)) for row in shown(f)
    )


@pytest.mark.parametrize(("ranks", "message"), [(17, "17 ranks, more than the maximum of 16"), (40, "40 ranks")])
def test_too_large_a_program_is_not_drawn_but_named(ranks: int, message: str) -> None:
    for draw in (draw_buffers_text, draw_buffers):
        with pytest.raises(UserError, match=message):
            draw(check_collective(ring(ranks)))


def test_programs_of_every_operation_can_be_drawn() -> None:
    for program in {program.operation: program for program in programs()}.values():
        tags = Tags()
        tags.feed(draw_buffers(check_collective(program)))
        assert tags.open == []
