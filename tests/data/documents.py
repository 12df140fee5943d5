"""Documents of a file, or its error message."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError


def read(path: Path, *, named: bool = True, **settings: object) -> list[tuple[str, str | None]]:
    """Return (name, text) of the documents of a file that the recipe names, or that a glob found."""
    pattern = str(path) if named else f"{path.parent}/[{path.name[0]}]{path.name[1:]}"
    (file,) = find_files([pattern])
    assert file.named == named
    return [(document.name, document.text) for document in Reader(**settings).read_documents(file)]  # type: ignore[arg-type]


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line
