"""Chat templates as publishers write them, with the special tokens that each needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


class Style(NamedTuple):
    """A chat template, its special tokens, and whether it accepts a system message or an initial assistant turn."""

    template: str
    bos: str | None
    eos: str
    special: tuple[str, ...]
    system: bool = True


STYLES = {
    "chatml": Style(  # Qwen 2
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        None,
        "<|im_end|>",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
    "llama-2": Style(
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
        "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
        "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        "<s>",
        "</s>",
        ("<s>", "</s>"),
    ),
    "llama-3": Style(
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "zephyr": Style(
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        "<s>",
        "</s>",
        ("<s>", "</s>"),
    ),
    "gemma": Style(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        "<bos>",
        "<eos>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        system=False,
    ),
    "marked": Style(  # with {% generation %}, as SmolLM 3
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content | trim + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
        "{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        None,
        "<|im_end|>",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
}

TEXT = "The quick brown fox jumps over the lazy dog; a user asks and the assistant answers with what it knows.\n" * 20


def write_tokenizer(directory: Path, style: Style, kind: str = "byte-level") -> Path:
    """A tokenizer of this style as a Hugging Face directory: byte-level BPE, or in the form of SentencePiece."""
    from transformers import PreTrainedTokenizerFast

    special = [AddedToken(token, special=True, normalized=False) for token in style.special]
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator([TEXT], trainer)
    if kind != "byte-level":  # byte fallback: a token for each byte
        learnt = json.loads(tokenizer.to_str())["model"]
        tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
        merges = [tuple(merge) for merge in learnt["merges"]]
        vocab = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace(prepend_scheme="first")]
        )
    tokenizer.add_special_tokens(special)
    named = {"eos_token": style.eos} | ({"bos_token": style.bos} if style.bos else {})
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=style.template, **named)
    theirs.save_pretrained(directory)
    return directory
