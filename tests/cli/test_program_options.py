"""Common options of `meshwright collective` and `meshwright schedule`: --text, --program, --trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.program.load import format_program, load_program

COMMANDS = {
    "collective": ("all-reduce", "ring", "--ranks", "3", "--bytes", "12"),
    "schedule": ("1f1b", "--stages", "2", "--microbatches", "3"),
}
FIRST_LINE = {"collective": "collective all-reduce ring", "schedule": "pipeline 1f1b"}


@pytest.fixture(params=sorted(COMMANDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_dash_prints_program_alone_and_report_on_standard_error(command_line, name: str, tmp_path: Path):
    report = command_line(name, *COMMANDS[name]).output
    outcome = command_line(name, *COMMANDS[name], "--program", "-")
    assert outcome.code == 0 and outcome.output.splitlines()[0] == FIRST_LINE[name]
    assert outcome.errors.rstrip() == report.rstrip()
    path = tmp_path / "piped.txt"
    path.write_text(outcome.output)
    words = (f"@{path}",) if name == "schedule" else ("all-reduce", f"@{path}", "--bytes", "12")
    assert command_line(name, *words).code == 0


def test_dash_is_refused_with_json(command_line, name: str):
    outcome = command_line(name, *COMMANDS[name], "--program", "-", "--json")
    assert (outcome.code, outcome.output) == (2, "")
    assert "--program -: with --json, standard output carries one JSON document; name a file" in outcome.errors


@pytest.mark.parametrize("file", ["program.txt", "program.json", "PROGRAM.JSON"])
def test_program_file_format_follows_suffix_and_parses_back(command_line, name: str, file: str, tmp_path: Path):
    path = tmp_path / file
    outcome = command_line(name, *COMMANDS[name], "--program", path, "--json")
    assert json.loads(outcome.output)["files"] == {"program": str(path)}
    text = path.read_text()
    assert text.startswith("{" if file.lower().endswith("json") else FIRST_LINE[name])
    dialect: Any = "pipeline" if name == "schedule" else "collective"
    assert format_program(load_program(path, dialect), path) == text


def test_text_drawing_is_below_report_and_in_json(command_line, name: str):
    drawing = json.loads(command_line(name, *COMMANDS[name], "--text", "--json").output)["drawing"]
    shown = command_line(name, *COMMANDS[name], "--text").output
    assert "rank 0" in drawing and shown.rstrip().endswith(drawing.rstrip())
    assert shown.startswith(command_line(name, *COMMANDS[name]).output.rstrip())


def test_trace_has_the_simulated_times_in_microseconds(command_line, name: str, tmp_path: Path):
    path = tmp_path / "trace.json"
    answer = json.loads(command_line(name, *COMMANDS[name], "--trace", path, "--json").output)
    assert answer["files"] == {"trace": str(path)}
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    ends = answer["seconds"] if name == "collective" else answer["makespan"]
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(ends * 1e6)
    assert min(event["ts"] for event in slices) == 0
    # Ring: each of 3 ranks sends in each of 4 rounds. 1F1B: forward and backward of 3 micro-batches on 2 ranks.
    assert len(slices) == 12


def test_output_with_the_name_of_an_algorithm_is_no_input(command_line, name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = next(each for each in COMMANDS[name] if each in ("ring", "1f1b"))
    for _ in range(2):
        assert command_line(name, *COMMANDS[name], "--program", output).code == 0
    words = ("all-reduce", f"@{output}", "--bytes", "12") if name == "collective" else (f"@{output}",)
    outcome = command_line(name, *words, "--svg", f"./{output}")
    assert outcome.code == 2 and "is the same file, which would be lost" in outcome.errors


def test_pipe_is_written_not_replaced(command_line, name: str, tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "pipe")
    descriptor = os.open(pipe, os.O_RDWR)  # an end for each of reader and writer
    try:
        assert command_line(name, *COMMANDS[name], "--program", pipe, "--svg", pipe).code == 0
        assert pipe.is_fifo() and FIRST_LINE[name].encode() in os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def test_output_through_a_link_keeps_the_link(command_line, name: str, tmp_path: Path):
    (link := tmp_path / "link").symlink_to(tmp_path / "program")
    assert command_line(name, *COMMANDS[name], "--program", link).code == 0
    assert link.is_symlink() and FIRST_LINE[name] in (tmp_path / "program").read_text()
