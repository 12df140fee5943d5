"""Records of instruction and chat data as they lie in files: what was asked, what was answered; all else is kept."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.files import canonical_json, write_whole
from meshwright.data.reading import LONGEST_LINE
from meshwright.data.sources import find_files
from meshwright.data.streams import compression, decoding_errors, open_stream
from meshwright.errors import UserError
from meshwright.names import nearest

Record: TypeAlias = dict[str, Any]
ANNOTATION = "annotation"  # the key under which a record carries its labels; not part of what it is
_KEYS = ("instruction", "messages", "conversations", "prompt")
_ANSWERS = ("chosen", "response", "completion")  # the keys of an answer to a `prompt`
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


class Exchange(NamedTuple):
    """What a record asks, all turns before the last answer, and that answer; "" where there is none."""

    prompt: str
    response: str


class Turn(NamedTuple):
    role: str
    content: str


def exchange(record: Mapping[str, Any], where: str) -> Exchange:
    """The two sides of a record.

    instruction (with input) and output as in Alpaca; messages [{role, content}] or ShareGPT's conversations [{from,
    value}], whose last assistant turn is the response; prompt (text or messages) with chosen, response or completion.
    `UserError`, which begins with `where`, for anything else.
    """
    if "instruction" in record:
        parts = [_text(record, "instruction", where), _text(record, "input", where, optional=True)]
        return Exchange("\n\n".join(filter(None, parts)), _text(record, "output", where, optional=True))
    if "messages" in record or "conversations" in record:
        turns = _turns(record, "messages" if "messages" in record else "conversations", where)
        answered = bool(turns) and turns[-1].role == "assistant"
        return Exchange(_joined(turns[:-1] if answered else turns), turns[-1].content if answered else "")
    if "prompt" in record:
        answer = next((key for key in _ANSWERS if key in record), None)
        return Exchange(_side(record, "prompt", where), _side(record, answer, where) if answer else "")
    held = ", ".join(f'"{key}"' for key in list(record)[:8]) or "no keys"
    close = next((f'; did you mean "{near}"?' for key in record if (near := nearest(key, _KEYS))), "")
    raise UserError(
        f'{where}: neither "instruction" with "output", nor "messages", nor "prompt" with "chosen" '
        f"(it has {held}){close}"
    )


def with_response(record: Mapping[str, Any], response: str, where: str) -> Record:
    """The record with another last answer, written where the old one was."""
    changed = dict(record)
    if "instruction" in record:
        changed["output"] = response
        return changed
    key = next((key for key in ("messages", "conversations") if key in record), None)
    if key is None:
        key = next((key for key in _ANSWERS if key in record), "response")
        if not isinstance(record.get(key), list):
            changed[key] = response
            return changed
    turns = _turns(record, key, where)
    if turns and turns[-1].role == "assistant":
        last = dict(record[key][-1])
        changed[key] = [*record[key][:-1], {**last, "value" if "value" in last else "content": response}]
    elif key == "conversations":
        changed[key] = [*record[key], {"from": "gpt", "value": response}]
    else:
        changed[key] = [*record[key], {"role": "assistant", "content": response}]
    return changed


def first_request(record: Mapping[str, Any], where: str) -> str:
    """What a record asks for at its beginning: its instruction without the input, or the first turn of the user."""
    if "instruction" in record:
        return _text(record, "instruction", where)
    key = next((key for key in ("messages", "conversations", "prompt") if isinstance(record.get(key), list)), None)
    if key is None:
        return exchange(record, where).prompt
    return next((turn.content for turn in _turns(record, key, where) if turn.role == "user"), "")


def record_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each record: 16 hexadecimal digits of the SHA-256 of what it is, annotation aside, and "-2", "-3" for
    its repetitions. It stays the same wherever the record stands and however it is labelled."""
    seen: dict[str, int] = {}
    names = []
    for record in records:
        plain = {key: value for key, value in record.items() if key != ANNOTATION}
        name = hashlib.sha256(canonical_json(plain)).hexdigest()[:16]
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def read_rows(path: Path) -> list[tuple[str, Record]]:
    """(where, record) of each record of a JSON Lines file or of one JSON list (`.json`), compressed or not."""
    return list(_rows(path))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON Lines file, whole or not at all. Raises UserError where it cannot be written."""
    try:
        write_whole(path, b"".join(map(json_line, rows)))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of JSON, in readable characters where UTF-8 has them."""
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can say
        return json.dumps(row).encode() + b"\n"


def _rows(path: Path) -> Iterator[tuple[str, Record]]:
    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file of records")
    [file] = find_files([str(path)], "jsonl", key="records") if path.exists() else _missing(path)
    try:
        with open_stream(file) as stream:
            if stream.peek(1)[:1] == b"[" or ".json" in path.suffixes:
                yield from _list(path, stream.read())
                return
            for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
                where = f"{path}:{number}"
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if len(line) == LONGEST_LINE:
                    raise UserError(f"{where}: a line of {LONGEST_LINE:,} bytes or more; one record is one line")
                if not line.isspace():
                    yield where, _object(_parsed(line.rstrip(b"\r\n"), where), where)
    except EOFError:
        raise UserError(f"{path}: the {compression(file)} file is cut short, its end is missing") from None
    except decoding_errors() as error:
        raise UserError(f"{path}: not a readable {compression(file)} file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _missing(path: Path) -> list[Any]:
    return find_files([str(path)], "jsonl", key="records")  # which says what there is instead


def _list(path: Path, data: bytes) -> Iterator[tuple[str, Record]]:
    """The records of a file that is one JSON value: a list of objects, or one object."""
    value = _parsed(data.removeprefix(codecs.BOM_UTF8), str(path))
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        where = f"{path}: record {number}"
        yield where, _object(row, where)


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode())
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{where}: not JSON ({error.msg} at {place})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None


def _object(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise UserError(f'{where}: not an object, as in {{"instruction": "...", "output": "..."}}')
    return value


def _text(record: Mapping[str, Any], key: str, where: str, optional: bool = False) -> str:
    value = record.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" is {json.dumps(value)[:40]}, not a string')
    return value


def _side(record: Mapping[str, Any], key: str, where: str) -> str:
    """A text, or messages: the prompt's all, an answer's last."""
    if isinstance(record[key], str):
        return _text(record, key, where)
    turns = _turns(record, key, where)
    return _joined(turns) if key == "prompt" else turns[-1].content if turns else ""


def _turns(record: Mapping[str, Any], key: str, where: str) -> list[Turn]:
    said = record[key]
    if not isinstance(said, list):
        raise UserError(f'{where}: "{key}" is {json.dumps(said)[:40]}, not a list of messages')
    turns = []
    for number, message in enumerate(said, 1):
        keys = ("from", "value") if isinstance(message, dict) and "from" in message else ("role", "content")
        role, content = map(message.get, keys) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str):
            raise UserError(f'{where}: "{key}" message {number} has no "{keys[0]}"')
        if not isinstance(content, str):
            raise UserError(
                f'{where}: "{key}" message {number}: "{keys[1]}" is {json.dumps(content)[:40]}, not a string'
            )
        turns.append(Turn(_ROLES.get(role, role), content))
    return turns


def _joined(turns: Sequence[Turn]) -> str:
    """The text of turns: alone, the first of the user's is bare; several are told apart by their roles."""
    if len(turns) == 1 and turns[0].role == "user":
        return turns[0].content
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in turns)
