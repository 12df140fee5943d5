"""An argument that no command can use is refused by every command, in one line, with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

UNREADABLE = os.fsdecode(b"b\xff")
PATHS = {
    "train": ["train", f"{UNREADABLE}.toml"],
    "train run.directory": ["train", "{recipe}", f"run.directory={UNREADABLE}"],
    "plan": ["plan", f"{UNREADABLE}.toml", "--cluster", "1xa100-80"],
    "plan --html": ["plan", "llama-tiny", "--cluster", "1xa100-80", "--html", UNREADABLE],
    "verify": ["verify", f"{UNREADABLE}.toml"],
    "launch": ["launch", "--torchrun", f"{UNREADABLE}.toml"],
    "data prepare": ["data", "prepare", "{recipe}", f"data.source={UNREADABLE}"],
    "data show": ["data", "show", f"{UNREADABLE}.toml"],
    "evaluate": ["evaluate", UNREADABLE, "--data", "stdlib"],
    "evaluate --data": ["evaluate", "runs/a", "--data", UNREADABLE],
    "generate": ["generate", UNREADABLE, "--prompt", "a"],
    "generate --prompt": ["generate", "runs/a", "--prompt", UNREADABLE],
    "inspect": ["inspect", UNREADABLE],
    "report": ["report", UNREADABLE],
    "schedule": ["schedule", f"@{UNREADABLE}", "--stages", "2", "--microbatches", "2"],
    "collective": ["collective", "all-reduce", f"@{UNREADABLE}", "--ranks", "2", "--bytes", "8"],
    "run": ["run", f"{UNREADABLE}.py"],
}


@pytest.mark.parametrize("arguments", PATHS.values(), ids=PATHS)
def test_non_utf8_argument_is_refused_by_every_command(
    arguments: list[str], tiny_recipe: Path, command_line: Callable[..., Outcome]
):
    outcome = command_line(*(each.format(recipe=tiny_recipe) for each in arguments))
    assert outcome.code == 2 and outcome.errors.count("\n") == 1 and not outcome.output
    assert "byte 0xff of it is not UTF-8; rename the file or directory" in outcome.errors
    assert outcome.errors.isascii(), "a terminal shows the byte as an escape"


LAYOUTS = {
    "plan --layout": ["plan", "llama-tiny", "--cluster", "1xa100-80", "--sequence", "64", "--batch", "1",
    "--layout", "{}"],
    "plan": ["plan", "{recipe}", "--cluster", "1xa100-80", "layout={}"],
    "verify --layout": ["verify", "--layout", "{}"],
    "verify": ["verify", "{recipe}", "layout={}"],
    "train": ["train", "{recipe}", "layout={}"],
    "launch": ["launch", "--slurm", "{recipe}", "layout={}"],
    "data show": ["data", "show", "{recipe}", "layout={}"],
    "inspect": ["inspect", "{model}", "--no-statistics", "--layout", "{}"],
    "generate": ["generate", "{model}", "--prompt", "a", "--layout", "{}"],
    "evaluate": ["evaluate", "{model}", "--data", "stdlib", "--layout", "{}"],
}  # fmt: skip


@pytest.mark.parametrize("command", LAYOUTS)
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp99999999999", "dp99999999999: dp must be at most 1,048,576"),
        ("pp2:interleaved:99999999999", "chunks must be at most 1,048,576"),
        ("tp999999 dp999999", "= 999,998,000,001 ranks: at most 1,048,576"),
    ],
)
def test_unbounded_count_is_refused_by_every_command_with_limit(
    command: str, layout: str, said: str, tiny_recipe: Path, shared_data: Path, command_line: Callable[..., Outcome]
):
    filled = [
        each.replace("{}", layout).format(recipe=tiny_recipe, model=shared_data / "stories260k")
        for each in LAYOUTS[command]
    ]
    outcome = command_line(*filled)
    assert outcome.code == 2 and said in outcome.errors and outcome.errors.count("\n") == 1, outcome.errors


@pytest.mark.parametrize("text", ["nan", "inf"])
@pytest.mark.parametrize(
    "arguments",
    [
        *(["serve", "{model}", option] for option in ("--step-seconds", "--queue-seconds", "--drain-seconds")),
        ["plan", "llama-tiny", "--cluster", "1xa100-80", "--sequence", "64", "--batch", "1", "--documents"],
        ["schedule", "auto", "--stages", "2", "--microbatches", "4", "--memory"],
    ],
    ids=" ".join,
)
def test_number_that_is_not_finite_is_refused(arguments: list[str], text: str, command_line: Callable[..., Outcome]):
    outcome = command_line(*arguments, text)
    assert outcome.code == 2 and f"{arguments[-1]}: '{text}': a finite number is needed" in outcome.errors
