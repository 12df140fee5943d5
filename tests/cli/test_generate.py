"""`meshwright generate` on the command line."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPT = "Once upon a time, there was a little girl"
KEYS = {"schema", "text", "tokens", "seconds_to_first_token", "tokens_per_second"}


@pytest.fixture
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260k"


def test_prompt_is_continued_on_standard_output(command_line: Callable[..., Any], stories: Path):
    outcome = command_line("generate", stories, "--prompt", PROMPT, "--max-tokens", 12)
    story = (stories / "greedy_200_tokens.txt").read_text()
    assert outcome.code == 0
    assert story.startswith(outcome.output.rstrip("\n"))
    assert len(outcome.output) > len(PROMPT) + 20
    assert "12 tokens, the first after" in outcome.errors


def test_json_is_one_document_with_documented_keys(command_line: Callable[..., Any], stories: Path):
    outcome = command_line("generate", stories, "--prompt", PROMPT, "--max-tokens", 12, "--json")
    document = json.loads(outcome.output)
    assert document.keys() >= KEYS
    assert document["tokens"] == 12
    assert document["tokens_per_second"] > 0
    assert (stories / "greedy_200_tokens.txt").read_text().startswith(PROMPT + document["text"])


def test_prompt_is_read_from_standard_input(
    command_line: Callable[..., Any], stories: Path, monkeypatch: pytest.MonkeyPatch
):
    """One final newline is removed; the rest, a second one too, belongs to the prompt."""
    for given, prompt in ((PROMPT, PROMPT), (f"{PROMPT}\n", PROMPT), ("two\nlines, é\n\n", "two\nlines, é\n")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode()), encoding="ascii"))
        outcome = command_line("generate", stories, "--prompt", "-", "--max-tokens", 2, "--device", "cpu", "--json")
        assert json.loads(outcome.output)["prompt"] == prompt
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"good\xff"), encoding="utf-8"))
    outcome = command_line("generate", stories, "--prompt", "-")
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
    assert "--prompt -: standard input is not UTF-8 text (byte 4)" in outcome.errors


def test_chat_prompt_uses_the_chat_template(command_line: Callable[..., Any], stories: Path, tmp_path: Path):
    asked = ("--prompt", "there </s> was", "--chat", "--max-tokens", 3)
    outcome = command_line("generate", stories, *asked)
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
    assert "the model's chat template is missing" in outcome.errors
    model = tmp_path / "model"
    shutil.copytree(stories, model, copy_function=shutil.copyfile)
    template = "{{ bos_token }}{% for m in messages %}Once upon a time, {{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    answer = command_line("generate", model, *asked)
    plain = command_line("generate", stories, "--prompt", "Once upon a time, there </s> was", "--max-tokens", 3)
    assert plain.output == f"Once upon a time, there </s> was{answer.output}"


def test_chat_template_with_empty_output_is_refused(command_line: Callable[..., Any], stories: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(stories, model, copy_function=shutil.copyfile)
    for template, word in (
        ("", "the prompt is empty: it needs at least one token"),
        ("{{ 'x' * 10**10 }}", "needs more than 2 GiB"),
    ):
        (model / "chat_template.jinja").write_text(template)
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
        outcome = command_line("generate", model, "--prompt", "x", "--chat")
        assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
        assert word in outcome.errors


def test_seed_reproduces_the_text(command_line: Callable[..., Any], stories: Path):
    draw = ("generate", stories, "--prompt", PROMPT, "--max-tokens", 12, "--temperature", 1, "--top-p", 0.9, "--json")
    texts = [json.loads(command_line(*draw, "--seed", seed).output)["text"] for seed in (1, 1, 4)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--temperature", "-1"), "temperature -1"),
        (("--top-p", "2"), "top_p 2"),
        (("--max-tokens", "0"), "max_tokens 0"),
        (("--max-tokens", "1000000000000"), "max_tokens 1000000000000 is too large: at most 1,073,741,824"),
        (("--top-q", "2"), "did you mean --top-"),
        (("--device", "gpu"), '--device: unknown device "gpu"; did you mean "cpu"?'),
    ],
)
def test_mistake_is_one_line(command_line: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], word: str):
    """Options are checked before the model is looked for, so that no kernels are compiled for them."""
    outcome = command_line("generate", tmp_path / "missing", "--prompt", "x", *arguments)
    assert outcome.code == 2
    assert outcome.output == ""
    assert outcome.errors.startswith("meshwright: error: ")
    assert outcome.errors.count("\n") == 1
    assert word in outcome.errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is there")
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_missing_device_is_one_error_line(command_line: Callable[..., Any], stories: Path, command: str):
    given = ("--prompt", "x") if command == "generate" else ("--data", stories / "greedy_200_tokens.txt")
    outcome = command_line(command, stories, *given, "--device", "cuda")
    assert (outcome.code, outcome.output, outcome.errors.count("\n")) == (2, "", 1)
    assert 'device "cuda": this machine has no CUDA device' in outcome.errors


def test_directory_without_checkpoint_is_one_error_line(
    command_line: Callable[..., Any], stories: Path, tmp_path: Path
):
    for path, word in ((tmp_path / "none", "no such directory"), (tmp_path, "no checkpoint in it")):
        outcome = command_line("generate", path, "--prompt", "x")
        assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
        assert word in outcome.errors
    shutil.copytree(stories, tmp_path / "cut")
    for file in (tmp_path / "cut").iterdir():
        file.chmod(0o600)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    outcome = command_line("generate", tmp_path / "cut", "--prompt", "x")
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
    assert "model.safetensors" in outcome.errors
