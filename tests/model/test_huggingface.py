"""Model directories are interchangeable with transformers; a damaged one is a one-line error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from bench.shared.key_value_cache import KeyValueCache
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.errors import UserError
from meshwright.model import huggingface
from meshwright.model.huggingface import load_huggingface
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.spec.config_json import config_from_huggingface
from meshwright.spec.parameters import parameter_table

ODD = {
    "vocab_size": 499, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"sliding_window": 7, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {
    "vocab_size": 499, "n_embd": 48, "n_layer": 5, "n_head": 6, "n_positions": 64, "n_inner": 100, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ODD),
    "llama, tied": ("llama", {**ODD, "tie_word_embeddings": True}),
    "llama, one key-value head": ("llama", {**ODD, "num_key_value_heads": 1}),
    "llama, all key-value heads": ("llama", {**ODD, "num_key_value_heads": 6}),
    "llama, every bias": ("llama", {**ODD, "attention_bias": True, "mlp_bias": True}),
    "llama, gelu": ("llama", {**ODD, "hidden_act": "gelu_pytorch_tanh"}),
    "llama, linear": ("llama", {**ODD, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama, llama3": ("llama", {**ODD, "rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {**ODD, "rope_parameters": YARN}),
    "llama, yarn in full": (
        "llama",
        {**ODD, "rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5}},
    ),
    "mistral, short window": ("mistral", {**ODD, "sliding_window": 7}),
    "mistral, no window": ("mistral", {**ODD, "sliding_window": None}),
    "qwen2": ("qwen2", {key: value for key, value in ODD.items() if key != "head_dim"}),
    "qwen2, windows in some layers": (
        "qwen2",
        {**{key: value for key, value in ODD.items() if key != "head_dim"}, **WINDOWS, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", ODD),
    "qwen3, tied, biases, windows": (
        "qwen3",
        {**ODD, **WINDOWS, "max_window_layers": 0, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2, untied, exact gelu": ("gpt2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
}


def their_model(family: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """A random model of transformers; norms and biases are not at their neutral initial values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.3))
    return model


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 499, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small saved model that tests damage."""
    config = config_from_huggingface({**ODD, "model_type": "llama", "num_hidden_layers": 2})
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=0)
    save_huggingface(model, tmp_path)
    return tmp_path


@pytest.mark.parametrize(("family", "settings"), CASES.values(), ids=CASES)
def test_logits_match_transformers_in_both_directions(family: str, settings: dict[str, Any], tmp_path: Path):
    theirs = their_model(family, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = load_huggingface(tmp_path / "theirs")
    save_huggingface(ours, tmp_path / "ours")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = some_tokens()
    with torch.no_grad():
        want = theirs(tokens).logits
        assert want.std() > 0.1  # not a comparison of zeros
        torch.testing.assert_close(ours.logits(tokens), want, atol=1e-5, rtol=0)
        torch.testing.assert_close(back.eval()(tokens).logits, want, atol=1e-5, rtol=0)


def test_a_trained_model_prints_its_reference_text(shared_data: Path):
    directory = shared_data / "stories260k"
    model, config = load_huggingface(directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    whole, cached = [config.bos_token], [config.bos_token]
    cache = KeyValueCache(config, capacity=16)
    with torch.no_grad():
        for _ in range(200):
            whole.append(int(model.logits(torch.tensor([whole]))[0, -1].argmax()))
            cached.append(int(model.logits(torch.tensor([cached[-1:]]), cache=cache)[0, -1].argmax()))
    assert cached == whole
    assert tokenizer.decode(whole[1:]) == (directory / "greedy_200_tokens.txt").read_text()


def test_sharded_model_loads_here_and_in_transformers(saved: Path, tmp_path: Path):
    model, _ = load_huggingface(saved)
    sharded = tmp_path / "sharded"
    save_huggingface(model, sharded, largest_file_bytes=60_000)
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 2
    assert all((sharded / file).stat().st_size < 120_000 for file in files)
    tokens = some_tokens()
    again, _ = load_huggingface(sharded)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sharded).eval()
    with torch.no_grad():
        want = model.logits(tokens)
        assert torch.equal(again.logits(tokens), want)
        torch.testing.assert_close(theirs(tokens).logits, want, atol=1e-5, rtol=0)


def test_model_is_saved_in_requested_dtype_with_tokenizer(saved: Path, tmp_path: Path):
    (saved / "tokenizer.json").write_text("{}")
    model, _ = load_huggingface(saved)
    save_huggingface(model, tmp_path / "half", dtype=torch.bfloat16, tokenizer_from=saved)
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "half" / "generation_config.json").read_text()) == {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert (tmp_path / "half" / "tokenizer.json").read_text() == "{}"
    half, _ = load_huggingface(tmp_path / "half", dtype=torch.bfloat16)
    assert torch.equal(half.layers[1].mlp.up.weight, model.layers[1].mlp.up.weight.bfloat16())


def test_files_of_a_model_without_its_head_load(saved: Path, tmp_path: Path):
    config = transformers.GPT2Config(**GPT2)
    theirs = their_model("gpt2", GPT2)
    theirs.transformer.save_pretrained(tmp_path / "bare")
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    assert "wte.weight" in tensors
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask buffer, as in GPT-2's first files
    save_file(tensors, tmp_path / "bare" / "model.safetensors")
    config.save_pretrained(tmp_path / "bare")
    ours, _ = load_huggingface(tmp_path / "bare")
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=0)


def rewrite(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def in_two_files(directory: Path, change: Any = lambda index, first, second: None) -> None:
    """The model in two files with an index; `change` edits them before they are written."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    first, second = ({n: t for at, (n, t) in enumerate(sorted(tensors.items())) if at % 2 == odd} for odd in (0, 1))
    index = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    change(index, first, second)
    save_file(first, directory / "a.safetensors")
    save_file(second, directory / "b.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def index_that_repeats(directory: Path) -> None:
    in_two_files(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('{"weight_map": {', f'{{"weight_map": {{"{NAME}": "a.safetensors", '))


def spoiled(value: float, at: int) -> Any:
    return lambda directory: rewrite(directory, lambda tensors: tensors[NAME].view(-1)[at].fill_(value))


def retyped(dtype: torch.dtype) -> Any:
    return lambda directory: rewrite(directory, lambda tensors: tensors.update({NAME: tensors[NAME].to(dtype)}))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


NAME = "model.layers.1.mlp.up_proj.weight"


def in_place(path: Path) -> Path:
    """The file, empty."""
    path.write_bytes(b"")
    return path


DAMAGES = {
    "missing": (lambda at: rewrite(at, lambda t: t.pop(NAME)), [NAME, r"\[100, 48\]", "missing"]),
    "several missing": (
        lambda at: rewrite(at, lambda t: [t.pop(name) for name in sorted(t)[:5]]),
        [r"missing", r"embed_tokens.weight \[499, 48\]; .*; .* and 2 more is missing"],
    ),
    "left over": (
        lambda at: rewrite(at, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)})),
        ["model.layers.2.mlp.up_proj.weight", "no place"],
    ),
    "shape": (
        lambda at: rewrite(at, lambda t: t.update({NAME: torch.ones(100, 47)})),
        ["model.safetensors", NAME, r"\[100, 47\]", r"\[100, 48\]"],
    ),
    "cut": (lambda at: cut(at / "model.safetensors", 5000), ["model.safetensors", "cut or damaged"]),
    "empty": (lambda at: cut(at / "model.safetensors", 0), ["model.safetensors", "cut or damaged"]),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), ["no model.safetensors"]),
    "pickle": (
        lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
        ["pytorch_model.bin", "pickle", "safetensors"],
    ),
    "no configuration": (lambda at: (at / "config.json").unlink(), ["config.json"]),
    "index to nowhere": (
        lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-9.safetensors"}}'),
        ["index.json", "model-9.safetensors"],
    ),
    "index with a wrong file": (
        lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
        ["model.safetensors", "tensor a is missing"],
    ),
    "index out of the directory": (
        lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x/model.safetensors"}}'),
        ["index.json", "not in the directory"],
    ),
    "tensor in two files": (
        lambda at: in_two_files(at, lambda index, first, second: second.update({NAME: first[NAME]})),
        ["b.safetensors", NAME, "is in a.safetensors as well"],
    ),
    "tensor that the index leaves out": (
        lambda at: in_two_files(at, lambda index, first, second: index.pop(NAME)),
        ["a.safetensors", NAME, "is not in model.safetensors.index.json"],
    ),
    "tensor twice in the index": (index_that_repeats, ["index.json", NAME, "is in it twice"]),
    "NaN": (spoiled(float("nan"), 7), ["model.safetensors", NAME, "1 of 4,800 values that are NaN or infinite"]),
    "infinite": (spoiled(float("inf"), 0), ["model.safetensors", NAME, "1 of 4,800 values that are NaN or infinite"]),
    "minus infinite": (spoiled(-float("inf"), -1), ["model.safetensors", NAME, "NaN or infinite"]),
    "integers": (retyped(torch.int8), ["model.safetensors", NAME, "is of type I8; weights are F64, F32, BF16, F16"]),
    "booleans": (retyped(torch.bool), [NAME, "is of type BOOL; .* save the unquantized one"]),
    "floats of 8 bits": (retyped(torch.float8_e4m3fn), [NAME, "is of type F8_E4M3"]),
    "index of gigabytes": (
        lambda at: os.truncate(in_place(at / "model.safetensors.index.json"), 10**10),
        ["index.json: cannot be read: it has more than 67,108,864 bytes"],
    ),
    "no index": (lambda at: (at / "model.safetensors.index.json").write_text("[]"), ["index.json", "weight_map"]),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_directory_is_named_in_one_line(damage: Any, words: list[str], saved: Path):
    damage(saved)
    with pytest.raises(UserError) as caught:
        load_huggingface(saved)
    assert "\n" not in str(caught.value)
    assert str(saved) in str(caught.value)
    for word in words:
        assert caught.match(word)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_every_floating_type_are_read_and_checked(dtype: torch.dtype, saved: Path):
    rewrite(saved, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    load_huggingface(saved)
    spoiled(float("nan"), 7)(saved)
    with pytest.raises(UserError, match="1 of 4,800 values that are NaN or infinite"):
        load_huggingface(saved)


def test_model_split_into_two_files_loads_equally(saved: Path):
    whole = load_huggingface(saved)[0].state_dict()
    in_two_files(saved)
    for name, value in load_huggingface(saved)[0].state_dict().items():
        assert torch.equal(value, whole[name])


def test_a_file_is_not_a_directory(tmp_path: Path):
    (tmp_path / "model").write_text("")
    with pytest.raises(UserError, match="is a file; a Hugging Face model directory is needed"):
        load_huggingface(tmp_path / "model")
    with pytest.raises(UserError, match="does not exist"):
        load_huggingface(tmp_path / "nowhere")


def test_files_are_checked_before_the_model_is_allocated(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface, "Transformer", lambda *given, **options: pytest.fail("a model was allocated"))
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 20}))
    with pytest.raises(UserError, match="by config.json"):
        load_huggingface(saved)
