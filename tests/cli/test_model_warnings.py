"""Every command that reads a model's configuration warns in one line about ignored fields and code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import ModelWarning, UserError
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
        ["plan", "{model}", "--serve", "--layout", "dp1", "--device", "cpu"],
        ["train", "{recipe}"],
        ["launch", "{recipe}", "--torchrun"],
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
    assert warned_fields(outcome.errors, foreign) == BOTH, outcome.errors


BOTH = ['"auto_map": ', "unknown llam"]


def warned_fields(errors: str, foreign: Path) -> list[str]:
    """Return the sorted beginnings of the texts of the warnings about the model's config.json."""
    lines = [line for line in errors.splitlines() if "warning" in line.lower() and "config.json" in line]
    return [line.removeprefix(f"meshwright: warning: {foreign}/config.json: ")[:12] for line in sorted(lines)]


def test_serve_warns_before_it_is_ready(foreign: Path, command_line: Callable[..., Outcome], monkeypatch: Any):
    """The server ends where it would listen."""

    def listen(*_: object, **__: object) -> None:
        raise UserError("ended by the test")

    monkeypatch.setattr("meshwright.serving.serve.start_server", lambda modules: None)
    monkeypatch.setattr("meshwright.serving.http_server.open_socket", listen)
    outcome = command_line("serve", foreign, "--device", "cpu", "--port", "0")
    assert outcome.code == 2 and "ended by the test" in outcome.errors
    assert warned_fields(outcome.errors, foreign) == BOTH, outcome.errors


def test_load_in_python_warns(foreign: Path):
    with pytest.warns(ModelWarning) as warned:
        mw.load(foreign, device="cpu")
    assert sorted({str(each.message).removeprefix(f"{foreign}/config.json: ")[:12] for each in warned}) == BOTH
