"""The split depends on content, an empty split is an error, and dropped documents are counted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.cleaning import corpus as corpus_module
from meshwright.data.cleaning.corpus import SHORT_DOCUMENT, CleanedCorpus, clean_and_split_corpus, find_last
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe, DataRecipe


def text(number: int, lines: int = 3) -> str:
    return "".join(f"document {number}, line {line}\n" for line in range(lines))


def clean_directory(
    directory: Path, log: list[str] | None = None, **data: Any
) -> tuple[CleanedCorpus, dict[str, list[str]]]:
    """Return the cleaned corpus of a directory and the texts of each split."""
    recipe = DataRecipe(source=str(directory), sequence=8, **data)
    files = find_files(recipe.all_sources)
    result = clean_and_split_corpus(files, recipe, (log if log is not None else []).append)
    reader = Reader(longest=result.longest)
    splits = {
        split: [text for _, text in result.iterate_texts(files, reader, split)] for split in ("train", "validation")
    }
    return result, splits


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(200):
        (tmp_path / f"{number:03d}.txt").write_text(text(number))
    return tmp_path


def test_validation_split_depends_on_content_hash(corpus: Path):
    _, splits = clean_directory(corpus, validation_fraction=0.25)

    def held_out(content: str) -> bool:
        return int(hashlib.sha256(content.strip().encode()).hexdigest()[:16], 16) / 2**64 < 0.25

    assert len(splits["train"]) + len(splits["validation"]) == 200
    assert all(map(held_out, splits["validation"])) and not any(map(held_out, splits["train"]))
    assert 30 <= len(splits["validation"]) <= 70


def test_split_is_independent_of_other_documents_and_names(corpus: Path):
    _, before = clean_directory(corpus, validation_fraction=0.1)
    for number in range(200):
        (corpus / f"{number:03d}.txt").rename(corpus / f"renamed {199 - number:03d}.txt")
    for number in range(200, 300):
        (corpus / f"{number:03d}.txt").write_text(text(number))
    _, after = clean_directory(corpus, validation_fraction=0.1)
    assert set(before["validation"]) < set(after["validation"])
    assert set(before["train"]) < set(after["train"])


def test_equal_contents_are_never_in_both_splits(corpus: Path):
    for number in range(200):
        (corpus / f"copy {number:03d}.txt").write_text("\n" + text(number))
    _, splits = clean_directory(corpus, validation_fraction=0.3, clean=CleanRecipe(exact_duplicates=False))
    train, validation = ({content.strip() for content in splits[name]} for name in ("train", "validation"))
    assert len(splits["train"]) + len(splits["validation"]) == 400
    assert train.isdisjoint(validation)


def test_two_documents_are_enough_for_two_splits(tmp_path: Path):
    for name, number in (("a", 0), ("b", 1)):
        (tmp_path / name).write_text(text(number))
    for fraction in (1e-9, 0.999999):
        _, splits = clean_directory(tmp_path, validation_fraction=fraction)
        assert [len(split) for split in splits.values()] == [1, 1]
        by_hash = sorted((hashlib.sha256(text(number).strip().encode()).digest(), text(number)) for number in range(2))
        assert splits["validation"] == [by_hash[0][1]]


def test_without_a_validation_fraction_everything_trains(tmp_path: Path):
    (tmp_path / "a.txt").write_text(text(1))
    _, splits = clean_directory(tmp_path, validation_fraction=0)
    assert splits == {"train": [text(1)], "validation": []}


def test_one_short_text_cannot_be_split(tmp_path: Path):
    (tmp_path / "a.txt").write_text(text(1))
    with pytest.raises(UserError, match="only one short text remains after cleaning, too little to split"):
        clean_directory(tmp_path)


def test_one_long_text_is_cut_into_splittable_documents(tmp_path: Path):
    whole = "\n".join(text(number) for number in range(9000))
    (tmp_path / "a.txt").write_text(whole)
    log: list[str] = []
    result, splits = clean_directory(tmp_path, log, validation_fraction=0.05)
    pieces = splits["train"] + splits["validation"]
    assert all(len(piece) <= SHORT_DOCUMENT for piece in pieces)
    assert sorted("".join(pieces)) == sorted(whole)
    assert 0.01 < len("".join(splits["validation"])) / len(whole) < 0.12
    assert result.bytes == {name: len("".join(split)) for name, split in splits.items()}
    assert log == [
        "only 1 document: long ones are cut after blank lines into pieces of at most 8,000 characters, "
        "so that no split is empty"
    ]


def test_many_documents_are_not_cut(corpus: Path):
    long = "\n\n".join(text(number) for number in range(1000, 2000))
    (corpus / "long.txt").write_text(long)
    _, splits = clean_directory(corpus)
    assert long in splits["train"] + splits["validation"]


def test_dropped_documents_are_counted_by_rule_with_example(corpus: Path):
    (corpus / "x binary").write_bytes(b"\x00\x01\x02")
    (corpus / "x latin").write_bytes("größer".encode("latin-1"))
    (corpus / "x same 1").write_text(text(7))
    (corpus / "x same 2").write_text(text(8))
    (corpus / "x empty").touch()
    (corpus / "x bell").write_text("\a\a\a")
    (corpus / "x again").write_text("again\n" * 9)
    result, _ = clean_directory(corpus)
    assert result.dropped == {
        "encoding": 2,
        "control_characters": 1,
        "length": 1,
        "repetition": 1,
        "exact_duplicates": 2,
    }
    assert result.report["examples"]["exact_duplicates"] == "x same 1"
    assert sum(result.documents.values()) == 200


def test_empty_corpus_after_cleaning_error_lists_rules(tmp_path: Path):
    (tmp_path / "a.txt").write_text("again\n" * 9)
    (tmp_path / "b.txt").write_bytes(b"\x00")
    with pytest.raises(UserError) as caught:
        clean_directory(tmp_path)
    assert str(caught.value) == (
        "data: no document remains after cleaning; dropped by rule: encoding 1 (first: b.txt), "
        "repetition 1 (first: a.txt); see [data.clean]"
    )


def test_texts_resume_at_any_document_without_opening_earlier_files(corpus: Path):
    recipe = DataRecipe(source=str(corpus), sequence=8)
    files = find_files(recipe.all_sources)
    result = clean_and_split_corpus(files, recipe, print)
    every = list(result.iterate_texts(files, Reader(), "train"))
    for file in files[:50]:
        file.path.unlink()
    assert list(result.iterate_texts(files, Reader(), "train", first=50)) == [item for item in every if item[0] >= 50]
    assert [number for number, _ in every] == np.flatnonzero(result.codes == 0).tolist()


def test_file_changed_between_passes_is_detected(corpus: Path):
    recipe = DataRecipe(source=str(corpus), sequence=8)
    files = find_files(recipe.all_sources)
    result = clean_and_split_corpus(files, recipe, print)
    (corpus / "100.txt").write_bytes(b"\x00")
    with pytest.raises(UserError, match=r"100\.txt (changed while it was being prepared|is binary)"):
        list(result.iterate_texts(files, Reader(), "train")), list(result.iterate_texts(files, Reader(), "validation"))


def test_last_document_of_split_is_found_across_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_module, "_BLOCK", 3)
    codes = np.array([0, 1, 0, 0, 2, 1, 2, 0, 2, 2], dtype=np.uint8)
    for code in range(4):
        for begin in range(11):
            for end in range(begin, 11):
                places = [place for place in range(begin, end) if codes[place] == code]
                assert find_last(codes, code, begin, end) == (places[-1] if places else -1)


def test_samples_of_dropped_documents_are_masked(tmp_path: Path):
    """Applies to documents dropped for their text, to duplicates, and to the documents they repeat."""
    secret = "someone@example.org"
    for name, content in (
        ("a", f"Write to {secret} today.\n"), ("b", f"Write to {secret} today.\n"), ("c", f"{secret}\n" * 9),
        ("d", text(1)), ("e", text(2)),
    ):  # fmt: skip
        (tmp_path / f"{name}.txt").write_text(content)
    result, _ = clean_directory(tmp_path, validation_fraction=0, clean={"mask": ["email"]})
    assert result.report["dropped"]["exact_duplicates"] == result.report["dropped"]["repetition"] == 1
    shown = json.dumps(result.report["samples"])
    assert "<email>" in shown and secret not in shown


def test_examples_of_one_record_share_their_split_and_are_no_near_duplicates_of_each_other(tmp_path: Path):
    """Each answer with reasoning ends an example of its own, which repeats most of the one before it."""

    def make_record(number: int, change: str = "") -> str:
        messages = [{"role": "user", "content": " ".join(f"word{number}x{at}" for at in range(200))}]
        for turn in range(3):
            messages += [
                {"role": "assistant", "content": f"<think>because {number}</think>answer {turn}{change}"},
                {"role": "user", "content": f"and {turn}?"},
            ]
        return json.dumps({"messages": messages[:-1]})

    records = [make_record(number) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*records, make_record(0, change=" changed")]))
    recipe = DataRecipe(
        source=str(tmp_path / "a.jsonl"),
        sequence=8,
        records="chat",
        thinking="all",
        validation_fraction=0.3,
        clean=CleanRecipe(near_duplicates=True),
    )
    files = find_files(recipe.all_sources, records=True)
    cleaned = clean_and_split_corpus(files, recipe, print)
    codes = cleaned.codes.reshape(41, 3)
    assert cleaned.dropped["near_duplicates"] == 3 and (codes[40] >= 2).all()
    assert (codes == codes[:, :1]).all() and 2 <= (codes[:40, 0] == 1).sum() <= 30
