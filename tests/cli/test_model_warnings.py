"""Every command that reads a model's configuration warns in one line about ignored fields and code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Outcome


@pytest.fixture
def foreign(tmp_path: Path, shared_data: Path) -> Path:
    """A small trained model whose repository has its own code and an unknown field."""
    source, directory = shared_data / "stories260k", tmp_path / "foreign"
    directory.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "own_scale": 2.0}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


TEXT = "Once upon a time there was a mesh. " * 40


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "{model}", "--prompt", "Once", "--max-tokens", "2"],
        ["generate", "{model}", "--prompt", "Once", "--max-tokens", "2", "--layout", "tp2"],
        ["evaluate", "{model}", "--data", "{text}", "--no-xz"],
        ["inspect", "{model}"],
        ["plan", "{model}", "--cluster", "1xa100-80", "--sequence", "64", "--batch", "1", "--layout", "dp1"],
        ["plan", "{recipe}", "--cluster", "1xa100-80", "--layout", "dp1"],
        ["train", "{recipe}"],
        ["verify", "--layout", "dp1", "--model", "{model}"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[1].strip('{}')} {'split' if 'tp2' in arguments else ''}".strip(),
)
def test_ignored_code_and_fields_are_one_warning_line_each(
    arguments: list[str], foreign: Path, tmp_path: Path, command_line: Callable[..., Outcome], monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "recipe.toml").write_text(
        f'[model]\nfrom = "{foreign}"\nload_weights = true\n[data]\nsource = "text.txt"\nsequence = 32\n'
        "validation_fraction = 0.0\n[train]\nsteps = 1\nbatch = 1\nlearning_rate = 1e-3\n"
    )
    places = {"model": foreign, "text": tmp_path / "text.txt", "recipe": tmp_path / "recipe.toml"}
    outcome = command_line(*(argument.format(**places) for argument in arguments))
    assert outcome.code == 0, outcome.errors
    lines = [line for line in outcome.errors.splitlines() if "warning" in line.lower() and "config.json" in line]
    where = f"meshwright: warning: {foreign}/config.json: "
    assert [line.removeprefix(where)[:12] for line in sorted(lines)] == ['"auto_map": ', "unknown llam"], outcome.errors
