from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.corpus import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 120 documents."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def file(tmp_path: Path):
    """Writes bytes to a file of that name."""

    def write(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write
