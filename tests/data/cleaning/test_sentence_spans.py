"""Spans of three sentences that occur before in the corpus are removed; the first occurrence is kept."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import prepare
from meshwright.data.cleaning import cleaning_pass, duplicates
from meshwright.data.cleaning.corpus import CleanedCorpus, clean_and_split_corpus, make_reader
from meshwright.data.cleaning.rules import Cleaner
from meshwright.data.cleaning.sentences import split_sentences
from meshwright.data.sources.resolution import find_files
from meshwright.recipe import CleanRecipe, DataRecipe

SENTENCES = [f"Sentence number {number} is short." for number in range(12)]


def write(directory: Path, texts: list[str], files: int) -> Path:
    """JSON Lines files with consecutive runs of the texts."""
    directory.mkdir(exist_ok=True)
    cut = -(-len(texts) // files)
    for number in range(files):
        lines = [json.dumps({"text": text, "id": number}) for text in texts[number * cut : (number + 1) * cut]]
        (directory / f"{number}.jsonl").write_text("".join(line + "\n" for line in lines))
    return directory


def make_recipe(source: Path, **clean: Any) -> DataRecipe:
    clean = {"sentence_duplicates": True, "maximum_repetition": 1.0, **clean}
    return DataRecipe(
        source=str(source), tokenizer="bytes", sequence=8, validation_fraction=0.0, clean=CleanRecipe(**clean),
        cache=str(source.parent / "cache"),
    )  # fmt: skip


def clean(source: Path, **clean: Any) -> tuple[CleanedCorpus, dict[int, str]]:
    """Return the cleaned corpus, and the texts by document number as they are read again."""
    recipe, files = make_recipe(source, **clean), find_files([str(source)])
    found = clean_and_split_corpus(files, recipe, lambda line: None)
    return found, dict(found.iterate_texts(files, make_reader(recipe, found.longest), "train"))


def remove_by_dictionary(documents: list[list[str]]) -> dict[int, list[str]]:
    """The rule in plain Python, over documents as lists of sentences."""
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    left: dict[int, list[str]] = {}
    for number, sentences in enumerate(documents):
        gone: set[int] = set()
        for at in range(len(sentences) - 2):
            where = first.setdefault(tuple(sentences[at : at + 3]), (number, at))
            own = range(where[1], where[1] + 3) if where[0] == number else range(0)
            if where != (number, at):
                gone |= {at, at + 1, at + 2} - {*own}
        if len(gone) < len(sentences):
            left[number] = [one for place, one in enumerate(sentences) if place not in gone]
    return left


def draw_documents(seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    return [draw.choices(SENTENCES[: draw.choice([2, 5, 12])], k=draw.randint(1, 9)) for _ in range(60)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("files, part, segment", [(1, 1 << 21, 1 << 16), (4, 16, 7), (3, 50, 1)])
def test_removed_sentences_match_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, files: int, part: int, segment: int
):
    """Whatever the files, the segments and the partitions of the external sort."""
    monkeypatch.setattr(duplicates, "KEYS_PER_PARTITION", part)
    monkeypatch.setattr(cleaning_pass, "SEGMENT_DOCUMENTS", segment)
    documents = draw_documents(seed)
    found, texts = clean(
        write(tmp_path / "source", [" ".join(one) for one in documents], files), exact_duplicates=False
    )
    expected = remove_by_dictionary(documents)
    assert {number: text.strip() for number, text in texts.items()} == {
        number: " ".join(left) for number, left in expected.items()
    }
    report = found.report
    assert report["dropped"]["sentence_duplicates"] == len(documents) - len(expected)
    counts = [len(documents[number]) - len(left) for number, left in expected.items()]
    assert report["removed_sentences"]["sentences"] == sum(counts) > 0
    assert report["removed_sentences"]["documents"] == sum(map(bool, counts))
    assert report["bytes"]["after"] == found.bytes["train"] == sum(len(text.encode()) for text in texts.values())


def test_spans_are_compared_without_case_and_white_space_across_line_breaks(tmp_path: Path):
    a, b, c, d = "One is here.", "Two is there!", "Is three?", "Four is last."
    first, later = f"{a} {b} {c} {d}", f"Begin.\n{a.upper()}\n\n{b}   {c}\tEnd."
    _, texts = clean(write(tmp_path / "source", [first, later], 1))
    assert texts == {0: first, 1: "Begin.\nEnd."}


def test_spans_of_documents_that_other_rules_drop_are_not_compared(tmp_path: Path):
    span = " ".join(SENTENCES[:3])
    _, texts = clean(write(tmp_path / "source", [span, f"{span} {SENTENCES[4]}"], 1), minimum_characters=len(span) + 1)
    assert texts == {1: f"{span} {SENTENCES[4]}"}


def test_source_code_is_compared_only_if_enabled(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    lines = "import a\nimport b\nimport c\n"
    for name in "xy":
        (source / f"{name}.py").write_text(f"{lines}{name} = 1\n")
    assert clean(source)[1] == {0: f"{lines}x = 1\n", 1: f"{lines}y = 1\n"}
    assert clean(source, heuristics_on_code=True)[1] == {0: f"{lines}x = 1\n", 1: "y = 1\n"}


def test_prepared_data_are_without_the_removed_sentences(tmp_path: Path):
    documents = draw_documents(1)
    source = write(tmp_path / "source", [" ".join(one) for one in documents], 2)
    recipe = make_recipe(source, exact_duplicates=False)
    for _ in range(2):  # the second time from the cache
        data = prepare(recipe, keep_text=True)
        assert list(data.iterate_documents("train")) == [*clean(source, exact_duplicates=False)[1].values()]
        (data.directory / "manifest.json").unlink()
    assert data.summary()["removed_sentences"]["sentences"] > 0


@pytest.mark.parametrize(
    "text, sentences",
    [
        ('He said "Go." She went (at 3.5 km/h). Why?', ['He said "Go." ', "She went (at 3.5 km/h). ", "Why?"]),
        ("  \n Title\nText... more", ["  \n Title\n", "Text... ", "more"]),
        ("今日は。明日は！「本当。」はい", ["今日は。", "明日は！", "「本当。」", "はい"]),
        (" \n ", []),
        ("", []),
    ],
)
def test_sentences_end_at_marks_and_lines(text: str, sentences: list[str]):
    assert split_sentences(text) == sentences


def test_splitting_takes_linear_time_on_any_text():
    """A backtracking expression takes hours on the first three."""
    for unit in ("!", ".)", '."', "! ", "。", "\n", " ", "a. "):
        text = "x" + unit * 300_000 + "x"
        begun = time.process_time()
        assert "".join(split_sentences(text)) == text
        assert time.process_time() - begun < 2


def test_records_keep_their_sentences(tmp_path: Path):
    with pytest.raises(
        ValueError, match="clean.sentence_duplicates removes sentences, but chat records must stay whole"
    ):
        DataRecipe(source="a.jsonl", records="chat", sequence=8, clean=CleanRecipe(sentence_duplicates=True))


def test_verdict_has_sentences_of_kept_documents_alone():
    cleaner = Cleaner(CleanRecipe(sentence_duplicates=True, maximum_characters=40))
    assert list(cleaner.judge_document("One. Two.").sentences) == ["One. ", "Two."]
    assert list(cleaner.judge_document("One. Two." * 9).sentences) == []
    assert cleaner.rules[-1] == "sentence_duplicates"
