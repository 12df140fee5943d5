"""Every parser of files and notations that a stranger may have written: valid inputs, and what reads them.

A reader raises one of its `refusals` in one line, or returns; where there is a printer, it checks that what was read,
printed and read again is equal.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from meshwright.errors import CheckFailed, UserError
from meshwright.layout import Layout
from meshwright.names import SCHEDULES
from tests.conftest import TINY_RECIPE
from tests.fuzz.inputs import spoiled, spoiled_json


class Parser(NamedTuple):
    """`inputs` makes inputs, `read(data, directory)` reads one; the directory is empty before the first of them."""

    inputs: Callable[[], st.SearchStrategy[bytes]]
    read: Callable[[bytes, Path], None]
    refusals: tuple[type[Exception], ...] = (UserError,)


def _written(directory: Path, name: str, data: bytes) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# --- recipes and layouts


def _recipe(data: bytes, directory: Path) -> None:
    from meshwright.recipe import load_recipe, load_recipe_text

    recipe = load_recipe(_written(directory, "recipe.toml", data))
    assert load_recipe_text(recipe.to_toml(), "again") == recipe


def _recipe_keys() -> list[bytes]:
    from meshwright.recipe import SCHEMA

    return [f"{key}=".encode() for key in SCHEMA.keys]


def _overrides(data: bytes, directory: Path) -> None:
    from meshwright.recipe import load_recipe, load_recipe_text

    path = directory / "recipe.toml"
    if not path.exists():
        path.write_text(TINY_RECIPE)
    recipe = load_recipe(path, _text(data).split("\n"))
    assert load_recipe_text(recipe.to_toml(), "again") == recipe


OVERRIDES = (
    b"train.steps=100\nlayout=dp2 zero1\nmodel.hidden=64", b'data.sources=[{path="a", weight=1.0}]\nrun.name=5',
    b"train.learning_rate=1e-3\ntrack.to=[]\ncheckpoint.every=3", b'model={preset="llama-tiny"}\ndata.tokenizer="bpe"',
)  # fmt: skip


def _layout(data: bytes, directory: Path) -> None:
    layout = Layout.parse(_text(data))
    assert Layout.parse(str(layout)) == layout


LAYOUTS = (
    b"dp4 zero1 tp2 cp2 pp4:zb-v mb8 ep2 ac:selective bf16", b"dp4 zero3 hs2 mb2", b"cp2:ulysses tp2:nosp fp32", b"dp1",
    b"pp2:interleaved:3 mb8 offload:cpu", b"pp4:@FILE mb8", b"dp8 ep4:etp2 tp2 fp8", b"pp4:dualpipe mb16 ac:full",
)  # fmt: skip
LAYOUT_WORDS = [f"pp2:{name}".encode() for name in SCHEDULES] + [
    b"dp2 ", b" tp2", b"mb4", b":2", b"zero2 ", b"99999999999", b"hs2 ", b"ep2", b":etp2", b"ac:", b"offload:nvme",
    b"fp16",
]  # fmt: skip


# --- models


@cache
def _configs() -> list[dict[str, Any]]:
    from meshwright.model.presets import PRESETS

    names = ("llama-tiny", "mistral-tiny", "qwen3-tiny", "gpt2", "mixtral-8x7b-v0.1", "gemma-2-2b", "llama-3.1-8b")
    configs = [PRESETS[name].config for name in names if name in PRESETS]
    found = [config.to_huggingface() for config in configs if not config.planning_only]
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 24.0, "original_max_position_embeddings": 16}
    return [
        *found,
        {**found[0], "rope_scaling": yarn},
        {**found[0], "architectures": ["BertModel"], "model_type": "bert"},
    ]


def _config_words() -> list[str]:
    from meshwright.model.config_fields import field_table
    from meshwright.model.families import FAMILIES

    tables = [field_table(name) for name in FAMILIES]
    return sorted({name for one in tables for name in (*one.read, *one.neutral)} | {"quantization_config", *FAMILIES})


def _config(data: bytes, directory: Path) -> None:
    from meshwright.model.config import ModelConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = ModelConfig.from_path(_written(directory, "config.json", data))
        if not config.planning_only:
            assert ModelConfig.from_huggingface(config.to_huggingface()) == config


def _safetensors(tensors: dict[str, Any]) -> bytes:
    from safetensors.numpy import save

    return bytes(save(tensors))


def _weights() -> st.SearchStrategy[bytes]:
    import numpy as np

    whole = _safetensors({"a.weight": np.ones((3, 4), dtype="float32"), "b": np.zeros(5, dtype="float16")})
    begin = 8 + int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8:begin]), whole[begin:]

    def framed(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + body

    return st.one_of(spoiled_json([header], ["F32", "BF16", "F4", "dtype"]).map(framed), spoiled([whole], [b"F8_E4M3"]))


def _read_tensors(directory: Path, path: Path) -> None:
    """Read as `inspect` does, and as a model is."""
    from meshwright.inspect.report import inspect_model
    from meshwright.model.huggingface import CheckpointFiles

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


def _weight_file(data: bytes, directory: Path) -> None:
    _read_tensors(directory, _written(directory, "model.safetensors", data))


INDEX = {
    "metadata": {"total_size": 68},
    "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"},
}


def _index(data: bytes, directory: Path) -> None:
    import numpy as np

    if not (directory / "1.safetensors").exists():
        one = np.ones((3, 4), dtype="float32")
        _written(directory, "1.safetensors", _safetensors({"a": one}))
        _written(directory, "2.safetensors", _safetensors({"b": one, "c": one}))
    _read_tensors(directory, _written(directory, "model.safetensors.index.json", data))


# --- tokenizers, templates and records


@cache
def _tokenizers() -> list[dict[str, Any]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["a mesh of ranks", "one mesh of many"], trainer)
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), ("me", -3.0)], 0))
    unigram.add_special_tokens(["</s>"])
    return [json.loads(each.to_str()) for each in (tokenizer, unigram)]


def _tokenizer(data: bytes, directory: Path) -> None:
    from meshwright.data.tokenizer import find_tokenizer

    _written(directory, "tokenizer.json", data)
    found = find_tokenizer(str(directory))
    assert found is not None
    tokenizer = found.load()
    (ids,) = tokenizer.encode(["a mesh of ranks: é"])
    tokenizer.decode(ids)


TOKENIZER_CONFIG = {
    "eos_token": "</s>", "bos_token": {"content": "</s>", "special": True}, "additional_special_tokens": ["<unk>"],
    "chat_template": [{"name": "default", "template": "{{ messages }}"}], "model_max_length": 1000,
}  # fmt: skip


def _tokenizer_config(data: bytes, directory: Path) -> None:
    from meshwright.data.tokenizer import find_tokenizer

    if not (directory / "tokenizer.json").exists():
        _written(directory, "tokenizer.json", json.dumps(_tokenizers()[0]).encode())
    _written(directory, "tokenizer_config.json", data)
    found = find_tokenizer(str(directory))
    assert found is not None
    found.load()
    found.named_tokens()
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


def _template(data: bytes, directory: Path) -> None:
    from meshwright.data.chat_template import ChatTemplate
    from meshwright.data.records import Message

    template = ChatTemplate(
        _text(data), {"eos_token": "</s>", "bos_token": "<s>"}, frozenset(("</s>", "<s>")), "template"
    )
    template.check()
    turns = (Message("user", "a mesh"), Message("assistant", "of ranks </s>"))
    template.rendered(turns)
    template.render(turns[:1], prompt=True)


def _template_refusals() -> tuple[type[Exception], ...]:
    from meshwright.data.chat_template import TemplateError

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


def _records(kind: str, form: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, directory: Path) -> None:
        from meshwright.data.reading import Reader
        from meshwright.data.records import Records
        from meshwright.data.sources import SourceFile

        path = _written(directory, f"records.{form}", data)
        for document in Reader(records=Records(kind)).documents(SourceFile(path.name, path, form, True)):
            assert document.example is not None

    return read


def _record_inputs(kind: str, form: str) -> Callable[[], st.SearchStrategy[bytes]]:
    if form == "json":
        return lambda: spoiled_json([RECORDS[kind]], ["role", "content", "user", "system", "from", "value"])
    lines = b"\n".join(json.dumps(each).encode() for each in RECORDS[kind])
    return lambda: st.one_of(
        spoiled([lines], [b'"role"', b'"assistant"', b"}\n{"]), spoiled_json(RECORDS[kind], ["role", "content", "user"])
    )


def _rows(data: bytes, directory: Path) -> None:
    from meshwright.data.exchanges import exchange, read_rows

    for where, record in read_rows(_written(directory, "rows.jsonl", data)):
        exchange(record, where)


# --- programs


def _program(dialect: str, name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, directory: Path) -> None:
        from meshwright.program.load import load_program, print_program

        program = load_program(_written(directory, name, data), dialect)  # type: ignore[call-overload]
        again = _written(directory, f"again-{name}", print_program(program, name).encode())
        assert print_program(load_program(again, dialect), name).encode() == again.read_bytes()  # type: ignore[call-overload]

    return read


@cache
def _program_seeds(dialect: str, name: str) -> list[bytes]:
    from meshwright.collectives.library import generate as collective
    from meshwright.program.load import print_program
    from meshwright.schedules.library import generate as schedule

    if dialect == "collective":
        made: list[Any] = [collective("all-reduce", "ring", 3), collective("all-to-all", "bruck", 4)]
    else:
        made = [schedule("1f1b", 2, 3), schedule("zb-v", 2, 4), schedule("dualpipe", 2, 4)]
    return [print_program(each, name).encode() for each in made]


def _program_json(dialect: str) -> st.SearchStrategy[bytes]:
    seeds = [json.loads(each) for each in _program_seeds(dialect, "p.json")]
    return spoiled_json(seeds, sorted({key for seed in seeds for key in seed}))


def _csv(data: bytes, directory: Path) -> None:
    from meshwright.schedules.pytorch_csv import from_csv, to_csv

    program = from_csv(_text(data), "schedule.csv")
    again = to_csv(program)
    assert to_csv(from_csv(again, "again")) == again


def _csv_seeds() -> list[bytes]:
    from meshwright.schedules.library import generate
    from meshwright.schedules.pytorch_csv import to_csv

    return [to_csv(generate(name, 2, 4)).encode() for name in ("1f1b", "zb-v")]


# --- plans


CLUSTER = b"""
device = "h100-sxm"
devices = 16
devices_per_node = 8
inside_gb_per_second = 450
across_gb_per_second = 50.0
"""
CLUSTER_KEYS = (
    b"memory_gib = 80", b"[calibration]", b"time_factor = 1.1", b"device = ", b"[device]", b"devices = 3", b"inf",
    b"-0",
    b"[peak_tflops]", b"bf16 = 900", b"runs = 3", b"inside_latency_seconds = 1e-6", b'"a100-80"',
    b"devices_per_node = 3",
)  # fmt: skip


def _cluster(data: bytes, directory: Path) -> None:
    from meshwright.plan.cluster import cluster

    cluster(str(_written(directory, "cluster.toml", data)))


def _shorthand(data: bytes, directory: Path) -> None:
    from meshwright.plan.cluster import cluster

    if "/" not in (text := _text(data)):
        cluster(text)


JOB = {"model": "llama-tiny", "cluster": "8xh100-sxm", "sequence": 64, "batch": 8, "layout": "dp4 tp2",
    "engine": "megatron",
       "compile": False, "optimizer": "adamw", "documents": 1.0, "precision": "bf16"}  # fmt: skip
JOB_CLUSTER = {"device": "h100-sxm", "devices": 8, "devices_per_node": 8, "inside_gb_per_second": 450.0}


def _job(data: bytes, directory: Path) -> None:
    from meshwright.cli.plumbing import json_document
    from meshwright.plan.jobs import answer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = answer(_text(data))
    assert "a fault of the planner" not in str(found.get("error")), found
    json_document(found)


# --- runs


def _damaged() -> tuple[type[Exception], ...]:
    from meshwright.train.checkpoint.manifest import Damaged

    return (UserError, Damaged)


def _manifest_bytes() -> bytes:
    from meshwright.train.checkpoint.manifest import FileRecord, Manifest

    digest = hashlib.sha256(b"{}").hexdigest()
    return Manifest(3, 2.5, {"config.json": FileRecord(2, digest, (digest,))}).to_json()


def _manifest(data: bytes, directory: Path) -> None:
    """A manifest with a right hash of its own, or the bytes as they are."""
    from meshwright.train.checkpoint import manifest

    try:
        content = json.loads(data)
        content.pop("manifest_sha256", None)
        content["manifest_sha256"] = manifest._own_hash(content)
        data = json.dumps(content).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass
    at = directory / "step-000003"
    _written(at, manifest.MANIFEST, data)
    _written(at, "config.json", b"{}")
    manifest.check_contents(at, (found := manifest.read_manifest(at)), found.files)
    manifest.check_sizes(at, found)


def _slices(data: bytes, directory: Path) -> None:
    from meshwright.train.checkpoint.slices import INDEX, read_index

    _written(directory, INDEX, data)
    read_index(directory)


SLICES = {
    "format": 1, "columns": ["kind", "name", "start", "stop", "dtype", "offset"],
    "files": {"training/rank-00000-of-00001.safetensors": [["master", "a", 0, 4, "F32", 0], ["m", "a", 0, 4, "F32",
    16, 0, 2, 4]]},
}  # fmt: skip


def _state(data: bytes, directory: Path) -> None:
    from meshwright.train.checkpoint.catalogue import STATE, read_state

    _written(directory, STATE, data)
    assert isinstance(read_state(directory), dict)


METRICS = b"\n".join(
    json.dumps({"step": n, "loss": 5.0 / n, "tokens_per_second": 10.0, "memory_gib": 0.2, "learning_rate": 1e-3,
                "seconds_by_part": {"forward": 0.1}, "gradient_norm": 1.0, "validation_loss": 4.0,
                "tokens": 100 * n}).encode()
    for n in range(1, 6)
)  # fmt: skip
RESULT: dict[str, Any] = {
    "schema": 1, "step": 5, "loss": 1.0, "validation_loss": 2.0, "tokens_per_second": 10.0, "mfu": 0.1,
    "skipped_steps": 0,
    "peak_flops_per_device": 1e12, "flops_convention": "6 N", "layout": "dp2", "checkpoint": "c",
    "best_checkpoint": "c",
    "predicted": {"step_seconds": 0.1, "device": "cpu", "memory_bytes": {"peak": 10**9},
    "calibration": {"time_factor": 1.1},
                  "step_seconds_low": 0.1, "step_seconds_high": 0.2, "compile": False},
    "measured": {"step_seconds": 0.2, "memory_bytes": {"peak": 10**9, "unexplained": 10**6}, "bytes_sent": 4},
}  # fmt: skip


def _report(metrics: bytes | None, result: bytes | None, directory: Path) -> None:
    from meshwright.train.report import write_report

    _written(directory, "metrics.jsonl", METRICS if metrics is None else metrics)
    _written(directory, "result.json", json.dumps(RESULT).encode() if result is None else result)
    write_report(directory)


def _calibrate(data: bytes, directory: Path) -> None:
    from meshwright.plan.calibrate import read_run

    _written(directory, "result.json", data)
    read_run(directory).document()


def _prepared(data: bytes, directory: Path) -> None:
    """What is damaged in the cache is made again, or refused."""
    from meshwright.data import prepare
    from meshwright.recipe_data import DataRecipe

    text = directory / "text.txt"
    if not text.exists():
        text.write_text("".join(f"One mesh of {n} ranks, and {n * n} of words about it.\n" for n in range(60)))
    recipe = DataRecipe(
        source=str(text), tokenizer="bytes", sequence=16, cache=str(directory / "cache"), validation_fraction=0.0
    )
    made = prepare(recipe, 0)
    manifest = made.directory / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(data)
    try:
        again = prepare(recipe, 0)
        again.summary(1)
        again.split("train").batch([0])
    finally:
        manifest.write_bytes(whole)


@cache
def _prepared_seed() -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        _prepared(b"", Path(directory))
        (found,) = Path(directory).rglob("manifest.json")
        return json.loads(found.read_bytes())


def _text_of(seeds: Callable[[], Sequence[bytes]], words: Callable[[], Sequence[bytes]] | None = None) -> Any:
    return lambda: spoiled(seeds(), words() if words else ())


PARSERS: dict[str, Parser] = {
    "recipe": Parser(_text_of(lambda: [TINY_RECIPE.encode()], lambda: [b"[track]\n", b'to = ["a:b"]\n',
    *_recipe_keys()]), _recipe),
    "overrides": Parser(_text_of(lambda: OVERRIDES, _recipe_keys), _overrides),
    "layout": Parser(_text_of(lambda: LAYOUTS, lambda: LAYOUT_WORDS), _layout),
    "config.json": Parser(lambda: spoiled_json(_configs(), _config_words()), _config),
    "safetensors": Parser(_weights, _weight_file),
    "safetensors index": Parser(lambda: spoiled_json([INDEX], ["a", "b", "1.safetensors", "3.safetensors"]), _index),
    "tokenizer.json": Parser(lambda: spoiled_json(_tokenizers(), ["BPE", "Unigram", "</s>", "vocab"]), _tokenizer),
    "tokenizer_config.json": Parser(
        lambda: spoiled_json([TOKENIZER_CONFIG], ["eos_token", "unk_token", "content", "</s>"]), _tokenizer_config
    ),
    "chat template": Parser(_text_of(lambda: TEMPLATES, lambda: TEMPLATE_WORDS), _template, _template_refusals()),
    **{
        f"{kind} records, {form}": Parser(_record_inputs(kind, form), _records(kind, form))
        for kind in RECORDS
        for form in ("jsonl", "json")
    },
    "rows": Parser(_record_inputs("chat", "jsonl"), _rows),
    **{
        f"{dialect} program, text": Parser(
            _text_of(lambda dialect=dialect: _program_seeds(dialect, "p.txt")), _program(dialect, "p.txt")
        )
        for dialect in ("collective", "pipeline")
    },
    **{
        f"{dialect} program, JSON": Parser(lambda dialect=dialect: _program_json(dialect), _program(dialect, "p.json"))
        for dialect in ("collective", "pipeline")
    },
    "schedule of PyTorch": Parser(_text_of(_csv_seeds, lambda: [b"0F0", b"1B3", b"0I1", b"0W1", b"SEND_F", b","]),
    _csv),
    "cluster file": Parser(_text_of(lambda: [CLUSTER], lambda: CLUSTER_KEYS), _cluster),
    "cluster shorthand": Parser(
        _text_of(lambda: [b"64xh100-sxm", b"2x8xa100-80"], lambda: [b"x", b"b200", b"h100-sxm"]), _shorthand
    ),
    "jobs line": Parser(lambda: spoiled_json([JOB, {**JOB, "cluster": JOB_CLUSTER}], [*JOB, *JOB_CLUSTER, "gpt2"]),
    _job),
    "checkpoint manifest": Parser(lambda: spoiled_json([json.loads(_manifest_bytes())], ["size"]), _manifest,
    _damaged()),
    "checkpoint slices": Parser(lambda: spoiled_json([SLICES], ["files"]), _slices, _damaged()),
    "checkpoint state": Parser(lambda: spoiled_json([{"step": 3, "recipe": "a", "layout": "dp1"}]), _state),
    "metrics": Parser(
        lambda: st.one_of(spoiled([METRICS]), spoiled_json([json.loads(METRICS.split(b"\n")[0])])),
        lambda data, directory: _report(data, None, directory),
    ),
    "result of a run, report": Parser(
        lambda: spoiled_json([RESULT], [*RESULT, *RESULT["predicted"]]),
        lambda data, directory: _report(None, data, directory),
    ),
    "result of a run, calibrate": Parser(
        lambda: spoiled_json([RESULT], [*RESULT, *RESULT["predicted"]]), _calibrate, (UserError, CheckFailed)
    ),
    "prepared data": Parser(lambda: spoiled_json([_prepared_seed()], ["splits", "train"]), _prepared),
}  # fmt: skip
