"""Deduplication of sentence spans: three consecutive sentences that occur earlier in the corpus are removed.

C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2) keeps one of each three-sentence span that occurs more than once.
Here the first in reading order is kept. Spans are compared by 128-bit hashes in an external sort.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.duplicates import find_repeated_keys
from meshwright.data.cleaning.segments import KEPT, Segment
from meshwright.data.cleaning.sentences import split_sentences
from meshwright.data.files import PARTIAL

SPAN = 3  # sentences
SENTENCE_BITS = 24  # of a removed sentence's number in its document; a document has at most a million characters


def hash_spans(sentences: Sequence[str]) -> bytes:
    """Return the 128-bit hash of each span of three consecutive sentences, 16 bytes each: BLAKE2b of the sentences in
    lower case without surrounding white space.
    """
    digests = [hashlib.blake2b(one.strip().lower().encode(), digest_size=16).digest() for one in sentences]
    spans = zip(*(digests[at:] for at in range(SPAN)), strict=False)
    return b"".join(hashlib.blake2b(b"".join(span), digest_size=16).digest() for span in spans)


def remove_sentences(text: str, numbers: Collection[int]) -> str:
    """Return `text` without the sentences whose numbers, from 0, are in `numbers`."""
    if not numbers:
        return text
    return "".join(one for number, one in enumerate(split_sentences(text)) if number not in numbers)


class RemovedSentences:
    """Sentences that are removed from kept documents, because they are part of a span of three consecutive sentences
    that occurs earlier in the corpus.

    entries: int64 [removed sentences], ascending: (number of the document << 24) | number of the sentence in it.
    """

    def __init__(self, entries: NDArray[np.int64]) -> None:
        """Store the sorted entries; see the class."""
        self.entries = entries

    @classmethod
    def find(cls, segments: Sequence[Segment], codes: NDArray[np.uint8], directory: Path) -> RemovedSentences:
        """Find the repeated spans of three sentences in all documents that no rule dropped, by an external sort. All
        sentences of a repeated span are removed, except those that are also part of its first occurrence: of five equal
        sentences three remain.

        segments: cleaning results of blocks of consecutive documents, with the hashes of their spans. codes: uint8
        [documents], 0 for documents that no rule dropped. directory: folder for temporary files. Up to a billion spans
        take about 100 MB of memory; beyond that, memory grows with the number of spans.
        """
        marks = _map_temporary(directory / f"{PARTIAL}sentences", np.uint8, sum(one.sentences for one in segments))

        def iterate_spans() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
            """Yield (hashes [spans, 2], numbers in the corpus of the spans' first sentences [spans])."""
            first = 0
            for segment in segments:
                counts = segment.read_column("sentences")[:, 0].astype(np.int64)
                kept = codes[segment.first : segment.first + segment.documents] == KEPT
                begins, spans = np.cumsum(counts) - counts, np.maximum(counts - SPAN + 1, 0)
                owner = np.repeat(np.arange(len(counts)), spans)
                within = np.arange(len(owner)) - np.repeat(np.cumsum(spans) - spans, spans)
                wanted = kept[owner]
                yield segment.read_spans()[wanted], (first + begins[owner] + within)[wanted]
                first += segment.sentences

        total = sum(one.spans for one in segments)
        for numbers, earlier in find_repeated_keys(iterate_spans(), total, directory / f"{PARTIAL}keys"):
            for offset in range(SPAN):
                sentences = numbers + offset
                marks[sentences[sentences >= earlier + SPAN]] = 1
        path, size = directory / f"{PARTIAL}removed", 0
        with path.open("wb") as file:
            first = 0
            for segment in segments:
                counts = segment.read_column("sentences")[:, 0].astype(np.int64)
                found = np.flatnonzero(marks[first : first + segment.sentences])
                owner = np.searchsorted(np.cumsum(counts), found, side="right")
                within = found - (np.cumsum(counts) - counts)[owner]
                file.write((((segment.first + owner) << SENTENCE_BITS) | within).tobytes())
                size, first = size + len(found), first + segment.sentences
        return cls(_map_temporary(path, np.int64, size, "r+"))

    def find_numbers(self, document: int) -> set[int]:
        """Return the numbers, from 0, of the sentences removed from the document with number `document`."""
        entries = self._select_entries(document, document + 1)
        return {*(entries & ((1 << SENTENCE_BITS) - 1)).tolist()}

    def measure(self, segment: Segment) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return three arrays for the documents of `segment`, [documents] each: number of removed sentences; size of
        the removed sentences in UTF-8 bytes; True if no sentence is left."""
        entries = self._select_entries(segment.first, segment.first + segment.documents)
        counts = segment.read_column("sentences")[:, 0].astype(np.int64)
        owner = (entries >> SENTENCE_BITS) - segment.first
        at = (np.cumsum(counts) - counts)[owner] + (entries & ((1 << SENTENCE_BITS) - 1))
        removed = np.bincount(owner, minlength=len(counts))
        sizes = np.bincount(owner, segment.read_sentence_sizes()[at], len(counts)).astype(np.int64)
        return removed, sizes, (counts > 0) & (removed == counts)

    def _select_entries(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the entries of the documents with numbers from `begin` to `end`, exclusive."""
        low, high = np.searchsorted(self.entries, [begin << SENTENCE_BITS, end << SENTENCE_BITS])
        return np.asarray(self.entries[low:high])


NO_SENTENCES = RemovedSentences(np.zeros(0, np.int64))


def _map_temporary(
    path: Path, kind: type[np.uint8 | np.int64], size: int, mode: Literal["r+", "w+"] = "w+"
) -> NDArray[Any]:
    """Map the temporary file `path` as an array of `size` values. kind: NumPy type of a value. mode: "w+" creates the
    file, "r+" opens an existing one. The file is unlinked while it is mapped, so that a killed process leaves no file
    behind."""
    array: NDArray[Any] = np.memmap(path, kind, mode, shape=(size,)) if size else np.zeros(0, kind)
    path.unlink(missing_ok=True)
    return array
