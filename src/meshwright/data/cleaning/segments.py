"""Segments: files of columns with the cleaning results of consecutive documents, from which a killed pass resumes."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.characters import KINDS, count_character_kinds
from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.rules import RULES, Verdict
from meshwright.data.files import AtomicFile, to_canonical_json
from meshwright.data.sources.reading import Document, EarlierReading
from meshwright.data.sources.resolution import SourceFile

KEPT = 0  # a code; 1 + the index in RULES: dropped by that rule
CHANGES = ("key", "email", "phone", "ip", "c4_lines")
SAMPLES = 4  # documents of each rule that the report shows
EXCERPT = 400  # characters of each
_MAGIC = b"meshwright segment 4\n"


def compute_sampling_priority(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash document numbers to pseudorandom priorities, uint64 of the same shape. The report shows, for each rule, the
    dropped documents with the lowest priorities: a sample that is spread over the corpus and the same in every run."""
    values = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(32)
    return values * np.uint64(0xD6E8FEB86659FD93)


def list_column_types(bands: int, rewrites: bool, sentences: bool, records: bool) -> dict[str, tuple[str, int]]:
    """Return {name: (NumPy dtype, values per document)} of the columns of a segment file, which holds the cleaning
    results of consecutive documents.

    bands: number of MinHash bands. rewrites: True if texts are masked or their lines filtered. sentences: True if spans
    of sentences are compared. records: True if the documents are examples of instruction, chat or preference records.

    Columns: `code`: 0 (kept) or 1 + the index in `RULES` of the rule that dropped the document. `before`: numbers of
    characters, of UTF-8 bytes, and of characters of each kind, before masking. `digest`: first half of the text's
    SHA-256. `bands`: MinHash keys. With `rewrites`: `after`, the same numbers as in `before`, but after masking;
    `changes`, numbers of masked items and removed lines by kind. With `sentences`: `sentences`, the number of
    sentences. With `records`: `record`, 64 bits of a hash of the record, equal for all examples of one record.
    """
    sizes = 2 + len(KINDS)
    after = {"after": ("<u4", sizes), "changes": ("<u4", len(CHANGES))} if rewrites else {}
    columns = {"code": ("u1", 1), "before": ("<u4", sizes), **after, "digest": ("<u8", 2), "bands": ("<u8", bands)}
    columns |= {"sentences": ("<u4", 1)} if sentences else {}
    return columns | ({"record": ("<u8", 1)} if records else {})


class SegmentWriter:
    """Writer of a segment: collects the cleaning results of consecutive documents and writes them to a file at once.

    first: number of the first document. minhash: computes the keys for near duplicates; None: near duplicates are not
    searched. rewrites: True if the rules change texts (replace personal data, remove lines). hash_spans: returns
    16-byte hashes of the spans of a document's sentences; None: sentences are not compared. records: True if the
    documents are training examples of records. documents, characters: totals added so far.
    """

    def __init__(
        self,
        first: int,
        minhash: MinHash | None,
        rewrites: bool,
        hash_spans: Callable[[Sequence[str]], bytes] | None,
        records: bool = False,
    ) -> None:
        """Start without results; arguments: see the class."""
        self.records = records
        self.first, self.minhash, self.rewrites, self.hash_spans = first, minhash, rewrites, hash_spans
        self._spans, self._sizes = bytearray(), array("I")  # hashes; UTF-8 bytes of each sentence
        self.documents = self.characters = self.longest_kept = 0
        self.documents_by_file: dict[int, int] = {}  # index of a source file -> number of its documents
        self.examples: dict[str, str] = {}
        self.unused = Counter[str]()  # keys and columns of records that are not used
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self._columns = {name: bytearray() for name in list_column_types(0, rewrites, hash_spans is not None, records)}

    def add(self, file: int, document: Document, verdict: Verdict) -> None:
        """Append the cleaning result of the next document. file: index of its source file. document: as read, before
        masking and line filters. verdict: the text after masking and line filters, and the rule that dropped the
        document, if any.
        """
        name, raw = document.name, document.text
        self.unused.update(document.unread)
        if document.example is not None:
            self.unused.update(document.example.unused)
        code = KEPT if verdict.rule is None else 1 + RULES.index(verdict.rule)
        text = raw or ""
        unchanged = verdict.text is raw
        content = verdict.content if unchanged else text.encode(errors="replace")
        before = np.concatenate([np.array([len(text), len(content)], np.uint32), count_character_kinds(content)])
        self._columns["code"].append(code)
        self._columns["before"] += before.tobytes()
        if self.rewrites:
            after = before
            if not unchanged:
                sizes = np.array([len(verdict.text), len(verdict.content)], np.uint32)
                after = np.concatenate([sizes, count_character_kinds(verdict.content)])
            self._columns["after"] += after.tobytes()
            self._columns["changes"] += array("I", (verdict.changes.get(kind, 0) for kind in CHANGES)).tobytes()
        self._columns["digest"] += verdict.digest[:16].ljust(16, b"\0")
        if self.records:
            self._columns["record"] += (document.record or verdict.digest)[:8].ljust(8, b"\0")
        if self.minhash:
            keys = np.zeros(self.minhash.bands, np.uint64)
            if code == KEPT:
                shingles = self.minhash.hash_shingles(verdict.text)
                # A text without words has no near duplicates: its key is unique.
                keys = (
                    self.minhash.hash_bands(self.minhash.compute_signature(shingles))
                    if len(shingles)
                    else np.full(len(keys), self.first + self.documents, np.uint64)
                )
            self._columns["bands"] += keys.tobytes()
        if self.hash_spans is not None:
            self._columns["sentences"] += array("I", [len(verdict.sentences)]).tobytes()
            self._spans += self.hash_spans(verdict.sentences)
            self._sizes.extend(len(one.encode()) for one in verdict.sentences)
        if code == KEPT:
            self.longest_kept = max(self.longest_kept, len(verdict.text))
        else:
            assert verdict.rule is not None
            self.examples.setdefault(verdict.rule, name)
            shown = verdict.text or ("" if self.rewrites else text)  # text that should be masked is never shown
            self._keep_sample(verdict.rule, name, shown, verdict.why)
        self.documents_by_file[file] = self.documents_by_file.get(file, 0) + 1
        self.documents += 1
        self.characters += len(text)

    def _keep_sample(self, rule: str, name: str, text: str, why: str) -> None:
        """Store the current document, dropped by `rule`, as a sample for the report if its sampling priority is among
        the 4 lowest of that rule. name, text: the document's name and text. why: the measured value for which it was
        dropped.
        """
        number = self.first + self.documents
        rank = int(compute_sampling_priority(np.array([number]))[0])
        samples = self.samples.setdefault(rule, [])
        if len(samples) < SAMPLES or rank < samples[-1]["priority"]:
            excerpt = text[:EXCERPT].encode(errors="replace").decode()
            samples.append({"priority": rank, "number": number, "document": name, "why": why, "text": excerpt})
            samples.sort(key=lambda sample: int(sample["priority"]))
            del samples[SAMPLES:]

    def write(self, path: Path) -> None:
        """Write the collected results to the file `path` atomically."""
        header = to_canonical_json(
            {
                "first": self.first,
                "documents": self.documents,
                "pieces": [[file, count] for file, count in self.documents_by_file.items()],
                "bands": self.minhash.bands if self.minhash else 0,
                "rewrites": self.rewrites,
                "sentences": None if self.hash_spans is None else len(self._sizes),
                "spans": len(self._spans) // 16,
                "records": self.records,
                "longest_kept": self.longest_kept,
                "examples": self.examples,
                "unused": self.unused,
                "samples": self.samples,
            }
        )
        with AtomicFile(path) as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            for column in self._columns.values():
                file.write(memoryview(column))
            file.write(bytes(self._spans) + self._sizes.tobytes())
            file.finish()


class Segment:
    """File with the cleaning results of a block of consecutive documents. Header and columns are read from disk on each
    access.

    first: number of the first document. documents: number of documents. sentences, spans: total numbers of sentences
    and of spans (three consecutive sentences) in these documents; 0 if spans are not compared.
    """

    def __init__(self, path: Path) -> None:
        """Open the segment file `path`. Raises `ValueError` if it is incomplete or no segment."""
        self.path = path
        header, offset = self._read_header()
        self.first, self.documents = int(header["first"]), int(header["documents"])
        self.sentences, self.spans = int(header["sentences"] or 0), int(header["spans"])
        options = header["rewrites"], header["sentences"] is not None, header["records"]
        self._types = list_column_types(header["bands"], *options)
        self._offsets: dict[str, int] = {}
        for name, (dtype, width) in self._types.items():
            self._offsets[name] = offset
            offset += np.dtype(dtype).itemsize * width * self.documents
        self._end = offset
        if path.stat().st_size != offset + 16 * self.spans + 4 * self.sentences:
            raise ValueError(f"{path} is cut short")

    @property
    def header(self) -> dict[str, Any]:
        """Header of the file as JSON. `pieces`: [[index of a source file, number of its documents in this segment]].
        `longest_kept`: characters of the longest document kept. `examples`: {rule: name of the first document that the
        rule dropped}. `samples`: {rule: sample of the documents that the rule dropped}."""
        return self._read_header()[0]

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """Read the header; returns (header as JSON, byte offset of the first column). Raises `ValueError` if the file
        is no segment.
        """
        with self.path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{self.path} is no segment")
            length = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(length)), len(_MAGIC) + 8 + length

    def __contains__(self, column: str) -> bool:
        """Return True if the segment has the column named `column`, such as "code" or "after"."""
        return column in self._types

    def read_column(self, name: str) -> NDArray[Any]:
        """Read the column `name` of the segment: [documents] for "code", else [documents, values per document]."""
        dtype, width = self._types[name]
        values = np.fromfile(self.path, dtype, count=width * self.documents, offset=self._offsets[name])
        return values if width == 1 and name == "code" else values.reshape(self.documents, width)

    def read_spans(self) -> NDArray[np.uint64]:
        """Read the 128-bit hashes of the sentence spans of all documents, uint64 [spans, 2]."""
        return np.fromfile(self.path, "<u8", count=2 * self.spans, offset=self._end).reshape(-1, 2)

    def read_sentence_sizes(self) -> NDArray[np.uint32]:
        """Read the size in UTF-8 bytes of each sentence of all documents, uint32 [sentences]."""
        return np.fromfile(self.path, "<u4", count=self.sentences, offset=self._end + 16 * self.spans)


def find_earlier_reading(file: SourceFile, codes: NDArray[np.uint8], first: int) -> EarlierReading:
    """Summarize the earlier reading of `file`, so that a second reading can yield the same documents. Return the number
    of documents, and the numbers (from 0) of the documents whose text could not be extracted from a web page.

    codes: uint8 [documents], the cleaning result of each document of `file`. first: the value in `codes` for documents
    that the first rule in `RULES` dropped; the value for the i-th rule is `first` + i.
    """
    failed = np.flatnonzero(codes == first + RULES.index("extraction")).tolist() if file.format == "warc" else ()
    return EarlierReading(len(codes), frozenset(failed))


def merge_samples(headers: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return {rule: samples of the documents that it dropped}, the 4 samples of each rule with the lowest sampling
    priorities over all segments. headers: `Segment.header` of each segment.
    """
    merged: dict[str, list[dict[str, Any]]] = {}
    for header in headers:
        for rule, samples in header["samples"].items():
            both = sorted([*merged.get(rule, []), *samples], key=lambda sample: int(sample["priority"]))
            merged[rule] = both[:SAMPLES]
    return merged
