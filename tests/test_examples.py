"""The scripts of examples/ on the Python API run, and print what the tutorial shows; `plan.py` and `programs.py` are
commands of the learning path (`test_documented_commands.py`)."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.documented_commands import Command, find_difference, read_page

REPOSITORY = Path(__file__).resolve().parent.parent
SHOWN = {
    command.words[1]: command.shown
    for command in read_page(REPOSITORY / "docs" / "tutorial.md")
    if isinstance(command, Command) and command.words[0] == "python"
}


@pytest.fixture
def run_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs `python examples/NAME ARGUMENTS...` in this process and an empty directory; returns standard output."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(REPOSITORY / "examples" / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        return capsys.readouterr().out

    return run


def train_here(recipe: Any, **options: Any) -> dict[str, Any]:
    """Train a recipe of one rank in this process, which has torch loaded, instead of a new one."""
    from meshwright.comm.mesh import Mesh
    from meshwright.monitoring.run_directory import RunDirectory
    from meshwright.training.loop import train

    with RunDirectory(recipe.run_directory) as directory:
        directory.write_recipe(recipe.to_toml())
        document: dict[str, Any] = train(recipe, Mesh.single(recipe.parsed_layout), directory, show_progress=False)
    return document


def test_train_and_generate_examples_print_what_the_tutorial_shows(run_example, monkeypatch: pytest.MonkeyPatch):
    from meshwright.training import api

    monkeypatch.setattr(api, "launch_recipe", train_here)
    Path("mine.txt").write_text("\n\n".join(f"Text number {number} of this file says hello." for number in range(900)))
    trained = run_example("train.py", "mine.txt").splitlines()
    assert find_difference(SHOWN["examples/train.py"], trained) is None
    generated = run_example("generate.py", "runs/example", "The ", "In Python ").splitlines()
    assert [line.partition("|")[0] for line in generated[:2]] == ["The ", "In Python "]
    assert all(line.endswith((" tokens, length)", " tokens, end)")) for line in generated[:2])
    assert generated[-1].startswith("first token after ")


def test_verify_example_proves_a_layout(run_example, monkeypatch: pytest.MonkeyPatch):
    from meshwright.verification import cases

    every = cases.CaseBuilder.make_default_cases
    counts: list[int] = []

    def make_one_case(builder: cases.CaseBuilder) -> list[cases.Case]:  # the others take longer
        counts.append(len(every(builder)))
        return every(builder)[:1]

    monkeypatch.setattr(cases.CaseBuilder, "make_default_cases", make_one_case)
    # Two ranks instead of eight.
    printed = run_example("verify.py", "dp2 zero1").replace("dp2 zero1", "dp2 zero1 tp2").splitlines()
    assert find_difference(SHOWN["examples/verify.py"], printed) is None
    assert f" {counts[0]} cases, passed: True" in SHOWN["examples/verify.py"][0]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_says_how_to_run_it(path: Path):
    assert f"examples/{path.name}" in path.read_text().split('"""')[1]
