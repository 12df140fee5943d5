"""One cleaning pass over a corpus in bounded memory. Results are saved in segment files, from which a killed pass
resumes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.characters import KINDS
from meshwright.data.cleaning.duplicate_finder import DuplicateFinder
from meshwright.data.cleaning.language import describe_thresholds
from meshwright.data.cleaning.rules import RULES, Cleaner
from meshwright.data.cleaning.segments import (
    CHANGES,
    EXCERPT,
    KEPT,
    Segment,
    SegmentWriter,
    find_earlier_reading,
    merge_samples,
)
from meshwright.data.cleaning.sentence_spans import RemovedSentences, hash_spans
from meshwright.data.files import sync_directory
from meshwright.data.packing.shards import limit_rate
from meshwright.data.sources.reading import EarlierReading, Reader
from meshwright.data.sources.resolution import SourceChanged, SourceFile

SEGMENT_CHARACTERS = 1 << 25  # approximate characters of text in a segment: the work that is lost if the pass is killed
SEGMENT_DOCUMENTS = 1 << 16
_LENGTHS = 33  # bins of document lengths, with the upper bounds 1, 2, 4, ... 2^32 characters
_SOURCES = 20  # sources that the report lists one by one; the others are summed

Log = Callable[[str], None]


@dataclass(frozen=True)
class CleaningResult:
    """Result of a cleaning pass over N documents, numbered from 0 in reading order.

    segments: files with the results of consecutive documents. codes: uint8 [N], memory-mapped: 0 (`KEPT`), or 1 + the
    index in `RULES` of the rule that dropped the document. documents_by_file: number of documents in each source file.
    kept: number of documents that no rule dropped. longest_kept: number of characters of the longest kept document.
    report: counts, distributions and samples, as JSON. removed: repeated sentences that are removed from kept
    documents.
    """

    segments: tuple[Segment, ...]
    codes: NDArray[np.uint8]
    documents_by_file: tuple[int, ...]
    kept: int
    longest_kept: int  # characters
    report: dict[str, Any]
    removed: RemovedSentences

    def iterate_segments(self) -> Iterator[tuple[slice, NDArray[np.uint64], NDArray[np.int64]]]:
        """Yield (slice of document numbers, hashes, sizes) for each segment, a block of consecutive documents.

        hashes: uint64 [documents], the first 64 bits of the SHA-256 of each document's text; if one record has several
        documents, each has the hash of the whole record. sizes: int64 [documents], UTF-8 bytes after masking and
        removal of sentences.
        """
        for segment in self.segments:
            sizes = segment.read_column("after" if "after" in segment else "before")[:, 1]
            hashes = segment.read_column("record" if "record" in segment else "digest")[:, 0].byteswap()  # big-endian
            sizes = sizes.astype(np.int64)
            if "sentences" in segment:
                sizes -= self.removed.measure(segment)[1]
            yield slice(segment.first, segment.first + segment.documents), hashes, sizes


def run_cleaning_pass(
    files: Sequence[SourceFile], reader: Reader, cleaner: Cleaner, directory: Path, log: Log
) -> CleaningResult:
    """Apply all rules of `cleaner` to all documents of `files`; return which documents are kept, and a report. Raises
    `UserError` for unreadable sources.

    reader: splits each file into documents. directory: folder for segment files (results of consecutive documents);
    segment files of an interrupted pass are reused. log: receives progress lines.
    """
    directory.mkdir(parents=True, exist_ok=True)
    segments = tuple(_iterate_segments(files, reader, cleaner, directory, log))
    documents_by_file = [0] * len(files)
    for segment in segments:
        for file, count in segment.header["pieces"]:
            documents_by_file[file] += count
    duplicates = DuplicateFinder(segments, cleaner, directory)
    report = _ReportBuilder(files, reader, cleaner, segments, duplicates, documents_by_file).build()
    longest = max((segment.header["longest_kept"] for segment in segments), default=0)
    kept = report["documents"]["after"]
    return CleaningResult(
        segments, duplicates.codes, tuple(documents_by_file), kept, longest, report, duplicates.removed
    )


def _iterate_segments(
    files: Sequence[SourceFile], reader: Reader, cleaner: Cleaner, directory: Path, log: Log
) -> Iterator[Segment]:
    """Yield the segments (files with the cleaning results of consecutive documents) in order: first the segments that
    an interrupted pass left in `directory`, then new segments, written while the rest of `files` is read.

    reader: splits each file into documents. cleaner: applies the rules to a document. log: receives progress lines.
    """
    file = first = 0  # position to resume at: index of a file, number of the next document
    judged: list[NDArray[np.uint8]] = []  # codes of that file's documents so far
    for number in itertools.count():
        try:
            segment = Segment(directory / f"{number:06d}.segment")
        except (OSError, ValueError):
            break
        yield segment
        codes = segment.read_column("code")
        for at, count in segment.header["pieces"]:
            judged = [*(judged if at == file else ()), codes[:count]]
            file, codes = at, codes[count:]
        first = segment.first + segment.documents
    log_progress = limit_rate(lambda documents: log(f"cleaning: {documents:,} documents"))
    writer = _begin_segment(first, cleaner, reader)

    def finish_segment() -> Segment:
        """Write the results collected in `writer` as the next segment file, replace `writer` by a new one, and return
        the segment that was written."""
        nonlocal number, writer
        path = directory / f"{number:06d}.segment"
        writer.write(path)
        sync_directory(directory)
        number += 1
        writer = _begin_segment(writer.first + writer.documents, cleaner, reader)
        return Segment(path)

    known = np.concatenate([np.zeros(0, np.uint8), *judged])
    for at in range(file, len(files)):
        before = find_earlier_reading(files[at], known, KEPT + 1) if at == file else EarlierReading()
        for document in itertools.islice(reader.read_documents(files[at], before), before.documents, None):
            verdict = cleaner.judge_document(document.text, document.name, document.problem, document.example)
            writer.add(at, document, verdict)
            log_progress(writer.first + writer.documents)
            if writer.characters >= SEGMENT_CHARACTERS or writer.documents >= SEGMENT_DOCUMENTS:
                yield finish_segment()
    if writer.documents:
        yield finish_segment()


def _begin_segment(first: int, cleaner: Cleaner, reader: Reader) -> SegmentWriter:
    """Return a writer of a new segment (file with the cleaning results of consecutive documents). first: number of its
    first document. cleaner, reader: the settings of both determine the segment's columns.
    """
    spans = hash_spans if cleaner.recipe.sentence_duplicates else None
    return SegmentWriter(first, cleaner.minhash, cleaner.rewrites, spans, reader.records is not None)


class _ReportBuilder:
    """Builder of the JSON report of a cleaning pass: documents dropped by each rule, and statistics of the corpus
    before and after the cleaning.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        reader: Reader,
        cleaner: Cleaner,
        segments: Sequence[Segment],
        duplicates: DuplicateFinder,
        documents_by_file: Sequence[int],
    ) -> None:
        """Store the results from which the report is built. files: the source files that `reader` split and `cleaner`
        checked. segments: the cleaning results, in blocks of consecutive documents. duplicates: the final code (kept,
        or the rule that dropped it) of each document. documents_by_file: number of documents in each file."""
        self.files, self.reader, self.cleaner = files, reader, cleaner
        self.segments, self.duplicates, self.documents_by_file = segments, duplicates, documents_by_file
        self.labels = sorted({file.counted_as for file in files})
        self._label_of = [self.labels.index(file.counted_as) for file in files]

    def build(self) -> dict[str, Any]:
        """Return the report as a JSON object: documents and bytes that each rule dropped, masked items by kind, and
        sample documents. Numbers of documents and bytes, histograms of lengths, character kinds and sources are each
        given for "before" and "after" the cleaning.
        """
        sides = ("before", "after")
        documents = dict.fromkeys(sides, 0)
        kinds = {side: np.zeros(len(KINDS), np.int64) for side in sides}
        lengths = {side: np.zeros(_LENGTHS, np.int64) for side in sides}
        sources = {side: np.zeros((len(self.labels), 2), np.int64) for side in sides}  # documents, bytes
        dropped = np.zeros((1 + len(RULES), 2), np.int64)
        changes = np.zeros(len(CHANGES), np.int64)
        unused = Counter[str]()
        sentences = np.zeros(3, np.int64)  # removed from kept documents; their bytes; documents
        for segment in self.segments:
            codes = self.duplicates.codes[segment.first : segment.first + segment.documents]
            labels = np.repeat(*np.array([[self._label_of[at], count] for at, count in segment.header["pieces"]]).T)
            unused.update(segment.header["unused"])
            kept = codes == KEPT
            removed = self.duplicates.removed.measure(segment) if "sentences" in segment else None
            columns = {side: segment.read_column(side if side in segment else "before") for side in sides}
            for side, chosen in (("before", np.ones(len(kept), bool)), ("after", kept)):
                values = columns[side][chosen].astype(np.int64)
                if removed is not None and side == "after":
                    values[:, 1] -= removed[1][chosen]
                    sentences += [removed[0][kept].sum(), removed[1][kept].sum(), (removed[0][kept] > 0).sum()]
                documents[side] += len(values)
                kinds[side] += values[:, 2:].sum(axis=0)
                lengths[side] += np.bincount(np.frexp(values[:, 0])[1], minlength=_LENGTHS)
                for at, counts in enumerate((None, values[:, 1])):
                    sources[side][:, at] += np.bincount(labels[chosen], counts, len(self.labels)).astype(np.int64)
            sizes = columns["before"][:, 1]
            for at, counts in enumerate((None, sizes)):
                dropped[:, at] += np.bincount(codes, counts, 1 + len(RULES)).astype(np.int64)
            if "changes" in segment:
                changes += segment.read_column("changes")[kept].sum(axis=0, dtype=np.int64)
        minhash = self.cleaner.minhash
        recipe = self.cleaner.recipe
        masked = [*recipe.mask, *(["c4_lines"] if "c4" in recipe.heuristics else [])]
        removed_sentences = dict(zip(("sentences", "bytes", "documents"), sentences.tolist(), strict=True))
        return {
            "rules": list(self.cleaner.rules),
            "dropped": {rule: int(dropped[1 + RULES.index(rule), 0]) for rule in self.cleaner.rules},
            "dropped_bytes": {rule: int(dropped[1 + RULES.index(rule), 1]) for rule in self.cleaner.rules},
            "masked": {kind: int(changes[CHANGES.index(kind)]) for kind in CHANGES if kind in masked},
            "unused_keys": dict(unused.most_common()),
            "documents": documents,
            "bytes": {side: int(sources[side][:, 1].sum()) for side in sides},
            "characters": {side: dict(zip(KINDS, kinds[side].tolist(), strict=True)) for side in sides},
            "lengths": {side: lengths[side].tolist() for side in sides},
            "sources": self._summarize_sources(sources),
            "language_thresholds": describe_thresholds(recipe.minimum_language_probability)
            if recipe.languages
            else None,
            "removed_sentences": removed_sentences if recipe.sentence_duplicates else None,
            "minhash": {"bands": minhash.bands, "rows": minhash.rows, "words": minhash.words} if minhash else None,
            **self._collect_samples(),
        }

    def _summarize_sources(self, sources: dict[str, NDArray[np.int64]]) -> list[dict[str, Any]]:
        """Return [{source, before: {documents, bytes}, after: {documents, bytes}}] ("before" and "after" the cleaning):
        one entry for each of the 20 largest sources, and one for the sum of all others.

        sources: {"before" or "after": numbers of documents and of bytes of each source, int64 [sources, 2]}.
        """
        order = np.argsort(-sources["before"][:, 1], kind="stable").tolist()
        shown, rest = order[:_SOURCES], order[_SOURCES:]
        rows = [(self.labels[at], [at]) for at in shown] + ([(f"{len(rest)} others", rest)] if rest else [])
        return [
            {
                "source": label,
                **{
                    side: dict(zip(("documents", "bytes"), sources[side][at].sum(axis=0).tolist(), strict=True))
                    for side in ("before", "after")
                },
            }
            for label, at in rows
        ]

    def _collect_samples(self) -> dict[str, Any]:
        """Return {"examples": {rule: name of the first document that it dropped}, "samples": {rule: [sample]}}.

        A sample is a dropped document, {document: its name, why: reason, text: its beginning}; a duplicate also has
        `earlier`, the beginning of the document that it repeats.
        """
        examples: dict[str, str] = {}
        for segment in self.segments:
            examples = {**segment.header["examples"], **examples}
        samples = merge_samples(segment.header for segment in self.segments)
        duplicates = self.duplicates
        wanted = {*duplicates.first.values()}
        wanted.update(number for pairs in duplicates.earlier.values() for pair in pairs.items() for number in pair)
        documents = self._read_excerpts(sorted(wanted))
        for rule, number in duplicates.first.items():
            examples[rule] = documents[number][0]
            samples[rule] = [
                {
                    **dict(zip(("document", "text"), documents[number], strict=True)),
                    "why": f"repeats {documents[earlier][0]}",
                    "earlier": documents[earlier][1],
                }
                for number, earlier in duplicates.earlier[rule].items()
            ]
        fields = ("document", "why", "text", "earlier")
        return {
            "examples": {rule: examples[rule] for rule in self.cleaner.rules if rule in examples},
            "samples": {
                rule: [{field: sample[field] for field in fields if field in sample} for sample in samples[rule]]
                for rule in self.cleaner.rules
                if rule in samples
            },
        }

    def _read_excerpts(self, numbers: list[int]) -> dict[int, tuple[str, str]]:
        """Read sample documents again; return {number: (name, first 400 characters of the masked text)}. numbers:
        document numbers, ascending; only the files that contain them are read. Raises `SourceChanged` if a file no
        longer contains one of the documents."""
        found: dict[int, tuple[str, str]] = {}
        begin, at = 0, 0
        for file, count in zip(self.files, self.documents_by_file, strict=True):
            here = [number for number in numbers[at:] if number < begin + count] if at < len(numbers) else []
            if here:
                at += len(here)
                last = here[-1] - begin
                before = find_earlier_reading(file, self.duplicates.codes[begin : begin + count], KEPT + 1)
                documents = self.reader.read_documents(file, before)
                for place, document in enumerate(itertools.islice(documents, last + 1), begin):
                    if place in here:
                        text = document.text or ""
                        if self.cleaner.rewrites:
                            text, _ = self.cleaner.rewrite_text(text, document.name)
                        found[place] = document.name, text[:EXCERPT].encode(errors="replace").decode()
                if any(number not in found for number in here):
                    raise SourceChanged(file)
            begin += count
        return found
