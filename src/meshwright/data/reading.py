"""From files to documents: text and JSON Lines, plain or gzipped, with one line for everything that cannot be read."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.schema import record_problem
from meshwright.data.sources import SourceFile
from meshwright.errors import UserError
from meshwright.names import nearest

LONGEST_DOCUMENT = 1_000_000  # characters; longer texts are cut at blank lines: memory stays bounded, threads stay busy
_HEAD = 1 << 16  # bytes looked at to tell text from anything else
_CHUNK = 1 << 18  # characters read at a time
_UNDECODABLE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that does not decode


@dataclass(frozen=True, slots=True)
class Document:
    """One document as read: newlines are "\\n", no byte order mark. A byte that did not decode is a lone surrogate.

    `text` None: the file is not text at all, or its record has a `problem`: it does not fit the schema.
    """

    name: str
    text: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """How files become documents. A text file is one document; a JSON line is one, its text under `text_key`.

    A text of more than `longest` characters is cut into several documents after a blank line, else after a line, else
    anywhere; the pieces joined are the text again. With `required_keys` (and the types of their values) a JSON line
    that lacks them or its text is a document with a problem; without, it is an error.
    """

    encoding: str = "utf-8"
    text_key: str = "text"
    longest: int = LONGEST_DOCUMENT
    required_keys: Mapping[str, str] = field(default_factory=dict)

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The documents of `file`, in order. `UserError` names the file (and the line) that cannot be read."""
        try:
            with _open(file) as stream:
                yield from self._text(file, stream) if file.format == "text" else self._json_lines(file, stream)
        except EOFError:
            raise UserError(
                f"{file.path}: the gzip file is cut short, its end is missing; fetch or write it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{file.path}: not a readable gzip file ({error})") from None
        except FileNotFoundError:
            raise UserError(f"{file.path} vanished while it was being read") from None
        except OSError as error:
            raise UserError(f"{file.path}: cannot be read: {error.strerror or error}") from None

    def _text(self, file: SourceFile, stream: io.BufferedReader | gzip.GzipFile) -> Iterator[Document]:
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

    def _json_lines(self, file: SourceFile, stream: io.BufferedReader | gzip.GzipFile) -> Iterator[Document]:
        number = 0
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            if self.required_keys and (problem := self._schema_problem(line)):
                yield Document(f"{file.name}:{number}", None, problem)
                continue
            text = self._json_text(line.rstrip(b"\r\n"), f"{file.path}:{number}")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            for count, piece in enumerate(_pieces(iter([text]), self.longest), 1):
                yield Document(f"{file.name}:{number}" + (f"#{count}" if count > 1 else ""), piece)
        if number == 0 and file.named:
            raise UserError(f"{file.path} is empty")

    def _schema_problem(self, line: bytes) -> str | None:
        try:
            record = json.loads(line.decode(self.encoding, "surrogateescape"))
        except (ValueError, RecursionError):
            return "is not JSON"
        return record_problem(record, self.required_keys, self.text_key)

    def _json_text(self, line: bytes, where: str) -> str:
        try:
            value: Any = json.loads(line.decode(self.encoding, "surrogateescape"))
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
        except (UnicodeError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise UserError(f'{where}: the line is not an object, as in {{"{self.text_key}": "..."}}')
        if self.text_key not in value:
            keys = ", ".join(f'"{key}"' for key in list(value)[:8]) or "no keys"
            close = nearest(self.text_key, value)
            hint = f'; set data.text_key = "{close}"' if close else "; set data.text_key to the one that holds the text"
            raise UserError(f'{where}: no key "{self.text_key}" (the line has {keys}){hint}')
        text = value[self.text_key]
        if not isinstance(text, str):
            raise UserError(f'{where}: "{self.text_key}" is {json.dumps(text)[:40]}, not a string')
        return text

    def _not_text(self, head: bytes) -> str | None:
        """Why a file that begins with `head` is not text in this encoding, or None."""
        wide = self.encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32", "utf16", "utf32"))
        if b"\0" in head and not wide:
            return "is binary, not text: it holds NUL bytes; sources are text, JSON Lines, or .gz of these"
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


def check_encoding(encoding: str) -> None:
    """`UserError` unless Python knows `encoding` as an encoding of text."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding).close()
    except LookupError:
        close = nearest(encoding, ("utf-8", "utf-16", "utf-32", "latin-1", "ascii", "cp1252", "iso-8859-15", "koi8-r"))
        hint = f'; did you mean "{close}"?' if close else '; the usual one is "utf-8"'
        raise UserError(f'data.clean.encoding: unknown encoding "{encoding}"{hint}') from None


def _open(file: SourceFile) -> io.BufferedReader | gzip.GzipFile:
    if file.path.name.lower().endswith(".gz"):
        return gzip.open(file.path, "rb")
    return io.BufferedReader(io.FileIO(file.path), _HEAD)


def _pieces(chunks: Iterator[str], longest: int) -> Iterator[str]:
    """The text that comes in `chunks`, without a leading byte order mark, in pieces of at most `longest` characters.

    At least one piece, and none empty unless all is.
    """
    text = next(chunks, "").removeprefix("\ufeff")
    produced = False
    for more in itertools.chain(chunks, [""]):
        text += more
        while len(text) > longest:
            cut = _last_break(text, longest)
            yield text[:cut]
            text, produced = text[cut:], True
    if text or not produced:
        yield text


def _last_break(text: str, longest: int) -> int:
    """Where to cut: in the second half of `longest` characters after the last blank line, else after the last line."""
    blank = text.rfind("\n\n", longest // 2, longest)
    if blank >= 0:
        return blank + 2
    return text.rfind("\n", longest // 2, longest) + 1 or longest
