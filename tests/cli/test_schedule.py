"""`meshwright schedule` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main

KEYS = {
    *("ranks", "makespan", "idle", "bubble_fraction", "bubble_to_ideal", "peak_activations", "weight_copies"),
    *("checked", "steps", "schema"),
}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["schedule", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(["schedule", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("meshwright: error: ")
    return captured.err


def test_schedule_json_has_documented_keys(capsys: pytest.CaptureFixture[str]):
    document = answer(capsys, "1f1b", "--stages", "4", "--microbatches", "8")
    assert document.keys() >= KEYS
    assert document["ranks"] == 4 and document["checked"] is True
    # (P - 1)(F + I + W) of idle time on the first rank, none on the last.
    assert document["makespan"] == 24 + 9 and document["idle"] == [9, 6, 3, 0]
    assert document["bubble_fraction"] == pytest.approx(9 / 33)
    assert document["bubble_to_ideal"] == pytest.approx(9 / 24)
    assert document["peak_activations"] == [4, 3, 2, 1] and document["weight_copies"] == 1
    assert document["steps"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]


def test_overlapped_steps_are_drawn_together(capsys: pytest.CaptureFixture[str]):
    steps = answer(capsys, "dualpipe-v", "--stages", "4", "--microbatches", "8")["steps"]
    assert "0F7 | 7B3" in steps[0]


def test_durations_are_per_rank_and_may_differ(capsys: pytest.CaptureFixture[str]):
    arguments = ("gpipe", "--stages", "2", "--microbatches", "3", "--forward", "1,2", "--weight-gradient", "0")
    # rank 1: waits 1, then 3 forwards of 2 and 3 backwards of 1; rank 0 ends one backward later.
    assert answer(capsys, *arguments)["makespan"] == 1 + 6 + 3 + 1
    assert answer(capsys, *arguments, "--transfer", "0.5")["makespan"] == 1 + 0.5 + 6 + 3 + 0.5 + 1


def test_every_written_file_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = {"--svg": "p.svg", "--html": "p.html", "--trace": "t.json", "--program": "p.txt"}
    options = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    arguments = ("zb-h1", "--stages", "3", "--microbatches", "4")
    named = answer(capsys, *arguments, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())
    assert set(named["files"].values()) == {str(tmp_path / name) for name in names.values()}
    ET.fromstring((tmp_path / "p.svg").read_text())
    slices = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 3 * 4 * 3  # ranks, micro-batches, kinds of step
    read = answer(capsys, f"@{tmp_path / 'p.txt'}")
    assert {key: value for key, value in read.items() if key != "files"} == {
        key: value for key, value in named.items() if key != "files"
    }


def test_split_layers_hide_all_to_all_behind_computation(capsys: pytest.CaptureFixture[str]):
    # One after the other a micro-batch takes 4 + 6 = 10 on a rank; 4 + 4 of its parts are all-to-all.
    arguments = ("--stages", "4", "--microbatches", "8", "--parts", "1,1,1,1")
    plain, dual = (answer(capsys, name, *arguments) for name in ("1f1b", "dualpipe"))
    assert plain["makespan"] == (8 + 3) * 10 and plain["exposed_all_to_all"] == plain["all_to_all"] == [32] * 4
    assert dual["makespan"] < 0.75 * plain["makespan"] and max(dual["exposed_all_to_all"]) < 32


def test_auto_reports_tried_schedules_and_reason_for_winner(capsys: pytest.CaptureFixture[str]):
    arguments = ("auto", "--stages", "3", "--microbatches", "6", "--forward", "1,1,1.5")
    document = answer(capsys, *arguments)
    fitting = [one["makespan"] for one in document["candidates"] if one["fits"]]
    assert document["makespan"] == min(fitting) >= document["lower_bound"]
    assert {"1f1b", "zb-v"} <= {one["name"] for one in document["candidates"]}
    assert main(["schedule", *arguments]) == 0
    assert f"{document['found_by']} wins: makespan" in capsys.readouterr().out


def test_schedule_shows_layers_of_each_rank(capsys: pytest.CaptureFixture[str]):
    assert main(["schedule", "dualpipe-v", "--stages", "2", "--microbatches", "4", "--layers", "8"]) == 0
    out = capsys.readouterr().out
    assert "0      stage 0: embedding, layers 0-1   stage 3: layers 6-7, head" in out


@pytest.mark.parametrize("name", ["program.json", "program.csv"])
def test_every_program_format_is_read_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / name
    named = answer(capsys, "interleaved", "--stages", "2", "--microbatches", "4", "--program", str(path))
    read = answer(capsys, f"@{path}")
    assert read["steps"] == named["steps"] and read["makespan"] == named["makespan"]


def test_text_output_is_a_summary_and_a_picture(capsys: pytest.CaptureFixture[str]):
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "3", "--text"]) == 0
    text = capsys.readouterr().out
    assert "makespan 12; bubble 25.0% of it" in text
    assert "\nrank 0 |F0|F1|      B0---|F2|B1---|   B2---|" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1f1", "--stages", "4", "--microbatches", "8"], 'unknown schedule "1f1"; did you mean "1f1b"?'),
        (["1f1b", "--microbatches", "8"], "--stages 4"),
        (["1f1b", "--stages", "4"], "--microbatches 8"),
        (["1f1b", "--stages", "0", "--microbatches", "8"], "0 is not in the range"),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--forward", "1,x"], "'1,x' is not a duration"),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--forward", "1,2"], "expected 1 or 4"),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--forward", "nan"], "finite"),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--forward", "1e308"], "their sum overflows"),
        (["auto", "--stages", "2", "--microbatches", "4", "--forward", "1e308"], "their sum overflows"),
        (
            ["auto", "--stages", "2", "--microbatches", "4", "--overlapped", "1,2,3"],
            "overlapped: 3 values; expected 1 or 2",
        ),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--chunks", "2"], "exactly 1"),
        (["dualpipe", "--stages", "3", "--microbatches", "8"], "even"),
        (
            ["1f1b", "--stages", "4", "--microbatches", "8", "--memory", "3"],
            "--memory 3: 1f1b has no memory limit",
        ),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--parts", "1,1"], "expected 4"),
        (
            ["1f1b", "--stages", "4", "--microbatches", "8", "--parts", "1,1,1,1", "--forward", "3"],
            "--parts gives the durations of a forward and of both gradient passes; leave out --forward",
        ),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--layers", "3"], "at least 4 layers"),
        (["@missing.txt"], "missing.txt"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--svg", "/no/such/folder/p.svg"], "/no/such/folder/p.svg"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--svg", ""], "cannot write"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert said in refusal(capsys, 2, *arguments)


def test_invalid_program_ends_with_rank_step_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "program.txt"
    arguments = ("1f1b", "--stages", "2", "--microbatches", "2", "--program", str(path))
    answer(capsys, *arguments)
    lines = path.read_text().splitlines()
    receive = next(line for line in lines if "RECV_F" in line)
    path.write_text("\n".join(line for line in lines if line != receive) + "\n")
    said = refusal(capsys, 1, f"@{path}")
    assert "rank" in said and "step" in said


def test_command_imports_no_torch():
    program = (
        "import sys; from meshwright.cli.main import main; "
        "main(['schedule', '1f1b', '--stages', '4', '--microbatches', '8', '--text']); "
        "sys.exit(bool({'torch', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
