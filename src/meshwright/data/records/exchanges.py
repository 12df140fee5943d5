"""Records of instruction, chat and preference data as they lie in files: what was asked and what was answered, with all
else that a record holds kept as it is."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.files import canonical_json, write_whole
from meshwright.data.records.conversations import Example, Malformed, Message, Records
from meshwright.data.sources.json_lines import json_lines
from meshwright.data.sources.resolution import find_files
from meshwright.data.sources.streams import compression, decoding_errors, open_stream
from meshwright.errors import UserError
from meshwright.names import nearest

Record: TypeAlias = dict[str, Any]
ANNOTATION = "annotation"  # the key under which a record carries its labels; not part of what it is
# The key that tells each kind of record, in the order in which they are looked for.
_KINDS = {"instruction": "instruction", "messages": "chat", "conversations": "chat", "chosen": "preference"}


class Exchange(NamedTuple):
    """What a record asks, all turns before the last answer, and that answer; "" where there is none."""

    prompt: str
    response: str


def exchange(record: Mapping[str, Any], where: str) -> Exchange:
    """The two sides of an instruction, a chat or a preference, of which the chosen answer counts.

    An instruction may lack its output. `UserError`, which begins with `where`, for anything else.
    """
    turns = _turns(record, where)
    answered = bool(turns) and turns[-1].role == "assistant"
    return Exchange(_joined(turns[:-1] if answered else turns), turns[-1].content if answered else "")


def with_response(record: Mapping[str, Any], response: str, where: str) -> Record:
    """The record with another last answer, written where the old one was."""
    key = next((key for key in _KINDS if key in record), "")
    key = "output" if key == "instruction" else key
    changed, held = dict(record), record.get(key)
    if not isinstance(held, list):
        changed[key] = response
    elif _turns(record, where)[-1].role == "assistant":
        last = held[-1]
        changed[key] = [*held[:-1], {**last, "content" if "content" in last else "value": response}]
    else:
        turn = (
            {"from": "gpt", "value": response} if key == "conversations" else {"role": "assistant", "content": response}
        )
        changed[key] = [*held, turn]
    return changed


def first_request(record: Mapping[str, Any], where: str) -> str:
    """What a record asks for at its beginning: its instruction without the input, or the first turn of the user."""
    return next((turn.content for turn in _turns(record, where) if turn.role == "user"), "")


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


def each_row(path: Path) -> Iterator[tuple[str, Record]]:
    """(where, record) of each record of a file, JSON Lines or one JSON list, compressed or not. `UserError`."""
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
                yield from _list(path, stream.read())
                return
            for number, line in json_lines(file, stream):
                where = f"{path}:{number}"
                yield where, _object(_parsed(line.rstrip(b"\r\n"), where), where)
    except EOFError:
        raise UserError(f"{path}: the {compression(file)} file is cut short, its end is missing") from None
    except decoding_errors() as error:
        raise UserError(f"{path}: not a readable {compression(file)} file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_rows(path: Path) -> list[tuple[str, Record]]:
    """All that `each_row` yields."""
    return list(each_row(path))


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


def _turns(record: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """All messages of a record; of a preference those up to the chosen answer."""
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
        example: Example = Records(kind).example(said)
    except Malformed as error:
        raise UserError(f"{where}: the record {error}") from None
    turns = (*example.prompt, *example.branches[0])
    return turns[:-1] if kind == "instruction" and not record.get("output") else turns


def _joined(turns: Sequence[Message]) -> str:
    """The text of turns: alone, the first of the user's is bare; several are told apart by their roles."""
    texts = [turn.as_template_sees_it()["content"] for turn in turns]
    if len(turns) == 1 and turns[0].role == "user":
        return texts[0]
    return "\n\n".join(f"{turn.role}: {text}" for turn, text in zip(turns, texts, strict=True))
