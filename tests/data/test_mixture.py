"""Weighted mixtures: sources are packed separately, mixed by the sample order, and counted separately."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import prepare
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe, load_recipe
from tests.data.corpus import files


def write(directory: Path, name: str, letter: str, documents: int) -> str:
    """A JSON Lines file of texts of one letter, so that every token identifies its source."""
    path = directory / f"{name}.jsonl"
    lines = [json.dumps({"text": letter * (50 + number)}) + "\n" for number in range(documents)]
    path.write_text("".join(lines))
    return str(path)


def recipe(tmp_path: Path, weights: dict[str, float | None], **settings: object) -> DataRecipe:
    sources = [
        {"path": str(tmp_path / f"{name}.jsonl"), "name": name} | ({"weight": weight} if weight else {})
        for name, weight in weights.items()
    ]
    clean = {"maximum_repetition": 1.0}
    said = {
        "tokenizer": "bytes",
        "sequence": 16,
        "shard_tokens": 1000,
        "cache": str(tmp_path / "cache"),
        "clean": clean,
    }
    return DataRecipe.model_validate({"sources": sources, **said, **settings})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, letter, documents in (("web", "w", 150), ("books", "b", 60), ("code", "c", 20)):
        write(tmp_path, name, letter, documents)
    return tmp_path


def letters(data, numbers: np.ndarray) -> list[str]:
    """Return the letter of each sample in training order; no sample has two."""
    batch = data.split("train").read_batch(data.make_sample_order().sample(numbers))
    found = []
    for row in batch.tokens:
        letters = {chr(token) for token in row.tolist() if token < 256}
        assert len(letters) == 1
        found.append(letters.pop())
    return found


def test_mixture_samples_follow_weights(corpus: Path):
    data = prepare(recipe(corpus, {"web": 5, "books": 3, "code": 2}), seed=1)
    found = letters(data, np.arange(2000))
    assert [found.count(letter) for letter in "wbc"] == [1000, 600, 400]
    for begin in range(0, 2000, 50):
        assert [found[begin : begin + 50].count(letter) for letter in "wbc"] == [25, 15, 10]
    assert found[:10] != sorted(found[:10])


def test_mixture_reads_every_sample_once_per_epoch(corpus: Path):
    data = prepare(recipe(corpus, {"web": 1, "books": 1, "code": 1}))
    sequences = data.split("train").sequences_by_source
    assert sum(sequences) == data.split("train").sequences and len(set(sequences)) == 3
    samples = data.make_sample_order().sample(np.arange(3 * max(sequences)))
    begin = 0
    for count in sequences:
        own = samples[(samples >= begin) & (samples < begin + count)]
        assert len(own) == max(sequences)
        for epoch in range(len(own) // count):
            assert sorted(own[epoch * count : (epoch + 1) * count].tolist()) == list(range(begin, begin + count))
        begin += count


def test_weighted_source_rows_hold_only_its_tokens(corpus: Path):
    data = prepare(recipe(corpus, {"web": 1, "books": 2}))
    split = data.split("train")
    stream = np.concatenate(list(split.iterate_tokens()))
    border = data.summary()["sources"][0]["train"]["tokens"]
    first, second = split.sequences_by_source
    rows = split.read_batch(np.arange(first + second)).tokens
    assert np.array_equal(rows[:first].ravel(), stream[: first * 16])
    assert np.array_equal(rows[first:].ravel(), stream[border : border + second * 16])
    assert len(split.shards) > 4


def test_weights_change_order_not_prepared_data(corpus: Path):
    made = [
        prepare(recipe(corpus, weights))
        for weights in ({"web": 5, "books": 3}, {"web": 1, "books": 3}, {"web": None, "books": None})
    ]
    assert len({data.directory for data in made}) == 1
    assert len({tuple(data.make_sample_order().sample(np.arange(50)).tolist()) for data in made}) == 3
    one_text = made[2].split("train")
    assert len(one_text.sequences_by_source) == 1


def test_validation_split_is_independent_of_weights(corpus: Path):
    said = recipe(corpus, {"web": 5, "books": 3}, validation_fraction=0.2)
    weighted = prepare(said)
    paths = [source.path for source in said.all_sources]
    listed = prepare(DataRecipe.model_validate(said.model_dump() | {"source": paths, "sources": None}))
    assert list(weighted.iterate_documents()) == list(listed.iterate_documents())
    assert weighted.split("validation").rows > 1


def test_source_key_and_format_override_defaults(tmp_path: Path):
    (tmp_path / "a.data").write_text('{"body": "aaa"}\n{"body": "aab"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "bbb"}\n{"text": "bba"}\n')
    sources = [
        {"path": str(tmp_path / "a.data"), "format": "jsonl", "text_key": "body"},
        {"path": str(tmp_path / "b.jsonl")},
    ]
    settings = {"tokenizer": "bytes", "sequence": 2, "validation_fraction": 0.0, "cache": str(tmp_path / "cache")}
    data = prepare(DataRecipe.model_validate({"sources": sources, **settings}), keep_text=True)
    assert list(data.iterate_documents("train")) == ["aaa", "aab", "bbb", "bba"]


def test_source_counts_sum_up_and_report_epochs(corpus: Path):
    with (corpus / "web.jsonl").open("a") as file:
        file.write('{"text": ""}\n')
    summary = prepare(recipe(corpus, {"web": 2, "books": 1, "code": 1})).summary(samples=4000)
    sources = {source["name"]: source for source in summary["sources"]}
    assert [sources[name]["documents"] for name in ("web", "books", "code")] == [151, 60, 20]
    for split in ("train", "validation"):
        for key in ("documents", "tokens", "bytes"):
            assert sum(source[split][key] for source in sources.values()) == summary["splits"][split][key]
    for name, share in (("web", 0.5), ("books", 0.25), ("code", 0.25)):
        assert sources[name]["share"] == share
        assert sources[name]["epochs"] == pytest.approx(4000 * share / sources[name]["sequences"])
    alike = prepare(recipe(corpus, {"web": None, "books": None})).summary(samples=4000)
    assert {source["epochs"] for source in alike["sources"]} == {4000 / alike["splits"]["train"]["sequences"]}
    assert sum(source["share"] for source in alike["sources"]) == pytest.approx(1)


def test_shards_end_with_source_and_resume_after_kill(corpus: Path, tmp_path: Path):
    said = recipe(corpus, {"web": 2, "books": 1, "code": 1})
    whole = prepare(said)
    before = files(whole.directory)
    removed = sorted((whole.directory / "train").glob("*.json"))[len(whole.split("train").shards) // 2 :]
    for path in [*removed, whole.directory / "manifest.json"]:
        path.unlink()
    assert prepare(said).sha256 == whole.sha256
    assert files(whole.directory) == before


def test_weighted_source_without_samples_is_refused_by_name(corpus: Path):
    (corpus / "code.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(
        UserError, match='data.sources: "code" has a weight, but too little of it remains after cleaning'
    ):
        prepare(recipe(corpus, {"web": 2, "code": 1}))
    assert prepare(recipe(corpus, {"web": None, "code": None})).summary()["sources"][1]["train"]["documents"] == 0


def test_missing_source_error_names_its_table(corpus: Path):
    with pytest.raises(UserError, match=r'^data.sources: ".*/boks.jsonl" does not exist; did you mean ".*books.jsonl"'):
        prepare(recipe(corpus, {"web": 1, "boks": 1}))


def test_override_of_source_replaces_sources(tmp_path: Path):
    path = tmp_path / "mixed.toml"
    path.write_text(
        '[model]\nfamily = "llama"\nlayers = 1\nhidden = 8\nheads = 1\n[data]\nsequence = 8\n'
        '[[data.sources]]\npath = "a.jsonl"\nweight = 1\n[[data.sources]]\npath = "b.jsonl"\nweight = 2\n'
        "[train]\nsteps = 1\nbatch = 1\nlearning_rate = 1e-3\n"
    )
    assert load_recipe(path).data.source_key == "data.sources"
    small = load_recipe(path, ["data.source=small.txt"]).data
    assert [source.path for source in small.all_sources] == ["small.txt"] and small.source_key == "data.source"
    again = load_recipe(path, ["data.source=small.txt", 'data.sources=[{path = "c.jsonl"}]']).data
    assert [source.path for source in again.all_sources] == ["c.jsonl"]
