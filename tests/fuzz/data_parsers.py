"""Readers of data files, pickled weights, documents of a run and request bodies for `tests.fuzz.parsers`, and valid
inputs of each. Where another library reads the same format, a value that is read must equal what it reads."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.inputs import Inputs, one_of, spoiled, spoiled_json, write_input

# --- data files

ROWS = [{"text": "One mesh.\n\nOf ranks: é.", "id": 1}, {"text": "a\r\nb", "other": [None]}, {"text": ""}]
TEXT = b"One mesh of ranks.\r\n\r\nTwo: \xc3\xa9.\n" * 5
WET = (
    b"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://example.org/\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 9\r\n\r\nOne mesh.\r\n\r\n"
)


@cache
def data_files() -> dict[str, list[bytes]]:
    """Return valid files of each data format, by suffix."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    tables = []
    for columns in ({"text": ["One mesh.", None, "é"]}, {"text": ["a"] * 300, "id": list(range(300))}):
        for options in ({}, {"compression": "zstd", "row_group_size": 100}, {"use_dictionary": False}):
            stream = io.BytesIO()
            parquet.write_table(arrow.table(columns), stream, **options)
            tables.append(stream.getvalue())
    return {
        "jsonl": [b"\n".join(json.dumps(row).encode() for row in ROWS)],
        "json": [json.dumps(ROWS).encode()],
        "parquet": tables,
        "text": [TEXT, b"\xef\xbb\xbf" + TEXT],
        "wet": [WET + WET.replace(b"conversion", b"warcinfo")],
    }


def data_inputs(kind: str) -> Callable[[], Inputs]:
    words = {
        "jsonl": [b'"text"', b"}\n{"],
        "parquet": [b"PAR1"],
        "wet": [b"WARC/1.0\r\n", b"Content-Length: ", b"\r\n\r\n"],
    }.get(kind, [])
    if kind == "json":
        return lambda: spoiled_json([ROWS], ["text", "id"])
    return lambda: spoiled(data_files()[kind], words)


def read_data(kind: str, suffix: str = "") -> Callable[[bytes, Path], None]:
    """Return a reader of data files of a format. suffix: of the compression, such as ".gz"."""

    def read(data: bytes, directory: Path) -> None:
        from meshwright.data.sources.reading import Reader
        from meshwright.data.sources.resolution import SourceFile

        path = write_input(directory, f"data.{kind}{suffix}", data)
        documents = list(Reader().read_documents(SourceFile(path.name, path, kind, True)))
        texts = [each.text for each in documents]
        assert all(text is None or type(text) is str for text in texts)
        if kind in EXPECTED and max((len(text or "") for text in texts), default=0) < 900_000:
            assert texts == EXPECTED[kind](DECOMPRESSED[suffix](data))

    return read


def _normal(text: str) -> str:
    """Return a text as the data package keeps it: with LF line ends and without a byte order mark."""
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")


def _read_json_lines(data: bytes) -> list[str]:
    lines = data.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape").split("\n")
    return [_normal(json.loads(line)["text"] or "") for line in lines if line.strip()]


def _read_json_list(data: bytes) -> list[str]:
    return [_normal(row["text"] or "") for row in json.loads(data.decode("utf-8-sig", errors="surrogateescape"))]


def _read_parquet(data: bytes) -> list[str]:
    import pyarrow
    import pyarrow.parquet as parquet

    column = parquet.read_table(io.BytesIO(data), columns=["text"])["text"].cast(pyarrow.large_binary())
    return [_normal((text or b"").decode(errors="surrogateescape")) for text in column.to_pylist()]


EXPECTED: dict[str, Callable[[bytes], list[str]]] = {
    "jsonl": _read_json_lines,
    "json": _read_json_list,
    "parquet": _read_parquet,
}
"""Functions that return the texts of a file with another library, by format."""


def _decompress_zstandard(data: bytes) -> bytes:
    from backports import zstd

    return bytes(zstd.decompress(data))


DECOMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.decompress,
    ".zst": _decompress_zstandard,
}


def compressed_inputs(suffix: str) -> Callable[[], Inputs]:
    """Compressed JSON lines with edits before or after compression, several members, and ten megabytes of one line."""

    def make() -> Inputs:
        if suffix == ".gz":
            compress: Callable[[bytes], bytes] = partial(gzip.compress, compresslevel=1, mtime=0)
        else:
            from backports import zstd

            compress = zstd.compress
        lines = data_files()["jsonl"][0]
        long = b'{"text": "' + b"a" * 10_000_000 + b'"}'
        whole = [compress(lines), compress(lines[:30]) + compress(lines[30:]), compress(long)]
        others = [bz2.compress(lines), lzma.compress(lines), lines]
        inside = spoiled([lines], [b'"text"', b"}\n{"])
        return one_of(lambda random: compress(inside(random)), spoiled(whole[:2] * 20 + whole[2:] + others))

    return make


def read_evaluation_set(data: bytes, directory: Path) -> None:
    """Read a file of texts that the training data must not contain."""
    from meshwright.data.cleaning.decontamination import _iterate_examples
    from meshwright.data.sources.resolution import SourceFile

    path = write_input(directory, "held-out.json", data)
    assert all(type(text) is str for text in _iterate_examples(SourceFile(path.name, path, "json", True)))


# --- pickled weights


@cache
def torch_files() -> list[bytes]:
    """Return files that `torch.save` writes: tensors in several containers, of several kinds, and other objects."""
    import torch

    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    values: list[Any] = [
        {"a.weight": whole, "b": torch.zeros(5, dtype=torch.float16)},
        OrderedDict(model={"a": whole, "a.T": whole.T, "part": whole[1:, :2], "none": None, "n": 3}),
        {"state_dict": {"a": torch.nn.Parameter(whole)}, "epoch": 7},
        {"sparse": whole.to_sparse(), "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)},
        [whole, whole],
        {"a": whole.bfloat16(), "ids": torch.arange(3)},
    ]
    found = []
    for value in values:
        for old in (False, True):
            stream = io.BytesIO()
            torch.save(value, stream, _use_new_zipfile_serialization=not old)
            found.append(stream.getvalue())
    return found


def read_torch_file(data: bytes, directory: Path) -> None:
    import numpy as np
    import torch

    from meshwright.inspection.files import TensorFiles
    from meshwright.inspection.report import inspect_model

    path = write_input(directory, "pytorch_model.bin", data)
    inspect_model(path)
    files = TensorFiles(path)
    mapped = {entry: files.map_bytes(entry) for entry in files.entries}
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.namelist():
                if "/data/" in record:
                    archive.read(record)  # checks its CRC
    except zipfile.BadZipFile:  # torch's other reader, the oracle, returns uninitialized memory
        return
    loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for entry, found in mapped.items():
        value: Any = loaded
        with suppress(KeyError, TypeError):  # names inside containers are joined with points
            value = loaded[entry.name]
        if isinstance(value, torch.Tensor):
            expected = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(found, expected)


# --- documents of a run

EVALUATION = {"loss": 1.5, "perplexity": 4.5, "bits_per_byte": 2.1, "tokens": 100, "xz_bits_per_byte": 2.5}
SAMPLE = {"prompt": "One", "text": "One mesh", "checkpoint": "run/checkpoints/step-000010"}
TRACKERS = {"mlflow": {"run_id": "0123"}, "wandb": {"id": "4567"}}


def read_printed(command: str) -> Callable[[bytes, Path], None]:
    """Return a reader of the document that `meshwright COMMAND --json` prints, as `meshwright report` reads it."""

    def read(data: bytes, directory: Path) -> None:
        from meshwright.cli.report import _find_document
        from meshwright.monitoring.report import write_report
        from tests.fuzz.run_parsers import METRICS

        path = write_input(directory, f"{command}.json", data)
        found = _find_document(path, None, command)
        assert found == json.loads(data)
        write_input(directory, "metrics.jsonl", METRICS)
        if command == "evaluate":
            write_report(directory, evaluation=found)
        else:
            write_report(directory, samples=[found])

    return read


def read_trackers(data: bytes, directory: Path) -> None:
    """Return tracker -> key -> string, or {}: a damaged file only makes the trackers begin new runs."""
    from meshwright.monitoring.run_directory import TRACKERS as NAME
    from meshwright.monitoring.run_directory import RunDirectory

    write_input(directory, NAME, data)
    found = RunDirectory(directory).read_trackers()
    assert all(type(text) is str for kept in found.values() for text in kept.values())


# --- serving and its clients


def read_keys(data: bytes, directory: Path) -> None:
    from meshwright.serving.gate import read_api_keys

    keys = read_api_keys(write_input(directory, "keys.txt", data))
    assert keys and all(key and key == key.strip() and not key.startswith("#") for key in keys)


COMPLETION: dict[str, Any] = {
    "model": "m", "prompt": ["One mesh", "a"], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1,
    "stop": ["\n"], "logprobs": 2, "logit_bias": {"5": -100}, "stream": True, "stream_options": {"include_usage": True},
    "echo": False, "ignore_eos": True, "min_tokens": 1, "presence_penalty": 0.5, "user": "u", "suffix": None,
}  # fmt: skip
CHAT = {
    **{key: COMPLETION[key] for key in ("model", "max_tokens", "temperature", "n", "stop", "seed", "stream")},
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "One mesh?"}]},
    ],
    "logprobs": True, "top_logprobs": 2,
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "CompletionBody": [COMPLETION, {"prompt": [[1, 2], [3]], "max_tokens": 1}, {"prompt": [1, 2]}, {"prompt": "a"}],
    "ChatBody": [CHAT],
    "LlamaBody": [{"prompt": "One", "n_predict": 4, "top_k": 5, "logit_bias": [[5, False], [6, 1.0]], "n_probs": 2}],
    "TokenizeBody": [{"prompt": "One"}, {"messages": CHAT["messages"], "add_generation_prompt": True}],
    "DetokenizeBody": [{"tokens": [1, 2, 3]}],
}


@cache
def _make_prompts() -> Any:
    from bench.shared.fake_engine import make_prompts

    with tempfile.TemporaryDirectory() as directory:
        return make_prompts(Path(directory))


def read_body(name: str) -> Callable[[bytes, Path], None]:
    """Return a reader of a request body, up to the requests that the engine would get."""

    def read(data: bytes, directory: Path) -> None:
        from meshwright.serving.protocol import bodies
        from meshwright.serving.protocol.errors import ApiError
        from meshwright.serving.protocol.jobs import build_job

        prompts = _make_prompts()
        try:
            body = bodies.parse_body(getattr(bodies, name), data)
            assert type(body).model_validate_json(body.model_dump_json(exclude_unset=True, by_alias=True)) == body
            if isinstance(body, bodies.GenerationBody):
                requests = [choice.request for choice in build_job(body, prompts, "m", "id").choices]
                vocabulary = prompts.vocabulary
                assert all(0 <= token < vocabulary for each in requests for token in each.tokens)
                assert all(len(each.tokens) <= prompts.max_length for each in requests)
        except ApiError as error:
            assert 400 <= error.status < 500
            assert json.loads(error.to_json())["error"]["message"]
            raise

    return read


def body_refusals() -> tuple[type[Exception], ...]:
    from meshwright.errors import UserError
    from meshwright.serving.protocol.errors import ApiError

    return (ApiError, UserError)


ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "One."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


def read_answer(data: bytes, directory: Path) -> None:
    """Read the answer of a chat endpoint that generates data."""
    from meshwright.synthesis.endpoint import _parse_completion

    found = _parse_completion(data)
    assert type(found.text) is str and (found.finish_reason is None or type(found.finish_reason) is str)


def answer_refusals() -> tuple[type[Exception], ...]:
    from meshwright.synthesis.endpoint import _TryAgainError

    return (_TryAgainError,)


def file_inputs(files: Callable[[], Sequence[bytes]], words: Sequence[bytes] = ()) -> Callable[[], Inputs]:
    """Return a function that makes corrupted copies of binary files: half of them with one to eight changed bytes only,
    as more edits seldom pass the first check."""

    def make() -> Inputs:
        edited, wholes = spoiled(files(), words), list(files())

        def flipped(random: Random) -> bytes:
            data = bytearray(random.choice(wholes))
            for _ in range(random.randrange(1, 9)):
                data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            return bytes(data)

        return one_of(edited, flipped)

    return make
