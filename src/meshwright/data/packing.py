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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import WholeFile, canonical_json, damage, read_json, sync_directory, write_whole
from meshwright.data.tokenizer import TextTokenizer

TOKENS, DOCUMENTS, TEXT = "tokens.bin", "documents.npy", "text.txt"
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


class Packer:
    """Packs the documents of one split into shards of at least `shard_tokens` tokens, cut between documents and at the
    end of each source.

    `texts(first)` gives (number, text) of the split's documents from number `first` on; `ends` is, for each source, one
    past its last number.
    """

    def __init__(
        self,
        directory: Path,
        texts: Callable[[int], Iterator[tuple[int, str]]],
        ends: Sequence[int],
        tokenizer: TextTokenizer,
        tokenizer_sha256: str,
        shard_tokens: int,
        keep_text: bool,
    ) -> None:
        self.directory, self.texts, self.ends = directory, texts, tuple(ends)
        self.tokenizer, self.tokenizer_sha256 = tokenizer, tokenizer_sha256
        self.shard_tokens, self.keep_text = shard_tokens, keep_text

    def pack(self, progress: Callable[[int], None]) -> list[list[Shard]]:
        """The shards of each source; whole ones of an interrupted call stay. `progress` hears the bytes done."""
        self.directory.mkdir(exist_ok=True)
        shards: list[list[Shard]] = []
        done = following = number = 0
        for end in self.ends:
            encoded: Iterator[tuple[int, NDArray[Any], bytes]] | None = None
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

    def _encoded(self, first: int, end: int) -> Iterator[tuple[int, NDArray[Any], bytes]]:
        """(number, framed tokens, UTF-8 text) of each document from number `first` to before `end`."""
        begin_token, end_token = (
            np.array([token], self.tokenizer.dtype) for token in (self.tokenizer.start, self.tokenizer.end)
        )
        for batch in _batches(itertools.takewhile(lambda item: item[0] < end, self.texts(first))):
            tokens = self.tokenizer.encode([text for _, text in batch])
            for (number, text), inner in zip(batch, tokens, strict=True):
                yield number, np.concatenate([begin_token, inner, end_token]), text.encode()

    def _write(
        self,
        number: int,
        first: int,
        end: int,
        encoded: Iterator[tuple[int, NDArray[Any], bytes]],
        progress: Callable[[int], None],
    ) -> Shard:
        names = {kind: shard_file(number, kind) for kind in (TOKENS, DOCUMENTS, TEXT)}
        documents: list[tuple[int, int]] = []
        count = size = 0
        following = end
        record = self.directory / shard_file(number, "json")
        record.unlink(missing_ok=True)
        files: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            tokens = stack.enter_context(WholeFile(self.directory / names[TOKENS]))
            texts = stack.enter_context(WholeFile(self.directory / names[TEXT])) if self.keep_text else None
            for document, values, text in encoded:
                documents.append((count, len(text)))
                tokens.write(values.tobytes())
                if texts:
                    texts.write(text)
                count, size = count + len(values), size + len(text)
                progress(size)
                if count >= self.shard_tokens:
                    following = document + 1
                    break
            files[names[TOKENS]] = tokens.finish()
            if texts:
                files[names[TEXT]] = texts.finish()
        index = io.BytesIO()
        np.save(index, np.array(documents, dtype="<u8"))
        files[names[DOCUMENTS]] = write_whole(self.directory / names[DOCUMENTS], index.getvalue())
        shard = Shard(number, first, following, count, len(documents), size, self.tokenizer_sha256, files)
        sync_directory(self.directory)
        write_whole(record, canonical_json(dataclasses.asdict(shard)))
        sync_directory(self.directory)
        return shard


def _batches(texts: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Documents in batches: enough for the tokenizer's threads to share, little enough for memory."""
    batch: list[tuple[int, str]] = []
    size = 0
    for number, text in texts:
        batch.append((number, text))
        size += len(text)
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
