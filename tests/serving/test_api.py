"""`load`, `Model.generate` and `Model.stream`: offline batches through the engine."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

import meshwright as mw
from meshwright.data.tokenizers.tokenizer import write_tokenizer
from meshwright.errors import UserError
from meshwright.serving.api import Generation
from meshwright.serving.protocol.bodies import CompletionBody, parse_body
from meshwright.serving.protocol.jobs import build_job
from meshwright.spec.presets import preset
from tests.serving.small_models import small_config, write_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes with 40 positions, which puts its end token before a text."""
    config = small_config("mistral-tiny", max_positions=40, sliding_window=16, tied=False)
    return write_model(tmp_path_factory.mktemp("api") / "model", config)


@pytest.fixture(scope="module")
def model(model_directory: Path) -> mw.Model:
    return mw.load(model_directory, device="cpu")


def test_load_without_compiler_says_that_it_computes_in_plain_torch(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    mw.load(model_directory, device="cpu", log=lines.append)
    assert len(lines) == 1 and lines[0].startswith("warning: computing in plain torch, many times slower"), lines
    with pytest.raises(UserError, match="needs the compiled kernels, and /bin/false ended with exit code 1"):
        mw.load(write_model(tmp_path / "experts", small_config("mixtral-tiny", experts=4)), "tp2 ep2")


@pytest.fixture
def copy(model_directory: Path, tmp_path: Path) -> Path:
    """A copy of the model to change."""
    return shutil.copytree(model_directory, tmp_path / "model")


def test_trained_model_generates_reference_story(shared_data: Path):
    stories = mw.load(shared_data / "stories260k", device="cpu")
    want = (shared_data / "stories260k" / "greedy_200_tokens.txt").read_text()
    pieces = list(stories.stream("", max_tokens=200))
    assert "".join(pieces) == want
    assert len(pieces) > 100
    begun = "Once upon a time, there was a little girl"
    half, *_ = stories.generate([begun, "One day"], max_tokens=20)
    assert want.startswith(half.prompt + half.text)
    assert half.text.startswith(" named Lily.")


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "seed": 5}], ids=str)
def test_batched_prompt_is_answered_as_alone(model: mw.Model, options: dict[str, float]):
    prompts = ["def f", "x" * 20, [104, 105]]
    together = model.generate(prompts, max_tokens=12, ignore_eos=True, **options)
    for prompt, answer in zip(prompts, together, strict=True):
        assert model.generate([prompt], max_tokens=12, ignore_eos=True, **options)[0].tokens == answer.tokens
        assert len(answer.tokens) == 12
    assert [answer.prompt for answer in together] == ["def f", "x" * 20, "hi"]


def test_seed_determines_text(model: mw.Model):
    texts = [model.generate("x", max_tokens=20, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def end_where(directory: Path, place: int) -> tuple[mw.Model, Generation]:
    """A model for which the token that comes at `place` ends a text, and the answer without that."""
    generation = mw.load(directory, device="cpu").generate("x", max_tokens=20)
    ends = {"eos_token_id": [300, generation.tokens[place]]}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return mw.load(directory, device="cpu"), generation


def test_end_token_ends_text_and_is_excluded(copy: Path):
    model, before = end_where(copy, 3)
    after = model.generate("x", max_tokens=20)
    first = before.tokens.index(before.tokens[3])
    assert after.tokens == before.tokens[:first]
    assert after.stopped == "end"
    assert model.generate("x", max_tokens=20, ignore_eos=True).tokens == before.tokens


def test_immediate_end_token_gives_empty_text(copy: Path):
    model, _ = end_where(copy, 0)
    generation = model.generate("x", max_tokens=20)
    assert (generation.tokens, generation.text, generation.stopped) == ([], "", "end")
    assert generation.seconds_to_first_token > 0


def test_generation_reports_token_counts_and_times(model: mw.Model):
    generation = model.generate("xyz", max_tokens=10)
    assert generation.prompt_tokens == 4  # with the start token
    assert len(generation.tokens) == 10
    assert generation.stopped == "length"
    assert generation.seconds_to_first_token > 0
    assert generation.tokens_per_second > 1


def test_text_ends_at_the_models_last_position(model: mw.Model):
    generation = model.generate("x" * 30, max_tokens=100)
    assert generation.prompt_tokens + len(generation.tokens) == 40
    assert generation.stopped == "context"


def test_prompt_without_space_for_one_token_is_refused(model: mw.Model):
    assert len(model.generate("x" * 38).tokens) == 1
    with pytest.raises(UserError, match="40 tokens with its start token, and the model 40 positions"):
        model.generate("x" * 39)


def test_unfinished_stream_refuses_another_call(model: mw.Model):
    stream = model.stream("def ", max_tokens=8)
    first = next(stream)
    with pytest.raises(UserError, match="unfinished stream"):
        model.generate("import ", max_tokens=2)
    assert first + "".join(stream) == model.generate("def ", max_tokens=8).text


def test_further_answers_are_reported_like_the_first(model: mw.Model):
    found = model.generate("def ", max_tokens=3, n=2, temperature=1.0, seed=1)
    (other,) = found.to_json_dict()["others"]
    assert other.keys() == found.to_json_dict().keys() and other["tokens"] == 3
    with pytest.raises(UserError, match="logprobs 2.5: should be a valid integer"):
        model.generate("def ", logprobs=2.5)


def test_abandoned_stream_leaves_model_usable(model: mw.Model):
    expected = model.generate("abc", max_tokens=8).tokens
    pieces = model.stream("a", max_tokens=30)
    next(pieces)
    del pieces
    assert model.generate("abc", max_tokens=8).tokens == expected


OPTIONS = {
    "temperature": 1.1, "top_p": 0.95, "seed": 3, "n": 3, "max_tokens": 18, "min_tokens": 4, "logprobs": 2,
    "logit_bias": {104: 2.5, 101: -100}, "presence_penalty": 0.5, "ignore_eos": True,
}  # fmt: skip


def answer_as_server(model: mw.Model, prompt: str, options: dict[str, Any]) -> list[Generation]:
    """The choices of an HTTP body with the same options, from the same engine."""
    bias = {str(token): value for token, value in options["logit_bias"].items()}
    body = parse_body(CompletionBody, json.dumps(options | {"prompt": prompt, "logit_bias": bias}).encode())
    job = build_job(body, model._prompts, "m", "name")
    choices = {choice.request.id: (choice, Generation(prompt)) for choice in job.choices}
    requests = [choice.request for choice in job.choices]
    for output in model._run(requests, lambda name: choices[name][0].finish_reason is not None):
        choice, generation = choices[output.request_id]
        if choice.finish_reason is None:
            piece = choice.push(output)
            generation.text += piece.text
            generation.logprobs += [token.result for token in piece.tokens]
            generation.stopped = "stop" if choice.finish_reason == "stop" else "length"
    return [generation for _, generation in choices.values()]


def test_options_give_the_tokens_of_the_server(model: mw.Model):
    text = model.generate("def f", **OPTIONS).text
    for stop in ([], text[5:8], ["not there", text[5:8]]):
        first = model.generate("def f", stop=stop, **OPTIONS)
        server = answer_as_server(model, "def f", OPTIONS | {"stop": stop})
        assert len({tuple(one.tokens) for one in (first, *first.others)}) == len(server) == 3
        for mine, other in zip([first, *first.others], server, strict=True):
            assert (mine.text, mine.logprobs, mine.stopped) == (other.text, other.logprobs, other.stopped)
            assert mine.tokens == [result.token for result in mine.logprobs]
            assert all(len(result.top) == 2 for result in mine.logprobs)
        assert first.stopped == ("stop" if stop else "length")
        assert first.text == (text[: text.index(text[5:8])] if stop else text)


def test_stop_string_ends_generation_and_stream(model: mw.Model, monkeypatch: pytest.MonkeyPatch):
    options = {"max_tokens": 30, "ignore_eos": True}
    text = model.generate("x", **options).text
    engine, steps = model._run.args[0], list[int]()  # type: ignore[attr-defined]
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: steps.append(1) or step())
    pieces = model.stream("x", stop=text[2:4], **options)
    assert "".join(pieces) == pieces.generation.text == text[: text.index(text[2:4])]
    assert pieces.generation.stopped == "stop" and len(steps) < 12
    assert model.generate(["x", "xy"], **options)[0].text == text
    with pytest.raises(UserError, match="n 2: should be 1, as a stream has one answer"):
        model.stream("x", n=2)


def test_numbers_of_tokens_and_answers_may_be_numpy_integers(model: mw.Model):
    options: dict[str, Any] = {"max_tokens": np.int64(3), "n": np.uint8(2)}
    found = model.generate("x", **options)
    assert len(found.others) == 1 and found.tokens == model.generate("x", max_tokens=3).tokens


def test_prompts_may_be_numpy_integers(model: mw.Model):
    ids = [65, 66, 67]
    prompts: list[Any] = [ids, [*np.array(ids)], np.array(ids, np.uint16), *np.array([ids, ids])]
    found = model.generate(prompts, max_tokens=3)
    assert len(found) == 5 and [each.tokens for each in found] == [found[0].tokens] * 5


@pytest.mark.parametrize("name", ["bytes", "bpe", "word", "character", "wordpiece", "unigram"])
def test_prompt_text_never_becomes_special_token(copy: Path, name: str):
    write_tokenizer(copy, name, 257, None, iter(["a b <|endoftext|> [UNK] <unk>"] * 9))
    model = mw.load(copy, device="cpu")
    end = Tokenizer.from_file(str(copy / "tokenizer.json")).token_to_id("<|endoftext|>")
    start, *tokens = model._encode("a <|endoftext|><|endoftext|> b", chat=False)
    assert start == 256 and end is not None and end not in tokens


def test_prompt_text_is_never_encoded_as_special_token(copy: Path):
    """As in SentencePiece's models, whose end is the most probable piece of all."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "</s>ab")]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(copy / "tokenizer.json"))
    tokens = mw.load(copy, device="cpu")._encode("a</s>b", chat=False)
    assert tokens[1:] == [tokenizer.token_to_id(letter) for letter in "a</s>b"]


def test_directory_without_generative_model_is_refused(model: mw.Model, copy: Path):
    for prompt, options, reason in (
        ("x", {"max_tokens": 0}, "max_tokens 0"),
        ("x", {"top_p": 2.0}, "top_p 2"),
        ("x", {"n": 0}, "n 0: should be 1 or more"),
        ("x", {"n": np.int64(129)}, "n 129 is too large: at most 128"),
        ("x", {"stop": ""}, "stop: should be a text"),
        ("x", {"stop": [3]}, "stop: should be a text"),
        ("x", {"logit_bias": [1]}, "logit_bias .1.: should be"),
        ("x", {"logit_bias": {999: 1.0}}, "logit_bias: token ID 999"),
        ("x", {"min_tokens": 300}, "min_tokens 300"),
        ("x", {"logprobs": -1}, "logprobs -1"),
        ("x", {"top_q": 2.0}, 'unknown option "top_q"; did you mean "top_'),
        ([257], {}, "token 257 is not in the model's vocabulary, 0 to 256"),
        ([], {}, "the prompt is empty"),
        (None, {}, "prompt: takes a text or a list of token IDs, not NoneType"),
        ([True, False], {}, "prompt: takes a text or a list of token IDs, not list"),
        (np.array([1.0]), {}, "prompt: takes a text or a list of token IDs, not ndarray"),
    ):
        with pytest.raises(UserError, match=reason):
            model.generate([prompt], **options)  # type: ignore[list-item, arg-type]
    sparse = (torch.eye(2, dtype=torch.int64).to_sparse(), torch.eye(2).to_sparse_csr(), torch.ones(2).to_sparse())
    without_values = torch.ones(2, dtype=torch.int64, device="meta")
    singles: tuple[Any, ...] = (
        *(5, np.array(5), torch.tensor(5), {"prompt": "x"}, b"x", bytearray(b"x"), memoryview(b"x")),
        *sparse, without_values, [without_values], [sparse[2]], [b"x"], [memoryview(b"x")],
    )  # fmt: skip
    for single in singles:
        kind = type(single[0] if isinstance(single, list) else single).__name__
        with pytest.raises(UserError, match=f"prompt: takes a text or a list of token IDs, not {kind}"):
            model.generate(single)
    (copy / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match="generation_config.json is not a JSON object"):
        mw.load(copy, device="cpu")
    (copy / "generation_config.json").unlink()
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json cannot be read as a tokenizer"):
        mw.load(copy, device="cpu")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json"):
        mw.load(copy, device="cpu")


def test_tokenizer_larger_than_model_vocabulary_is_refused(copy: Path, tmp_path: Path):
    (tmp_path / "large").mkdir()
    write_tokenizer(tmp_path / "large", "bpe", 300, None, iter(["many words, many merges " * 30]))
    shutil.copy(tmp_path / "large" / "tokenizer.json", copy / "tokenizer.json")
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    shutil.copy(tmp_path / "large" / "tokenizer_config.json", copy / "tokenizer_config.json")
    model = mw.load(copy, device="cpu")
    for chat in (False, True):
        with pytest.raises(UserError, match=r"token 2.. is not in the model's vocabulary, 0 to 256"):
            model.generate("many words, many merges", chat=chat)


def test_chat_without_template_asks_for_plain_prompt(model: mw.Model):
    with pytest.raises(
        UserError, match=r"template is missing.* give a plain prompt \(/v1/completions, without --chat\)"
    ):
        model.generate("Q", chat=True)


def test_encoder_is_refused(tmp_path: Path):
    from meshwright.checkpoint.model_directory import save_huggingface
    from meshwright.model.encoder import Encoder
    from meshwright.model.initialise import initialise
    from meshwright.spec.parameters import parameter_table

    config = dataclasses.replace(preset("bert-tiny"), layers=1)
    encoder = Encoder(config, dtype=torch.float32)
    initialise(encoder, parameter_table(config), seed=0)
    save_huggingface(encoder, tmp_path)
    with pytest.raises(UserError, match="bert is an encoder"):
        mw.load(tmp_path, device="cpu")
