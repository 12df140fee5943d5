"""Reading packed tokens: samples of a fixed length from memory-mapped shards, with document boundaries and targets.

Shapes: B rows, S tokens in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.data.packing.shards import DOCUMENTS, TEXT, TOKENS, Shard, shard_file

NO_TARGET = -100  # what a loss passes over, as in PyTorch's cross-entropy


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What one forward pass reads.

    tokens: int64 [B, S]. targets: int64 [B, S], the token after each one; -100 where that belongs to another document
    or is padding. document_ids: int32 [B, S], 0 for the document a row begins in, then 1, 2 ...
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    document_ids: NDArray[np.int32]

    @property
    def target_tokens(self) -> int:
        """How many targets count towards the loss."""
        return int((self.targets != NO_TARGET).sum())

    def starts(self) -> list[NDArray[np.int64]]:
        """For each row the places where a document begins, ascending; the first is 0."""
        begins = np.diff(self.document_ids, axis=1, prepend=-1) != 0
        return [np.flatnonzero(row) for row in begins]


class TokenRows(ABC):
    """One split as rows of `sequence` tokens, cut from shards: the common part of a stream of text and of examples."""

    def __init__(
        self,
        directory: Path,
        shards: Sequence[Shard],
        dtype: np.dtype[Any],
        sequence: int,
        document_mask: bool,
        padding: int,
        sources: Sequence[int] | None = None,
    ) -> None:
        """`sources`: the number of shards of each source, where no row may have tokens of two."""
        self.directory, self.shards, self.dtype = directory, tuple(shards), dtype
        self.sequence, self.document_mask, self.padding = sequence, document_mask, padding
        self._bounds = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._shards_before = np.cumsum([0, *(sources or [len(shards)])])
        assert self._shards_before[-1] == len(shards), (sources, len(shards))
        self._streams = len(self._shards_before) - 1
        self._mapped: dict[tuple[int, str], NDArray[Any]] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all documents, those that frame them included."""
        return int(self._bounds[-1])

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of its text."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def sequences(self) -> int:
        """Full rows: what training draws its samples from."""
        return sum(self.sequences_by_source)

    @property
    @abstractmethod
    def sequences_by_source(self) -> list[int]:
        """Full rows of each source; one number where sources are not kept apart."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows that hold every target once: what exact evaluation reads."""

    @abstractmethod
    def batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Rows `numbers` [B], each below `sequences`.

        With `padded` also those up to `rows`, and rows from there on, which hold nothing (so that every rank can have
        as many): padding has no targets.
        """

    def batches(self, size: int) -> Iterator[TokenBatch]:
        """All rows in order, `size` at a time: each target comes once."""
        for first in range(0, self.rows, size):
            yield self.batch(np.arange(first, min(first + size, self.rows)), padded=True)

    def token_batches(self, size: int = 1 << 20) -> Iterator[NDArray[Any]]:
        """The bare tokens, `size` at a time."""
        for number, shard in enumerate(self.shards):
            for begin in range(0, shard.tokens, size):
                yield np.array(self._shard(number)[begin : begin + size])

    def texts(self) -> Iterator[str]:
        """The text of each document, in order; only of a split whose text is kept (see `prepare`)."""
        for shard in self.shards:
            assert shard_file(shard.number, TEXT) in shard.files, f"the text of {self.directory} was not kept"
            sizes = self._index(shard)[:, 1].tolist()
            with (self.directory / shard_file(shard.number, TEXT)).open("rb") as file:
                for size in sizes:
                    yield file.read(size).decode()

    def _shard(self, number: int, kind: str = TOKENS) -> NDArray[Any]:
        """The tokens of a shard, or what else it says of each (`kind`), mapped."""
        if (number, kind) not in self._mapped:
            shard = self.shards[number]
            path = self.directory / shard_file(shard.number, kind)
            dtype = self.dtype if kind == TOKENS else np.dtype(np.uint8)
            self._mapped[number, kind] = np.memmap(path, dtype=dtype, mode="r", shape=(shard.tokens,))
        return self._mapped[number, kind]

    def _index(self, shard: Shard) -> NDArray[np.uint64]:
        index: NDArray[np.uint64] = np.load(
            self.directory / shard_file(shard.number, DOCUMENTS), mmap_mode="r", allow_pickle=False
        )
        return index


class PackedTokens(TokenRows):
    """One split as a stream of tokens, read as rows: row r has tokens r*S ... r*S+S-1, its targets are the tokens after
    them.

    So every token but the stream's first is a target once. `sequences` rows are full; `rows` counts the last, partial
    one too. With `sources`, the number of shards of each, every source is a stream of its own: its rows follow those of
    the source before it, and none has tokens of two.
    """

    _starts: NDArray[np.int64] | None = None

    @property
    def sequences_by_source(self) -> list[int]:
        """Full rows of each source; one number where the split is one stream."""
        return [max(0, tokens - 1) // self.sequence for tokens in np.diff(self._source_bounds).tolist()]

    @property
    def _source_bounds(self) -> NDArray[np.int64]:
        """Where each source's tokens begin, and the end of the last."""
        bounds: NDArray[np.int64] = self._bounds[self._shards_before]
        return bounds

    @property
    def rows(self) -> int:
        """Rows that hold every target once, the last one perhaps partial: what exact evaluation reads."""
        assert self._streams == 1, "evaluation reads one stream"
        return -(-max(0, self.tokens - 1) // self.sequence)

    def batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Rows `numbers` [B], each below `sequences`.

        With `padded` also the last, partial row, and rows from `rows` on, which hold nothing (so that every rank can
        have as many): padding has no targets.
        """
        rows = np.asarray(numbers, dtype=np.int64)
        assert rows.ndim == 1, rows.shape
        assert not padded or self._streams == 1, "padded rows are those of one stream"
        assert padded or rows.size == 0 or 0 <= rows.min() <= rows.max() < self.sequences, (rows, self.sequences)
        length = self.sequence
        values = np.full((len(rows), length + 1), self.padding, dtype=np.int64)
        begins = self._begins(rows)
        for place, begin in enumerate(begins.tolist()):
            self._read(begin, values[place])
        tokens, targets = values[:, :-1], values[:, 1:].copy()
        if padded:
            targets[begins[:, None] + np.arange(1, length + 1) >= self.tokens] = NO_TARGET
        document_ids = np.zeros(tokens.shape, dtype=np.int32)
        if self.document_mask:
            marks = self._document_starts(begins)
            np.cumsum(marks[:, :-1], axis=1, out=document_ids)
            targets[marks[:, 1:]] = NO_TARGET
        return TokenBatch(np.ascontiguousarray(tokens), targets, document_ids)

    def _begins(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the stream each row begins."""
        if self._streams == 1:
            return rows * self.sequence
        first_rows = np.cumsum([0, *self.sequences_by_source])
        source = np.searchsorted(first_rows, rows, side="right") - 1
        begins: NDArray[np.int64] = self._source_bounds[source] + (rows - first_rows[source]) * self.sequence
        return begins

    def _read(self, begin: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the stream from `begin` on, as far as it goes."""
        end = min(begin + len(out), self.tokens)
        number = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        filled = 0
        while begin < end:
            first = int(self._bounds[number])
            part = self._shard(number)[begin - first : end - first]
            out[filled : filled + len(part)] = part
            filled, begin, number = filled + len(part), begin + len(part), number + 1

    def _document_starts(self, begins: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[B, S+1]: whether a document begins at that place; not at a row's first, which begins a row anyway."""
        if self._starts is None:
            parts = [
                self._index(shard)[:, 0].astype(np.int64) + bound
                for shard, bound in zip(self.shards, self._bounds, strict=False)
            ]
            self._starts = np.concatenate(parts)
        first = np.searchsorted(self._starts, begins, side="right")
        counts = np.searchsorted(self._starts, begins + self.sequence, side="right") - first
        row_of = np.repeat(np.arange(len(begins)), counts)
        within = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        marks = np.zeros((len(begins), self.sequence + 1), dtype=bool)
        marks[row_of, self._starts[first[row_of] + within] - begins[row_of]] = True
        return marks
