"""`meshwright collective`: figures, pictures, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.collectives.library import generate
from meshwright.program.collective_text import format_collective, parse_collective
from meshwright.program.json_form import to_json_dict


@pytest.fixture
def asked(command_line):
    """The JSON document that the command prints."""

    def ask(*words: str) -> Any:
        outcome = command_line("collective", *words, "--json")
        assert outcome.code == 0, outcome.errors
        return json.loads(outcome.output)

    return ask


def test_ring_all_reduce_on_uniform_links(asked):
    answer = asked("all-reduce", "ring", "--ranks", "8", "--bytes", "64MiB")
    size = 64 * 2**20
    assert answer["schema"] == 1 and answer["checked"] is True
    assert answer["rounds"] == 14
    assert answer["bytes_sent"] == [size * 14 / 8] * 8
    closed = 14 * (5e-6 + size / 8 / 25e9)
    assert answer["seconds"] == pytest.approx(closed) and answer["closed_form_seconds"] == pytest.approx(closed)
    assert answer["lower_bound_seconds"] == pytest.approx(5e-6 + size * 14 / 8 / 25e9)
    assert answer["measured_seconds"] is None
    assert answer["busiest_link"] == {
        "link": "rank 0 → switch",
        "bytes": size * 14 / 8,
        "busy_seconds": pytest.approx(size * 14 / 8 / 25e9),
    }


def test_latency_bandwidth_and_topology_change_the_time(asked):
    words = ("all-reduce", "ring", "--ranks", "4", "--bytes", "1GB")
    slow = asked(*words, "--latency", "1ms", "--bandwidth", "1GB/s")
    assert slow["seconds"] == pytest.approx(6 * (1e-3 + 0.25))
    assert asked(*words, "--topology", "ring,1GB/s,1ms")["seconds"] == pytest.approx(slow["seconds"])
    adding = asked(*words, "--latency", "1ms", "--bandwidth", "1GB/s", "--reduce-rate", "10GB/s")
    assert adding["seconds"] == pytest.approx(slow["seconds"] + 3 * 0.025)


def test_options_reach_the_generator(asked, tmp_path: Path):
    torus = asked(
        "all-reduce", "2d-torus", "--ranks", "12", "--bytes", "1MB", "--dims", "2x6", "--topology", "torus:2x6"
    )
    assert torus["rounds"] == 2 * (1 + 5) and torus["dims"] == [2, 6]
    nodes = asked("all-reduce", "hierarchical", "--ranks", "8", "--bytes", "1MB", "--groups", "4")
    assert nodes["groups"] == 4 and nodes["rounds"] == 2 * 2 + 2
    file = tmp_path / "chain.txt"
    chain = ("broadcast", "ring", "--ranks", "4", "--bytes", "1MB", "--segments", "5", "--root", "2")
    assert asked(*chain, "--program", str(file))["rounds"] == 4 + 5 - 2
    assert parse_collective(file.read_text()).root == 2


def test_topology_gives_groups_and_dims(asked):
    assert asked("all-reduce", "2d-torus", "--ranks", "12", "--bytes", "1MB", "--topology", "torus:2x6")["dims"] == [
        2,
        6,
    ]
    nodes = asked("all-reduce", "hierarchical", "--ranks", "16", "--bytes", "1MB", "--topology", "nodes:2x8")
    assert nodes["groups"] == 8


def test_auto_ranks_all_algorithms_with_reasons_and_crossovers(asked):
    answer = asked("all-reduce", "auto", "--ranks", "8", "--bytes", "1KiB", "--topology", "nodes:2x4")
    first, *others = answer["ranking"]
    assert first["algorithm"] == answer["algorithm"] and first["seconds"] == answer["seconds"]
    assert all(first["seconds"] <= one["seconds"] for one in others)
    assert len(answer["ranking"]) + len(answer["refused"]) + len(answer["left_out"]) == 15
    assert answer["reason"].startswith(f"{answer['algorithm']} takes ")
    assert answer["crossovers"][0]["before"] == answer["algorithm"]
    assert all(one["bytes"] > 1024 for one in answer["crossovers"])


def test_program_from_a_file_is_checked_and_timed(asked, tmp_path: Path):
    program = generate("broadcast", "binomial-tree", 5, root=3)
    named = asked("broadcast", "binomial-tree", "--ranks", "5", "--bytes", "1MB", "--root", "3")
    for name, text in (("b.txt", format_collective(program)), ("b.json", json.dumps(to_json_dict(program)))):
        (tmp_path / name).write_text(text)
        answer = asked("broadcast", f"@{tmp_path / name}", "--bytes", "1MB")
        assert answer["closed_form_seconds"] is None
        assert {key: answer[key] for key in ("ranks", "rounds", "seconds", "bytes_sent")} == {
            key: named[key] for key in ("ranks", "rounds", "seconds", "bytes_sent")
        }


def test_invalid_program_exits_1_with_rank_and_step(command_line, tmp_path: Path):
    text = format_collective(generate("all-reduce", "ring", 4))
    lines = text.splitlines()
    spoiled = next(number for number, line in enumerate(lines) if "reduce data" in line)
    lines[spoiled] = lines[spoiled].replace("reduce data", "receive data")
    (tmp_path / "wrong.txt").write_text("\n".join(lines) + "\n")
    outcome = command_line("collective", "all-reduce", f"@{tmp_path / 'wrong.txt'}", "--bytes", "64", "--json")
    assert (outcome.code, outcome.output) == (1, "")
    [line] = outcome.errors.strip().splitlines()
    assert line.startswith("meshwright: error: rank ") and "step" in line


def test_text_output_is_a_report(command_line):
    outcome = command_line("collective", "all-reduce", "auto", "--ranks", "4", "--bytes", "1MiB")
    assert outcome.code == 0
    lines = outcome.output.splitlines()
    assert lines[0].endswith("on 4 ranks, 1 MiB, switch,25GB/s,5us")
    for word in ("checked", "rounds", "bytes sent", "simulated", "closed form", "lower bound", "busiest link"):
        assert any(line.strip().startswith(word) for line in lines), word
    assert any(line.startswith("chosen: ") for line in lines) and any(line.startswith("crossovers: ") for line in lines)
    assert max(map(len, lines)) < 400 and not any(line != line.rstrip() for line in lines)


def test_text_prints_transfers_round_by_round(command_line):
    outcome = command_line("collective", "all-reduce", "ring", "--ranks", "3", "--bytes", "12", "--text")
    assert "0 → 1 adds data[2]   1 → 2 adds data[0]" in outcome.output and "round 1 of 4" in outcome.output


def test_pages_and_pictures_are_self_contained(asked, tmp_path: Path):
    answer = asked(
        *("all-reduce", "auto", "--ranks", "4", "--bytes", "1MiB"),
        *("--svg", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html")),
    )
    assert answer["files"] == {"picture": str(tmp_path / "a.svg"), "page": str(tmp_path / "a.html")}
    svg, page = (tmp_path / "a.svg").read_text(), (tmp_path / "a.html").read_text()
    shapes = svg.partition("</style>")[2].rpartition("</svg>")[0]
    assert svg.startswith("<svg") and shapes.count("polyline") > 5 and shapes in page
    assert '<div class="slim"><svg class="picture" width="380"' in page
    assert page.count("<h1>") == 1 and "Round by round" in page and "The choice" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_page_of_large_program_reports_missing_picture(asked, tmp_path: Path):
    asked("scatter", "linear", "--ranks", "17", "--bytes", "1MiB", "--html", str(tmp_path / "a.html"))
    assert "The buffers are not drawn" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("reduction", ["minimum", "maximum", "mean"])
def test_minimum_maximum_and_mean_are_reductions(command_line, reduction: str):
    words = ("reduce", "binomial-tree", "--ranks", "4", "--bytes", "64", "--reduction", reduction, "--program", "-")
    assert parse_collective(command_line("collective", *words).output).reduction == reduction


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("all-redcue ring --ranks 4 --bytes 4", 'unknown operation "all-redcue"; did you mean "all-reduce"?'),
        ("all-reduce rign --ranks 4 --bytes 4", 'did you mean "ring"?'),
        ("all-reduce ring --bytes 4", "the number of ranks is missing, such as --ranks 8"),
        ("all-reduce ring --ranks 4", "the size of the vector is missing, such as --bytes 64MiB"),
        ("all-reduce ring --ranks 4 --bytes 4parsecs", "is not a size such as 4096, 64MiB or 1GB"),
        ("all-reduce ring --ranks 4 --bytes -4", '--bytes: "-4" is not a size'),
        ("all-reduce ring --ranks 4 --bytes 1e400", "--bytes: 1e400 is too large"),
        ("all-reduce ring --ranks 0 --bytes 4", "0 is not in the range"),
        ("all-reduce ring --ranks 4 --bytes 4 --groups 2", "ring all-reduce takes no groups"),
        ("all-reduce 2d-torus --ranks 7 --bytes 4", "2d-torus cannot take 7 ranks"),
        ("all-reduce 2d-torus --ranks 8 --bytes 4 --dims 3x3", "dims 3x3 hold 9 ranks, not 8"),
        ("all-reduce 2d-torus --ranks 8 --bytes 4 --dims 3by3", '"3by3" is not a shape such as 4x4'),
        ("broadcast ring --ranks 4 --bytes 4 --root 4", "root 4 is not one of ranks 0 to 3"),
        ("broadcast ring --ranks 4 --bytes 4 --reduction mean", "broadcast reduces nothing"),
        ("all-reduce ring --ranks 4 --bytes 4 --reduction average", 'unknown reduction "average"'),
        ("all-reduce ring --ranks 4 --bytes 4 --topology tours:2x2", 'did you mean "torus"?'),
        ("all-reduce ring --ranks 4 --bytes 4 --latency 5", "is not a time such as 5us"),
        ("all-reduce ring --ranks 4 --bytes 4 --bandwidth 25Gb/s", "is not a rate such as 25GB/s"),
        ("all-reduce @/no/such/file --bytes 4", "/no/such/file"),
        ("barrier auto --ranks 4 --svg never.svg", "there is no chart"),
        ("all-reduce ring --ranks 100000 --bytes 4", "too large a program"),
        (
            "all-reduce ring --ranks 99999999999999999999 --bytes 4",
            "ranks would take too long; at most 131,072 are accepted",
        ),
        ("all-reduce auto --ranks 16385 --bytes 4", "16,385 ranks would take too long; at most 16,384 are accepted"),
        ("all-reduce ring --ranks 64 --bytes 4 --text", "cannot be drawn"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(command_line, words: str, said: str):
    outcome = command_line("collective", *words.split(), "--json")
    assert (outcome.code, outcome.output) == (2, ""), outcome.errors
    [line] = outcome.errors.strip().splitlines()
    assert line.startswith("meshwright: error: ") and said in line


@pytest.mark.parametrize("option", [("--ranks", "4"), ("--root", "1"), ("--segments", "2"), ("--reduction", "mean")])
def test_options_that_contradict_program_file_are_refused(command_line, tmp_path: Path, option: tuple[str, str]):
    (tmp_path / "b.txt").write_text(format_collective(generate("broadcast", "binomial-tree", 5)))
    outcome = command_line("collective", "broadcast", f"@{tmp_path / 'b.txt'}", "--bytes", "4", *option)
    assert outcome.code == 2 and option[0] in outcome.errors
    outcome = command_line("collective", "all-reduce", f"@{tmp_path / 'b.txt'}", "--bytes", "4")
    assert outcome.code == 2 and "a program for broadcast, not for all-reduce" in outcome.errors


def test_run_measures_on_processes_and_compares(asked):
    answer = asked("all-reduce", "butterfly", "--ranks", "2", "--bytes", "64KiB", "--run")
    assert answer["measured_seconds"] > 0 and answer["native_seconds"] > 0 and answer["exact"] is True
    assert answer["bytes_sent"] == [65536.0, 65536.0]


def test_collective_help_and_result_import_no_torch():
    program = """
import sys
from meshwright.cli.main import main
assert main(["collective", "--help"]) == 0
print(sorted({"torch", "numpy", "rich", "pydantic"} & set(sys.modules)))
assert main(["collective", "all-reduce", "auto", "--ranks", "4", "--bytes", "1MiB"]) == 0
print(sorted({"torch", "rich", "pydantic"} & set(sys.modules)))
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "meshwright collective all-reduce ring --ranks 8 --bytes 64MiB" in outcome.stdout
    assert outcome.stdout.splitlines().count("[]") == 2
