"""The first pass over a corpus: which documents are kept, and on which side of the split each one falls."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cleaning import RULES, Cleaner
from meshwright.data.reading import LONGEST_DOCUMENT, Reader
from meshwright.data.sources import SourceFile
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe

SPLITS = ("train", "validation")
FEW_DOCUMENTS = 100
SHORT_DOCUMENT = 8_000  # characters
_DROPPED = len(SPLITS)  # codes from here on: dropped by RULES[code - _DROPPED]


@dataclass(frozen=True, slots=True)
class Survey:
    """What became of every document of the corpus, in reading order.

    `codes` [documents]: the index in `SPLITS`, or len(SPLITS) + the index in `RULES` of what dropped it. `pieces`:
    documents of each file. `longest`: characters at which texts were cut. `bytes`: UTF-8 bytes per split. `examples`:
    the first document that each rule dropped.
    """

    codes: NDArray[np.uint8]
    pieces: tuple[int, ...]
    longest: int
    bytes: dict[str, int]
    examples: dict[str, str]

    @property
    def dropped(self) -> dict[str, int]:
        """Documents that each rule dropped; every rule is there."""
        return {rule: int((self.codes == _DROPPED + index).sum()) for index, rule in enumerate(RULES)}

    @property
    def documents(self) -> dict[str, int]:
        """Documents in each split."""
        return {split: int((self.codes == index).sum()) for index, split in enumerate(SPLITS)}

    def description(self) -> dict[str, Any]:
        """All but `codes`, as JSON."""
        return {"pieces": list(self.pieces), "longest": self.longest, "bytes": self.bytes, "examples": self.examples}

    @classmethod
    def from_description(cls, codes: NDArray[np.uint8], description: dict[str, Any]) -> Survey:
        return cls(codes, tuple(description["pieces"]), *(description[key] for key in ("longest", "bytes", "examples")))

    def texts(
        self, files: Sequence[SourceFile], reader: Reader, split: str, first: int = 0
    ) -> Iterator[tuple[int, str]]:
        """(number, text) of the split's documents from number `first` on; files without any are not opened."""
        wanted = np.flatnonzero(self.codes == SPLITS.index(split)).tolist()
        position = bisect.bisect_left(wanted, first)
        begin = 0
        for file, pieces in zip(files, self.pieces, strict=True):
            end = begin + pieces
            if position < len(wanted) and wanted[position] < end:
                number = begin
                for number, document in enumerate(reader.documents(file), begin):
                    if position < len(wanted) and wanted[position] == number:
                        if document.text is None:
                            raise changed(file)
                        yield number, document.text
                        position += 1
                if number + 1 != end:
                    raise changed(file)
            begin = end


def changed(file: SourceFile) -> UserError:
    return UserError(f"{file.path} changed while it was being prepared; run the command again when it is finished")


def survey(files: Sequence[SourceFile], recipe: DataRecipe, log: Callable[[str], None]) -> Survey:
    """Read and clean everything once and split it.

    A document goes to validation when the hash of its content, as a fraction of 2^64, is below `validation_fraction`:
    whatever else the corpus holds, and without a seed. Should none go there, the one with the smallest hash does. A
    corpus of fewer than 100 documents has its long ones cut at blank lines, so that there is something to split.
    `UserError` when nothing is left, or a split would be empty.
    """
    result = _Pass(files, recipe, LONGEST_DOCUMENT)
    if recipe.validation_fraction and result.kept < FEW_DOCUMENTS and result.longest_kept > SHORT_DOCUMENT:
        log(
            f"only {result.kept} document{'s' * (result.kept != 1)}: long ones are cut after blank lines into pieces "
            f"of at most {SHORT_DOCUMENT:,} characters, so that both splits get some"
        )
        result = _Pass(files, recipe, SHORT_DOCUMENT)
    return result.split()


class _Pass:
    """One reading of the corpus with texts cut at `longest` characters."""

    def __init__(self, files: Sequence[SourceFile], recipe: DataRecipe, longest: int) -> None:
        self.recipe, self.longest = recipe, longest
        self.codes = bytearray()
        self.pieces: list[int] = []
        self.hashes: list[int] = []  # of kept documents: the first 8 bytes of the SHA-256
        self.sizes: list[int] = []  # of kept documents, in UTF-8 bytes
        self.examples: dict[str, str] = {}
        self.longest_kept = 0
        cleaner, reader = Cleaner(recipe.clean), Reader(recipe.clean.encoding, recipe.text_key, longest)
        for file in files:
            before = len(self.codes)
            for document in reader.documents(file):
                rule, digest = cleaner.check(document.text)
                if rule is None:
                    assert document.text is not None
                    self.codes.append(0)
                    self.hashes.append(int.from_bytes(digest[:8]))
                    self.sizes.append(len(document.text.encode()))
                    self.longest_kept = max(self.longest_kept, len(document.text))
                else:
                    self.codes.append(_DROPPED + RULES.index(rule))
                    self.examples.setdefault(rule, document.name)
            self.pieces.append(len(self.codes) - before)

    @property
    def kept(self) -> int:
        return len(self.hashes)

    def split(self) -> Survey:
        """The survey, with every kept document on its side."""
        if not self.kept:
            raise UserError(self._nothing_left())
        codes = np.frombuffer(bytes(self.codes), dtype=np.uint8).copy()
        hashes, sizes = np.array(self.hashes, dtype=np.uint64), np.array(self.sizes, dtype=np.int64)
        validation = self._in_validation(hashes)
        codes[codes < _DROPPED] = validation
        sides = {"train": int(sizes[~validation].sum()), "validation": int(sizes[validation].sum())}
        return Survey(codes, tuple(self.pieces), self.longest, sides, self.examples)

    def _in_validation(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        fraction = self.recipe.validation_fraction
        if not fraction:
            return np.zeros(len(hashes), dtype=bool)
        least, most = hashes.min(), hashes.max()
        if least == most:
            raise UserError(
                "data.source: all that is left after cleaning is one short text, too little to split into training and "
                "validation; add text, or set data.validation_fraction = 0"
            )
        # Equal contents stay on one side, so both corrections go by hash and not by document.
        validation = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
        if not validation.any():
            validation = hashes == least
        return validation & (hashes != most) if validation.all() else validation

    def _nothing_left(self) -> str:
        if not self.codes:
            return "data.source: there is no text in its files"
        reasons = ", ".join(
            f"{rule} {self.codes.count(_DROPPED + index)} (first: {self.examples[rule]})"
            for index, rule in enumerate(RULES)
            if rule in self.examples
        )
        return f"data: no document is left after cleaning; dropped by rule: {reasons}; see [data.clean]"
