"""The data cache: keyed by contents, complete, with one-line errors if it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data import preparation as preparation_module
from meshwright.data import prepare
from meshwright.data.cleaning import rules
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe, DataRecipe
from tests.data.corpus import files, recipe, undisturbed


def test_every_byte_and_document_is_counted(corpus: Path, tmp_path: Path):
    data = prepare(recipe(corpus, tmp_path), seed=3)
    summary, texts = data.summary(), {path.read_text() for path in corpus.iterdir()}
    assert summary["documents"] == 120 and sum(summary["dropped"].values()) == 0
    assert summary["bytes"] == sum(len(text.encode()) for text in texts) == summary["tokens"] - 2 * 120
    held_out = list(data.iterate_documents())
    assert set(held_out) < texts and 0 < len(held_out) == summary["splits"]["validation"]["documents"]
    train = b"".join(part.astype("<u2").tobytes() for part in data.split("train").iterate_tokens())
    decoded = data.tokenizer.decode(np.frombuffer(train, "<u2").tolist()).split("<|endoftext|>")
    assert {text for text in decoded if text} == texts - set(held_out)
    assert summary["splits"]["train"]["shards"] > 5
    assert data.make_sample_order().seed == 3 and data.make_sample_order().sequences == data.split("train").sequences


def test_second_call_uses_cache(corpus: Path, tmp_path: Path):
    log: list[str] = []
    first = prepare(recipe(corpus, tmp_path), log=log.append)
    assert any(line.startswith("packed train") for line in log)
    log.clear()
    # The packing of samples is not part of the cache.
    again = prepare(recipe(corpus, tmp_path, sequence=64, document_mask=False), log=log.append)
    assert log == [] and again.directory == first.directory
    assert again.split("train").sequence == 64


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "bpe"},
        {"validation_fraction": 0.2},
        {"shard_tokens": 40_000},
        {"clean": CleanRecipe(minimum_characters=2)},
    ],
)
def test_cache_key_covers_every_option(corpus: Path, tmp_path: Path, change: dict[str, Any]):
    before = prepare(recipe(corpus, tmp_path, vocabulary=300))
    assert prepare(recipe(corpus, tmp_path, vocabulary=300, **change)).directory != before.directory


def test_cache_key_covers_blocked_words(corpus: Path, tmp_path: Path):
    words = tmp_path / "words.txt"
    directories = set()
    for listed in ("unheard", "unheard of"):
        words.write_text(listed)
        directories.add(prepare(recipe(corpus, tmp_path, clean=CleanRecipe(blocked_words=str(words)))).directory)
    assert len(directories) == 2


def test_cache_key_covers_the_rules_of_masks(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    masked, plain = recipe(corpus, tmp_path, clean=CleanRecipe(mask=["ip"])), recipe(corpus, tmp_path)
    before = prepare(masked).directory, prepare(plain).directory
    monkeypatch.setattr(rules, "MASKS_VERSION", rules.MASKS_VERSION + 1)
    assert prepare(masked).directory != before[0] and prepare(plain).directory == before[1]


def test_cache_key_depends_on_contents_not_location(corpus: Path, tmp_path: Path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    cache = tmp_path / "cache"
    before = prepare(recipe(corpus, cache)).directory
    assert prepare(recipe(moved, cache)).directory == before
    (moved / "000.txt").write_text("something else")
    assert prepare(recipe(moved, cache)).directory != before


def test_tokenizer_is_not_trained_on_validation_text(corpus: Path, tmp_path: Path):
    data = prepare(recipe(corpus, tmp_path, tokenizer="bpe"))
    held_out = set(data.iterate_documents())
    others = tmp_path / "others"
    others.mkdir()
    for path in corpus.iterdir():
        if path.read_text() not in held_out:
            (others / path.name).write_text(path.read_text())
    alone = prepare(recipe(others, tmp_path, tokenizer="bpe", validation_fraction=0))
    same = [(prepared.tokenizer_directory / "tokenizer.json").read_bytes() for prepared in (data, alone)]
    assert same[0] == same[1]


def test_large_corpus_trains_tokenizer_on_even_sample(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def remember(directory, name, vocabulary, found, texts, template):
        seen.extend(texts)
        return write(directory, "bytes", vocabulary, found, iter([]))

    write = preparation_module.write_tokenizer
    monkeypatch.setattr(preparation_module, "write_tokenizer", remember)
    size = sum(path.stat().st_size for path in corpus.iterdir())
    monkeypatch.setattr(preparation_module, "TRAINING_TEXT", size // 4)
    prepare(recipe(corpus, tmp_path, tokenizer="bpe"))
    assert 0.15 < sum(len(text.encode()) for text in seen) / size < 0.35
    order = [path.read_text() for path in sorted(corpus.iterdir())]
    places = [order.index(text) for text in seen]
    assert np.histogram(places, bins=4, range=(0, 120))[0].min() >= 3


def refusal(data: DataRecipe) -> str:
    with pytest.raises(UserError) as caught:
        prepare(data)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_split_that_cannot_fill_a_sample_is_refused(corpus: Path, tmp_path: Path):
    line = refusal(recipe(corpus, tmp_path, sequence=100_000))
    assert line.startswith("data.sequence = 100000: the validation split has only")
    assert line.endswith("one sample needs 100,001; add text, raise data.validation_fraction or reduce data.sequence")
    assert "the train split" in refusal(recipe(corpus, tmp_path, sequence=10**6, validation_fraction=0))


def test_unwritable_cache_is_refused(corpus: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    line = refusal(recipe(corpus, tmp_path / "file"))
    assert line.startswith(f"data.cache: {tmp_path / 'file'}") and "another directory" in line


def test_full_disk_leaves_no_partial_data(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        if sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 200_000:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    sync = os.fsync
    monkeypatch.setattr(os, "fsync", full)
    assert "cannot be written: No space left on device; free space there" in refusal(recipe(corpus, tmp_path))
    assert not list(tmp_path.rglob(".partial*"))
    monkeypatch.setattr(os, "fsync", sync)
    prepare(recipe(corpus, tmp_path))
    assert files(tmp_path) == undisturbed("bytes")


@pytest.mark.parametrize("when", ["reading", "kept", "packed train"])
def test_source_changed_during_preparation_is_refused(corpus: Path, tmp_path: Path, when: str):
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in corpus.iterdir():
        (texts / path.name).write_bytes(path.read_bytes())

    def log(line: str) -> None:
        if line.startswith(when):
            (texts / "000.txt").write_bytes(b"changed" if when != "kept" else b"")

    with pytest.raises(UserError, match=r"000\.txt changed while it was being prepared"):
        prepare(recipe(texts, tmp_path / "cache"), log=log)
    assert files(tmp_path / "cache") == {}
    prepare(recipe(texts, tmp_path / "cache"))
