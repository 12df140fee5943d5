"""Records that do not fit the schema are counted and dropped; without a schema they are an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data import prepare
from meshwright.data.schema import record_problem
from meshwright.data.sources import find_files
from meshwright.data.survey import document_reader, survey
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


def test_what_does_not_fit_is_counted_under_schema_with_a_reason(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    recipe = DataRecipe(source=str(tmp_path), sequence=8, validation_fraction=0, clean={"required_keys": REQUIRED})  # type: ignore[arg-type]
    files = find_files(recipe.all_sources)
    result = survey(files, recipe, print)
    assert result.dropped["schema"] == 7 and result.report["examples"]["schema"] == "a.jsonl:2"
    reader = document_reader(recipe, result.longest)
    assert [text for _, text in result.texts(files, reader, "train")] == ["one", "three"]
    with pytest.raises(UserError, match=r"a.jsonl:3: not JSON"):
        survey(files, recipe.model_copy(update={"clean": type(recipe.clean)()}), print)


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
def test_a_problem_names_the_key_and_what_it_holds(record: Any, problem: str | None):
    assert record_problem(record, REQUIRED, "text") == problem


def test_rows_of_parquet_are_held_to_no_schema_and_the_recipe_is_told_so(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    recipe = DataRecipe(
        source=str(tmp_path / "a.parquet"), sequence=8, tokenizer="bytes", cache=str(tmp_path / "cache"),
        clean={"required_keys": REQUIRED},  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(UserError, match=r"required_keys: .*a.parquet has no records of JSON Lines"):
        prepare(recipe, 0)
