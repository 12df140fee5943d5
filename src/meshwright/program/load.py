"""Collective and pipeline programs in files, in text form or JSON form, which the first character distinguishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, overload

from meshwright.errors import UserError
from meshwright.program.collective import CollectiveProgram
from meshwright.program.collective_text import format_collective, parse_collective
from meshwright.program.json_form import format_json, from_json_dict
from meshwright.program.pipeline import PipelineProgram
from meshwright.program.pipeline_text import format_pipeline, parse_pipeline
from meshwright.untrusted import parse_json, read_file


@overload
def load_program(path: str | Path, dialect: Literal["collective"]) -> CollectiveProgram:
    """Read a collective program from the file `path`, in text or JSON form."""


@overload
def load_program(path: str | Path, dialect: Literal["pipeline"]) -> PipelineProgram:
    """Read a pipeline schedule from the file `path`, in text or JSON form."""


def load_program(path: str | Path, dialect: Literal["collective", "pipeline"]) -> CollectiveProgram | PipelineProgram:
    """Read a collective program (if `dialect` is "collective") or a pipeline schedule ("pipeline") from a file in text
    or JSON form.

    path: a leading `@`, as on the command line, is ignored. Raises `UserError` with the file's name and, where known,
    the line.
    """
    name = str(path).removeprefix("@")
    text = read_program_text(name)
    if not text.lstrip().startswith("{"):
        return parse_collective(text, name) if dialect == "collective" else parse_pipeline(text, name)
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}, line {error.lineno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{name}: not the JSON form of a program: {error}") from None
    program = from_json_dict(value, name)
    if isinstance(program, CollectiveProgram) != (dialect == "collective"):
        other = "pipeline" if dialect == "collective" else "collective"
        raise UserError(f"{name}: a {other} program where a {dialect} program is wanted")
    return program


def format_program(program: CollectiveProgram | PipelineProgram, path: str | Path) -> str:
    """Return a collective program or pipeline schedule as the text to write to the file `path`: JSON if the suffix is
    `.json`, else the text form."""
    if Path(path).suffix.lower() == ".json":
        return format_json(program)
    return format_collective(program) if isinstance(program, CollectiveProgram) else format_pipeline(program)


def read_program_text(path: str | Path) -> str:
    """Read the file `path` of a collective program or pipeline schedule and return its text. Raises `UserError` if the
    file is missing, unreadable, empty or not text."""
    try:
        text = read_file(path, "program_bytes", pipe=True).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory, not a program file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text; a program file has the text or the JSON form of a program") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if "\0" in text:
        raise UserError(f"{path}: not text; a program file has the text or the JSON form of a program")
    if not text.strip():
        raise UserError(f'{path}: the file is empty; a program starts with a line "collective ..." or "pipeline ..."')
    return text
