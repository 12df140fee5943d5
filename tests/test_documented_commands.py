"""README, tutorial and learning path show the output of their commands: except numbers, or exactly for programs."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.layout import Layout
from tests.documented_commands import Command, File, find_difference, find_seconds_not_shown, read_page

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "learn").glob("*.md"))]
QUICK = {"plan", "explain", "schedule", "collective", "launch", "verify"}
NOT_RUN = ("make test", ".venv/bin/python -m pytest", "pip install", ". .venv")
"""Commands that start this test again, load packages, or need the environment that `make` creates."""
SAMPLED = ("meshwright generate", "curl", "python examples/generate.py")  # texts depend on the machine's arithmetic
KILLED = re.compile(r"bash: line \d+: +\d+ Killed ")
"""The shell's report of a killed job, which it prints with the output of any later command."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def is_quick(command: Command) -> bool:
    """True for commands of a few seconds: no training, no server, no program on processes, a layout of at most two
    ranks to verify."""
    words = command.words
    if words[:1] == ["python"]:
        return words[1] in ("examples/plan.py", "examples/programs.py")
    if words[:1] != ["meshwright"]:
        return False
    if words[1] == "verify":
        return "--layout" in words and Layout.parse(words[words.index("--layout") + 1]).world_size <= 2
    return "--help" in words or (words[1] in QUICK and "--run" not in words)


def make_place(directory: Path) -> None:
    """Copy the folders that documented commands use into a directory."""
    for name in ("examples", "recipes", "scripts"):
        shutil.copytree(REPOSITORY / name, directory / name)


@each_page
def test_quick_commands_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from meshwright.cli.main import main
    from meshwright.verification import cases

    every = cases.CaseBuilder.make_default_cases
    monkeypatch.setattr(
        cases.CaseBuilder, "make_default_cases", lambda builder: every(builder)[:1]
    )  # one of the cases is enough
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    ran = 0
    for item in read_page(page):
        if isinstance(item, File):
            (tmp_path / item.name).write_text(item.text)
        elif is_quick(item):
            ran += 1
            kind, *arguments = item.words
            if kind == "python":
                monkeypatch.setattr(sys, "argv", arguments)
                runpy.run_path(arguments[0], run_name="__main__")
            else:
                assert main(arguments) == 0, item.line
            output, errors = capsys.readouterr()
            difference = find_difference(item.shown, (errors + output).splitlines(), item.exact)
            assert not item.shown or not difference, f"$ {item.line}\n{difference}"
    assert ran


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@each_page
def test_all_commands_print_what_the_page_shows(page: Path, tmp_path: Path):
    """Runs them in order in one shell without a hardware profile; `make demo` as its script."""
    make_place(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, options in (("meshwright", " -m meshwright"), ("python", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable}{options} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    script, ran = ["set -m"], []
    for item in read_page(page):
        if isinstance(item, File):
            (tmp_path / item.name).write_text(item.text)
        elif not item.line.startswith(NOT_RUN):
            line = item.line.replace("make demo", "scripts/demo.sh")
            script.append(f"{{ {line}\n}} >{len(ran)}.out 2>{len(ran)}.err; echo $? >{len(ran)}.code")
            ran.append(item)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MESHWRIGHT", "XDG"))}
    environment |= {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "200"}
    subprocess.run(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, check=False)
    for number, command in enumerate(ran):
        printed = [(tmp_path / f"{number}.{kind}").read_text() for kind in ("err", "out")]
        assert (tmp_path / f"{number}.code").read_text() == "0\n", f"$ {command.line}\n{''.join(printed)}"
        if command.line.startswith(SAMPLED):
            continue
        lines = [line for line in "".join(printed).splitlines() if not KILLED.match(line)]
        difference = find_difference(command.shown, lines, command.exact)
        assert not command.shown or not difference, f"$ {command.line}\n{difference}"


SHOWN = ["rounds 6", "...", "sent 1.5 MiB by every ...", "took 3 ms"]


@pytest.mark.parametrize(
    ("printed", "fails"),
    [
        ("rounds 6|other|sent 2 MiB by every rank|took 12.1 µs", False),
        ("rounds 6|sent 2 MiB by every rank|took 12.1 µs|more", True),
        ("round 6|sent 2 MiB by every rank|took 12.1 µs", True),
        ("rounds 6|sent 2 MiB by some|took 12.1 µs", True),
        ("rounds 6|sent 2 MiB by every rank|other|took 12.1 µs", True),
    ],
)
def test_comparison_finds_lines_that_differ_in_more_than_numbers(printed: str, fails: bool):
    assert bool(find_difference(SHOWN, printed.split("|"))) is fails


def test_comparison_accepts_what_depends_on_the_machine_precision_of_the_layout_and_fullest_rank():
    assert find_difference(["layout: dp2 fp32 on 2 cpu processes"], ["layout: dp2 bf16 on 2 cpu processes"]) is None
    assert find_difference(["1 dp8 fp32 0.1 s"], ["1 dp8 bf16 0.1 s"])
    peak = (
        "process peak of rank 1 3 MiB (predicted 2 MiB for rank 0, error -5%)"  # the fullest rank is the predicted one
    )
    assert find_difference([peak], [peak.replace(" for rank 0", "")]) is None
    busy = "predicted: 3 ms a step (2 ms to 9 ms; upper bound: the machine as busy as when it was measured)"
    assert find_difference(["predicted: 3 ms a step (2 ms to 4 ms)"], [busy]) is None


def test_exact_comparison_finds_numbers_that_differ():
    assert find_difference(["makespan 33"], ["makespan   33"], exact=True) is None
    assert find_difference(["makespan 33"], ["makespan 34"], exact=True)
    assert find_difference(["...", "33 of 4 ..."], ["round 1", "34 of 40"], exact=True)


@pytest.mark.parametrize(
    ("line", "exact"),
    [
        ("meshwright plan gpt2 --cluster 8xa100-40", True),
        ("meshwright plan gpt2 --cluster this", False),
        ("meshwright collective all-reduce ring --ranks 4 --bytes 16", True),
        ("meshwright collective all-reduce ring --ranks 4 --bytes 16 --run", False),
        ("meshwright train tiny.toml", False),
        ("python examples/plan.py", True),
        ("python examples/train.py mine.txt", False),
    ],
)
def test_numbers_of_commands_that_measure_nothing_are_compared(line: str, exact: bool):
    assert Command(line).exact is exact


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_seconds_in_the_prose_of_a_page_are_those_of_its_output(page: Path):
    """In the tutorial, section 5 alone is compared: the others show measured runs."""
    text = page.read_text()
    if page.stem == "tutorial":
        text = text[text.index("\n## 5.") : text.index("\n## 6.")]
    assert find_seconds_not_shown(text) == []


def test_seconds_that_a_page_does_not_show_are_found():
    text = "It takes 0.25 s, 12 ms more than 3 s.\n\n```console\n$ run\n0.25 s  12.5\n```\n\n| 9 s |\n"
    assert find_seconds_not_shown(text) == ["12 ms", "3 s"]
