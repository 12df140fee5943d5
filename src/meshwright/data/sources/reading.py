"""Reading of source files as documents: text, JSON Lines, JSON lists, Parquet, WET and WARC, with one-line errors.

Each format has one function; compression, stores, cutting and errors are shared.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.data.cleaning.schema import find_record_problem
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.messages import MalformedRecord
from meshwright.data.records.parsed_example import Example
from meshwright.data.records.record_files import count_unread_columns, format_position, iterate_file_records
from meshwright.data.records.trees import group_rows
from meshwright.data.sources.page_process import FAILED, Extraction, get_page_extractor
from meshwright.data.sources.parquet import iterate_parquet_texts
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.streams import Stream, detect_compression, list_decoding_errors, open_stream
from meshwright.data.sources.warc import iterate_warc_texts
from meshwright.data.sources.wet import iterate_wet_texts
from meshwright.errors import UserError
from meshwright.names import nearest

MAX_DOCUMENT_LENGTH = (
    1_000_000  # characters; longer texts are cut at blank lines: memory stays bounded, threads stay busy
)
_HEAD = 1 << 16  # bytes read to distinguish text from binary data
_CHUNK = 1 << 18  # characters read at a time
_UNDECODABLE = re.compile("[\udc80-\udcff]")  # to which "surrogateescape" decodes an invalid byte


class Document(NamedTuple):
    """One document of a source file. Newlines are LF, a byte order mark is removed, and a byte that did not decode is a
    lone surrogate.

    name: file and the document's position in it. text: the text; None if the file is not text, or if there is a
    `problem`. problem: (rule that drops the document, reason as a clause): "schema" if the record violates it,
    "extraction" if no text can be extracted from the page. example: the parsed instruction, chat or preference record,
    whose texts `text` joins. record: if the record of this document has several examples, SHA-256 of all texts of the
    record; else empty. unread: {column that is not read: number of its rows}, only in the first document of a Parquet
    file of records.
    """

    name: str
    text: str | None
    problem: tuple[str, str] | None = None
    example: Example | None = None
    record: bytes = b""
    unread: Mapping[str, int] = {}


class EarlierReading(NamedTuple):
    """Results of an earlier reading of a source file, from which a second reading yields the same documents.

    documents: number of documents read, from the file's first on. failed: numbers, from 0, of the documents whose text
    could not be extracted from a page. The second reading does not try these documents again, and gives the extraction
    of other pages more time.
    """

    documents: int = 0
    failed: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """Splits source files into documents: one per text file, JSON line, element of a JSON list, Parquet row, WET or
    WARC page.

    encoding: text encoding of the files, such as "utf-8". text_key: key of a record's text; a source may set a
    different key. longest: texts of more characters are cut into several documents, after a blank line, else after a
    line, else anywhere. required_keys: {key: type}; if not empty, a record without one of these keys or without text is
    no error, but becomes a document with a problem. records: parse every file as instruction, chat or preference
    records, one document each, never cut; None: plain text. extractor: library that extracts the texts of WARC pages.
    """

    encoding: str = "utf-8"
    text_key: str = "text"
    longest: int = MAX_DOCUMENT_LENGTH
    required_keys: Mapping[str, str] = field(default_factory=dict)
    records: RecordFormat | None = None
    extractor: str = "trafilatura"

    def read_documents(self, file: SourceFile, before: EarlierReading | None = None) -> Iterator[Document]:
        """Yield the documents of `file` in order. before: results of an earlier reading, so that the same documents are
        yielded; None: first reading. Raises `UserError` that names the file (and line) if it cannot be read."""
        before = before or EarlierReading()
        with open_source(file) as stream:
            if file.named and not stream.peek(1):
                raise UserError(f"{file.path} is empty")
            if self.records is not None:
                yield from self._read_examples(file, stream, self.records)
            elif file.format == "text":
                yield from self._read_text(file, stream)
            else:
                yield from self._read_records(file, stream, before)

    def _read_text(self, file: SourceFile, stream: Stream) -> Iterator[Document]:
        """Yield the documents of a text file: one, or several if it has more than `longest` characters. A binary file
        yields one document without text if a glob or directory found it; if the recipe names it, `UserError` is raised.
        stream: the file's decompressed bytes.
        """
        head = stream.peek(_HEAD)[:_HEAD]
        if problem := self._explain_not_text(head):
            if file.named:
                raise UserError(f"{file.path} {problem}")
            yield Document(file.name, None)
            return
        try:
            with io.TextIOWrapper(stream, self.encoding, errors="surrogateescape", newline=None) as text:
                for number, piece in enumerate(_cut_text(iter(lambda: text.read(_CHUNK), ""), self.longest), 1):
                    yield Document(file.name if number == 1 else f"{file.name}#{number}", piece)
        except UnicodeError:  # encodings such as UTF-16 have no surrogates for broken bytes
            yield Document(file.name, None)

    def _read_examples(self, file: SourceFile, stream: Stream, records: RecordFormat) -> Iterator[Document]:
        """Yield one document with a parsed example for each record. A malformed record raises `UserError`, or with
        `required_keys` becomes a document with a problem. stream: the file's decompressed bytes. records: format of the
        records.
        """
        required = self.required_keys
        columns = [*records.columns, *required]
        unread = count_unread_columns(file, stream, columns) if file.format == "parquet" else {}
        rows = iterate_file_records(file, stream, columns, self.encoding, quick=False)  # integers are trained on
        schema: tuple[str, ...] | None = None  # keys of the records before
        for position, value, problem in group_rows(rows) if records.kind == "chat" else rows:
            if problem is None and required:
                problem = find_record_problem(value, required, next(iter(required)))
            if problem is None:
                try:
                    if schema is not None:
                        records.check_schema(value, schema)
                    examples = records.parse_examples(value)
                except MalformedRecord as error:
                    problem = str(error)
                else:
                    schema = schema or records.find_schema(value)
                    record = _hash_texts(examples) if len(examples) > 1 else b""
                    for number, example in enumerate(examples, 1):
                        name = file.name + position + (f"#{number}" if len(examples) > 1 else "")
                        yield Document(name, example.join_texts(), None, example, record, unread)
                        unread = {}
                    continue
            if not required:
                where = format_position(file, position)
                raise UserError(f"{where}: the record {problem}; expected {records.format_example_record()}")
            yield Document(file.name + position, None, ("schema", problem or ""), unread=unread)
            unread = {}

    def _read_records(self, file: SourceFile, stream: Stream, before: EarlierReading) -> Iterator[Document]:
        """Yield the documents of a JSON Lines, JSON, Parquet, WET or WARC file, named by file and position. stream: the
        file's decompressed bytes. before: results of an earlier reading of the file."""
        number = 0  # of the next document

        def extract(html: str) -> Extraction:
            """Extract the main text of the page at the present position of the file."""
            if number in before.failed:
                return FAILED
            return get_page_extractor(self.extractor, again=number < before.documents).extract_text(html)

        key = file.text_key or self.text_key
        texts: Iterator[tuple[str, str | None, str | None]]
        match file.format:
            case "parquet":
                texts = iterate_parquet_texts(file, stream, key, self.encoding, self.required_keys)
            case "wet":
                texts = iterate_wet_texts(file, stream, self.encoding)
            case "warc":
                texts = iterate_warc_texts(file, stream, extract)
            case _:
                texts = self._iterate_json_texts(file, stream, key)
        for place, text, problem in texts:
            if problem is not None or text is None:
                rule = "extraction" if file.format == "warc" else "schema"
                yield Document(file.name + place, None, None if problem is None else (rule, problem))
                number += 1
                continue
            if "\r" in text:
                text = text.replace("\r\n", "\n").replace("\r", "\n")
            if len(text) <= self.longest:
                yield Document(file.name + place, text.removeprefix("\ufeff"))
                number += 1
                continue
            for count, piece in enumerate(_cut_text(iter([text]), self.longest), 1):
                yield Document(file.name + place + (f"#{count}" if count > 1 else ""), piece)
                number += 1

    def _iterate_json_texts(self, file: SourceFile, stream: Stream, key: str) -> Iterator[tuple[str, str, str | None]]:
        """Yield (position such as ":17", text under `key`, problem) for each record of a JSON Lines file or JSON list.
        problem: how the record violates the schema `required_keys`, as a clause, or None. stream: the file's
        decompressed bytes. key: key of a record's text. Raises `UserError` for a record without text if `required_keys`
        is empty.
        """
        required = self.required_keys
        held = False  # a record before has the key
        for position, value, problem in iterate_file_records(file, stream, [key], self.encoding, quick=not required):
            if problem is None and required:
                problem = find_record_problem(value, required, key)
            if problem is None:
                text = value.get(key) if type(value) is dict else None
                yield position, text if type(text) is str else _get_text(value, key, file, position, held), None
                held = True
            elif required:
                yield position, "", problem
            else:
                raise UserError(f"{format_position(file, position)}: {problem.removeprefix('is ')}")

    def _explain_not_text(self, head: bytes) -> str | None:
        """Return the reason why a file is not text in the reader's encoding, as a clause; None if it is text. head:
        first bytes of the file."""
        wide = codecs.lookup(self.encoding).name.startswith(("utf-16", "utf-32"))
        if b"\0" in head and not wide:
            return (
                "is binary, not text: it has NUL bytes; sources are text, JSON Lines, Parquet or WET, by suffix or "
                "data.format"
            )
        if wide or not head:
            return None
        text = codecs.getincrementaldecoder(self.encoding)("surrogateescape").decode(head)
        share = len(_UNDECODABLE.findall(text)) / max(1, len(text))
        if share > 0.3:
            return (
                f"is binary or not in {self.encoding}: {share:.0%} of its beginning does not decode; "
                "if it is text, set data.clean.encoding"
            )
        return None


@contextmanager
def open_source(file: SourceFile) -> Iterator[Stream]:
    """Context manager that opens the decompressed stream of `file`. Read errors inside the context become a `UserError`
    that names the file.
    """
    try:
        with open_stream(file) as stream:
            yield stream
    except EOFError:
        raise UserError(
            f"{file.path}: the {detect_compression(file.path.name)} file is cut short, its end is missing; "
            "fetch or write it again"
        ) from None
    except list_decoding_errors() as error:
        raise UserError(f"{file.path}: not a readable {detect_compression(file.path.name)} file ({error})") from None
    except FileNotFoundError:
        raise UserError(f"{file.path} vanished while it was being read") from None
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror or ' '.join(str(error).split())}") from None


def _hash_texts(examples: Sequence[Example]) -> bytes:
    """Return the SHA-256 of the texts of all `examples` of one record."""
    texts = "\0".join(example.join_texts() for example in examples)
    return hashlib.sha256(texts.encode(errors="surrogatepass")).digest()


def check_encoding(encoding: str) -> None:
    """Raise `UserError` unless Python knows a text encoding with the name `encoding`."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding).close()
        codecs.getincrementaldecoder(encoding)("surrogateescape").decode(b"a")
    except (LookupError, ValueError, TypeError):  # "undefined" decodes nothing and "idna" no bytes of this kind
        close = nearest(encoding, ("utf-8", "utf-16", "utf-32", "latin-1", "ascii", "cp1252", "iso-8859-15", "koi8-r"))
        hint = f'; did you mean "{close}"?' if close else '; the usual one is "utf-8"'
        raise UserError(f'data.clean.encoding: unknown encoding "{encoding}"{hint}') from None


def _get_text(value: Any, key: str, file: SourceFile, position: str, held: bool) -> str:
    """Return the text stored in a record; null becomes "". Raises `UserError` if the value is not text.

    value: parsed JSON record. key: key of the text in it; "a.b" is key b inside the object under a. file, position: the
    record's file and position in it, for the error. held: True if earlier records of the file have the key; the error
    for a record without it then says that the file changes its schema.
    """
    where, setting = format_position(file, position), file.key_setting
    if not isinstance(value, dict):
        raise UserError(f'{where}: the record is not an object, as in {{"{key}": "..."}}')
    for name in [key] if key in value else key.split("."):
        if not isinstance(value, dict) or name not in value:
            keys = ", ".join(f'"{key}"' for key in list(value)[:8]) if isinstance(value, dict) else "no keys"
            close = nearest(name, value) if isinstance(value, dict) else None
            right = f"{key[: len(key) - len(name)]}{close}" if key.endswith(name) else close
            hint = f'; set {setting} = "{right}"' if close else f"; set {setting} to the key of the text"
            if held:
                hint = ", which the records before it have; records with other keys must be in a file of their own"
            raise UserError(f'{where}: no key "{key}" (it has {keys or "no keys"}){hint}')
        value = value[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" is {json.dumps(value)[:40]}, not a string')
    return value


def _cut_text(chunks: Iterator[str], longest: int) -> Iterator[str]:
    """Cut a text, read in `chunks`, into consecutive pieces of at most `longest` characters.

    A leading byte order mark is removed. Yields at least one piece, and an empty piece only for an empty text.
    """
    rest = next(chunks, "").removeprefix("\ufeff")
    produced = False
    for more in itertools.chain(chunks, [""]):
        text, begin = rest + more, 0
        while len(text) - begin > longest:
            cut = _find_cut(text, begin, longest)
            yield text[begin:cut]
            begin, produced = cut, True
        rest = text[begin:]
    if rest or not produced:
        yield rest


def _find_cut(text: str, begin: int, longest: int) -> int:
    """Return the index at which to cut `text`, `longest` / 2 to `longest` characters after `begin`: after the last
    blank line in this range, else after the last line, else at the end of the range."""
    middle, end = begin + longest // 2, begin + longest
    blank = text.rfind("\n\n", middle, end)
    if blank >= 0:
        return blank + 2
    return text.rfind("\n", middle, end) + 1 or end
