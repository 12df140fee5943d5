"""Generation from checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from meshwright.data.tokenizers.tokenizer import write_tokenizer
from meshwright.errors import UserError
from meshwright.model.huggingface import save_huggingface
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.serving.generate import Generation, Generator
from meshwright.serving.sampling import Sampling
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A random model over bytes, with 40 positions and a window of 16."""
    config = dataclasses.replace(
        preset("mistral-tiny"),
        vocabulary=257, max_positions=40, sliding_window=16, tied=False, bos_token=None, eos_token=256,
    )  # fmt: skip
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():  # answers that differ, and depend on what was read
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    save_huggingface(model, tmp_path / "model")
    write_tokenizer(tmp_path / "model", "bytes", 257, None, iter(()))
    return tmp_path / "model"


def test_a_trained_model_tells_its_reference_story(shared_data: Path):
    generator = Generator.from_directory(shared_data / "stories260k")
    want = (shared_data / "stories260k" / "greedy_200_tokens.txt").read_text()
    pieces = [piece for piece, _ in generator.stream("", max_tokens=200)]
    assert "".join(pieces) == want
    assert len(pieces) > 100
    assert generator.generate("", max_tokens=200, cached=False).text == want
    half = generator.generate("Once upon a time, there was a little girl", max_tokens=20)
    assert want.startswith(half.prompt + half.text)
    assert half.text.startswith(" named Lily.")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.3, top_k=50, top_p=0.95, seed=5)], ids=str)
def test_the_cache_changes_no_token(checkpoint: Path, sampling: Sampling):
    generator = Generator.from_directory(checkpoint, dtype=torch.float64)
    cached, whole = (generator.generate("def f", 30, sampling, cached=cached) for cached in (True, False))
    assert cached.tokens == whole.tokens
    assert len(cached.tokens) == 30


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path):
    ours = Generator.from_directory(checkpoint).generate("import", max_tokens=30)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).generate(
        torch.tensor([[256, *b"import"]]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ours.tokens == theirs[0, 7:].tolist()


def test_a_seed_fixes_the_text(checkpoint: Path):
    generator = Generator.from_directory(checkpoint)
    texts = [generator.generate("x", 20, Sampling(temperature=1.0, seed=seed)).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def end_where(checkpoint: Path, place: int) -> tuple[Generator, Generation]:
    """A generator for which the token that comes at `place` ends a text."""
    generation = Generator.from_directory(checkpoint).generate("x", 20)
    ends = {"eos_token_id": [300, generation.tokens[place]]}
    (checkpoint / "generation_config.json").write_text(json.dumps(ends))
    return Generator.from_directory(checkpoint), generation


def test_an_end_token_ends_the_text_and_is_no_part_of_it(checkpoint: Path):
    generator, before = end_where(checkpoint, 3)
    after = generator.generate("x", 20)
    first = before.tokens.index(before.tokens[3])
    assert after.tokens == before.tokens[:first]
    assert after.stopped == "end"


def test_an_end_at_once_is_an_empty_text(checkpoint: Path):
    generator, _ = end_where(checkpoint, 0)
    generation = generator.generate("x", 20)
    assert (generation.tokens, generation.text, generation.stopped) == ([], "", "end")
    assert generation.seconds_to_first_token > 0


def test_figures_are_those_of_the_run(checkpoint: Path):
    generation = Generator.from_directory(checkpoint).generate("xyz", max_tokens=10)
    assert generation.prompt_tokens == 4  # with the start token
    assert len(generation.tokens) == 10
    assert generation.stopped == "length"
    assert generation.seconds_to_first_token > 0
    assert generation.tokens_per_second > 1


def test_a_text_ends_with_the_models_positions(checkpoint: Path):
    generation = Generator.from_directory(checkpoint).generate("x" * 30, max_tokens=100)
    assert generation.prompt_tokens + len(generation.tokens) == 40
    assert generation.stopped == "context"


def test_a_prompt_without_room_for_a_token_is_refused(checkpoint: Path):
    generator = Generator.from_directory(checkpoint)
    assert len(generator.generate("x" * 38).tokens) == 1
    with pytest.raises(UserError, match="40 tokens with its start, and the model 40 positions"):
        generator.generate("x" * 39)


@pytest.mark.parametrize("name", ["bytes", "bpe", "word", "character", "wordpiece", "unigram"])
def test_a_prompt_never_spells_a_special_token(checkpoint: Path, name: str):
    write_tokenizer(checkpoint, name, 257, None, iter(["a b <|endoftext|> [UNK] <unk>"] * 9))
    generator = Generator.from_directory(checkpoint)
    end = generator.tokenizer.token_to_id("<|endoftext|>")
    start, *tokens = generator.encode("a <|endoftext|><|endoftext|> b")
    assert start == generator.start and end is not None and end not in tokens


def test_a_prompt_never_spells_a_special_token_that_is_a_piece_of_the_model(checkpoint: Path):
    """As in SentencePiece's models, whose end is the most probable piece of all."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "</s>ab")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    generator = Generator.from_directory(checkpoint)
    assert generator.encode("a</s>b")[1:] == [tokenizer.token_to_id(letter) for letter in "a</s>b"]


def test_what_cannot_be_generated_from_is_named(checkpoint: Path):
    with pytest.raises(UserError, match="max-tokens 0"):
        Generator.from_directory(checkpoint).generate("x", max_tokens=0)
    generator = Generator.from_directory(checkpoint)
    generator.start = None
    with pytest.raises(UserError, match="an empty prompt needs"):
        generator.generate("")
    (checkpoint / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match="generation_config.json is not a JSON object"):
        Generator.from_directory(checkpoint)
    (checkpoint / "generation_config.json").unlink()
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json is not a tokenizer"):
        Generator.from_directory(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json"):
        Generator.from_directory(checkpoint)


def test_a_tokenizer_with_more_tokens_than_the_model_is_named(checkpoint: Path, tmp_path: Path):
    (tmp_path / "large").mkdir()
    write_tokenizer(tmp_path / "large", "bpe", 300, None, iter(["many words, many merges " * 30]))
    shutil.copy(tmp_path / "large" / "tokenizer.json", checkpoint / "tokenizer.json")
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    shutil.copy(tmp_path / "large" / "tokenizer_config.json", checkpoint / "tokenizer_config.json")
    generator = Generator.from_directory(checkpoint)
    for chat in (False, True):
        with pytest.raises(UserError, match="the tokenizer gives token 2.., but the model's vocabulary has 257"):
            generator.generate("many words, many merges", chat=chat)


def test_a_model_without_a_chat_template_is_asked_for_a_text_to_continue(checkpoint: Path):
    with pytest.raises(UserError, match=r"without a chat template, .* give a text to be continued \(without --chat\)"):
        Generator.from_directory(checkpoint).generate("Q", chat=True)
