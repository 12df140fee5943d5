"""Written TOML parses back equal with the standard library."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.toml import format_toml, read_toml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
INLINE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3))
TABLES = st.recursive(
    st.dictionaries(TEXTS, INLINE, max_size=3), lambda inner: st.dictionaries(TEXTS, INLINE | inner, max_size=3)
)


@given(TABLES)
def test_written_toml_parses_back_equal(tables: dict):
    assert tomllib.loads(format_toml(tables)) == tables


def test_tables_inside_lists_are_written_inline():
    tables = {"points": [{"x": 1, "y z": [0.5]}, {}]}
    assert tomllib.loads(format_toml(tables)) == tables


def test_file_is_read_with_or_without_byte_order_mark(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbfkey = 1\n")
    assert read_toml(path, "recipe") == {"key": 1}


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"a = 1\nb = \n", 2), (b"a = 1\n\nsomething\n", 3), (b'a = """\n\nnever closed', 3), (b"a = 1\na = 2\n", 2)],
)
def test_wrong_syntax_names_file_and_line(tmp_path: Path, content: bytes, line: int):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_toml(path, "recipe")
    assert str(caught.value).startswith(f"{path}:{line}: not valid TOML: ")


def test_binary_files_and_directories_are_refused(tmp_path: Path):
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"abc\xff\x00")
    with pytest.raises(UserError, match="is not a recipe: byte 3 is not UTF-8 text"):
        read_toml(binary, "recipe")
    with pytest.raises(UserError, match="is a directory; a recipe is a TOML file"):
        read_toml(tmp_path, "recipe")


def test_missing_file_error_names_nearest_neighbour(tmp_path: Path):
    (tmp_path / "quickstart.toml").touch()
    for wrong in ("quikstart.toml", "quickstart", "quickstart.tml"):
        with pytest.raises(UserError) as caught:
            read_toml(tmp_path / wrong, "recipe")
        assert str(caught.value) == f"no such recipe: {tmp_path / wrong}; did you mean {tmp_path / 'quickstart.toml'}?"
    with pytest.raises(UserError, match="there is no directory"):
        read_toml(tmp_path / "elsewhere" / "quickstart.toml", "recipe")
