"""Cleaning of all documents of a corpus, and their split into training and validation documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning.cleaning_pass import CleaningResult, run_cleaning_pass
from meshwright.data.cleaning.rules import Cleaner, Rewriter
from meshwright.data.cleaning.segments import KEPT, find_earlier_reading
from meshwright.data.cleaning.sentence_spans import NO_SENTENCES, RemovedSentences, remove_sentences
from meshwright.data.files import (
    AtomicFile,
    find_damage,
    read_json,
    sync_directory,
    to_canonical_json,
    write_array,
    write_atomic,
)
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.messages import MessageFormat
from meshwright.data.sources.reading import MAX_DOCUMENT_LENGTH, Document, Reader
from meshwright.data.sources.resolution import SourceChanged, SourceFile
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe

SPLITS = ("train", "validation")
FEW_DOCUMENTS = 100
SHORT_DOCUMENT = 8_000  # characters
_DROPPED = len(SPLITS)  # codes from here on: dropped by RULES[code - _DROPPED]
_BLOCK = 1 << 24  # codes read at a time
_FILES = {"codes": "survey.npy", "sentences": "survey.sentences.npy"}


@dataclass(frozen=True, slots=True)
class CleanedCorpus:
    """Cleaning result of a corpus of N documents, split into training and validation data. It has a code for each
    document, not the texts, which are read again from the source files. Documents are numbered from 0 in reading order.

    codes: uint8 [N]: 0: training document; 1: validation document; 2 + i: dropped by the i-th rule in `RULES`.
    documents_by_file: number of documents in each source file. longest: maximum characters of a document; longer texts
    are cut into several documents. bytes: {split: UTF-8 bytes}. report: the cleaning report as JSON. rewriter: masks
    the texts when the documents are read again. removed: sentences that are then removed from the texts.
    """

    codes: NDArray[np.uint8]
    documents_by_file: tuple[int, ...]
    longest: int
    bytes: dict[str, int]
    report: dict[str, Any]
    rewriter: Rewriter
    removed: RemovedSentences = NO_SENTENCES

    @property
    def dropped(self) -> dict[str, int]:
        """Number of documents that each rule dropped, by rule name."""
        return dict(self.report["dropped"])

    @property
    def documents(self) -> dict[str, int]:
        """Number of documents in each split, by split name."""
        return {split: count_codes(self.codes, index) for index, split in enumerate(SPLITS)}

    def write(self, directory: Path) -> None:
        """Write the results to survey.npy, survey.sentences.npy and, last, survey.json in a directory."""
        written = {}
        for name, values in (("codes", self.codes), ("sentences", self.removed.entries)):
            with AtomicFile(directory / _FILES[name]) as file:
                write_array(file, values)
                written[name] = file.finish()
        record = {
            "pieces": list(self.documents_by_file),
            "longest": self.longest,
            "bytes": self.bytes,
            "report": self.report,
        }
        write_atomic(directory / "survey.json", to_canonical_json(record | written))
        sync_directory(directory)

    @classmethod
    def read(cls, directory: Path, rewriter: Rewriter) -> CleanedCorpus | None:
        """Read the results that `write` wrote to a directory; None if they are incomplete or damaged. rewriter: masks
        the texts when the documents are read again."""
        record = read_json(directory / "survey.json")
        if record is None or any(find_damage(directory / _FILES[name], record[name], contents=True) for name in _FILES):
            (directory / "survey.json").unlink(missing_ok=True)
            return None
        codes, entries = (np.load(directory / name, mmap_mode="r", allow_pickle=False) for name in _FILES.values())
        longest, sizes, report = (record[key] for key in ("longest", "bytes", "report"))
        return cls(codes, tuple(record["pieces"]), longest, sizes, report, rewriter, RemovedSentences(entries))

    def iterate_texts(
        self, files: Sequence[SourceFile], reader: Reader, split: str, first: int = 0
    ) -> Iterator[tuple[int, str]]:
        """Yield (document number, cleaned text with personal data masked) of each document of `split` ("train" or
        "validation"), in order.

        files, reader: source files and reader of the cleaning pass. first: lowest document number to yield.
        """
        return (
            (number, document.text or "") for number, document in self.iterate_documents(files, reader, split, first)
        )

    def iterate_documents(
        self, files: Sequence[SourceFile], reader: Reader, split: str, first: int = 0
    ) -> Iterator[tuple[int, Document]]:
        """Yield (document number, masked document) of the documents of `split` ("train" or "validation") in order.
        Files without such documents are not opened.

        files, reader: source files and reader of the cleaning pass. first: lowest document number to yield. Raises
        `SourceChanged` if a file no longer yields the same number of documents.
        """
        wanted = SPLITS.index(split)
        end = 0
        for file, documents in zip(files, self.documents_by_file, strict=True):
            begin, end = end, end + documents
            if end <= first or not count_codes(self.codes[max(begin, first) : end], wanted):
                continue
            number = begin - 1
            before = find_earlier_reading(file, self.codes[begin:end], _DROPPED)
            for number, document in enumerate(reader.read_documents(file, before), begin):
                if number >= end:
                    break
                if number >= first and self.codes[number] == wanted:
                    if document.text is None:
                        raise SourceChanged(file)
                    if self.rewriter.rewrites:
                        document = self._rewrite_document(document)
                    if numbers := self.removed.find_numbers(number):
                        document = document._replace(text=remove_sentences(document.text or "", numbers))
                    yield number, document
            if number + 1 != end:
                raise SourceChanged(file)

    def _rewrite_document(self, document: Document) -> Document:
        """Return a copy of the document with masks and line filters applied to its text, or to every text of its
        record."""
        if document.example is None:
            return document._replace(text=self.rewriter.rewrite_text(document.text or "", document.name)[0])
        example, _ = self.rewriter.rewrite_example(document.example, document.name)
        return document._replace(text=example.join_texts(), example=example)


def count_codes(codes: NDArray[np.uint8], code: int) -> int:
    """Count the entries of `codes` [documents] that equal `code`, block by block: the array may be larger than
    memory.
    """
    return sum(int((codes[at : at + _BLOCK] == code).sum()) for at in range(0, len(codes), _BLOCK))


def find_last(codes: NDArray[np.uint8], code: int, begin: int, end: int) -> int:
    """Return the last index i in [`begin`, `end`) with codes[i] == `code`; -1 if there is none. codes: [documents], may
    be larger than memory.
    """
    for at in range(end, begin, -_BLOCK):
        found = np.flatnonzero(codes[max(begin, at - _BLOCK) : at] == code)
        if len(found):
            return max(begin, at - _BLOCK) + int(found[-1])
    return -1


def clean_and_split_corpus(
    files: Sequence[SourceFile], recipe: DataRecipe, log: Callable[[str], None], directory: Path | None = None
) -> CleanedCorpus:
    """Clean all documents of `files` and split those that are kept into training and validation documents.

    A document goes to validation if the 64-bit hash of its content is below `validation_fraction` x 2^64; this does not
    depend on the seed or on other documents. If a split would be empty though `validation_fraction` is above 0, the
    documents with the smallest hash go to validation, or those with the largest hash to training. If fewer than 100
    documents are kept, long texts (not records) are cut at blank lines, so that both splits get text.

    recipe: the `[data]` table. directory: folder for segment files (cleaning results of consecutive documents), from
    which an interrupted pass resumes; None: a temporary folder. log: receives progress lines. Raises `UserError` if no
    document or only one short text is left.
    """
    with TemporaryDirectory() as temporary:
        cleaner = Cleaner(recipe.clean, extracts=any(file.format == "warc" for file in files))

        def run_pass(longest: int) -> CleaningResult:
            """Run the cleaning pass with texts cut into documents of at most `longest` characters."""
            reader = make_reader(recipe, longest)
            return run_cleaning_pass(files, reader, cleaner, (directory or Path(temporary)) / f"{longest}", log)

        longest = MAX_DOCUMENT_LENGTH
        result = run_pass(longest)
        cut = recipe.records == "text"  # records stay whole
        if cut and recipe.validation_fraction and result.kept < FEW_DOCUMENTS and result.longest_kept > SHORT_DOCUMENT:
            longest = SHORT_DOCUMENT
            log(
                f"only {result.kept} document{'s' * (result.kept != 1)}: long ones are cut after blank lines into "
                f"pieces of at most {SHORT_DOCUMENT:,} characters, so that no split is empty"
            )
            result = run_pass(longest)
        if not result.kept:
            raise UserError(_explain_nothing_left(result, recipe.source_key))
        codes, sides = _assign_splits(result, recipe.validation_fraction, recipe.source_key)
        return CleanedCorpus(codes, result.documents_by_file, longest, sides, result.report, cleaner, result.removed)


def make_reader(recipe: DataRecipe, longest: int) -> Reader:
    """Create the reader that splits source files into documents, with the options of the recipe. longest: maximum
    characters of a document; longer texts are cut.

    Documents are identified by number, so whenever they are read again, the reader must have the options of the
    cleaning pass.
    """
    records = None
    if recipe.records != "text":
        messages = MessageFormat(recipe.message_keys, recipe.record_roles)
        records = RecordFormat(recipe.records, recipe.record_keys, messages, recipe.thinking)
    return Reader(
        recipe.clean.encoding, recipe.text_key, longest, recipe.clean.required_keys, records, recipe.extractor
    )


def _assign_splits(cleaned: CleaningResult, fraction: float, key: str) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """Assign kept documents to the splits by the hash of their content; return (codes, {split: UTF-8 bytes}). Raises
    `UserError` if `fraction` is above 0 and all kept documents have the same content.

    codes: `cleaned.codes`, uint8 [documents], overwritten in place: 0 (training document), 1 (validation document) or 2
    + i (dropped by the i-th rule in `RULES`). cleaned: result of the cleaning pass. fraction: expected fraction of
    validation documents, in [0, 1]. key: recipe key of the sources, for errors.
    """
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    least, most, below = 2**64, -1, 0
    for place, hashes, _ in cleaned.iterate_segments() if fraction else ():
        kept = hashes[cleaned.codes[place] == KEPT]
        if len(kept):
            least, most = min(least, int(kept.min())), max(most, int(kept.max()))
            below += int((kept < threshold).sum())
    if fraction and least == most:
        raise UserError(
            f"{key}: only one short text remains after cleaning, too little to split into training and "
            "validation; add text, or set data.validation_fraction = 0"
        )
    codes, sizes = cleaned.codes, np.zeros(len(SPLITS), np.int64)
    for place, hashes, documents in cleaned.iterate_segments():
        kept = codes[place] == KEPT
        validation = hashes < threshold
        if not fraction:
            validation = np.zeros(len(hashes), bool)
        elif not below:  # equal contents must share a split, so both corrections select by hash
            validation = hashes == np.uint64(least)
        elif below == cleaned.kept:
            validation = hashes != np.uint64(most)
        sizes += [documents[kept & (validation == side)].sum() for side in (False, True)]
        codes[place] = np.where(kept, validation, codes[place] + np.uint8(_DROPPED - 1))
    return codes, dict(zip(SPLITS, sizes.tolist(), strict=True))


def _explain_nothing_left(cleaned: CleaningResult, key: str) -> str:
    """Return the error message for a corpus that has no document left after cleaning, with the number dropped by each
    rule. cleaned: result of the cleaning pass. key: recipe key of the sources."""
    if not len(cleaned.codes):
        return f"{key}: its files have no text"
    reasons = ", ".join(
        f"{rule} {count} (first: {cleaned.report['examples'][rule]})"
        for rule, count in cleaned.report["dropped"].items()
        if count
    )
    return f"data: no document remains after cleaning; dropped by rule: {reasons}; see [data.clean]"
