"""Worked examples as text of any width, Markdown and JSON; and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.gallery.examples import EXAMPLES, explain
from meshwright.gallery.explanation import ExampleWriter, Explanation, Table, Text, format_cell, format_size
from meshwright.gallery.page import make_anchor, render_example, render_page
from meshwright.gallery.text import render_list, render_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "worked-examples.md"


@pytest.fixture(scope="module")
def explanations() -> list[Explanation]:
    return list(map(explain, EXAMPLES))


def test_committed_page_is_the_generated_one(explanations: list[Explanation]):
    assert PAGE.read_text() == render_page(explanations)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_text_stays_within_the_width(explanations: list[Explanation], width: int):
    for explanation in explanations:
        free = {*explanation.commands, explanation.title, *explanation.source_files}
        for line in render_text(explanation, width).split("\n"):
            longest_word = max(map(len, line.split()), default=0)
            assert len(line) <= width or line.strip() in free or longest_word > width - 8, line


def test_text_and_page_show_every_cell(explanations: list[Explanation]):
    for explanation in explanations:
        text, narrow, page = render_text(explanation), render_text(explanation, 40), render_example(explanation)
        for step in explanation.steps:
            if isinstance(step, Table):
                for cell in (cell for row in step.rows for cell in row):
                    assert cell in text or " ".join(cell.split()) in " ".join(text.split()), cell
                    assert " ".join(cell.split()) in " ".join(narrow.split()), cell
                    assert cell.replace("|", r"\|").replace("_", r"\_").replace("*", r"\*") in page, cell


def test_wide_table_becomes_records_on_a_narrow_terminal():
    writer = ExampleWriter()
    writer.add_table("sizes", ("name", "a long heading", "count"), [("first", "some words", 1234), ("second", "", 5)])
    found = Explanation("x", "T", "p", "s", tuple(writer.steps), {}, "", ("cmd",), ("a.py",))
    assert "  name    a long heading  count\n" in render_text(found, 80)
    assert "  first\n    a long heading: some words\n    count: 1,234\n  second\n    count: 5" in render_text(found, 30)


def test_markup_of_markdown_is_escaped():
    found = Explanation("x", "T", "a * b_c | d < e", "s", (Text("2 * 3"),), {}, "", ("cmd",), ("a.py",))
    text = render_example(found)
    assert r"a \* b\_c \| d &lt; e" in text and r"2 \* 3" in text


@pytest.mark.parametrize(
    ("value", "text"), [(1234567, "1,234,567"), (0.125, "0.125"), (33.80, "33.8"), (12345.6, "12,346"), ("x", "x")]
)
def test_cells_are_formatted(value: object, text: str):
    assert format_cell(value) == text


@pytest.mark.parametrize(("size", "text"), [(800, "800 B"), (33.6e6, "33.6 MB"), (2.7937e12, "2.794 TB")])
def test_sizes_are_decimal(size: float, text: str):
    assert format_size(size) == text


def test_anchor_is_that_of_github():
    assert make_anchor("ZeRO 1, 2 and 3: 7.5 billion") == "zero-1-2-and-3-75-billion"


def test_list_wraps_on_a_narrow_terminal():
    titles = {name: example.title for name, example in EXAMPLES.items()}
    assert all(len(line) <= 80 for line in render_list(titles, 80).split("\n"))
    assert "ring-all-reduce\n  Ring all-reduce on 4" in render_list(titles, 30)


# --- the command


def test_command_lists_every_example(command_line):
    outcome = command_line("explain")
    assert outcome.code == 0 and all(f"  {name} " in outcome.output for name in EXAMPLES)
    document = json.loads(command_line("explain", "--json").output)
    assert document["schema"] == 1 and [one["name"] for one in document["examples"]] == list(EXAMPLES)


def test_command_and_python_give_the_same_document(command_line):
    document = json.loads(command_line("explain", "zero-memory", "--json").output)
    assert document == mw.explain("zero-memory").to_json_dict() | {"files": {}}
    assert document["schema"] == 1 and {step["kind"] for step in document["steps"]} == {"text", "table", "figure"}


def test_command_writes_the_picture(command_line, tmp_path: Path):
    outcome = command_line("explain", "bubble-gpipe", "--svg", tmp_path / "p.svg", "--json")
    assert json.loads(outcome.output)["files"] == {"picture": str(tmp_path / "p.svg")}
    assert (tmp_path / "p.svg").read_text() == (PAGE.parent / "pictures" / "schedules-gpipe.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ring-all-reduec",), 'unknown example "ring-all-reduec"; did you mean "ring-all-reduce"?'),
        (("foo",), '(26 are known; "meshwright explain" lists them)'),
        (("mfu", "--svg", "x.svg"), "--svg: mfu has no picture; these have one: ring-all-reduce"),
        (("--svg", "x.svg"), "--svg: give the name of an example"),
    ],
)
def test_mistake_is_one_line(command_line, arguments: tuple[str, ...], said: str):
    outcome = command_line("explain", *arguments)
    assert outcome.code == 2 and said in outcome.errors and outcome.errors.count("\n") == 1
