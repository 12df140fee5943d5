"""A small corpus, and the files of an undisturbed preparation of it."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.data import prepare
from meshwright.recipe import DataRecipe


def write_corpus(directory: Path) -> Path:
    """120 documents of 500 words."""
    directory.mkdir(parents=True, exist_ok=True)
    words = random.Random(0).choices(["alpha", "beta", "gamma", "δέλτα", "def f(x):\n    return x\n", "\n\n"], k=60_000)
    for number in range(120):
        (directory / f"{number:03d}.txt").write_text(" ".join(words[number * 500 : (number + 1) * 500]))
    return directory


def recipe(corpus: Path, cache: Path, **data: Any) -> DataRecipe:
    """Return a recipe with several shards, and the byte tokenizer or a BPE of 400 tokens."""
    settings = {"tokenizer": "bytes", "vocabulary": 400, "sequence": 32, "shard_tokens": 30_000, **data}
    return DataRecipe(source=str(corpus), cache=str(cache), **{"validation_fraction": 0.1, **settings})


def files(directory: Path) -> dict[str, str]:
    """Return {path below `directory`: SHA-256} of every file except the lock."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "lock"
    }


@cache
def undisturbed(tokenizer: str) -> dict[str, str]:
    """Return the files of an undisturbed preparation, by path with their SHA-256."""
    with TemporaryDirectory() as directory:
        prepare(recipe(write_corpus(Path(directory, "corpus")), Path(directory, "cache"), tokenizer=tokenizer))
        return files(Path(directory, "cache"))
