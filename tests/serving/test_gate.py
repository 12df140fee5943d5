"""API keys are read from a file, one per line."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.serving.gate import check_origins, read_api_keys


def test_keys_are_the_lines_of_the_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n  second \n")
    assert read_api_keys(file) == ("first", "second")


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\n# none\n", "has no key"), (b"\xff", "byte 0 is not UTF-8"), (None, "cannot be read")]
)
def test_file_without_keys_is_one_line(tmp_path: Path, content: bytes | None, reason: str):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_api_keys(tmp_path / "keys")


@pytest.mark.parametrize("origin", ["nonsense", "https://a.org/", "https://", "//a.org", "https://a.org/page", ""])
def test_origins_that_no_browser_sends_are_refused(origin: str):
    assert check_origins(["*", "https://a.org", "http://localhost:3000", "chrome-extension://abc"])
    with pytest.raises(UserError, match="should be an origin such as"):
        check_origins(["https://a.org", origin])
