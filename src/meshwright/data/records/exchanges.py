"""Prompts and responses of the records in a file; all other keys of a record are preserved."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.files import canonical_json, write_atomic
from meshwright.data.records.conversations import Example, MalformedRecord, Message, RecordFormat
from meshwright.data.sources.json_lines import iterate_json_lines
from meshwright.data.sources.resolution import find_files
from meshwright.data.sources.streams import detect_compression, list_decoding_errors, open_stream
from meshwright.errors import UserError
from meshwright.names import nearest

Record: TypeAlias = dict[str, Any]
ANNOTATION = "annotation"  # the key under which a record carries its labels; not part of what it is
# The key that tells each kind of record, in the order in which they are looked for.
_KINDS = {"instruction": "instruction", "messages": "chat", "conversations": "chat", "chosen": "preference"}


class Exchange(NamedTuple):
    """Prompt and response of a record as text. prompt: all turns before the last answer. response: the last answer, ""
    if the record ends with another turn.
    """

    prompt: str
    response: str


def split_exchange(record: Mapping[str, Any], where: str) -> Exchange:
    """Return prompt and response of an instruction, chat or preference record; for a preference the chosen response.
    where: position of the record, such as "a.jsonl:17", for errors.

    An instruction record may lack its output; its response is then "". Raises `UserError` for any other kind of record.
    """
    turns = _parse_turns(record, where)
    answered = bool(turns) and turns[-1].role == "assistant"
    return Exchange(_join_turns(turns[:-1] if answered else turns), turns[-1].content if answered else "")


def replace_response(record: Mapping[str, Any], response: str, where: str) -> Record:
    """Return a copy of the record with `response` in place of its last answer, or appended if it has no answer. where:
    position of the record, such as "a.jsonl:17", for errors.
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
    """Return the text of a record's first user turn; for an instruction record the instruction without its input.
    where: position of the record, such as "a.jsonl:17", for errors.
    """
    return next((turn.content for turn in _parse_turns(record, where) if turn.role == "user"), "")


def name_records(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each record: 16 hex digits of the SHA-256 of its content without the annotation (labels). To
    the names of repeated records "-2", "-3" ... is appended.
    """
    seen: dict[str, int] = {}
    names = []
    for record in records:
        plain = {key: value for key, value in record.items() if key != ANNOTATION}
        name = hashlib.sha256(canonical_json(plain)).hexdigest()[:16]
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def iterate_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield (position such as "a.jsonl:17", record) for each record of a JSON Lines file or JSON list, compressed or
    not. Raises `UserError` for anything that cannot be read.
    """
    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file of records")
    files = find_files([str(path)], "jsonl", key="records")  # which says what there is where it is not there
    if not path.expanduser().exists():
        raise UserError(f"{path} is a pattern that {len(files)} files fit; name the files of records one by one")
    [file] = files
    try:
        with open_stream(file) as stream:
            head = stream.peek(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
            if not head:
                raise UserError(f"{path} is empty: it holds no records")
            if head.startswith(b"["):
                yield from _iterate_list(path, stream.read())
                return
            for number, line in iterate_json_lines(file, stream):
                where = f"{path}:{number}"
                yield where, _check_object(_parse_json(line.rstrip(b"\r\n"), where), where)
    except EOFError:
        raise UserError(f"{path}: the {detect_compression(file)} file is cut short, its end is missing") from None
    except list_decoding_errors() as error:
        raise UserError(f"{path}: not a readable {detect_compression(file)} file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_records(path: Path) -> list[tuple[str, Record]]:
    """Read all records of a JSON Lines file or JSON list as (position such as "a.jsonl:17", record) pairs. Raises
    `UserError`.
    """
    return list(iterate_records(path))


def write_records(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the records `rows` to a JSON Lines file atomically. Raises `UserError` if it cannot be written."""
    try:
        write_atomic(path, b"".join(map(to_json_line, rows)))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def to_json_line(row: Mapping[str, Any]) -> bytes:
    """Serialize a record to one line of UTF-8 JSON with a line feed at its end, without escapes where possible."""
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can say
        return json.dumps(row).encode() + b"\n"


def _iterate_list(path: Path, data: bytes) -> Iterator[tuple[str, Record]]:
    """Yield (position such as "a.json: record 17", record) for each object of a JSON list, or for a single object.
    path: of the file, for errors; data: its content.
    """
    value = _parse_json(data.removeprefix(codecs.BOM_UTF8), str(path))
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        where = f"{path}: record {number}"
        yield where, _check_object(row, where)


def _parse_json(data: bytes, where: str) -> Any:
    """Parse one JSON document. where: file and position, with which the `UserError` for invalid JSON begins."""
    try:
        return json.loads(data.decode())
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{where}: not JSON ({error.msg} at {place})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None


def _check_object(value: Any, where: str) -> Record:
    """Return `value` if it is a JSON object. where: file and position, with which the `UserError` for anything else
    begins.
    """
    if not isinstance(value, dict):
        raise UserError(f'{where}: not an object, as in {{"instruction": "...", "output": "..."}}')
    return value


def _parse_turns(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Return all messages of a record; for a preference those up to the end of the chosen response. where: position of
    the record, such as "a.jsonl:17", for errors. Raises `UserError`.
    """
    kind = next((kind for key, kind in _KINDS.items() if key in record), None)
    if kind is None:
        held = ", ".join(f'"{key}"' for key in list(record)[:8]) or "no keys"
        close = next((f'; did you mean "{near}"?' for key in record if (near := nearest(key, _KINDS))), "")
        raise UserError(
            f'{where}: neither "instruction" with "output", nor "messages", nor "prompt" with "chosen" and "rejected" '
            f"(it has {held}){close}"
        )
    said = dict(record)
    if kind == "instruction":
        said["output"] = "" if said.get("output") is None else said["output"]
    elif kind == "preference":
        said.setdefault("rejected", said["chosen"])
    try:
        example: Example = RecordFormat(kind).parse_example(said)
    except MalformedRecord as error:
        raise UserError(f"{where}: the record {error}") from None
    turns = (*example.prompt, *example.branches[0])
    return turns[:-1] if kind == "instruction" and not record.get("output") else turns


def _join_turns(turns: Sequence[Message]) -> str:
    """Join messages to one text: a single user message as it is, several with their roles, separated by blank lines."""
    texts = [turn.template_variables()["content"] for turn in turns]
    if len(turns) == 1 and turns[0].role == "user":
        return texts[0]
    return "\n\n".join(f"{turn.role}: {text}" for turn, text in zip(turns, texts, strict=True))
