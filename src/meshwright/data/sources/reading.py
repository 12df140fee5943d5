"""From files to documents: text, JSON Lines, Parquet and WET, with one line for everything that cannot be read.

Each format is one function; what they share (compression, stores, cutting, errors) is around them.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.data.cleaning.schema import Unfit, record_problem
from meshwright.data.records.conversations import Example, Malformed, Records
from meshwright.data.records.record_files import file_records
from meshwright.data.sources.json_lines import json_lines, quick_json
from meshwright.data.sources.parquet import parquet_texts
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream, compression, decoding_errors, open_stream
from meshwright.data.sources.wet import wet_texts
from meshwright.errors import UserError
from meshwright.names import nearest

LONGEST_DOCUMENT = 1_000_000  # characters; longer texts are cut at blank lines: memory stays bounded, threads stay busy
_HEAD = 1 << 16  # bytes looked at to tell text from anything else
_CHUNK = 1 << 18  # characters read at a time
_UNDECODABLE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that does not decode


class Document(NamedTuple):
    """One document as read: newlines are "\\n", no byte order mark. A byte that did not decode is a lone surrogate.

    `text` None: the file is not text at all, or its record has a `problem`: it does not fit the schema. `example`: of
    an instruction, chat or preference record what it says; `text` then is all its texts together.
    """

    name: str
    text: str | None
    problem: str | None = None
    example: Example | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """How files become documents. A text file is one document; so is a JSON line, a row of a Parquet file (each has its
    text under `text_key`, unless the file has a key of its own), and a page of a WET file.

    A text of more than `longest` characters is cut into several documents after a blank line, else after a line, else
    anywhere; the pieces joined are the text again. With `required_keys` (and the types of their values) a JSON line
    or a row that lacks them or its text is a document with a problem; without, it is an error. With `records` every
    file holds such records, and a document is one of them, never cut.
    """

    encoding: str = "utf-8"
    text_key: str = "text"
    longest: int = LONGEST_DOCUMENT
    required_keys: Mapping[str, str] = field(default_factory=dict)
    records: Records | None = None

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The documents of `file`, in order. `UserError` names the file (and the line) that cannot be read."""
        with opened(file) as stream:
            if self.records is not None:
                yield from self._examples(file, stream, self.records)
            elif file.format == "text":
                yield from self._text(file, stream)
            else:
                yield from self._records(file, stream)

    def _text(self, file: SourceFile, stream: Stream) -> Iterator[Document]:
        head = stream.peek(_HEAD)[:_HEAD]
        if not head and file.named:
            raise UserError(f"{file.path} is empty")
        if problem := self._not_text(head):
            if file.named:
                raise UserError(f"{file.path} {problem}")
            yield Document(file.name, None)
            return
        try:
            with io.TextIOWrapper(stream, self.encoding, errors="surrogateescape", newline=None) as text:
                for number, piece in enumerate(_pieces(iter(lambda: text.read(_CHUNK), ""), self.longest), 1):
                    yield Document(file.name if number == 1 else f"{file.name}#{number}", piece)
        except UnicodeError:  # an encoding whose broken bytes have no place as surrogates, as UTF-16
            yield Document(file.name, None)

    def _examples(self, file: SourceFile, stream: Stream, records: Records) -> Iterator[Document]:
        """A document for each record. A malformed one is an error, with `required_keys` a document with a problem."""
        if file.named and not stream.peek(1):
            raise UserError(f"{file.path} is empty")
        required = self.required_keys
        for record in file_records(file, stream, [*records.columns, *required], self.encoding):
            problem = record.problem
            if problem is None and required:
                problem = record_problem(record.value, required, next(iter(required)))
            if problem is None:
                try:
                    example = records.example(record.value)
                except Malformed as error:
                    problem = str(error)
                else:
                    yield Document(file.name + record.place, example.text(), None, example)
                    continue
            if not required:
                raise UserError(f"{record.where}: the record {problem}; right is {records.shown()}")
            yield Document(file.name + record.place, None, problem)

    def _records(self, file: SourceFile, stream: Stream) -> Iterator[Document]:
        """Documents of a format whose files hold many: named by file and place."""
        if file.named and not stream.peek(1):
            raise UserError(f"{file.path} is empty")
        key = file.text_key or self.text_key
        texts: Iterator[tuple[str, str | Unfit]]
        match file.format:
            case "jsonl":
                texts = json_texts(file, stream, key, self.encoding, self.required_keys)
            case "json":
                texts = json_list_texts(file, stream, key, self.encoding, self.required_keys)
            case "parquet":
                if not isinstance(stream, io.BufferedReader):
                    raise UserError(f"{file.path}: Parquet is compressed inside, so unpack the file around it")
                texts = parquet_texts(file, stream, key, self.encoding, self.required_keys)
            case _:
                texts = wet_texts(file, stream, self.encoding)
        for place, text in texts:
            if isinstance(text, Unfit):
                yield Document(file.name + place, None, text.problem)
                continue
            if "\r" in text:
                text = text.replace("\r\n", "\n").replace("\r", "\n")
            if len(text) <= self.longest:
                yield Document(file.name + place, text.removeprefix("\ufeff"))
                continue
            for count, piece in enumerate(_pieces(iter([text]), self.longest), 1):
                yield Document(file.name + place + (f"#{count}" if count > 1 else ""), piece)

    def _not_text(self, head: bytes) -> str | None:
        """Why a file that begins with `head` is not text in this encoding, or None."""
        wide = codecs.lookup(self.encoding).name.startswith(("utf-16", "utf-32"))
        if b"\0" in head and not wide:
            return (
                "is binary, not text: it holds NUL bytes; sources are text, JSON Lines, Parquet or WET, by suffix or "
                "data.format"
            )
        if wide or not head:
            return None
        text = codecs.getincrementaldecoder(self.encoding)("surrogateescape").decode(head)
        share = len(_UNDECODABLE.findall(text)) / max(1, len(text))
        if share > 0.3:
            return (
                f"is binary or not in {self.encoding}: {share:.0%} of its beginning does not decode; "
                "if it is text, name its encoding in data.clean.encoding"
            )
        return None


@contextmanager
def opened(file: SourceFile) -> Iterator[Stream]:
    """The decompressed bytes of `file`, to be read inside; what goes wrong there is a `UserError` that names it."""
    try:
        with open_stream(file) as stream:
            yield stream
    except EOFError:
        raise UserError(
            f"{file.path}: the {compression(file)} file is cut short, its end is missing; fetch or write it again"
        ) from None
    except decoding_errors() as error:
        raise UserError(f"{file.path}: not a readable {compression(file)} file ({error})") from None
    except FileNotFoundError:
        raise UserError(f"{file.path} vanished while it was being read") from None
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or ' '.join(str(error).split())}") from None


def check_encoding(encoding: str) -> None:
    """`UserError` unless Python knows `encoding` as an encoding of text."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding).close()
        codecs.getincrementaldecoder(encoding)("surrogateescape").decode(b"a")
    except (LookupError, ValueError, TypeError):  # "undefined" decodes nothing and "idna" no bytes of this kind
        close = nearest(encoding, ("utf-8", "utf-16", "utf-32", "latin-1", "ascii", "cp1252", "iso-8859-15", "koi8-r"))
        hint = f'; did you mean "{close}"?' if close else '; the usual one is "utf-8"'
        raise UserError(f'data.clean.encoding: unknown encoding "{encoding}"{hint}') from None


def json_texts(
    file: SourceFile, stream: Stream, key: str, encoding: str, required: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str | Unfit]]:
    """(":17", text) of each line that is not blank: an object with its text under `key`; "a.b": the key b inside a.

    A null is an empty text. required: keys that a line must have, and the types of their values; a line that has not
    comes as what is wrong with it.
    """
    quick = quick_json() if encoding.lower().replace("_", "-") == "utf-8" else None
    for number, line in json_lines(file, stream):
        if required and (problem := _schema_problem(line, key, encoding, required)):
            yield f":{number}", Unfit(problem)
            continue
        text: Any = None
        if quick is not None:
            try:
                text = quick(line)[key]
            except (ValueError, KeyError, TypeError):  # as what is wrong with it, if anything is, the slower way says
                pass
        if type(text) is not str:
            text = _json_text(line.rstrip(b"\r\n"), key, encoding, f"{file.path}:{number}", file.key_setting)
        yield f":{number}", text


def json_list_texts(
    file: SourceFile, stream: Stream, key: str, encoding: str, required: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str | Unfit]]:
    """(":record 17", text) of each element of one JSON list; see `json_texts`."""
    for record in file_records(file, stream, [key], encoding):
        if required and (problem := record_problem(record.value, required, key)):
            yield record.place, Unfit(problem)
        else:
            yield record.place, _text_under(record.value, key, record.where, file.key_setting)


def _schema_problem(line: bytes, key: str, encoding: str, required: Mapping[str, str]) -> str | None:
    try:
        record = json.loads(line.decode(encoding, "surrogateescape"))
    except (ValueError, RecursionError):
        return "is not JSON"
    return record_problem(record, required, key)


def _json_text(line: bytes, key: str, encoding: str, where: str, setting: str) -> str:
    try:
        value: Any = json.loads(line.decode(encoding, "surrogateescape"))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # not its encoding, a number of thousands of digits, or too deep
        raise UserError(f"{where}: not JSON ({error})") from None
    return _text_under(value, key, where, setting)


def _text_under(value: Any, key: str, where: str, setting: str) -> str:
    """The text that a record has under `key`; "a.b": the key b inside a."""
    if not isinstance(value, dict):
        raise UserError(f'{where}: the line is not an object, as in {{"{key}": "..."}}')
    for name in [key] if key in value else key.split("."):
        if not isinstance(value, dict) or name not in value:
            keys = ", ".join(f'"{key}"' for key in list(value)[:8]) if isinstance(value, dict) else "no keys"
            close = nearest(name, value) if isinstance(value, dict) else None
            right = f"{key[: len(key) - len(name)]}{close}" if key.endswith(name) else close
            hint = f'; set {setting} = "{right}"' if close else f"; set {setting} to the one that holds the text"
            raise UserError(f'{where}: no key "{key}" (the line has {keys or "no keys"}){hint}')
        value = value[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" is {json.dumps(value)[:40]}, not a string')
    return value


def _pieces(chunks: Iterator[str], longest: int) -> Iterator[str]:
    """The text that comes in `chunks`, without a leading byte order mark, in pieces of at most `longest` characters.

    At least one piece, and none empty unless all is.
    """
    rest = next(chunks, "").removeprefix("\ufeff")
    produced = False
    for more in itertools.chain(chunks, [""]):
        text, begin = rest + more, 0
        while len(text) - begin > longest:
            cut = _last_break(text, begin, longest)
            yield text[begin:cut]
            begin, produced = cut, True
        rest = text[begin:]
    if rest or not produced:
        yield rest


def _last_break(text: str, begin: int, longest: int) -> int:
    """Where to cut: in the second half of `longest` characters after the last blank line, else after the last line."""
    middle, end = begin + longest // 2, begin + longest
    blank = text.rfind("\n\n", middle, end)
    if blank >= 0:
        return blank + 2
    return text.rfind("\n", middle, end) + 1 or end
