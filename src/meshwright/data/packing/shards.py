"""Shards of tokenized documents: a token file, a document index and a JSON record with checksums, written last."""

from __future__ import annotations

import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import AtomicFile, find_damage, read_json, sync_directory, to_canonical_json, write_atomic
from meshwright.data.packing.token_flags import TRAINED_BIT
from meshwright.data.sources.reading import Document
from meshwright.data.tokenizers.tokenizer import TextTokenizer

TOKENS, DOCUMENTS, TEXT, TRAINED = "tokens.bin", "documents.npy", "text.txt", "trained.bin"
_BATCH = 4_000_000  # characters passed to the tokenizer at a time
_LOG_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Shard:
    """Metadata of one shard of tokenized documents, stored as NNNNN.json. This file is written last: a shard without it
    is incomplete.

    number: index of the shard. first, next: numbers of the documents in the corpus at which this shard and the next
    shard begin. tokens, documents, bytes: totals; bytes are those of the text in UTF-8. tokenizer: SHA-256 of the
    tokenizer.json that encoded the documents. files: {file name: {"bytes", "sha256"}} of these files:

    - NNNNN.tokens.bin: documents one after another, each as start token, text, end token; little-endian uint16 or
      uint32
    - NNNNN.documents.npy: uint64 [documents, 2], each document's first token and UTF-8 bytes of text
    - NNNNN.text.txt: the texts one after another (if kept: for evaluation in bits per byte)

    A record may have several documents. For records, the field `documents` counts records, the index is uint64
    [documents, 3] with the number of response tokens as last column, and there is one more file:
    - NNNNN.trained.bin: flags of each token, uint8 [tokens]: loss target, role of its turn (see `token_flags`)
    """

    number: int
    first: int
    next: int
    tokens: int
    documents: int
    bytes: int
    tokenizer: str
    files: dict[str, dict[str, Any]]

    def find_problem(self, directory: Path, contents: bool) -> str | None:
        """Check the shard's files in `directory`; return the first problem as text (a path and "is missing" ...), None
        if there is no problem. contents: compare the SHA-256 of each file, not only its size."""
        for name, recorded in self.files.items():
            if found := find_damage(directory / name, recorded, contents):
                return f"{directory / name} {found}"
        return None


def format_shard_file_name(number: int, kind: str) -> str:
    """Return the name of a file of the shard with index `number`: kind "tokens.bin" gives "00003.tokens.bin"."""
    return f"{number:05d}.{kind}"


class EncodedDocument(NamedTuple):
    """One tokenized document.

    tokens: token ids with start and end tokens, [tokens]. text: the document's text in UTF-8; empty for a record's
    second document. flags: for records uint8 [tokens], which mark loss targets and store the role of each token's turn
    (`token_flags`); None for plain text.
    """

    tokens: NDArray[Any]
    text: bytes
    flags: NDArray[np.uint8] | None = None


class Encoder(Protocol):
    """Protocol of objects that tokenize documents. A preference record becomes two token sequences (chosen and
    rejected), any other document one."""

    def encode_documents(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument]]:
        """Tokenize `documents`; yield for each document the list of its token sequences: two (chosen, rejected) for a
        preference record, one for any other document. Raises `UserError`, which names the document, if a document
        cannot be encoded."""


class TextEncoder:
    """Tokenizer of plain text documents: each becomes one token sequence of start token, text and end token. tokenizer:
    encodes the texts.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Store the tokenizer."""
        self.tokenizer = tokenizer
        self._start, self._end = (np.array([token], tokenizer.dtype) for token in (tokenizer.start, tokenizer.end))

    def encode_documents(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument]]:
        """Tokenize `documents`; yield for each document a list with one token sequence. Raises `UserError` for a text
        that cannot be encoded.
        """
        texts = [document.text or "" for document in documents]
        for text, inner in zip(texts, self.tokenizer.encode(texts), strict=True):
            yield [EncodedDocument(np.concatenate([self._start, inner, self._end]), text.encode())]


class ShardWriter:
    """Writer of one split's token shards. A shard contains whole documents of one data source. It has at least
    `shard_tokens` tokens, except for the last shard of a source.

    directory: folder in which the shards are written. documents(first): function that yields (number, document) of the
    split's documents from number `first` on. ends: for each data source, 1 + the number of its last document. encoder:
    tokenizes documents. tokenizer_sha256: hex SHA-256 of tokenizer.json. keep_text: also store the texts.
    """

    def __init__(
        self,
        directory: Path,
        documents: Callable[[int], Iterator[tuple[int, Document]]],
        ends: Sequence[int],
        encoder: Encoder,
        tokenizer_sha256: str,
        shard_tokens: int,
        keep_text: bool,
    ) -> None:
        """Store the arguments; no shard is written yet. See the class."""
        self.directory, self.documents, self.ends = directory, documents, tuple(ends)
        self.encoder, self.tokenizer_sha256 = encoder, tokenizer_sha256
        self.shard_tokens, self.keep_text = shard_tokens, keep_text

    def write_missing(self, progress: Callable[[int], None]) -> list[list[Shard]]:
        """Write the shards that are missing on disk and return the metadata of all shards, one list per data source.
        Undamaged shards that an interrupted run left are reused. progress: called with the number of UTF-8 bytes packed
        so far.
        """
        self.directory.mkdir(exist_ok=True)
        shards: list[list[Shard]] = []
        done = following = number = 0

        def report(size: int) -> None:
            """Call `progress` with the bytes of all earlier shards and `size` bytes of the current one."""
            progress(done + size)

        for end in self.ends:
            encoded: Iterator[tuple[int, list[EncodedDocument]]] | None = None
            shards.append([])
            while following < end:
                shard = self._find_shard(number, following)
                if shard is None:
                    encoded = encoded or self._encode_documents(following, end)
                    shard = self._write_shard(number, following, end, encoded, report)
                else:
                    encoded = None
                shards[-1].append(shard)
                following = shard.next
                number += 1
                done += shard.bytes
        return shards

    def _find_shard(self, number: int, first: int) -> Shard | None:
        """Return the metadata of the shard with index `number` if it is on disk and usable: undamaged, beginning at
        document number `first`, and encoded with the same tokenizer; else None.
        """
        record = read_json(self.directory / format_shard_file_name(number, "json"))
        if record is None:
            return None
        shard = Shard(**record)
        fits = shard.first == first and shard.tokenizer == self.tokenizer_sha256
        return shard if fits and shard.find_problem(self.directory, contents=True) is None else None

    def _encode_documents(self, first: int, end: int) -> Iterator[tuple[int, list[EncodedDocument]]]:
        """Yield (document number, its token sequences) for the split's documents with numbers in [first, end),
        tokenized in batches."""
        for batch in _group_documents(itertools.takewhile(lambda item: item[0] < end, self.documents(first))):
            pieces = self.encoder.encode_documents([document for _, document in batch])
            for (number, _), of_it in zip(batch, pieces, strict=True):
                yield number, of_it

    def _write_shard(
        self,
        number: int,
        first: int,
        end: int,
        encoded: Iterator[tuple[int, list[EncodedDocument]]],
        progress: Callable[[int], None],
    ) -> Shard:
        """Write the shard with index `number`, its metadata last, and return the metadata.

        first: number of its first document. end: 1 + the number of the data source's last document. encoded: yields
        (document number, its token sequences); consumed until the shard is large enough. progress: called with the
        number of UTF-8 bytes written.
        """
        names = {kind: format_shard_file_name(number, kind) for kind in (TOKENS, DOCUMENTS, TEXT, TRAINED)}
        index_rows: list[tuple[int, ...]] = []
        count = size = documents = 0
        following = end
        record = self.directory / format_shard_file_name(number, "json")
        record.unlink(missing_ok=True)
        files: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            tokens = stack.enter_context(AtomicFile(self.directory / names[TOKENS]))
            texts = stack.enter_context(AtomicFile(self.directory / names[TEXT])) if self.keep_text else None
            trained: AtomicFile | None = None
            for document, pieces in encoded:
                documents += 1
                for piece in pieces:
                    row: tuple[int, ...] = (count, len(piece.text))
                    tokens.write(piece.tokens.tobytes())
                    if texts:
                        texts.write(piece.text)
                    if piece.flags is not None:
                        trained = trained or stack.enter_context(AtomicFile(self.directory / names[TRAINED]))
                        trained.write(piece.flags.tobytes())
                        row = (*row, int((piece.flags & TRAINED_BIT).sum()))
                    index_rows.append(row)
                    count, size = count + len(piece.tokens), size + len(piece.text)
                progress(size)
                if count >= self.shard_tokens:
                    following = document + 1
                    break
            for kind, file in ((TOKENS, tokens), (TEXT, texts), (TRAINED, trained)):
                if file:
                    files[names[kind]] = file.finish()
        index = io.BytesIO()
        np.save(index, np.array(index_rows, dtype="<u8"))
        files[names[DOCUMENTS]] = write_atomic(self.directory / names[DOCUMENTS], index.getvalue())
        shard = Shard(number, first, following, count, documents, size, self.tokenizer_sha256, files)
        sync_directory(self.directory)
        write_atomic(record, to_canonical_json(dataclasses.asdict(shard)))
        sync_directory(self.directory)
        return shard


def _group_documents(documents: Iterator[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """Group the (number, document) pairs of `documents` into batches of about 4 million characters: large enough for
    the tokenizer's threads, small enough for memory.
    """
    batch: list[tuple[int, Document]] = []
    size = 0
    for number, document in documents:
        batch.append((number, document))
        size += len(document.text or "")
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def limit_rate(report: Callable[[int], None]) -> Callable[[int], None]:
    """Wrap the callback `report` (argument: amount of work done) so that it is called at most once in 2 seconds; calls
    in between, and in the first 2 seconds, are ignored.
    """
    last = time.monotonic()

    def report_if_due(done: int) -> None:
        """Call `report(done)` if 2 seconds have passed since its last call."""
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            report(done)

    return report_if_due
