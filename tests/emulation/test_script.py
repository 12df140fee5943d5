"""`meshwright run --emulate`: scripts written for torchrun, the debugger, `--show`, and the exercises."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

RING = """
import os, sys
import torch
import torch.distributed as dist

class Kept(torch.nn.Linear):
    pass

def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    mine = torch.full((2,), float(rank))
    x = mine.clone()
    model = Kept(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(rank // 2)
    dist.all_reduce(x)
    print("sum", x[0].item(), sys.argv[1:], end="")
    print("", __name__)
    return x

if __name__ == "__main__":
    total = main()
"""

TENSORS = "tensors by rank (ranks that are listed together hold equal values)"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "ring.py"
    path.write_text(RING)
    return path


def test_script_runs_once_for_each_rank_with_prefixed_lines(script: Path, command_line: Callable[..., Outcome]):
    outcome = command_line("run", "--emulate", 4, script, "--steps", "3")
    assert outcome.code == 0, outcome.errors
    assert sorted(outcome.output.splitlines()) == [
        f"[rank {rank}] sum 6.0 ['--steps', '3'] __main__" for rank in range(4)
    ]


def test_show_prints_calls_in_order_and_tensors_of_each_rank(script: Path, command_line: Callable[..., Outcome]):
    lines = command_line("run", "--emulate", 4, "--show", script).output.splitlines()
    calls = [line.split() for line in lines if line.startswith("#")]
    assert [(call[0], call[2]) for call in calls] == [(f"#{rank + 1}", str(rank)) for rank in range(4)]
    assert all("all_reduce ranks 0-3 float32[2] 8 B ring.py:17" in " ".join(call) for call in calls)
    held = [" ".join(line.split()) for line in lines[lines.index(TENSORS) + 1 :]]
    assert held == ["Kept.weight float32[1, 2] ranks 0, 1; ranks 2, 3", "total float32[2] ranks 0-3"]


def test_json_document_has_calls_and_holdings(script: Path, command_line: Callable[..., Outcome]):
    outcome = command_line("run", "--emulate", 2, "--show", "--json", script)
    document = json.loads(outcome.output)
    assert document["passed"] and document["calls"] == 2 and document["failure"] is None
    assert [event["rank"] for event in document["events"]] == [0, 1] and document["events"][0]["bytes"] == 8
    assert {each["name"] for each in document["holdings"]} == {"Kept.weight", "total"}
    assert "[rank 1] sum" in outcome.errors


def test_modules_in_script_directory_are_imported_once_per_rank(tmp_path: Path, command_line: Callable[..., Outcome]):
    (tmp_path / "script_state.py").write_text("rank = None\n")
    path = tmp_path / "stateful.py"
    path.write_text(
        "import torch.distributed as dist, script_state\ndist.init_process_group()\n"
        "script_state.rank = dist.get_rank()\ndist.barrier()\nimport script_state as again\n"
        "print(script_state.rank, again is script_state)\n"
    )
    outcome = command_line("run", "--emulate", 3, path)
    assert sorted(outcome.output.split("\n")) == ["", *(f"[rank {rank}] {rank} True" for rank in range(3))]
    assert "script_state" not in sys.modules


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("if rank == 2: raise ValueError('no data')\ndist.barrier()", 1, "[rank 2] Traceback"),
        ("if rank == 2: raise SystemExit(5)\ndist.barrier()", 5, "[rank 2] the script ended with exit code 5"),
        ("if rank == 1: sys.exit('rank 1 leaves')\ndist.barrier()", 1, "[rank 1] rank 1 leaves"),
        ("if rank: dist.barrier()", 1, "rank 0 has ended"),
        ("import torch.multiprocessing as m; m.spawn(print)", 2, "write it for torchrun"),
        ("dist.TCPStore('localhost', 29500, 3)", 2, "start such a script with meshwright run --ranks N"),
    ],
)  # fmt: skip
def test_error_of_a_rank_is_printed_once(
    body: str, code: int, message: str, tmp_path: Path, command_line: Callable[..., Outcome]
):
    path = tmp_path / "failing.py"
    path.write_text(
        f"import sys, torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()\n{body}\n"
    )
    outcome = command_line("run", "--emulate", 3, path)
    assert outcome.code == code and outcome.errors.count(message) == 1 and outcome.errors.count("Traceback") <= 1


def test_debugger_opens_before_a_call_of_one_rank(
    script: Path, command_line: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("p rank, x.tolist()\nnext\np x.tolist()\ncontinue\n"))
    outcome = command_line("run", "--emulate", 4, "--break", "2:1", script)
    assert outcome.code == 0, outcome.errors
    assert "(rank 2) (2, [2.0, 2.0])" in outcome.output  # before the call
    assert "(rank 2) [6.0, 6.0]" in outcome.output  # after the call, for which the other ranks ran
    assert outcome.output.count("] sum 6.0") == 4


def test_breakpoint_stops_the_rank_that_reaches_it(
    tmp_path: Path, command_line: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "stops.py"
    path.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank() == 1:\n    breakpoint()\n    seen = 41\nprint('after')\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("next\np seen + 1\nquit\n"))
    outcome = command_line("run", "--emulate", 3, path)
    assert outcome.code == 1 and "(rank 1) 42" in outcome.output
    assert "[rank 1] stopped in the debugger" in outcome.errors and "[rank 2] after" not in outcome.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--show"], "need --emulate"),
        (["--emulate", "2", "--ranks", "2"], "no --ranks"),
        (["--emulate", "2", "--break", "2"], "ranks are 0 to 1"),
        (["--emulate", "2", "--break", "x"], "give RANK or RANK:CALL"),
        (["--emulate", "2", "--check"], "has no function one_device()"),  # and does not run
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], message: str, tmp_path: Path, command_line: Callable[..., Outcome]
):
    path = tmp_path / "training.py"
    path.write_text("import torch.distributed as dist\ndist.init_process_group()\nraise AssertionError\n")
    outcome = command_line("run", *options, path)
    assert outcome.code == 2 and message in outcome.errors and outcome.errors.count("\n") == 1


# --- exercises: the check names the first tensor that the planted bug affects

PLANTED = {
    "data_parallel": ("loss", 0),
    # Stage 3 runs backward passes in its own order: its gradient is right, and that of stage 2 is the first wrong one.
    "pipeline": ("gradient of layers.2.weight", 2),
    "tensor_parallel": ("gradient of embedding.weight", 0),
    "zero": ("step 1: momentum", 0),
}


@pytest.mark.parametrize("name", PLANTED)
def test_exercise_fails_at_the_first_wrong_tensor(name: str, repository: Path, command_line: Callable[..., Outcome]):
    outcome = command_line("run", "--emulate", 4, "--check", "--json", repository / "examples/exercises" / f"{name}.py")
    document = json.loads(outcome.output)
    tensor, rank = PLANTED[name]
    first = document["wrong"][0]
    assert outcome.code == 1 and (first["name"], first["rank"]) == (tensor, rank)
    assert 1e-6 < first["relative_error"] < 10 and not document["passed"]


@pytest.mark.parametrize("name", PLANTED)
def test_solution_matches_one_device(name: str, repository: Path, command_line: Callable[..., Outcome]):
    outcome = command_line("run", "--emulate", 4, "--check", repository / "examples/exercises/solutions" / f"{name}.py")
    assert outcome.code == 0 and outcome.output.startswith("passed: "), outcome.output + outcome.errors


@pytest.mark.parametrize(("name", "ranks"), [("pipeline", 8), ("zero", 3)])
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_exercise_says_how_many_ranks_it_takes(
    name: str, ranks: int, options: list[str], repository: Path, command_line: Callable[..., Outcome]
):
    for place in ("examples/exercises", "examples/exercises/solutions"):
        outcome = command_line("run", "--emulate", ranks, *options, repository / place / f"{name}.py")
        assert outcome.code == 1 and outcome.errors.count("\n") == 1
        assert "this exercise takes " in outcome.errors


def test_exercise_with_missing_elements_fails(tmp_path: Path, command_line: Callable[..., Outcome]):
    path = tmp_path / "exercise.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "def one_device(): return {'w': torch.ones(4)}\n"
        "def distributed():\n"
        "    r = dist.get_rank()\n"
        "    return {'w': (torch.ones(1), slice(r, r + 1))}\n"
    )
    assert command_line("run", "--emulate", 4, "--check", path).code == 0
    outcome = command_line("run", "--emulate", 3, "--check", path)
    assert outcome.code == 1 and "w: no rank returns 1 of its 4 elements" in outcome.output
