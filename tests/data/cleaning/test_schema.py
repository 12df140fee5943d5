"""Records that violate the schema are counted and dropped; without a schema they are errors."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data import prepare
from meshwright.data.cleaning.corpus import clean_and_split_corpus, make_reader
from meshwright.data.cleaning.schema import find_record_problem
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe

REQUIRED = {"url": "text", "score": "number"}
LINES = [
    '{"text": "one", "url": "a", "score": 1}',
    '{"text": "two", "url": "b", "score": "high"}',
    "{not JSON",
    '["a list"]',
    '{"url": "c", "score": 2}',
    '{"text": 7, "url": "d", "score": 2}',
    '{"text": "three", "url": "e", "score": 2.5}',
    '{"text": "four", "url": null, "score": 2.5}',
    '{"text": "five", "url": "f", "score": true}',
]


def test_unfit_records_are_counted_under_schema(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    recipe = DataRecipe(source=str(tmp_path), sequence=8, validation_fraction=0, clean={"required_keys": REQUIRED})  # type: ignore[arg-type]
    files = find_files(recipe.all_sources)
    result = clean_and_split_corpus(files, recipe, print)
    assert result.dropped["schema"] == 7 and result.report["examples"]["schema"] == "a.jsonl:2"
    reader = make_reader(recipe, result.longest)
    assert [text for _, text in result.iterate_texts(files, reader, "train")] == ["one", "three"]
    with pytest.raises(UserError, match=r"a.jsonl:3: not JSON"):
        clean_and_split_corpus(files, recipe.model_copy(update={"clean": type(recipe.clean)()}), print)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "a", "url": "b", "score": 1}, None),
        ({"text": "a", "url": "b", "score": 1, "more": None}, None),
        ({"text": "a", "url": "b", "score": True}, '"score" is boolean, not number'),
        ({"text": "a", "url": None, "score": 1}, '"url" is null, not text'),
        ({"text": "a", "score": 1}, 'no key "url"'),
        ({"url": "b", "score": 1}, 'no key "text"'),
        ("a", "is text, not a table"),
    ],
)
def test_schema_problem_names_key_and_value(record: Any, problem: str | None):
    assert find_record_problem(record, REQUIRED, "text") == problem


def test_parquet_rows_are_checked_against_schema(tmp_path: Path):
    rows = {
        "text": ["one", "two", None, "four", "five"],
        "meta": [{"score": 1.5}, {"score": None}, {"score": 1.0}, None, {"score": 2.0}],
        "when": [datetime(2020, 1, day, tzinfo=UTC) for day in range(1, 6)],
        "url": ["a", "b", "c", "d", None],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet", row_group_size=2)
    [file] = find_files([str(tmp_path / "a.parquet")])

    def found(required: dict[str, str]) -> list[str | None]:
        reader = Reader(required_keys=required)
        return [document.problem[1] if document.problem else document.text for document in reader.read_documents(file)]

    assert found({"url": "text", "meta.score": "number"}) == [
        "one", '"meta.score" is null, not number', '"text" is null, not text', 'no key "meta.score"',
        '"url" is null, not text',
    ]  # fmt: skip
    assert found({"when": "text"})[0] == '"when" is a datetime, not text'
    assert found({"other": "text"})[:2] == ['no key "other"'] * 2
    assert found({}) == ["one", "two", "", "four", "five"]
    recipe = DataRecipe(
        source=str(file.path), sequence=2, tokenizer="bytes", validation_fraction=0, cache=str(tmp_path / "cache"),
        clean={"required_keys": {"url": "text"}},  # type: ignore[arg-type]
    )  # fmt: skip
    assert prepare(recipe).summary()["dropped"]["schema"] == 2


def test_required_keys_on_wet_pages_are_refused(tmp_path: Path):
    (tmp_path / "a.wet").write_bytes(b"WARC/1.0\r\n")
    recipe = DataRecipe(
        source=str(tmp_path / "a.wet"), sequence=8, tokenizer="bytes", cache=str(tmp_path / "cache"),
        clean={"required_keys": REQUIRED},  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(UserError, match=r"required_keys: .*a.wet has pages, which have no keys"):
        prepare(recipe, 0)
