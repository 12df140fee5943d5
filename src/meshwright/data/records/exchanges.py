"""Prompts and responses of the records in a file; all other keys of a record are preserved."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.files import to_canonical_json, write_atomic
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.messages import MalformedRecord, Message
from meshwright.data.records.parsed_example import Example
from meshwright.data.records.record_files import format_position, iterate_file_records
from meshwright.data.sources.reading import open_source
from meshwright.data.sources.resolution import find_files
from meshwright.data.sources.streams import compress_by_suffix
from meshwright.errors import UserError
from meshwright.names import nearest
from meshwright.terminal import write_output

Record: TypeAlias = dict[str, Any]
ANNOTATION = "annotation"  # key of a record's labels, which are not part of its content
# The key that identifies each kind of record, in the order of search.
_KINDS = {"instruction": "instruction", "messages": "chat", "conversations": "chat", "chosen": "preference"}


class Exchange(NamedTuple):
    """Prompt and response of a record, as text: a last turn by the assistant is the response, the turns before it are
    the prompt. If the last turn has another role, all turns are the prompt, and the response is "".
    """

    prompt: str
    response: str


def split_exchange(record: Mapping[str, Any], where: str) -> Exchange:
    """Split an instruction, chat or preference record into prompt and response (the chosen response of a preference
    record). where: position of the record, such as "a.jsonl:17", for errors.

    An instruction record may lack its output; its response is then "". Raises `UserError` for any other kind of record.
    """
    turns = _parse_turns(record, where)
    answered = bool(turns) and turns[-1].role == "assistant"
    return Exchange(_join_turns(turns[:-1] if answered else turns), turns[-1].content if answered else "")


def replace_response(record: Mapping[str, Any], response: str, where: str) -> Record:
    """Return a copy of the record in which the assistant's turn at the end is replaced by `response`; if the record
    ends with another turn, `response` is appended. where: position of the record, such as "a.jsonl:17", for errors.
    """
    key = next((key for key in _KINDS if key in record), "")
    key = "output" if key == "instruction" else key
    changed, held = dict(record), record.get(key)
    if not isinstance(held, list):
        changed[key] = response
    elif _parse_turns(record, where)[-1].role == "assistant":
        last = held[-1]
        changed[key] = [*held[:-1], {**last, "content" if "content" in last else "value": response}]
    else:
        turn = (
            {"from": "gpt", "value": response} if key == "conversations" else {"role": "assistant", "content": response}
        )
        changed[key] = [*held, turn]
    return changed


def find_first_request(record: Mapping[str, Any], where: str) -> str:
    """Return the text of a record's first user turn, "" if there is none. For an instruction record, this text is the
    instruction without `input`. where: position of the record, such as "a.jsonl:17", for errors."""
    return next((turn.content for turn in _parse_turns(record, where) if turn.role == "user"), "")


def name_records(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each of `records`: 16 hex digits of the SHA-256 of its content without the annotation (labels).
    The second record with the same content gets the suffix "-2", the third "-3" ...
    """
    seen: dict[str, int] = {}
    names = []
    for record in records:
        plain = {key: value for key, value in record.items() if key != ANNOTATION}
        name = hashlib.sha256(to_canonical_json(plain)).hexdigest()[:16]
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def iterate_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield (position such as "a.jsonl:17", record) for each record of the JSON Lines file or JSON list `path`,
    compressed or not. Raises `UserError` if the file or one of its records cannot be read.
    """
    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file of records")
    files = find_files([str(path)], "jsonl", key="records")  # a missing file is an error that suggests another name
    if not path.expanduser().exists():
        raise UserError(f"{path} is a pattern that matches {len(files)} files; name the files of records one by one")
    [file] = files
    with open_source(file) as stream:
        head = stream.peek(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
        if not head:
            raise UserError(f"{path} is empty: it has no records")
        file = dataclasses.replace(file, format="json" if head.startswith(b"[") else "jsonl")
        for position, value, problem in iterate_file_records(file, stream, None, "utf-8", errors="strict", quick=False):
            where = format_position(file, position)
            if problem is not None:
                raise UserError(f"{where}: {problem.removeprefix('is ')}")
            if not isinstance(value, dict):
                raise UserError(f'{where}: not an object, as in {{"instruction": "...", "output": "..."}}')
            yield where, value


def read_records(path: Path) -> list[tuple[str, Record]]:
    """Read all records of the JSON Lines file or JSON list `path` as (position such as "a.jsonl:17", record) pairs.
    Raises `UserError` if the file or one of its records cannot be read.
    """
    return list(iterate_records(path))


def write_records(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the records `rows` to the JSON Lines file `path` atomically, compressed if it ends in .gz or .zst, or to a
    device or pipe. Raises `UserError` if that fails.
    """
    data = compress_by_suffix(path, b"".join(map(to_json_line, rows)))
    try:
        write_output(path, data, write_atomic)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def to_json_line(row: Mapping[str, Any]) -> bytes:
    """Serialize the record `row` to one line of UTF-8 JSON that ends with a line feed. Characters beyond ASCII are not
    escaped, unless the record has a lone surrogate.
    """
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
        return json.dumps(row).encode() + b"\n"


def _parse_turns(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Return all messages of a record; of a preference record, the messages up to the end of the chosen response.
    where: position of the record, such as "a.jsonl:17", for errors. Raises `UserError` if the record is of no known
    format or malformed.
    """
    kind = next((kind for key, kind in _KINDS.items() if key in record), None)
    if kind is None:
        held = ", ".join(f'"{key}"' for key in list(record)[:8]) or "no keys"
        close = next((f'; did you mean "{near}"?' for key in record if (near := nearest(key, _KINDS))), "")
        raise UserError(
            f'{where}: neither "instruction" with "output", nor "messages", nor "prompt" with "chosen" and "rejected" '
            f"(it has {held}){close}"
        )
    completed = dict(record)
    if kind == "instruction":
        completed["output"] = "" if completed.get("output") is None else completed["output"]
    elif kind == "preference":
        completed.setdefault("rejected", completed["chosen"])
    try:
        example: Example = RecordFormat(kind).parse_example(completed)
    except MalformedRecord as error:
        raise UserError(f"{where}: the record {error}") from None
    turns = (*example.prompt, *example.branches[0])
    return turns[:-1] if kind == "instruction" and not record.get("output") else turns


def _join_turns(turns: Sequence[Message]) -> str:
    """Join the messages `turns` to one text: a single user message unchanged, several with their roles, separated by
    blank lines."""
    texts = [str(turn.to_template_variables()["content"]) for turn in turns]
    if len(turns) == 1 and turns[0].role == "user":
        return texts[0]
    return "\n\n".join(f"{turn.role}: {text}" for turn, text in zip(turns, texts, strict=True))
