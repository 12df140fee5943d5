"""Training on responses: prompts give no gradient, packing changes none, and the model gives the learned answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.shared.chat_templates import STYLES, write_tokenizer
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.data import NO_TARGET, PackedExamples, TokenBatch, prepare
from meshwright.data.records.messages import Message
from meshwright.data.records.template_inputs import Conversation
from meshwright.errors import UserError
from meshwright.evaluation.evaluation import run_evaluation
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.model.documents import Documents
from meshwright.model.huggingface import load_huggingface
from meshwright.model.transformer import Transformer
from meshwright.recipe import DataRecipe, ModelRecipe, Recipe
from meshwright.serving.api import load
from meshwright.serving.prompts import Prompts
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.config_json import config_from_path
from tests.training import training_cases as cases

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "é"]


def config(vocabulary: int = 700) -> ModelConfig:
    sizes = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "intermediate": 40, "max_positions": 128}
    return config_from_recipe(ModelRecipe(family="llama", vocabulary=vocabulary, tied=False, **sizes), 128, vocabulary)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return chats of one or two turns of random words, of very different lengths."""
    draw = random.Random(0)

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))

    def turns(number: int) -> list[dict[str, str]]:
        roles = ["user", "assistant"] * (1 + number % 2)
        return [{"role": role, "content": words()} for role in roles]

    return [{"messages": turns(number)} for number in range(count)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer that has a chat template, and chats.jsonl."""
    directory = tmp_path_factory.mktemp("chats")
    write_tokenizer(directory, STYLES["llama-3"])
    (directory / "chats.jsonl").write_text("\n".join(map(json.dumps, conversations(24))))
    return directory


def rows(chats: Path, **changes: Any) -> PackedExamples:
    """Return the whole training split."""
    settings = {"records": "chat", "sequence": 100, "validation_fraction": 0.0, **changes}
    recipe = DataRecipe(source=str(chats / "chats.jsonl"), tokenizer=str(chats), cache=str(chats / "cache"), **settings)
    split = prepare(recipe).split("train")
    assert isinstance(split, PackedExamples) and split.report["trained"] == 24
    return split


def everything(split: PackedExamples) -> TokenBatch:
    return split.read_batch(np.arange(split.sequences))


def model() -> Transformer:
    torch.manual_seed(0)
    made = Transformer(config(), dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return made


def loss_of(made: Transformer, batch: TokenBatch, targets: np.ndarray | None = None) -> torch.Tensor:
    """Return the sum of the token losses."""
    goals = torch.from_numpy(batch.targets if targets is None else targets)
    return made(torch.from_numpy(batch.tokens), goals, Documents.from_ids(batch.document_ids))


def gradients(made: Transformer, batch: TokenBatch, targets: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    made.zero_grad()
    loss_of(made, batch, targets).backward()
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


def test_tokens_of_prompts_give_exactly_no_gradient(chats: Path):
    """Changed prompt targets change no bit, and changed prompt tokens change no earlier prediction."""
    batch, made = everything(rows(chats)), model()
    prompt = batch.targets == NO_TARGET
    assert 0.2 < prompt.mean() < 0.9
    before = gradients(made, batch)

    at_scores: list[torch.Tensor] = []
    final = made.final_norm
    assert final is not None
    made._norm = lambda norm, x_BSH: _kept(type(norm).forward(norm, x_BSH), at_scores)  # type: ignore[method-assign]
    again = gradients(made, batch)
    assert all(torch.equal(again[name], value) for name, value in before.items())
    [gradient_BSH] = at_scores
    silent = torch.from_numpy(prompt)
    assert (gradient_BSH[silent] == 0).all()
    assert (gradient_BSH[~silent].abs().sum(dim=-1) > 0).all()

    # With loss on prompts, the gradient would differ by exactly theirs.
    whole = everything(rows(chats, train_on="all"))
    assert np.array_equal(whole.tokens, batch.tokens)
    only_prompts = np.where(prompt, whole.targets, NO_TARGET)
    assert (only_prompts != NO_TARGET).sum() > 100
    parts = gradients(made, batch, only_prompts)
    for name, value in gradients(made, whole).items():
        torch.testing.assert_close(before[name] + parts[name], value, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(before[name], value)


def _kept(x_BSH: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    x_BSH.register_hook(gradients.append)
    return x_BSH


def test_packed_examples_give_gradients_of_separate_examples(chats: Path):
    made = model()
    together, alone = rows(chats), rows(chats, pack=False)
    assert together.sequences <= 15 and alone.sequences == 24
    assert together.report["targets"] == alone.report["targets"]
    packed, single = gradients(made, everything(together)), gradients(made, everything(alone))
    for name, value in single.items():
        torch.testing.assert_close(packed[name], value, rtol=1e-9, atol=1e-9)
    open_rows = everything(rows(chats, document_mask=False))  # the comparison detects a missing mask
    assert not torch.allclose(gradients(made, open_rows)["embedding.weight"], single["embedding.weight"])


def test_loss_matches_transformers_with_minus_100_labels(chats: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = model()
    save_huggingface(made, tmp_path, dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(chats)
    assistant = tokenizer.encode("<|start_header_id|>assistant<|end_header_id|>\n\n", add_special_tokens=False)
    total, count = 0.0, 0
    for line in (chats / "chats.jsonl").read_text().splitlines():
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=True)["input_ids"]
        labels, answering = [], False
        for place, token in enumerate(ids):
            labels.append(token if answering else -100)
            if token == tokenizer.eos_token_id:
                answering = False
            elif ids[max(0, place + 1 - len(assistant)) : place + 1] == assistant:
                answering = True
        targets = sum(label != -100 for label in labels)
        with torch.no_grad():
            mean = theirs(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total, count = total + float(mean) * targets, count + targets
    batch = everything(rows(chats))
    assert batch.target_tokens == count
    assert float(loss_of(made, batch)) == pytest.approx(total, rel=1e-6)  # its losses are float32


COLOURS = ["red", "blue", "green", "pink", "black", "white", "brown", "grey"]
ANIMALS = ["cat", "dog", "cow", "pig", "hen", "fox", "owl", "bee", "ant", "bat"]


def instruction(animal: str, colour: str, verb: str) -> dict[str, str]:
    question, story = f"What color is the {animal}?", f"We {verb} a {colour} {animal}."
    return {"instruction": question, "input": story, "output": f"It is {colour}."}


def test_fine_tuned_model_answers_held_out_questions(shared_data: Path, tmp_path: Path):
    """Held out: pairs of animal and colour that are not in the training data."""
    stories = shared_data / "stories260k"
    pairs = [(animal, colour) for animal in ANIMALS for colour in COLOURS]
    random.Random(1).shuffle(pairs)
    for name, some in (("train", pairs[:64]), ("held_out", pairs[64:])):
        lines = [instruction(*pair, verb) for pair in some for verb in ("see", "find")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = {
        "model": {"from": str(stories), "load_weights": True},
        "data": {
            "source": str(tmp_path / "train.jsonl"),
            "records": "instruction",
            "sequence": 150,
            "validation_fraction": 0.0,
            "cache": str(tmp_path / "cache"),
        },
        "train": {"steps": 40, "batch": 8, "learning_rate": 3e-3, "warmup": 4, "weight_decay": 0.0},
    }
    [outcome] = cases.run_without_error(None, tmp_path, "dp1 fp32", **recipe)
    tuned = Path(outcome["result"]["checkpoint"])

    held_out = tmp_path / "held_out.toml"
    tables = cases.recipe(tmp_path, "dp1", **recipe).to_tables()
    tables["data"] |= {"source": str(tmp_path / "held_out.jsonl"), "validation_fraction": 0.99}
    held_out.write_text(Recipe.from_tables(tables).to_toml())
    base_loss, loss = (run_evaluation(directory, str(held_out))["loss"] for directory in (stories, tuned))
    assert base_loss > 1.5 and loss < 0.2 * base_loss

    model = load(tuned, device="cpu")
    right = 0
    for animal, colour in pairs[64:74]:
        asked = instruction(animal, colour, "see")
        answer = model.generate(f"{asked['instruction']}\n\n{asked['input']}", max_tokens=20, chat=True)
        assert answer.stopped == "end"
        right += answer.text.strip() == asked["output"]
    assert right >= 5, right


@pytest.fixture(scope="module")
def packed(chats: Path) -> dict[str, Any]:
    """Changes of a recipe that trains on the chats; a run of one device with them is in `chats`/one."""
    data = {"source": str(chats / "chats.jsonl"), "tokenizer": str(chats), "records": "chat", "sequence": 96}
    changes: dict[str, Any] = {
        "data": {**data, "validation_fraction": 0.2, "cache": str(chats / "cache")},
        "train": {"steps": 3, "batch": 4, "learning_rate": 1e-3, "validate_every": 2, "validation_sequences": 3},
    }
    cases.run_without_error(None, chats / "one", "dp1 fp32", **changes)
    return changes


@pytest.mark.parametrize("layout", ["dp2 zero2", "tp2", "cp2", "pp2 mb2"])
def test_packed_examples_train_equally_on_every_layout(
    chats: Path, packed: dict[str, Any], tmp_path: Path, two, layout: str
):
    cases.run_without_error(two, tmp_path / "two", f"{layout} fp32", **packed)
    ours, theirs = (
        [line[key] for line in cases.metrics(place) for key in ("loss", "validation_loss") if key in line]
        for place in (tmp_path / "two", chats / "one")
    )
    assert len(ours) == 3 + 2 and ours == pytest.approx(theirs, rel=1e-4)


def test_checkpoint_stores_its_chat_template(chats: Path, tmp_path: Path):
    from transformers import AutoTokenizer, GenerationConfig

    changes = {
        "data": {
            "source": str(chats / "chats.jsonl"),
            "tokenizer": str(chats),
            "records": "chat",
            "template": "instruction",
            "sequence": 120,
            "validation_fraction": 0.0,
            "cache": str(chats / "cache"),
        },
        "train": {"steps": 1, "batch": 2, "learning_rate": 1e-3},
    }
    heard: list[str] = []
    wanted = cases.recipe(tmp_path, "dp1 fp32", **changes)
    lines = list(prepare(wanted.data, wanted.run.seed, log=heard.append).format_packing_lines())
    [outcome] = cases.run_without_error(None, tmp_path, "dp1 fp32", **changes)
    assert [line for line in heard + outcome["said"] if " examples in " in line] == lines != [], "said once, by the run"
    checkpoint = Path(outcome["result"]["checkpoint"])
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": "What does <|eot_id|> do?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin_of_text|>### Instruction:\nWhat does <|eot_id|> do?\n\n### Response:\n"
    prompts = Prompts.from_directory(checkpoint, config_from_path(checkpoint), 120)
    tokens = prompts.encode_chat(Conversation([Message("user", "What does <|eot_id|> do?")]))
    assert theirs.decode(tokens) == text and tokens.count(theirs.eos_token_id) == 0
    ends = GenerationConfig.from_pretrained(checkpoint).eos_token_id
    assert theirs.eos_token_id in (ends if isinstance(ends, list) else [ends])


def test_loaded_weights_keep_their_tokenizer_unless_one_is_named():
    def tokenizer(model: dict[str, Any], **data: Any) -> str:
        tables = {
            "model": model,
            "data": {"source": "stdlib", "sequence": 8, **data},
            "train": {"steps": 1, "batch": 1, "learning_rate": 1e-3},
        }
        return Recipe.from_tables(tables).data.tokenizer

    assert tokenizer({"from": "some/model", "load_weights": True}) == "some/model"
    assert tokenizer({"from": "some/model", "load_weights": True}, tokenizer="other") == "other"
    assert tokenizer({"from": "some/model"}) == "bpe"


def test_padded_vocabulary_is_trained_and_too_small_one_refused(chats: Path, tmp_path: Path):
    data = {
        "source": str(chats / "chats.jsonl"),
        "records": "chat",
        "sequence": 96,
        "validation_fraction": 0.0,
        "cache": str(chats / "cache"),
    }
    for vocabulary in (700, 300):
        source = tmp_path / str(vocabulary)
        base = Transformer(config(vocabulary), dtype=torch.bfloat16)
        for parameter in base.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        save_huggingface(base, source, tokenizer_from=chats, largest_file_bytes=20_000)
        assert len(list(source.glob("*.safetensors"))) > 1
        changes: dict[str, Any] = {
            "model": {"from": str(source), "load_weights": True},
            "data": data,
            "train": {"steps": 1, "batch": 2, "learning_rate": 1e-3},
        }
        if vocabulary == 700:
            [outcome] = cases.run_without_error(None, tmp_path / "run700", "dp1 fp32", **changes)
            assert load_huggingface(outcome["result"]["checkpoint"])[1].vocabulary == 700
        else:
            with pytest.raises(UserError, match="model.vocabulary 300 is smaller than the tokenizer's"):
                check_recipe(cases.recipe(tmp_path / "run300", "dp1", **changes))
