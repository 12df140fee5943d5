"""Inputs for which fuzzing once found a traceback: each is refused in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from meshwright.errors import UserError
from tests.fuzz.model_parsers import INDEX, TOKENIZER_CONFIG
from tests.fuzz.parsers import PARSERS
from tests.fuzz.run_parsers import METRICS, RESULT, SLICES
from tests.spec.test_config import LLAMA

STEP = json.loads(METRICS.split(b"\n")[0])
FOUND: dict[str, tuple[str, object]] = {
    "an index with a name that no file can have": ("safetensors index", {**INDEX, "weight_map": {"a": "x" * 300}}),
    "a config.json with a number that no float can hold": ("config.json", {**LLAMA, "rms_norm_eps": 10**400}),
    "an end of text that is a list": ("tokenizer_config.json", {**TOKENIZER_CONFIG, "eos_token": {"name": "a"}}),
    "half a character in a token's name": (
        "special_tokens_map.json",
        {"eos_token": "</s>", "bos_token": {"content": "\ud800"}},
    ),
    "half a character": ("tokenizer_config.json", {**TOKENIZER_CONFIG, "model_max_length": "\ud800"}),
    "a shorthand that no file can be called": ("cluster shorthand", "64x" + "[" * 300),
    "a state that is a list": ("checkpoint state", [1]),
    "a part of a layout as long as a page": ("layout", "dp4 zer" + "x" * 20_000),
    "a key of an override as long as a page": ("overrides", "m" + "x" * 20_000 + "set=1"),
    "slices that are a list": ("checkpoint slices", {**SLICES, "files": []}),
    "a step that is text": ("metrics", {**STEP, "step": "1"}),
    "a loss that is text": ("metrics", {**STEP, "loss": "1"}),
    "a gradient norm that is text": ("metrics", {**STEP, "gradient_norm": "abc"}),
    "a learning rate that is infinite": ("metrics", {**STEP, "learning_rate": float("inf")}),
    "a rate that is missing": ("metrics", {**STEP, "tokens_per_second": None}),
    "a time of 400 digits": (
        "result of a run, calibrate",
        {**RESULT, "predicted": {**RESULT["predicted"], "step_seconds": int("9" * 400)}},
    ),
    "a result that is a list": ("result of a run, report", [1]),
    "a layout that is a number": ("result of a run, report", {**RESULT, "layout": 7}),
    "a measured time that is text": ("result of a run, report", {**RESULT, "measured": {"step_seconds": "1"}}),
    "a size that is text": (
        "checkpoint manifest",
        {"format": 1, "step": 3, "validation_loss": 2.5, "block_bytes": 64 * 2**20,
         "files": {"config.json": {"size": "a", "sha256": "a", "blocks": "\0"}}},
    ),
    "a format as long as a page": ("checkpoint manifest", {"format": "4" * 20_000}),
    "a NUL in a file's name": (
        "checkpoint manifest",
        {"format": 1, "step": 3, "validation_loss": 2.5, "block_bytes": 64 * 2**20,
         "files": {"a\0b": {"size": 0, "sha256": "a", "blocks": []}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("norm", [-(2**63), -1.0])
def test_report_is_written_for_gradient_norms_that_no_run_has(norm: float, tmp_path: Path):
    PARSERS["metrics"].read(json.dumps({**STEP, "gradient_norm": norm}).encode(), tmp_path)


@pytest.mark.parametrize("name", FOUND)
def test_inputs_that_once_caused_tracebacks_are_refused(name: str, tmp_path: Path):
    kind, value = FOUND[name]
    parser = PARSERS[kind]
    data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    with pytest.raises(parser.refusals) as refused:
        parser.read(data, tmp_path)
    assert 0 < len(str(refused.value)) < 10_000


def test_parquet_column_with_inconsistent_metadata_does_not_end_the_process(tmp_path: Path):
    """The column says that it has no nulls, its histogram of definition levels that it has: pyarrow's accessor of the
    column's metadata calls abort()."""
    stream = io.BytesIO()
    column = arrow.field("text", arrow.string(), nullable=True)
    table = arrow.table({"text": ["a"]}, schema=arrow.schema([column]))
    parquet.write_table(table, stream, compression=None, store_schema=False)
    optional, required = (b"\x15\x0c%" + kind + b"\x18\x04text" for kind in (b"\x02", b"\x00"))
    assert optional in stream.getvalue()
    with pytest.raises(UserError, match="Definition level histogram size mismatch"):
        PARSERS["data, parquet"].read(stream.getvalue().replace(optional, required), tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(b"te8t", 'row group 1 has "te8t" .* in place of the column "text"'), (b"te\xf8t", "not a complete .* byte 0xf8")],
    ids=["other", "no text"],
)
def test_parquet_column_chunk_with_another_name_is_refused(name: bytes, reason: str, tmp_path: Path):
    stream = io.BytesIO()
    parquet.write_table(arrow.table({"text": ["a"]}), stream)
    before, _, after = stream.getvalue().rpartition(b"\x18\x04text")  # the column is named in the schema before
    assert b"\x18\x04text" in before
    with pytest.raises(UserError, match=reason):
        PARSERS["data, parquet"].read(before + b"\x18\x04" + name + after, tmp_path)


def test_tokenizers_library_panic_is_one_error_line(tmp_path: Path):
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "truncation": None, "padding": None,
        "model": {"type": "BPE", "continuing_subword_prefix": "x" * 8, "vocab": {"a": 0, "b": 1},
                  "merges": [["a", "b"]]},
    }  # fmt: skip
    with pytest.raises(PARSERS["tokenizer.json"].refusals, match="the tokenizers library: range end index"):
        PARSERS["tokenizer.json"].read(json.dumps(tokenizer).encode(), tmp_path)


def test_a_tokenizer_whose_templates_have_no_names_has_none(tmp_path: Path):
    config = {**TOKENIZER_CONFIG, "chat_template": [{"name": [1], "template": "a"}]}
    PARSERS["tokenizer_config.json"].read(json.dumps(config).encode(), tmp_path)
