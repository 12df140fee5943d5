"""Contents of large corpora are hashed once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from meshwright.data.sources.contents import SourceDigests
from meshwright.data.sources.resolution import find_files


def test_large_corpus_is_hashed_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshwright.data.sources.contents.REMEMBER_FROM", 1)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"text {number}")
        os.utime(texts / f"{number}.txt", (1e9, 1e9))
    monkeypatch.setattr("meshwright.data.sources.contents._SETTLED", -1.0)
    hashed: list[str] = []

    def digest(file):
        hashed.append(file.name)
        return original(file)

    from meshwright.data.sources import contents

    original = contents.hash_source
    monkeypatch.setattr(contents, "hash_source", digest)
    log: list[str] = []
    first = SourceDigests(find_files([str(texts)]), tmp_path, log.append)
    assert (len(hashed), len(log)) == (3, 1)
    again = SourceDigests(find_files([str(texts)]), tmp_path, log.append)
    assert again.sha256 == first.sha256 and len(hashed) == 3 and len(log) == 1
    (texts / "1.txt").write_text("text X")  # same size and modification time
    os.utime(texts / "1.txt", (1e9, 1e9))
    changed = SourceDigests(find_files([str(texts)]), tmp_path, log.append)
    assert hashed[3:] == ["1.txt"]
    assert changed.sha256[1] == hashlib.sha256(b"text X").hexdigest() != first.sha256[1]
    assert first.find_changed() is not None and changed.find_changed() is None
