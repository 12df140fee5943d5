"""A model cut over stages and tensor-parallel ranks reads as it does on one device: same tokens, same loss."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.local import LocalRanks
from meshwright.data.tokenizers.tokenizer import write_tokenizer
from meshwright.errors import UserError
from meshwright.model.huggingface import load_huggingface, save_huggingface
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.inference import parse_inference_layout
from meshwright.serving.generate import Generator
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from tests.parallel import inference_cases as cases

LAYOUTS = ["pp4", "tp2 pp2:1f1b", "tp4:nosp"]
# A window and an untied head; a tied one, learned positions and biases; experts.
MODELS = {"mistral-tiny": {"tied": False, "sliding_window": 6}, "gpt2-tiny": {"tied": True}, "qwen3-moe-tiny": {}}


def write_model(name: str, directory: Path) -> Path:
    config = dataclasses.replace(
        preset(name), vocabulary=257, layers=5, max_positions=40, bos_token=256, eos_token=None, **MODELS[name]
    )
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():  # answers that differ, and depend on what was read
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    save_huggingface(model, directory)
    write_tokenizer(directory, "bytes", 257, None, iter(()))
    return directory


@pytest.fixture(scope="module")
def four() -> Iterator[LocalRanks]:
    with LocalRanks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_the_tokens_and_the_loss_of_one_device(four: LocalRanks, tmp_path: Path, name: str) -> None:
    directory = write_model(name, tmp_path / "model")
    alone = Generator.from_directory(directory, dtype=torch.float64, device="cpu")
    greedy, drawn = alone.generate(cases.PROMPT, 12), alone.generate(cases.PROMPT, 12, cases.DRAWN)
    assert len(set(drawn.tokens)) > 3 and greedy.tokens != drawn.tokens
    model, config = load_huggingface(directory, torch.float64)
    with torch.no_grad():
        loss = sum(float(model(*batch)) for batch in cases.batches(5, 257))
    whole = sum(parameter.numel() for parameter in model.parameters())
    layouts = [str(parse_inference_layout(text, config)) for text in LAYOUTS]
    ranks = four.run(cases.read, str(directory), layouts)
    for at, layout in enumerate(layouts):
        for result in (rank[at] for rank in ranks):
            assert result["greedy"] == greedy.tokens, layout
            assert result["uncached"] == greedy.tokens[:5], layout
            assert result["drawn"] == drawn.tokens, layout
            assert result["loss"] == pytest.approx(loss, rel=1e-10), layout
            assert result["held"] < (0.7 if "pp" in layout else 0.9) * whole
    assert ranks[0][0]["sites"] == {"pipeline.activations", "generation.token", "evaluation.loss"}


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp2 pp2", "run on tpN and ppN alone"),
        ("pp2:zb-v", "run on tpN and ppN alone"),
        ("pp8", "makes 8 stages, but the model has 5 layers"),
        ("tp3", "tp3 does not divide"),
        ("xx3", "unknown part"),
    ],
)
def test_other_layouts_are_refused_with_the_reason(layout: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_inference_layout(layout, dataclasses.replace(preset("mistral-tiny"), layers=5))


def test_commands_take_a_layout(command_line: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, text = write_model("mistral-tiny", tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text()[:2000])
    answers = []
    for layout in ([], ["--layout", "pp2"]):
        said = command_line(
            "generate", directory, "--prompt", "x", "--max-tokens", 8, "--json", "--device", "cpu", *layout
        )
        told = command_line("evaluate", directory, "--data", text, "--no-xz", "--json", "--device", "cpu", *layout)
        assert (said.code, told.code) == (0, 0), said.errors + told.errors
        answers.append((json.loads(said.output), json.loads(told.output)))
    (alone, loss), (split, split_loss) = answers
    for key in ("text", "tokens", "stopped", "prompt_tokens", "checkpoint"):
        assert alone[key] == split[key], key
    assert split_loss["loss"] == pytest.approx(loss["loss"], rel=1e-5) and split_loss["tokens"] == loss["tokens"]
    refused = command_line("generate", directory, "--prompt", "x", "--device", "cuda", "--layout", "pp2")
    assert refused.code == 2 and "leave one of them out" in refused.errors
