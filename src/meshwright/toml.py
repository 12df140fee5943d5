"""TOML files: reading with errors that name file and line, and formatting that parses back to equal values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.names import nearest
from meshwright.untrusted import check_nesting, describe_parse_error, read_file


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read the TOML file `path` into nested dicts. kind: noun for the file's content, such as "recipe", for errors.
    Raises `UserError` if the file is missing, unreadable or invalid."""
    try:
        text = read_file(path, "recipe_bytes", pipe=True).decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_describe_missing_file(path, kind)) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; a {kind} is a TOML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a {kind}: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return parse_toml(text, str(path))


@cache
def read_packaged_toml(name: str) -> Mapping[str, Any]:
    """Return the tables of a TOML file that is part of Meshwright; cached. name: its path in the package, such as
    "planner/cost/rates.toml"."""
    return tomllib.loads(Path(__file__).parent.joinpath(name).read_text(encoding="utf-8"))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML text into nested dictionaries. where: name of the text, such as its file, for errors. Raises
    `UserError` with that name and the line."""
    try:
        tables = tomllib.loads(text)
        check_nesting(tables)
        return tables
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        position = re.search(r" \(at line (\d+), column \d+\)$", message)
        line = position[1] if position else len(text.splitlines()) or 1
        reason = message[: position.start()] if position else message.removesuffix(" (at end of document)")
        raise UserError(f"{where}:{line}: not valid TOML: {reason[:1].lower()}{reason[1:]}") from None
    except (ValueError, RecursionError) as error:  # a huge integer, an impossible date, or nested too deeply
        raise UserError(f"{where}: not valid TOML: {describe_parse_error(error)}") from None


def _describe_missing_file(path: Path, kind: str) -> str:
    """Return the error text for the missing file `path`, with the most similar name in its directory. kind: noun for
    the file's content, such as "recipe"."""
    if not path.parent.is_dir():
        return f"no such {kind}: {path} (there is no directory {path.parent})"
    files = [file.name for file in path.parent.iterdir() if file.suffix == ".toml"]
    close = nearest(path.name, files) or nearest(f"{path.name}.toml", files)
    return f"no such {kind}: {path}" + (f"; did you mean {path.parent / close}?" if close else "")


def format_toml(tables: Mapping[str, Any]) -> str:
    """Format nested dicts as TOML text. tables: strings, booleans, numbers, and lists and dicts of these; not None."""
    lines: list[str] = []
    _append_table(tables, "", lines)
    return "\n".join(lines) + "\n"


def _append_table(table: Mapping[str, Any], name: str, lines: list[str]) -> None:
    """Append the lines of a table and its inner tables to `lines`. name: dotted name of the table, empty for the
    root."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if name and (values or not table):
        lines.extend([""] * bool(lines) + [f"[{name}]"])
    lines.extend(f"{_format_key(key)} = {format_toml_value(value)}" for key, value in values.items())
    for key, value in table.items():
        if isinstance(value, Mapping):
            _append_table(value, f"{name}.{_format_key(key)}" if name else _format_key(key), lines)


def _format_key(key: str) -> str:
    """Format one key of a table, in quotes if necessary."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_toml_value(key)


def format_toml_value(value: Any) -> str:
    """Format one value on one line as TOML; dictionaries become inline tables."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are a subset of TOML's
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back as the same number; "inf" and "nan" are TOML too
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(format_toml_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_format_key(key)} = {format_toml_value(item)}' for key, item in value.items())}}}"
    assert isinstance(value, int), f"{value!r} has no TOML form"
    return str(value)
