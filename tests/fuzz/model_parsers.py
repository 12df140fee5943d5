"""Readers of recipes, layouts, models, tokenizers, chat templates and records for `tests.fuzz.parsers`, and valid
inputs of each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from meshwright.data.records.template_process import RenderProcess
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import get_limit
from meshwright.names import SCHEDULES
from tests.conftest import TINY_RECIPE
from tests.fuzz.inputs import Inputs, decode, one_of, spoiled, spoiled_json, write_input

# --- recipes and layouts


def read_recipe(data: bytes, directory: Path) -> None:
    from meshwright.recipe import load_recipe, load_recipe_text

    recipe = load_recipe(write_input(directory, "recipe.toml", data))
    assert load_recipe_text(recipe.to_toml(), "again") == recipe


def recipe_keys() -> list[bytes]:
    from meshwright.recipe import SCHEMA

    return [f"{key}=".encode() for key in SCHEMA.keys]


def read_overrides(data: bytes, directory: Path) -> None:
    from meshwright.recipe import load_recipe, load_recipe_text

    path = directory / "recipe.toml"
    if not path.exists():
        path.write_text(TINY_RECIPE)
    recipe = load_recipe(path, decode(data).split("\n"))
    assert load_recipe_text(recipe.to_toml(), "again") == recipe


OVERRIDES = (
    b"train.steps=100\nlayout=dp2 zero1\nmodel.hidden=64", b'data.sources=[{path="a", weight=1.0}]\nrun.name=5',
    b"train.learning_rate=1e-3\ntrack.to=[]\ncheckpoint.every=3", b'model={preset="llama-tiny"}\ndata.tokenizer="bpe"',
)  # fmt: skip


def read_layout(data: bytes, directory: Path) -> None:
    layout = Layout.parse(decode(data))
    assert Layout.parse(str(layout)) == layout


LAYOUTS = (
    b"dp4 zero1 tp2 cp2 pp4:zb-v mb8 ep2 ac:selective bf16", b"dp4 zero3 hs2 mb2", b"cp2:ulysses tp2:nosp fp32", b"dp1",
    b"pp2:interleaved:3 mb8 offload:cpu", b"pp4:@FILE mb8", b"pp2:@/dev/zero mb2",
    b"dp8 ep4:etp2 tp2 fp8", b"pp4:dualpipe mb16 ac:full",
)  # fmt: skip
LAYOUT_WORDS = [f"pp2:{name}".encode() for name in SCHEDULES] + [
    b"dp2 ", b" tp2", b"mb4", b":2", b"zero2 ", b"99999999999", b"hs2 ", b"ep2", b":etp2", b"ac:", b"offload:nvme",
    b"fp16",
]  # fmt: skip


# --- models


@cache
def configs() -> list[dict[str, Any]]:
    from meshwright.spec.config_json import config_to_huggingface
    from meshwright.spec.presets import PRESETS

    names = ("llama-tiny", "mistral-tiny", "qwen3-tiny", "gpt2", "mixtral-8x7b-v0.1", "gemma-2-2b", "llama-3.1-8b")
    configs = [PRESETS[name].config for name in names if name in PRESETS]
    found = [config_to_huggingface(config) for config in configs if not config.planning_only]
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 24.0, "original_max_position_embeddings": 16}
    return [
        *found,
        {**found[0], "rope_scaling": yarn},
        {**found[0], "architectures": ["BertModel"], "model_type": "bert"},
    ]


def config_words() -> list[str]:
    from meshwright.spec.config_fields import get_field_table
    from meshwright.spec.families import FAMILIES

    tables = [get_field_table(name) for name in FAMILIES]
    return sorted({name for one in tables for name in (*one.read, *one.neutral)} | {"quantization_config", *FAMILIES})


def read_config(data: bytes, directory: Path) -> None:
    from meshwright.spec.config_json import config_from_huggingface, config_from_path, config_to_huggingface

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_from_path(write_input(directory, "config.json", data))
        if not config.planning_only:
            assert config_from_huggingface(config_to_huggingface(config)) == config


def safetensors(tensors: dict[str, Any]) -> bytes:
    from safetensors.numpy import save

    return bytes(save(tensors))


def weights() -> Inputs:
    import numpy as np

    whole = safetensors({"a.weight": np.ones((3, 4), dtype="float32"), "b": np.zeros(5, dtype="float16")})
    begin = 8 + int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8:begin]), whole[begin:]
    huge = {**header, "b": {**header["b"], "shape": [10**6] * 20_000}}
    headers = spoiled_json([*[header] * 200, huge], ["F32", "BF16", "F4", "dtype"])

    def framed(random: Random) -> bytes:
        text = headers(random)
        return len(text).to_bytes(8, "little") + text + body

    return one_of(framed, spoiled([whole], [b"F8_E4M3"]))


def read_tensors(directory: Path, path: Path) -> None:
    """Read as `inspect` does and as a model loader does."""
    from meshwright.inspection.report import inspect_model
    from meshwright.model.checkpoint_files import CheckpointFiles

    refused: UserError | None = None
    try:
        inspect_model(path)
    except UserError as error:
        refused = error
    files = CheckpointFiles(directory)
    for name in sorted(files.names):
        files.shape(name)
        files.read_weights(name)
    if refused is not None:
        raise refused


def read_weight_file(data: bytes, directory: Path) -> None:
    read_tensors(directory, write_input(directory, "model.safetensors", data))


INDEX = {
    "metadata": {"total_size": 68},
    "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"},
}


def read_index(data: bytes, directory: Path) -> None:
    import numpy as np

    if not (directory / "1.safetensors").exists():
        one = np.ones((3, 4), dtype="float32")
        write_input(directory, "1.safetensors", safetensors({"a": one}))
        write_input(directory, "2.safetensors", safetensors({"b": one, "c": one}))
    read_tensors(directory, write_input(directory, "model.safetensors.index.json", data))


# --- tokenizers, templates and records


@cache
def tokenizers() -> list[dict[str, Any]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["a mesh of ranks", "one mesh of many"], trainer)
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), ("me", -3.0)], 0))
    unigram.add_special_tokens(["</s>"])
    return [json.loads(each.to_str()) for each in (tokenizer, unigram)]


def read_tokenizer(data: bytes, directory: Path) -> None:
    from meshwright.data.tokenizers.tokenizer import find_tokenizer

    write_input(directory, "tokenizer.json", data)
    found = find_tokenizer(str(directory))
    assert found is not None
    tokenizer = found.load()
    (ids,) = tokenizer.encode(["a mesh of ranks: é"])
    tokenizer.decode(ids)


TOKENIZER_CONFIG = {
    "eos_token": "</s>", "bos_token": {"content": "</s>", "special": True}, "additional_special_tokens": ["<unk>"],
    "chat_template": [{"name": "default", "template": "{{ messages }}"}], "model_max_length": 1000,
}  # fmt: skip


def read_tokenizer_config(data: bytes, directory: Path) -> None:
    from meshwright.data.tokenizers.tokenizer import find_tokenizer

    if not (directory / "tokenizer.json").exists():
        write_input(directory, "tokenizer.json", json.dumps(tokenizers()[0]).encode())
    write_input(directory, "tokenizer_config.json", data)
    found = find_tokenizer(str(directory))
    assert found is not None
    found.load()
    found.list_named_tokens()
    assert found.chat_template is None or isinstance(found.chat_template, str)


TEMPLATES = (
    b"{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    b"{% if add_generation_prompt %}<|a|>{% endif %}",
    b"{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}"
    b"{% endgeneration %}{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}",
    b"{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}"
    b"{% endfor %}{{ raise_exception('no') if ns.n > 9 }}",
)
TEMPLATE_WORDS = (
    b"{{ messages }}", b"{% for x in messages %}", b"{% endfor %}", b"{% if ", b"{% generation %}",
    b"{% endgeneration %}",
    b"{{ 1 / 0 }}", b"{{ x.y.z }}", b"| upper", b"| tojson", b"{% macro f() %}", b"{% include 'a' %}", b"{{ [1] * 9 }}",
    b"{{ messages[9] }}", b"{% set a = ", b"range(3)", b"strftime_now('%Y')", b"raise_exception('a')",
    b".__class__", b"{#",
)  # fmt: skip


class SharedProcess(RenderProcess):
    """Template rendered in the subprocess of the previous template: a new process takes 0.2 s to start."""

    alive: RenderProcess | None = None

    def _start(self) -> dict[str, Any]:
        if (before := SharedProcess.alive) is None or before._process is None or before._process.poll() is not None:
            SharedProcess.alive = before = RenderProcess("", {})
        self._process, self._owner = before._process, before._owner
        return self._send_request(self._first)

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            super()._stop()


def read_template(data: bytes, directory: Path) -> None:
    from meshwright.data.records import chat_template
    from meshwright.data.records.messages import Message

    template = chat_template.ChatTemplate(
        decode(data), {"eos_token": "</s>", "bos_token": "<s>"}, frozenset(("</s>", "<s>")), "template"
    )
    with mock.patch.object(chat_template, "RenderProcess", SharedProcess):
        template.check()
    turns = (Message("user", "a mesh"), Message("assistant", "of ranks </s>"))
    template.render_with_spans(turns)
    template.render(turns[:1], prompt=True)


def template_refusals() -> tuple[type[Exception], ...]:
    from meshwright.data.records.chat_template import TemplateError

    return (UserError, TemplateError)


RECORDS: dict[str, list[dict[str, Any]]] = {
    "instruction": [
        {"instruction": "Name it.", "output": "A mesh."},
        {"instruction": "Add.", "input": "1 1", "output": "2", "id": 7},
    ],
    "chat": [
        {"messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]},
        {"conversations": [{"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Hi."}]},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
                {"role": "user", "content": "Hello."},
                {"role": "assistant", "content": "Hi."},
            ]
        },
    ],
    "preference": [
        {"prompt": "Say.", "chosen": "Yes.", "rejected": "No."},
        {
            "chosen": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "No."}],
        },
    ],
}


def read_records(kind: str, form: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, directory: Path) -> None:
        from meshwright.data.records.conversations import RecordFormat
        from meshwright.data.sources.reading import Reader
        from meshwright.data.sources.resolution import SourceFile

        path = write_input(directory, f"records.{form}", data)
        for document in Reader(records=RecordFormat(kind)).read_documents(SourceFile(path.name, path, form, True)):
            assert document.example is not None

    return read


def record_inputs(kind: str, form: str) -> Callable[[], Inputs]:
    if form == "json":
        return lambda: spoiled_json([RECORDS[kind]], ["role", "content", "user", "system", "from", "value"])
    lines = b"\n".join(json.dumps(each).encode() for each in RECORDS[kind])
    return lambda: one_of(
        spoiled([lines], [b'"role"', b'"assistant"', b"}\n{"]), spoiled_json(RECORDS[kind], ["role", "content", "user"])
    )


def read_rows(data: bytes, directory: Path) -> None:
    from meshwright.data.records.exchanges import iterate_records, split_exchange

    for where, record in iterate_records(write_input(directory, "rows.jsonl", data)):
        split_exchange(record, where)


SPECIAL_TOKENS_MAP = {"eos_token": {"content": "</s>", "special": True}, "unk_token": "<unk>"}


def read_special_tokens_map(data: bytes, directory: Path) -> None:
    write_input(directory, "special_tokens_map.json", data)
    read_tokenizer_config(b"{}", directory)


def read_generation_config(data: bytes, directory: Path) -> None:
    from meshwright.serving.prompts import read_end_tokens
    from meshwright.spec.config_json import config_from_huggingface

    write_input(directory, "generation_config.json", data)
    read_tokenizer_config(b"{}", directory)
    read_end_tokens(directory, config_from_huggingface(configs()[0]))


def read_token_count(data: bytes, directory: Path) -> None:
    from meshwright.planner.models import tokenizer_vocabulary

    assert 0 < tokenizer_vocabulary(str(write_input(directory, "tokenizer.json", data))) <= get_limit("vocabulary")


def read_blocked_words(data: bytes, directory: Path) -> None:
    from meshwright.data.cleaning.blocked_words import BlockedWords

    BlockedWords(str(write_input(directory, "words.txt", data))).find_blocked("One mesh of ranks.")
