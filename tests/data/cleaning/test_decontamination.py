"""Decontamination: documents are dropped by the fraction of their words in n-grams of an evaluation set."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data import prepare
from meshwright.data.cleaning import rules as cleaning
from meshwright.data.cleaning.decontamination import EvaluationSets, hash_evaluation_sets
from meshwright.data.cleaning.rules import Cleaner
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe, DataRecipe

QUESTION = "Which of the two long rivers that leave this lake reaches the northern sea first, and why?"
OTHER = " ".join(f"other{number}" for number in range(83))


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    lines = [{"question": QUESTION, "choices": ["the first", "eight words make an answer that still counts"], "id": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_overlap_counts_words_in_shared_ngrams(evaluation: Path):
    sets = EvaluationSets([str(evaluation)], 13)
    assert len(QUESTION.split()) == 17
    assert sets.measure_overlap(f"{OTHER} {QUESTION.upper()}") == pytest.approx(17 / 100)
    assert sets.measure_overlap(OTHER) == sets.measure_overlap("") == 0
    assert sets.measure_overlap(" ".join(QUESTION.split()[:12])) == 0  # one word too few
    assert sets.measure_overlap("Eight words make an answer that still counts!") == 1
    assert sets.measure_overlap("the first the first the first") == 0  # shorter examples are ignored


def test_recipe_sets_ngram_length_and_maximum_overlap(evaluation: Path):
    def rule(**clean: object) -> str | None:
        recipe = CleanRecipe(evaluation_sets=[str(evaluation)], **clean)  # type: ignore[arg-type]
        return Cleaner(recipe).judge_document(f"{OTHER} {QUESTION}").rule

    assert rule() == "contamination"
    assert rule(maximum_contamination=0.17) is None
    assert rule(maximum_contamination=0.16) == "contamination"
    beginning = " ".join(QUESTION.split()[:14])
    for count, expected in ((13, "contamination"), (14, "contamination"), (15, None)):
        recipe = CleanRecipe(evaluation_sets=[str(evaluation)], contamination_words=count)
        assert Cleaner(recipe).judge_document(beginning).rule == expected


def test_plain_text_file_is_one_evaluation_example(tmp_path: Path):
    path = tmp_path / "set.txt"
    path.write_text(f"{QUESTION}\n{OTHER}")
    assert EvaluationSets([str(path)], 13).measure_overlap(QUESTION + " " + OTHER) == 1


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", r"set.jsonl:1 is not JSON"),
        ('{"a": "too short"}', "has no example of at least 8 words"),
        (None, r'evaluation_sets: ".*set.jsonl" does not exist'),
    ],
)
def test_unusable_evaluation_set_is_refused(tmp_path: Path, contents: str | None, message: str):
    path = tmp_path / "set.jsonl"
    if contents is not None:
        path.write_text(contents)
    with pytest.raises(UserError, match=message):
        EvaluationSets([str(path)], 13)


def test_evaluation_set_accepts_every_source_format(evaluation: Path, tmp_path: Path):
    lines = evaluation.read_bytes()
    columns = {key: [value] for key, value in json.loads(lines).items()}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "set.parquet")
    (tmp_path / "set.json").write_text(f"[{lines.decode()}]")
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(lines))
    fsspec.filesystem("memory").pipe("/sets/set.jsonl", lines)
    page = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
    (tmp_path / "set.wet").write_bytes(page % (len(QUESTION), QUESTION.encode()))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "set.jsonl").write_bytes(lines)
    for name in ("set.parquet", "set.json", "set.jsonl.gz", "set.wet", "some", "some/*.jsonl"):
        assert EvaluationSets([str(tmp_path / name)], 13).measure_overlap(QUESTION) == 1, name
    (tmp_path / "object.json").write_text(json.dumps({"data": [{"paragraphs": [{"question": QUESTION}]}]}))
    assert EvaluationSets([str(tmp_path / "object.json")], 13).measure_overlap(QUESTION) == 1
    (tmp_path / "cut.json").write_text('[{"a": "b"')
    with pytest.raises(UserError, match=r"^data.clean.evaluation_sets: .*cut.json is not JSON"):
        EvaluationSets([str(tmp_path / "cut.json")], 13)
    assert EvaluationSets(["memory://sets/*.jsonl"], 13).measure_overlap(QUESTION) == 1
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(lines)[:-9])
    with pytest.raises(UserError, match=r"cut.jsonl.gz: the gzip file is cut short"):
        EvaluationSets([str(cut)], 13)


def test_evaluation_sets_are_read_once_per_preparation(
    evaluation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = []
    monkeypatch.setattr(cleaning, "EvaluationSets", lambda *given: made.append(given) or EvaluationSets(*given))
    (tmp_path / "texts").mkdir()
    for number in range(120):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{OTHER} {number}")
    prepare(
        DataRecipe(
            source=str(tmp_path / "texts"), tokenizer="bytes", sequence=16, cache=str(tmp_path / "cache"),
            clean={"evaluation_sets": [str(evaluation)]},  # type: ignore[arg-type]
        )
    )  # fmt: skip
    assert len(made) == 1


def test_evaluation_set_digest_includes_format(tmp_path: Path):
    """As text a file is one example, as JSON Lines each line is: the prepared data and the cache key differ."""
    line = json.dumps({"text": OTHER}) + "\n"
    for name in ("set.txt", "set.jsonl", "again.jsonl"):
        (tmp_path / name).write_text(line)
    text, lines, again = hash_evaluation_sets(
        [str(tmp_path / name) for name in ("set.txt", "set.jsonl", "again.jsonl")]
    )
    assert text != lines == again
