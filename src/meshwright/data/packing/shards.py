"""Packing documents into shards: tokens, an index, a record with checksums. A shard without its record is not there."""

from __future__ import annotations

import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import WholeFile, canonical_json, damage, read_json, sync_directory, write_whole
from meshwright.data.sources.reading import Document
from meshwright.data.tokenizers.tokenizer import TextTokenizer

TOKENS, DOCUMENTS, TEXT, TRAINED = "tokens.bin", "documents.npy", "text.txt", "trained.bin"
_BATCH = 4_000_000  # characters given to the tokenizer at a time
_LOG_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard's record, NNNNN.json; written last, it makes the shard count.

    `first`, `next`: numbers, in the order of the survey, from which its documents and those of the shard after it
    begin. `tokenizer`: SHA-256 of the tokenizer.json that made it. `files`: by file name, `{"bytes", "sha256"}`:

    - NNNNN.tokens.bin: documents one after another, each as start token, text, end token; little-endian uint16 or
      uint32
    - NNNNN.documents.npy: uint64 [documents, 2], where each begins (in tokens) and the UTF-8 bytes of its text
    - NNNNN.text.txt: the texts one after another (where kept: what a model is compared on byte by byte)

    Of records, which may have several documents each (`documents` counts records), the index is uint64 [documents, 3],
    the last being how many tokens are responses, and there is
    - NNNNN.trained.bin: of each token uint8, 1 for those of responses
    """

    number: int
    first: int
    next: int
    tokens: int
    documents: int
    bytes: int
    tokenizer: str
    files: dict[str, dict[str, Any]]

    def problem(self, directory: Path, contents: bool) -> str | None:
        """What is wrong with its files, or None; reads them all if `contents`."""
        for name, said in self.files.items():
            if found := damage(directory / name, said, contents):
                return f"{directory / name} {found}"
        return None


def shard_file(number: int, kind: str) -> str:
    return f"{number:05d}.{kind}"


class Piece(NamedTuple):
    """A document as it is written: framed tokens, UTF-8 of its text; of a record's, 1 for each token of a response."""

    tokens: NDArray[Any]
    text: bytes
    trained: NDArray[np.uint8] | None = None


class Encoder(Protocol):
    """Makes pieces of documents: one of a text, of a record perhaps several."""

    def pieces(self, documents: Sequence[Document]) -> Iterator[list[Piece]]:
        """Of each document in turn. `UserError` names one that cannot be encoded."""


class TextEncoder:
    """A text is its start token, itself, its end token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._start, self._end = (np.array([token], tokenizer.dtype) for token in (tokenizer.start, tokenizer.end))

    def pieces(self, documents: Sequence[Document]) -> Iterator[list[Piece]]:
        texts = [document.text or "" for document in documents]
        for text, inner in zip(texts, self.tokenizer.encode(texts), strict=True):
            yield [Piece(np.concatenate([self._start, inner, self._end]), text.encode())]


class Packer:
    """Packs the documents of one split into shards of at least `shard_tokens` tokens, cut between documents and at the
    end of each source.

    `documents(first)` gives (number, document) of the split's documents from number `first` on; `ends` is, for each
    source, one past its last number.
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
        self.directory, self.documents, self.ends = directory, documents, tuple(ends)
        self.encoder, self.tokenizer_sha256 = encoder, tokenizer_sha256
        self.shard_tokens, self.keep_text = shard_tokens, keep_text

    def pack(self, progress: Callable[[int], None]) -> list[list[Shard]]:
        """The shards of each source; whole ones of an interrupted call stay. `progress` hears the bytes done."""
        self.directory.mkdir(exist_ok=True)
        shards: list[list[Shard]] = []
        done = following = number = 0
        for end in self.ends:
            encoded: Iterator[tuple[int, list[Piece]]] | None = None
            shards.append([])
            while following < end:
                shard = self._whole(number, following)
                if shard is None:
                    encoded = encoded or self._encoded(following, end)
                    shard = self._write(number, following, end, encoded, partial(_further, progress, done))
                else:
                    encoded = None
                shards[-1].append(shard)
                following = shard.next
                number += 1
                done += shard.bytes
        return shards

    def _whole(self, number: int, first: int) -> Shard | None:
        record = read_json(self.directory / shard_file(number, "json"))
        if record is None:
            return None
        shard = Shard(**record)
        fits = shard.first == first and shard.tokenizer == self.tokenizer_sha256
        return shard if fits and shard.problem(self.directory, contents=True) is None else None

    def _encoded(self, first: int, end: int) -> Iterator[tuple[int, list[Piece]]]:
        """(number, its pieces) of each document from number `first` to before `end`."""
        for batch in _batches(itertools.takewhile(lambda item: item[0] < end, self.documents(first))):
            pieces = self.encoder.pieces([document for _, document in batch])
            for (number, _), of_it in zip(batch, pieces, strict=True):
                yield number, of_it

    def _write(
        self,
        number: int,
        first: int,
        end: int,
        encoded: Iterator[tuple[int, list[Piece]]],
        progress: Callable[[int], None],
    ) -> Shard:
        names = {kind: shard_file(number, kind) for kind in (TOKENS, DOCUMENTS, TEXT, TRAINED)}
        index_rows: list[tuple[int, ...]] = []
        count = size = documents = 0
        following = end
        record = self.directory / shard_file(number, "json")
        record.unlink(missing_ok=True)
        files: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            tokens = stack.enter_context(WholeFile(self.directory / names[TOKENS]))
            texts = stack.enter_context(WholeFile(self.directory / names[TEXT])) if self.keep_text else None
            trained: WholeFile | None = None
            for document, pieces in encoded:
                documents += 1
                for piece in pieces:
                    row: tuple[int, ...] = (count, len(piece.text))
                    tokens.write(piece.tokens.tobytes())
                    if texts:
                        texts.write(piece.text)
                    if piece.trained is not None:
                        trained = trained or stack.enter_context(WholeFile(self.directory / names[TRAINED]))
                        trained.write(piece.trained.tobytes())
                        row = (*row, int(piece.trained.sum()))
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
        files[names[DOCUMENTS]] = write_whole(self.directory / names[DOCUMENTS], index.getvalue())
        shard = Shard(number, first, following, count, documents, size, self.tokenizer_sha256, files)
        sync_directory(self.directory)
        write_whole(record, canonical_json(dataclasses.asdict(shard)))
        sync_directory(self.directory)
        return shard


def _batches(documents: Iterator[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """Documents in batches: enough for the tokenizer's threads to share, little enough for memory."""
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


def _further(progress: Callable[[int], None], done: int, more: int) -> None:
    progress(done + more)


def every_few_seconds(say: Callable[[int], None]) -> Callable[[int], None]:
    """`say`, but at most once in two seconds, and not in the first two."""
    last = time.monotonic()

    def perhaps(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(done)

    return perhaps
