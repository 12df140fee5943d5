"""Models of the serving benchmarks: random weights of known shapes, with a tokenizer of 32,000 pieces as SentencePiece
makes them, trained on the standard library's text.

A directory holds what every peer reads: config.json, model.safetensors in bfloat16, tokenizer.json, tokenizer.model.
It is made once, in the cache directory (`MESHWRIGHT_BENCH_CACHE`, else ~/.cache/meshwright-bench), from a seed.

    python bench/serving_models.py smollm-135m      # prints the directory; needs the package sentencepiece
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sysconfig
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("MESHWRIGHT_BENCH_CACHE", Path.home() / ".cache" / "meshwright-bench"))
VOCABULARY = 32_000
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SEED = 0
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm-135m": {
        **_LLAMA,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_LLAMA,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "tie_word_embeddings": True,
    },
}
"""Configurations of Hugging Face by name; `tiny` is for trying the benchmarks themselves."""


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a Llama."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, hidden)
    return shapes


def weights_read_per_token(name: str) -> int:
    """Elements of the matrices that decoding one token reads: all but an embedding that is not the head's matrix."""
    config = SHAPES[name]
    shapes = parameter_shapes(config)
    if not config["tie_word_embeddings"]:
        del shapes["model.embed_tokens.weight"]
    return sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """Normal weights of standard deviation 0.02 in bfloat16; norms are ones."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape).normal_(std=0.02, generator=generator).bfloat16()
        for name, shape in parameter_shapes(config).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(directory: Path) -> None:
    """A byte-fallback BPE model: tokenizer.model, and tokenizer.json from its pieces."""
    import sentencepiece

    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = directory / "text"
    with text.open("w") as stream:
        for path in files:
            stream.write(path.read_text(errors="replace"))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=1 << 20,
        num_threads=2,
        minloglevel=2,
    )
    text.unlink()
    (directory / "tokenizer.vocab").unlink()
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    write_tokenizer_json(directory, [model.id_to_piece(index) for index in range(VOCABULARY)])
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_tokenizer_json(directory: Path, pieces: list[str]) -> None:
    """The same pieces for the library tokenizers; two pieces merge in the order of the piece that they make."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    numbers = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for piece in pieces[3 + 256 :]:
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [pair for pair in splits if pair[0] in numbers and pair[1] in numbers]
        merges += sorted(found, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:3]])
    tokenizer.save(str(directory / "tokenizer.json"))


def model_directory(name: str) -> Path:
    """The directory of a model of `SHAPES`, made if it is not there."""
    directory = CACHE / "models" / name
    if not (directory / "config.json").exists():
        making = directory.with_name(f"{name}.{os.getpid()}")
        making.mkdir(parents=True)
        write_weights(making, SHAPES[name])
        tokenizers = CACHE / "models" / "tokenizer"
        if not tokenizers.exists():
            trained = tokenizers.with_name(f"tokenizer.{os.getpid()}")
            trained.mkdir()
            write_tokenizer(trained)
            trained.rename(tokenizers)
        shutil.copytree(tokenizers, making, dirs_exist_ok=True)
        (making / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
        shutil.rmtree(directory, ignore_errors=True)
        making.rename(directory)
    return directory


def random_prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Prompts of `tokens` token IDs, none of them a special token or a byte."""
    draw = random.Random(seed)
    return [[draw.randrange(259, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SHAPES)
    for name in parser.parse_args().names:
        print(model_directory(name))


if __name__ == "__main__":
    main()
