"""Duplicate rules of a cleaning pass: they compare documents by the columns of the pass's segment files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.duplicates import find_repeated_keys
from meshwright.data.cleaning.rules import RULES, Cleaner
from meshwright.data.cleaning.segments import KEPT, SAMPLES, Segment, compute_sampling_priority
from meshwright.data.cleaning.sentence_spans import NO_SENTENCES, RemovedSentences
from meshwright.data.files import PARTIAL


class DuplicateFinder:
    """Finder of exact and near duplicates among the documents that pass all other rules.

    codes: uint8 [documents], 0 (`KEPT`), or 1 + the index in `RULES` of the rule that dropped the document; the finder
    writes the codes of duplicates into it. removed: repeated sentences that are removed from kept documents. first:
    {duplicate rule: lowest number of a document that the rule dropped}. earlier: samples for the report, {duplicate
    rule: {number of a duplicate: number of the document that it repeats}}.
    """

    def __init__(self, segments: Sequence[Segment], cleaner: Cleaner, directory: Path) -> None:
        """Collect the codes of all segments (blocks of consecutive documents), then mark exact and near duplicates if
        `cleaner` enables these rules. directory: folder for temporary files."""
        self.first: dict[str, int] = {}  # rule -> number of the first document that it drops
        self.earlier: dict[str, dict[int, int]] = {}  # rule -> {sample: document that it repeats}
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
            records = None
            if segments and "record" in segments[0]:
                records = np.concatenate([segment.read_column("record")[:, 0] for segment in segments])
            for band in range(cleaner.minhash.bands):
                self._drop_repeats("near_duplicates", partial(_select_band, band), records)
        self.removed = NO_SENTENCES
        if cleaner.recipe.sentence_duplicates:
            self._remove_sentences()

    def _remove_sentences(self) -> None:
        """Find spans of three consecutive sentences that occur earlier in the corpus. Store their sentences in
        `removed`; mark documents that would have no sentence left as dropped.
        """
        rule = "sentence_duplicates"
        self.removed = RemovedSentences.find(self._segments, self.codes, self._directory)
        for segment in self._segments:
            emptied = segment.first + np.flatnonzero(self.removed.measure(segment)[2])
            self.codes[emptied] = 1 + RULES.index(rule)
            if len(emptied) and rule not in self.first:
                self.first[rule], self.earlier[rule] = int(emptied[0]), {}

    def _drop_repeats(
        self,
        rule: str,
        keys: Callable[[Segment], NDArray[np.uint64]],
        records: NDArray[np.uint64] | None = None,
    ) -> None:
        """Find kept documents that repeat an earlier kept document, and mark them as dropped by `rule`. Documents
        repeat each other if their keys are equal.

        keys: function that returns the keys of a segment's documents, uint64 [documents, words per key]. records:
        uint64 [documents], hash of the record that each document is part of; documents of one record are not compared
        with each other. None: each document is a record.
        """
        code = 1 + RULES.index(rule)

        def iterate_keys() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
            """Yield (keys [n, width] of `width` 64-bit words each, document numbers [n]) for each segment, only for
            documents that no other rule dropped.
            """
            for segment in self._segments:
                codes = self.codes[segment.first : segment.first + segment.documents]
                asked = np.flatnonzero((codes == KEPT) | (codes == code))
                yield keys(segment)[asked], asked + segment.first

        total = len(self.codes)
        for numbers, earlier in find_repeated_keys(iterate_keys(), total, self._directory / f"{PARTIAL}keys"):
            if records is not None:
                others = records[numbers] != records[earlier]
                numbers, earlier = numbers[others], earlier[others]
            self.codes[numbers] = code
            self._sample_duplicates(rule, numbers, earlier)

    def _sample_duplicates(self, rule: str, numbers: NDArray[np.int64], earlier: NDArray[np.int64]) -> None:
        """Update the figures of `rule`, a duplicate rule, for the report: in `first` the lowest number of a document
        that it dropped, in `earlier` up to 4 pairs (duplicate, document that it repeats).

        numbers: numbers of newly dropped documents, [n]. earlier: number of the document that each of them repeats,
        [n].
        """
        if not len(numbers):
            return
        self.first[rule] = min(self.first.get(rule, len(self.codes)), int(numbers.min()))
        known = self.earlier.setdefault(rule, {})
        for at in np.argsort(compute_sampling_priority(numbers), kind="stable")[:SAMPLES].tolist():
            number = int(numbers[at])
            known[number] = min(known.get(number, number), int(earlier[at]))
        best = sorted(known, key=lambda number: int(compute_sampling_priority(np.array([number]))[0]))[:SAMPLES]
        self.earlier[rule] = {number: known[number] for number in best}


def _select_band(band: int, segment: Segment) -> NDArray[np.uint64]:
    """Return the MinHash keys of the documents of `segment` in band number `band` (from 0), uint64 [documents, 1].
    Documents with equal keys are near duplicates."""
    return segment.read_column("bands")[:, band : band + 1]
