"""One cleaning pass over a corpus in bounded memory, saved in segments so that a killed pass resumes."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.characters import KINDS
from meshwright.data.cleaning.duplicates import find_repeated
from meshwright.data.cleaning.rules import RULES, Cleaner
from meshwright.data.cleaning.segments import (
    CHANGES,
    EXCERPT,
    KEPT,
    SAMPLES,
    Segment,
    SegmentWriter,
    merge_samples,
    sampling_priority,
)
from meshwright.data.files import PARTIAL, sync_directory
from meshwright.data.packing.shards import limit_rate
from meshwright.data.sources.reading import Document
from meshwright.data.sources.resolution import SourceChanged, SourceFile

SEGMENT_CHARACTERS = 1 << 25  # of text in a segment, about: the work that a kill loses
SEGMENT_DOCUMENTS = 1 << 16
_LENGTHS = 33  # bins: the numbers of characters below 1, 2, 4, ... 2^32
_SOURCES = 20  # of which the report counts documents; the others together

Log = Callable[[str], None]


class DocumentReader(Protocol):
    """Protocol that reads the documents of a file."""

    def read_documents(self, file: SourceFile) -> Iterator[Document]: ...


@dataclass(frozen=True)
class Cleaned:
    """Result of a cleaning pass.

    segments: files with the verdicts on consecutive documents. codes [documents]: KEPT, or 1 + the index in RULES of
    the rule that dropped it; memory-mapped. pieces: number of documents of each file. kept: number of documents that
    stay. longest_kept: characters of the longest of these. report: counts, distributions and samples, as JSON.
    """

    segments: tuple[Segment, ...]
    codes: NDArray[np.uint8]
    pieces: tuple[int, ...]
    kept: int
    longest_kept: int  # characters
    report: dict[str, Any]

    def iterate_segments(self) -> Iterator[tuple[slice, NDArray[np.uint64], NDArray[np.int64]]]:
        """Yield for each segment its slice of the documents, the first 64 bits of their SHA-256, and their
        UTF-8 bytes.
        """
        for segment in self.segments:
            sizes = segment.read_column("after" if "after" in segment else "before")[:, 1]
            hashes = segment.read_column("digest")[:, 0].byteswap()  # the digest's bytes are big-endian
            yield slice(segment.first, segment.first + segment.documents), hashes, sizes.astype(np.int64)


def run_cleaning_pass(
    files: Sequence[SourceFile], reader: DocumentReader, cleaner: Cleaner, directory: Path, log: Log
) -> Cleaned:
    """Apply every rule of `cleaner` to every document of `files`, read by `reader`. Finished segments in `directory`,
    left by an interrupted pass, are reused. log: receives progress lines. Raises `UserError` for unreadable sources.
    """
    directory.mkdir(parents=True, exist_ok=True)
    segments = tuple(_iterate_segments(files, reader, cleaner, directory, log))
    pieces = [0] * len(files)
    for segment in segments:
        for file, count in segment.header["pieces"]:
            pieces[file] += count
    duplicates = _Duplicates(segments, cleaner, directory)
    report = _Report(files, reader, cleaner, segments, duplicates).build()
    longest = max((segment.header["longest_kept"] for segment in segments), default=0)
    return Cleaned(segments, duplicates.codes, tuple(pieces), report["documents"]["after"], longest, report)


def _iterate_segments(
    files: Sequence[SourceFile], reader: DocumentReader, cleaner: Cleaner, directory: Path, log: Log
) -> Iterator[Segment]:
    """Yield the segments (files with the verdicts on consecutive documents) in order: first those that exist in
    `directory`, then the missing ones, which are written.
    """
    judged = [0] * len(files)
    file = first = 0  # where to go on: a file, the number of the next document
    for number in itertools.count():
        try:
            segment = Segment(directory / f"{number:06d}.segment")
        except (OSError, ValueError):
            break
        yield segment
        for file, count in segment.header["pieces"]:
            judged[file] += count
        first = segment.first + segment.documents
    said = limit_rate(lambda documents: log(f"cleaning: {documents:,} documents"))
    writer = SegmentWriter(first, cleaner.minhash, cleaner.rewrites)

    def finished() -> Segment:
        """Write the current segment to disk, begin the next one and return the written one."""
        nonlocal number, writer
        path = directory / f"{number:06d}.segment"
        writer.write(path)
        sync_directory(directory)
        number += 1
        writer = SegmentWriter(writer.first + writer.documents, cleaner.minhash, cleaner.rewrites)
        return Segment(path)

    for at in range(file, len(files)):
        for document in itertools.islice(reader.read_documents(files[at]), judged[at], None):
            verdict = cleaner.judge_document(document.text, document.name, document.problem)
            writer.add(at, document.name, document.text, verdict)
            said(writer.first + writer.documents)
            if writer.characters >= SEGMENT_CHARACTERS or writer.documents >= SEGMENT_DOCUMENTS:
                yield finished()
    if writer.documents:
        yield finished()


class _Duplicates:
    """Finds duplicates among the documents that passed all other rules.

    codes [documents]: KEPT, or 1 + the index in RULES of the rule that dropped it, duplicates included. first: by
    rule, the number of the first document that it drops. earlier: by rule, for some sampled documents the number of
    the earlier document that each repeats.
    """

    def __init__(self, segments: Sequence[Segment], cleaner: Cleaner, directory: Path) -> None:
        """Load the codes of all segments and drop exact and near duplicates, as far as `cleaner` enables these rules.
        directory: for temporary files.
        """
        self.first: dict[str, int] = {}  # of each rule, the first document that it drops
        self.earlier: dict[str, dict[int, int]] = {}  # sample -> what it repeats
        self._segments, self._directory = segments, directory
        for left in directory.glob(f"{PARTIAL}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        path = directory / f"{PARTIAL}codes"
        total = sum(segment.documents for segment in segments)
        self.codes = np.memmap(path, np.uint8, "w+", shape=(total,)) if total else np.zeros(0, np.uint8)
        path.unlink(missing_ok=True)  # unlinked while mapped, so that no kill leaves it behind
        for segment in segments:
            self.codes[segment.first : segment.first + segment.documents] = segment.read_column("code")
        if "exact_duplicates" in cleaner.rules:
            self._drop_repeats("exact_duplicates", lambda segment: segment.read_column("digest"))
        if cleaner.minhash is not None:
            for band in range(cleaner.minhash.bands):
                self._drop_repeats("near_duplicates", partial(_select_band, band))

    def _drop_repeats(self, rule: str, keys: Callable[[Segment], NDArray[np.uint64]]) -> None:
        """Set the code of `rule` for each document whose key equals that of an earlier document that is not dropped
        otherwise. keys: returns the keys of a segment's documents, [documents, width].
        """
        code = 1 + RULES.index(rule)

        def chunks() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
            """Yield for each segment (keys, document numbers) of the documents that no other rule dropped."""
            for segment in self._segments:
                codes = self.codes[segment.first : segment.first + segment.documents]
                asked = np.flatnonzero((codes == KEPT) | (codes == code))
                yield keys(segment)[asked], asked + segment.first

        total = len(self.codes)
        for numbers, earlier in find_repeated(chunks(), total, self._directory / f"{PARTIAL}keys"):
            self.codes[numbers] = code
            self._sample_duplicates(rule, numbers, earlier)

    def _sample_duplicates(self, rule: str, numbers: NDArray[np.int64], earlier: NDArray[np.int64]) -> None:
        """Record the first duplicate that `rule` drops and a sample of pairs for the report. numbers: documents
        dropped; earlier: the document that each of them repeats.
        """
        if not len(numbers):
            return
        self.first[rule] = min(self.first.get(rule, len(self.codes)), int(numbers.min()))
        known = self.earlier.setdefault(rule, {})
        for at in np.argsort(sampling_priority(numbers), kind="stable")[:SAMPLES].tolist():
            number = int(numbers[at])
            known[number] = min(known.get(number, number), int(earlier[at]))
        best = sorted(known, key=lambda number: int(sampling_priority(np.array([number]))[0]))[:SAMPLES]
        self.earlier[rule] = {number: known[number] for number in best}


def _select_band(band: int, segment: Segment) -> NDArray[np.uint64]:
    """Return the MinHash keys of band number `band` for a segment's documents, [documents, 1]."""
    return segment.read_column("bands")[:, band : band + 1]


class _Report:
    """Builder of the JSON report of a cleaning pass from its segments and duplicates."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        reader: DocumentReader,
        cleaner: Cleaner,
        segments: Sequence[Segment],
        duplicates: _Duplicates,
    ) -> None:
        self.files, self.reader, self.cleaner = files, reader, cleaner
        self.segments, self.duplicates = segments, duplicates
        self.labels = sorted({file.counted_as for file in files})
        self._label_of = [self.labels.index(file.counted_as) for file in files]

    def build(self) -> dict[str, Any]:
        """Return the report: counts by rule, distributions before and after, sources, samples; as JSON."""
        sides = ("before", "after")
        documents = dict.fromkeys(sides, 0)
        kinds = {side: np.zeros(len(KINDS), np.int64) for side in sides}
        lengths = {side: np.zeros(_LENGTHS, np.int64) for side in sides}
        sources = {side: np.zeros((len(self.labels), 2), np.int64) for side in sides}  # documents, bytes
        dropped = np.zeros((1 + len(RULES), 2), np.int64)
        changes = np.zeros(len(CHANGES), np.int64)
        for segment in self.segments:
            codes = self.duplicates.codes[segment.first : segment.first + segment.documents]
            labels = np.repeat(*np.array([[self._label_of[at], count] for at, count in segment.header["pieces"]]).T)
            kept = codes == KEPT
            columns = {side: segment.read_column(side if side in segment else "before") for side in sides}
            for side, chosen in (("before", np.ones(len(kept), bool)), ("after", kept)):
                values = columns[side][chosen].astype(np.int64)
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
        masked = [*self.cleaner.recipe.mask, *(["c4_lines"] if "c4" in self.cleaner.recipe.heuristics else [])]
        return {
            "rules": list(self.cleaner.rules),
            "dropped": {rule: int(dropped[1 + RULES.index(rule), 0]) for rule in self.cleaner.rules},
            "dropped_bytes": {rule: int(dropped[1 + RULES.index(rule), 1]) for rule in self.cleaner.rules},
            "masked": {kind: int(changes[CHANGES.index(kind)]) for kind in CHANGES if kind in masked},
            "documents": documents,
            "bytes": {side: int(sources[side][:, 1].sum()) for side in sides},
            "characters": {side: dict(zip(KINDS, kinds[side].tolist(), strict=True)) for side in sides},
            "lengths": {side: lengths[side].tolist() for side in sides},
            "sources": self._summarize_sources(sources),
            "minhash": {"bands": minhash.bands, "rows": minhash.rows, "words": minhash.words} if minhash else None,
            **self._collect_samples(),
        }

    def _summarize_sources(self, sources: dict[str, NDArray[np.int64]]) -> list[dict[str, Any]]:
        """Return documents and bytes of the largest sources before and after, all others as one entry, as JSON.
        sources: for "before" and "after" the counts (documents, bytes) of each source, [sources, 2].
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
        """Return `examples`, the name of the first document that each rule dropped, and `samples` of what
        it dropped.
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
        """Return (name, beginning of the text) of the documents with these numbers; only files that hold some of them
        are opened.
        """
        found: dict[int, tuple[str, str]] = {}
        begin, at = 0, 0
        pieces = [0] * len(self.files)
        for segment in self.segments:
            for file, count in segment.header["pieces"]:
                pieces[file] += count
        for file, count in zip(self.files, pieces, strict=True):
            here = [number for number in numbers[at:] if number < begin + count] if at < len(numbers) else []
            if here:
                at += len(here)
                last = here[-1] - begin
                for place, document in enumerate(itertools.islice(self.reader.read_documents(file), last + 1), begin):
                    if place in here:
                        text = document.text or ""
                        if self.cleaner.rewrites:
                            text, _ = self.cleaner.rewrite_text(text, document.name)
                        found[place] = document.name, text[:EXCERPT].encode(errors="replace").decode()
                if any(number not in found for number in here):
                    raise SourceChanged(file)
            begin += count
        return found
