"""Every command that takes a recipe takes overrides of it, and refuses them, in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.plumbing import split_overrides
from meshwright.errors import UserError
from tests.conftest import Outcome

COMMANDS = {
    "plan": ["plan", "{recipe}", "{overrides}", "--cluster", "8xa100-80"],
    "verify": ["verify", "{recipe}", "{overrides}"],
    "verify --model": ["verify", "{overrides}", "--layout", "dp1", "--model", "{recipe}"],
    "train": ["train", "{recipe}", "{overrides}"],
    "launch": ["launch", "--torchrun", "{recipe}", "{overrides}"],
    "data prepare": ["data", "prepare", "{recipe}", "{overrides}"],
    "data show": ["data", "show", "{recipe}", "{overrides}"],
    "data report": ["data", "report", "{recipe}", "{overrides}"],
    "data tokenizer": ["data", "tokenizer", "{recipe}", "{overrides}"],
}


def filled(arguments: list[str], recipe: Path, *overrides: str) -> list[str]:
    return [
        part for each in arguments for part in (overrides if each == "{overrides}" else [each.format(recipe=recipe)])
    ]


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=3", 'override "train.stepz=3": train.stepz: unknown key; did you mean train.steps?'),
        ("train.steps=none", 'override "train.steps=none": train.steps: should be a whole number, at least 1'),
        ("layout=dp2 zero9", 'override "layout=dp2 zero9": layout: zero9: zero takes 0, 1, 2 or 3'),
    ],
)
def test_invalid_override_is_refused_alike_by_every_command(
    arguments: list[str], override: str, said: str, tiny_recipe: Path, command_line: Callable[..., Outcome]
):
    outcome = command_line(*filled(arguments, tiny_recipe, override))
    assert outcome.code == 2 and said in outcome.errors and outcome.errors.count("\n") == 1, outcome.errors


def test_plan_prices_the_recipe_with_its_overrides(tiny_recipe: Path, command_line: Callable[..., Outcome]):
    def planned(*overrides: str) -> dict:
        outcome = command_line("plan", tiny_recipe, *overrides, "--cluster", "2xa100-80", "--json")
        assert outcome.code == 0, outcome.errors
        return json.loads(outcome.output)

    plain, more = planned(), planned("model.layers=4", "layout=dp2 zero1")
    assert more["recipe_layout"]["layout"].startswith("dp2 zero1")
    assert plain["model"]["parameters"] < more["model"]["parameters"]


def test_verify_proves_the_layout_of_the_override(tiny_recipe: Path, command_line: Callable[..., Outcome]):
    outcome = command_line("verify", tiny_recipe, "layout=dp2 zero1", "--json")
    assert outcome.code == 0, outcome.errors
    assert [each["layout"] for each in json.loads(outcome.output)["layouts"]] == ["dp2 zero1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "llama-tiny", "train.batch=8", "--cluster", "1xa100-80"], "needs a recipe (.toml); got llama-tiny"),
        (["verify", "layout=dp2"], "needs a recipe (.toml); got none"),
        (["evaluate", "runs/none", "train.batch=8", "--data", "book.txt"], "needs a recipe (.toml); got book.txt"),
        (["plan", "a.toml", "b.toml", "--cluster", "this"], 'unexpected argument "b.toml": give one name'),
        (
            ["plan", "a.toml", "train.batch=8", "b.toml", "--cluster", "this"],
            'unexpected argument "b.toml": give one name',
        ),
    ],
)
def test_overrides_without_recipe_are_refused(arguments: list[str], said: str, command_line: Callable[..., Outcome]):
    outcome = command_line(*arguments)
    assert outcome.code == 2 and said in outcome.errors and outcome.errors.count("\n") == 1, outcome.errors


def test_existing_file_named_like_override_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=3.toml").write_text("")
    assert split_overrides(["lr=3.toml", "train.steps=3"]) == ("lr=3.toml", ("train.steps=3",))
    with pytest.raises(UserError, match="give one name, then KEY=VALUE"):
        split_overrides(["a.toml", "b.toml"])
