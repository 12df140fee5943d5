"""Packed rows of a fixed number of tokens, read from memory-mapped shards, with document ids and masked targets.

A packed row is one training sample: S tokens and their S targets. Shapes: B rows, S tokens in a row.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.data.packing.shards import DOCUMENTS, TEXT, TOKENS, Shard, format_shard_file_name

NO_TARGET = -100  # ignored by the loss, as `ignore_index` of PyTorch's cross-entropy


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Batch of B packed rows of S tokens. A row is one training sample with one or more documents.

    tokens: int64 [B, S]. targets: int64 [B, S], the token after each position; -100 (ignored by the loss) if that token
    is padding, begins another document (with `document_mask`) or, for records, is not trained on. document_ids: int32
    [B, S], 0 for a row's first document, then 1, 2 ...; all 0 without `document_mask`. undesirable: bool [B, S], True
    if the target belongs to an undesirable response (KTO); None for data without labels.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    document_ids: NDArray[np.int32]
    undesirable: NDArray[np.bool_] | None = None

    @property
    def target_tokens(self) -> int:
        """Number of targets that count towards the loss (not -100)."""
        return int((self.targets != NO_TARGET).sum())

    def list_document_starts(self) -> list[NDArray[np.int64]]:
        """List for each of the B rows the ascending positions, in [0, S), at which a document begins; the first is
        always 0."""
        begins = np.diff(self.document_ids, axis=1, prepend=-1) != 0
        return [np.flatnonzero(row) for row in begins]


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """Token shards of one split ("train" or "validation") on disk.

    directory: folder of the shard files. shards: metadata of each shard, in order. dtype: NumPy type of a token id on
    disk. sources: number of shards of each data source, if no packed row may have tokens of two sources; None: rows may
    mix sources.
    """

    directory: Path
    shards: Sequence[Shard]
    dtype: np.dtype[Any]
    sources: Sequence[int] | None = None


class PackedDataset(ABC):
    """Base class of one split ("train" or "validation") as packed rows of S tokens, read from memory-mapped shards.
    Subclasses: `PackedTokens` for text, `PackedExamples` for records.
    """

    def __init__(self, stored: StoredTokens, sequence: int, document_mask: bool, padding: int) -> None:
        """Prepare for reading rows; nothing is read yet. stored: the split's shards. sequence: S, tokens in a row.
        document_mask: number the documents of a row, so that they do not attend to each other; False: all have id 0.
        padding: token id that fills incomplete rows.
        """
        shards, sources = stored.shards, stored.sources
        self.directory, self.shards, self.dtype = stored.directory, tuple(shards), stored.dtype
        self.sequence, self.document_mask, self.padding = sequence, document_mask, padding
        self._bounds = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._shards_before = np.cumsum([0, *(sources or [len(shards)])])
        assert self._shards_before[-1] == len(shards), (sources, len(shards))
        self._streams = len(self._shards_before) - 1
        self._mapped: dict[tuple[int, str], NDArray[Any]] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents, start and end tokens included."""
        return int(self._bounds[-1])

    @property
    def documents(self) -> int:
        """Number of documents in the split; for records the number of records."""
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Total size of all documents' text in UTF-8 bytes."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def sequences(self) -> int:
        """Number of full packed rows, that is of training samples."""
        return sum(self.sequences_by_source)

    @property
    @abstractmethod
    def sequences_by_source(self) -> list[int]:
        """Number of full packed rows of each data source; a list of one number, for all sources, if rows may mix
        sources."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of packed rows, a partial last one included. Together the rows contain every target exactly once, as
        evaluation needs.
        """

    @property
    @abstractmethod
    def rows_sha256(self) -> str:
        """Hex SHA-256 of the division of the split's tokens into packed rows. The split's shards and this value fix the
        token at each position of every row."""

    @abstractmethod
    def read_batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Read the packed rows with the indices `numbers` [B], each in [0, sequences).

        padded: allow any index >= 0, so that all ranks can read equally many rows. A partial row is then filled with
        padding, which has no targets; rows from `rows` on are all padding.
        """

    def iterate_batches(self, size: int) -> Iterator[TokenBatch]:
        """Yield all packed rows in order, in batches of `size` rows; the last batch may be smaller. Together the
        batches contain every target once."""
        for first in range(0, self.rows, size):
            yield self.read_batch(np.arange(first, min(first + size, self.rows)), padded=True)

    def iterate_tokens(self, size: int = 1 << 20) -> Iterator[NDArray[Any]]:
        """Yield the token ids of all documents in order, in 1-D arrays of at most `size` tokens."""
        for number, shard in enumerate(self.shards):
            for begin in range(0, shard.tokens, size):
                yield np.array(self._map_shard(number)[begin : begin + size])

    def iterate_texts(self) -> Iterator[str]:
        """Yield the text of each document in order. The text must have been stored when the data were prepared; for the
        training split this requires `prepare(keep_text=True)`.
        """
        for shard in self.shards:
            name = format_shard_file_name(shard.number, TEXT)
            assert name in shard.files, f"the text of {self.directory} was not kept"
            sizes = self._map_index(shard)[:, 1].tolist()
            with (self.directory / name).open("rb") as file:
                for size in sizes:
                    yield file.read(size).decode()

    def _map_shard(self, number: int, kind: str = TOKENS) -> NDArray[Any]:
        """Memory-map one file of the shard with index `number`, [tokens]. kind: "tokens.bin" (token ids, of type
        `dtype`) or "trained.bin" (uint8 flags of each token, which mark loss targets and store the role of the turn).
        """
        if (number, kind) not in self._mapped:
            shard = self.shards[number]
            path = self.directory / format_shard_file_name(shard.number, kind)
            dtype = self.dtype if kind == TOKENS else np.dtype(np.uint8)
            self._mapped[number, kind] = np.memmap(path, dtype=dtype, mode="r", shape=(shard.tokens,))
        return self._mapped[number, kind]

    @cached_property
    def _document_begins(self) -> NDArray[np.int64]:
        """Position of each document's first token in the split's token stream, int64 [documents]."""
        begins = [self._map_index(shard)[:, 0].astype(np.int64) for shard in self.shards]
        return np.concatenate([np.zeros(0, np.int64), *map(np.add, begins, self._bounds[:-1])])

    def _map_index(self, shard: Shard) -> NDArray[np.uint64]:
        """Memory-map a shard's document index, uint64 [documents, 2 or 3]: each document's first token, UTF-8 bytes
        and, for records, number of response tokens.
        """
        index: NDArray[np.uint64] = np.load(
            self.directory / format_shard_file_name(shard.number, DOCUMENTS), mmap_mode="r", allow_pickle=False
        )
        return index


class PackedTokens(PackedDataset):
    """One split as a continuous token stream cut into packed rows of S tokens. Row r has the tokens [r S, (r + 1) S) of
    the stream, and as targets the tokens one position later.

    Every token but the stream's first is a target once. `sequences` counts full rows; `rows` also counts the partial
    last one. If `stored.sources` is given, each data source is a stream by itself, and its rows follow those of the
    previous source.
    """

    @property
    def sequences_by_source(self) -> list[int]:
        """Number of full packed rows of each data source; a list of one number if the split is one stream."""
        return [max(0, tokens - 1) // self.sequence for tokens in np.diff(self._source_bounds).tolist()]

    @property
    def _source_bounds(self) -> NDArray[np.int64]:
        """Position of the first token of each data source in the split's token stream, and the end of the last, int64
        [sources + 1].
        """
        bounds: NDArray[np.int64] = self._bounds[self._shards_before]
        return bounds

    @property
    def rows(self) -> int:
        """Number of packed rows, a partial last one included; together they contain every target once."""
        assert self._streams == 1, "evaluation reads one stream"
        return -(-max(0, self.tokens - 1) // self.sequence)

    @property
    def rows_sha256(self) -> str:
        """Hex SHA-256 of the length of a row and of the first token of each stream."""
        return hashlib.sha256(f"{self.sequence} {self._source_bounds.tolist()}".encode()).hexdigest()

    def read_batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Read the packed rows with the indices `numbers` [B], each in [0, sequences).

        padded: allow any index >= 0, so that all ranks can read equally many rows. The partial last row is then filled
        with padding, which has no targets; rows from `rows` on are all padding.
        """
        rows = np.asarray(numbers, dtype=np.int64)
        assert rows.ndim == 1, rows.shape
        assert not padded or self._streams == 1, "padded rows are those of one stream"
        assert padded or rows.size == 0 or 0 <= rows.min() <= rows.max() < self.sequences, (rows, self.sequences)
        length = self.sequence
        values = np.full((len(rows), length + 1), self.padding, dtype=np.int64)
        begins = self._find_row_starts(rows)
        for place, begin in enumerate(begins.tolist()):
            self._read_tokens(begin, values[place])
        tokens, targets = values[:, :-1], values[:, 1:].copy()
        if padded:
            targets[begins[:, None] + np.arange(1, length + 1) >= self.tokens] = NO_TARGET
        document_ids = np.zeros(tokens.shape, dtype=np.int32)
        if self.document_mask:
            document_starts = self._find_document_starts(begins)
            np.cumsum(document_starts[:, :-1], axis=1, out=document_ids)
            targets[document_starts[:, 1:]] = NO_TARGET
        return TokenBatch(np.ascontiguousarray(tokens), targets, document_ids)

    def _find_row_starts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position in the split's token stream at which each row begins, int64 [B]. rows: indices of packed
        rows, [B].
        """
        if self._streams == 1:
            return rows * self.sequence
        first_rows = np.cumsum([0, *self.sequences_by_source])
        source = np.searchsorted(first_rows, rows, side="right") - 1
        begins: NDArray[np.int64] = self._source_bounds[source] + (rows - first_rows[source]) * self.sequence
        return begins

    def _read_tokens(self, begin: int, out: NDArray[np.int64]) -> None:
        """Copy tokens of the split's stream, from position `begin` on, into `out` [n]; elements of `out` beyond the end
        of the stream are left unchanged.
        """
        end = min(begin + len(out), self.tokens)
        number = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        filled = 0
        while begin < end:
            first = int(self._bounds[number])
            part = self._map_shard(number)[begin - first : end - first]
            out[filled : filled + len(part)] = part
            filled, begin, number = filled + len(part), begin + len(part), number + 1

    def _find_document_starts(self, begins: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask [B, S + 1] of the positions in each row at which a document begins; position 0 is never marked.
        begins: position in the token stream at which each row begins, [B].
        """
        starts = self._document_begins
        first = np.searchsorted(starts, begins, side="right")
        counts = np.searchsorted(starts, begins + self.sequence, side="right") - first
        row_of = np.repeat(np.arange(len(begins)), counts)
        within = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        document_starts = np.zeros((len(begins), self.sequence + 1), dtype=bool)
        document_starts[row_of, starts[first[row_of] + within] - begins[row_of]] = True
        return document_starts
