"""Packed rows of text, compared with the token list that they were cut from."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import NO_TARGET, PackedTokens
from meshwright.data.packing.packed import StoredTokens
from meshwright.data.packing.shards import ShardWriter, TextEncoder
from meshwright.data.sources.reading import Document
from meshwright.data.tokenizers.tokenizer import find_tokenizer, load_tokenizer, write_tokenizer

END = 256


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("bytes")
    write_tokenizer(directory, "bytes", 0, find_tokenizer("bytes"), iter([]))
    return load_tokenizer(directory)


class Packed:
    """Pack documents with the bytes tokenizer; return the dataset and the expected token stream."""

    def __init__(self, directory: Path, tokenizer, documents: list[str], shard_tokens: int) -> None:
        def kept(first: int):
            return ((number, Document("", text)) for number, text in enumerate(documents) if number >= first)

        packer = ShardWriter(
            directory, kept, [len(documents)], TextEncoder(tokenizer), "", shard_tokens, keep_text=True
        )
        self.directory, [self.shards] = directory, packer.write_missing(lambda done: None)
        self.stream: list[int] = []
        self.document_of: list[int] = []
        for number, text in enumerate(documents):
            framed = [END, *text.encode(), END]
            self.stream += framed
            self.document_of += [number] * len(framed)

    def tokens(self, sequence: int, document_mask: bool = True) -> PackedTokens:
        return PackedTokens(StoredTokens(self.directory, self.shards, np.dtype("<u2")), sequence, document_mask, END)


cases = st.tuples(
    st.lists(st.text(alphabet="abé\n", max_size=12), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 9)
)


@given(case=cases, document_mask=st.booleans(), rows=st.integers(1, 5))
@settings(max_examples=50)
def test_rows_contain_every_token_once_and_mask_other_documents(
    bytes_tokenizer, tmp_path_factory: pytest.TempPathFactory, case, document_mask: bool, rows: int
):
    documents, shard_tokens, sequence = case
    packed = Packed(tmp_path_factory.mktemp("packed"), bytes_tokenizer, documents, shard_tokens)
    tokens = packed.tokens(sequence, document_mask)
    stream, document_of = packed.stream, packed.document_of
    assert tokens.tokens == len(stream) and tokens.bytes == sum(len(text.encode()) for text in documents)
    assert tokens.sequences == (len(stream) - 1) // sequence

    place = 0
    for batch in tokens.iterate_batches(rows):
        for row, (inputs, targets, ids) in enumerate(zip(batch.tokens, batch.targets, batch.document_ids, strict=True)):
            starts = batch.list_document_starts()[row].tolist()
            for column in range(sequence):
                here, following = place + column, place + column + 1
                if following >= len(stream):
                    assert targets[column] == NO_TARGET
                    continue
                assert inputs[column] == stream[here]
                other = document_mask and document_of[here] != document_of[following]
                assert targets[column] == (NO_TARGET if other else stream[following])
                if column and document_mask:
                    assert (ids[column] != ids[column - 1]) == (document_of[here] != document_of[here - 1])
                    assert (column in starts) == (document_of[here] != document_of[here - 1])
            assert ids[0] == starts[0] == 0
            place += sequence
    assert place >= len(stream) - 1 > place - sequence
    assert list(tokens.iterate_texts()) == documents


@given(case=cases, data=st.data())
@settings(max_examples=25)
def test_batch_equals_its_rows_in_any_order(
    bytes_tokenizer, tmp_path_factory: pytest.TempPathFactory, case, data: st.DataObject
):
    documents, shard_tokens, sequence = case
    tokens = Packed(tmp_path_factory.mktemp("packed"), bytes_tokenizer, documents, shard_tokens).tokens(sequence)
    if not tokens.sequences:
        return
    numbers = data.draw(st.lists(st.integers(0, tokens.sequences - 1), min_size=1, max_size=6))
    batch = tokens.read_batch(numbers)
    for row, number in enumerate(numbers):
        single = tokens.read_batch([number])
        for whole, alone in (
            (batch.tokens, single.tokens),
            (batch.targets, single.targets),
            (batch.document_ids, single.document_ids),
        ):
            assert np.array_equal(whole[row], alone[0])
    assert batch.target_tokens == int((batch.targets != NO_TARGET).sum())


def test_rows_are_independent_of_shards(bytes_tokenizer, tmp_path: Path):
    documents = [f"document {number}" * (number % 5) for number in range(50)]
    batches = []
    for shard_tokens in (1, 100, 10**6):
        (tmp_path / str(shard_tokens)).mkdir()
        packed = Packed(tmp_path / str(shard_tokens), bytes_tokenizer, documents, shard_tokens)
        tokens = packed.tokens(16)
        batches.append(tokens.read_batch(np.arange(tokens.sequences)))
        assert np.concatenate(list(tokens.iterate_tokens(7))).tolist() == packed.stream
    assert len({batch.tokens.tobytes() + batch.targets.tobytes() for batch in batches}) == 1


def test_rows_after_last_are_empty(bytes_tokenizer, tmp_path: Path):
    tokens = Packed(tmp_path, bytes_tokenizer, ["some text"], 100).tokens(4)
    assert (tokens.sequences, tokens.rows) == (2, 3)
    batch = tokens.read_batch([2, 3, 1000], padded=True)
    assert (batch.targets != NO_TARGET).sum(axis=1).tolist() == [2, 0, 0]
    with pytest.raises(AssertionError):
        tokens.read_batch([2])


def test_reading_is_far_faster_than_training(bytes_tokenizer, tmp_path: Path):
    tokens = Packed(tmp_path, bytes_tokenizer, ["a document of some length " * 20] * 4000, 10**6).tokens(256)
    numbers = np.random.default_rng(0).integers(tokens.sequences, size=(20, 64))
    tokens.read_batch(numbers[0])
    begun = time.process_time()
    for row in numbers:
        tokens.read_batch(row)
    assert numbers.size * 256 / (time.process_time() - begun) > 5e6  # tokens a second
