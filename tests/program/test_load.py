"""Programs from files: both forms, both dialects, and a clear error for any other file."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.program import collective, pipeline
from meshwright.program.collective_text import format_collective
from meshwright.program.json_form import format_json
from meshwright.program.load import load_program
from meshwright.program.pipeline_text import format_pipeline


def exchange() -> collective.CollectiveProgram:
    program = collective.Builder("all-reduce", "exchange", 2, chunks=1)
    with program.round():
        program.transfer([0, 1], [1, 0], chunk=0, reduce=True)
    return program.build()


def one_stage() -> pipeline.PipelineProgram:
    program = pipeline.Builder("small", 1, 1, (pipeline.place_cyclically(1),))
    program.ranks[0].forward(0)
    program.ranks[0].backward(0)
    return program.build()


def test_text_and_json_of_both_dialects_are_read(tmp_path: Path) -> None:
    path = tmp_path / "program"
    for text in (format_collective(exchange()), format_json(exchange()), "\ufeff\n" + format_json(exchange())):
        path.write_text(text)
        assert load_program(path, "collective") == exchange()
        assert load_program(f"@{path}", "collective") == exchange()
    for text in (format_pipeline(one_stage()), format_json(one_stage())):
        path.write_text(text)
        assert load_program(path, "pipeline") == one_stage()


def test_a_program_of_the_other_dialect_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_text(format_json(one_stage()))
    with pytest.raises(UserError, match="a pipeline program where a collective program is wanted"):
        load_program(path, "collective")
    path.write_text(format_pipeline(one_stage()))
    with pytest.raises(UserError, match=r"program, line 1: "):
        load_program(path, "collective")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\x7fELF\x01\xff", "not text"),
        (b"a\0b", "not text"),
        (b'{\n"dialect": }', "line 2: not JSON: Expecting value"),
        (b"[" * 10 + b"]", "line 1: "),
        (b'{"a":' * 100_000, "not the JSON form"),
        (b'{"dialect": "collective", "format": ' + b"9" * 5000 + b"}", "not the JSON form of a program"),
        (b'{"dialect": "collective", "format": NaN}', '"format" should be 1, not NaN'),
    ],
)
def test_file_without_program_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "program"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_program(path, "collective")
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_program(tmp_path / "nothing", "collective")
    with pytest.raises(UserError, match="is a directory, not a program file"):
        load_program(tmp_path, "pipeline")
    with pytest.raises(UserError, match="cannot be read"):
        load_program("a" * 5000, "pipeline")
