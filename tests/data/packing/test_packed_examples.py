"""Packed rows of examples, compared with the token lists that they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import NO_TARGET, PackedExamples
from meshwright.data.packing.packed import StoredTokens
from meshwright.data.packing.packing_plan import OPEN_ROWS, PackingSettings, pack_best_fit
from meshwright.data.packing.shards import EncodedDocument, ShardWriter
from meshwright.data.packing.token_flags import UNDESIRABLE_BIT
from meshwright.data.prepared import format_packing_report
from meshwright.data.sources.reading import Document
from meshwright.errors import UserError

END = 999


class Plain:
    """Encodes a document that is JSON: a list of [prompt length, response length] for each piece."""

    def encode_documents(self, documents):
        for document in documents:
            number, shapes = json.loads(document.text)
            yield [EncodedDocument(*self.piece(number, at, *shape)) for at, shape in enumerate(shapes)]

    @staticmethod
    def piece(number, at, prompt, response):
        tokens = np.array([(number * 31 + at * 7 + place) % 900 for place in range(prompt + response)], "<u2")
        trained = np.array([0] * prompt + [1] * response, np.uint8)
        trained[:1] = 0
        return tokens, b"", trained


def packed(directory: Path, shapes, sequence: int, sources=None, shard_tokens: int = 50, encoder=None, **options):
    documents = [Document("", json.dumps([number, shape])) for number, shape in enumerate(shapes)]

    def kept(first: int):
        return ((number, document) for number, document in enumerate(documents) if number >= first)

    ends, encoder = sources or [len(shapes)], encoder or Plain()
    packer = ShardWriter(directory, kept, ends, encoder, "", shard_tokens, keep_text=False)
    by_source = packer.write_missing(lambda done: None)
    shards = [shard for shards in by_source for shard in shards]
    pieces = len(shapes[0]) if shapes else 1
    apart = None if sources is None else [len(shards) for shards in by_source]
    stored = StoredTokens(directory, shards, np.dtype("<u2"), apart)
    return PackedExamples(stored, sequence, True, END, PackingSettings(documents_per_example=pieces, **options))


def documents_of(rows: PackedExamples):
    """(row, document id, tokens, targets) of every document with a target, and the tokens after the last one."""
    batch = rows.read_batch(np.arange(rows.sequences))
    for row, (tokens, targets, ids) in enumerate(zip(batch.tokens, batch.targets, batch.document_ids, strict=True)):
        assert (np.diff(ids) >= 0).all() and (np.diff(ids) <= 1).all() and ids[0] == 0
        for number in np.unique(ids).tolist():
            here = ids == number
            yield row, number, tokens[here].tolist(), targets[here].tolist()


class Labelled(Plain):
    """Every third example has an undesirable response."""

    @staticmethod
    def piece(number, at, prompt, response):
        tokens, text, trained = Plain.piece(number, at, prompt, response)
        return tokens, text, trained | np.where(trained & (number % 3 == 0), UNDESIRABLE_BIT, 0).astype(np.uint8)


@pytest.mark.parametrize("sources", [None, [6, 13]])
def test_labelled_examples_have_rows_with_the_responses_of_others(tmp_path: Path, sources):
    """Row by row as many documents, each the same prompt with the response of an example half the source away."""
    shapes, sequence = [[(1 + number % 4, 1 + number * 7 % 9)] for number in range(13)], 23
    rows = packed(tmp_path, shapes, sequence, sources, encoder=Labelled(), labelled=True)
    counts = rows.report
    assert (counts["trained"], counts["desirable"], counts["undesirable"]) == (13, 8, 5)
    pieces, bounds = [Plain.piece(number, 0, *one)[0].tolist() for number, [one] in enumerate(shapes)], [0, 6, 13]
    seen = []
    for row in range(rows.sequences):
        examples = rows.plan.numbers[rows.plan.order[slice(*rows.plan.bounds[row : row + 2])]].tolist()
        seen += examples
        own, other = [], []
        for example in examples:
            first, end = (0, 13) if sources is None else bounds[example >= 6 :][:2]
            partner = first + (example - first + (end - first) // 2) % (end - first)
            (prompt, length), (skipped, response) = shapes[example][0], shapes[partner][0]
            own.append((pieces[example], prompt, length, example % 3 == 0))
            other.append((pieces[example][:prompt] + pieces[partner][skipped:], prompt, response, None))
        for batch, documents in ((rows.read_batch([row]), own), (rows.mismatched.read_batch([row]), other)):
            tokens = [token for document, *_ in documents for token in document]
            assert len(tokens) <= sequence + 1 and batch.tokens[0].tolist()[: len(tokens)] == tokens[:sequence]
            at = 0
            for number, (document, prompt, length, bad) in enumerate(documents):
                trained = slice(at + prompt - 1, at + prompt + length - 1)
                assert batch.targets[0, trained].tolist() == document[prompt:]
                assert bad is None or {*batch.undesirable[0, trained].tolist()} == {bad}
                assert {*batch.document_ids[0, at : at + len(document)].tolist()} == {number}
                at += len(document)
            assert (batch.targets[0] >= 0).sum() == sum(length for _, _, length, _ in documents)
    assert sorted(seen) == [*range(13)]


def test_single_labelled_example_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="a data source with a single labelled example, and KTO estimates"):
        packed(tmp_path, [[(2, 3)]], 10, encoder=Labelled(), labelled=True).mismatched  # noqa: B018


shape = st.tuples(st.integers(1, 9), st.integers(1, 9))
examples = st.integers(1, 2).flatmap(
    lambda pieces: st.lists(st.lists(shape, min_size=pieces, max_size=pieces), min_size=1, max_size=30)
)


@given(shapes=examples, sequence=st.integers(37, 60), pack=st.booleans())
@settings(max_examples=40)
def test_rows_contain_whole_examples_with_responses_as_targets(
    tmp_path_factory: pytest.TempPathFactory, shapes, sequence: int, pack: bool
):
    rows = packed(tmp_path_factory.mktemp("packed"), shapes, sequence, pack=pack)
    pieces = len(shapes[0])
    wanted = []
    for number, example in enumerate(shapes):
        wanted.append([])
        for at, (prompt, response) in enumerate(example):
            tokens = Plain.piece(number, at, prompt, response)[0].tolist()
            wanted[-1].append((tokens, [*[NO_TARGET] * (prompt - 1), *tokens[prompt:], NO_TARGET]))
    found: dict[int, list] = {}
    for row, number, tokens, targets in documents_of(rows):
        if any(target != NO_TARGET for target in targets):
            found.setdefault(row, []).append((number, tokens, targets))
        else:
            assert set(tokens) == {END}  # padding
    met = []
    for documents in found.values():
        assert [number for number, *_ in documents] == list(range(len(documents)))
        assert pack or len(documents) == pieces
        for first in range(0, len(documents), pieces):
            met.append([(tokens, targets) for _, tokens, targets in documents[first : first + pieces]])
    # The last token of a full row is only a target, so the row's last document may be one shorter.
    for example in met:
        match = [
            one
            for one in wanted
            if all(
                mine == theirs or mine == (theirs[0][:-1], theirs[1][:-1])
                for mine, theirs in zip(example, one, strict=True)
            )
        ]
        assert match, example
        wanted.remove(match[0])
    assert not wanted
    assert rows.report["targets"] == rows.read_batch(np.arange(rows.sequences)).target_tokens
    assert rows.report["trained"] == rows.report["examples"] == len(shapes)
    size = sum(prompt + response for example in shapes for prompt, response in example)
    assert rows.report["padding"] == rows.sequences * (sequence + 1) - size


@given(sizes=st.lists(st.integers(1, 20), max_size=200))
@settings(max_examples=50)
def test_best_fit_chooses_row_with_least_remaining_capacity(sizes: list[int]):
    """Compares with an exhaustive search over all rows; with so few rows none is closed."""
    room, rows = 20, []
    for place, size in enumerate(sizes):
        left = [(room - sum(sizes[one] for one in row), number) for number, row in enumerate(rows)]
        fitting = [one for one in left if one[0] >= size]
        if fitting:
            rows[min(fitting)[1]].append(place)
        else:
            rows.append([place])
    assert len(rows) <= OPEN_ROWS
    assert pack_best_fit(sizes, room) == rows


def test_packing_wastes_little_with_few_open_rows():
    sizes = np.random.default_rng(0).integers(10, 400, 5000).tolist()
    rows = pack_best_fit(sizes, 512)
    assert sorted(place for row in rows for place in row) == list(range(5000))
    assert all(sum(sizes[place] for place in row) <= 512 for row in rows)
    assert sum(sizes) / (len(rows) * 512) > 0.97
    # 13 and then 7 tokens fill a row of 20, but those of the first rows are closed when the sevens come.
    late = pack_best_fit([13] * (OPEN_ROWS + 50) + [7] * (OPEN_ROWS + 50), 20)
    assert len(late) > OPEN_ROWS + 50


def test_too_long_examples_are_truncated_dropped_or_refused(tmp_path: Path):
    shapes = [[(4, 4)], [(5, 20)], [(30, 5)], [(3, 0)], [(6, 3)]]
    made = {}
    for too_long in ("truncate", "drop"):
        directory = tmp_path / too_long
        directory.mkdir()
        made[too_long] = packed(directory, shapes, 15, too_long=too_long)
    whole = {"examples": 5, "lost_targets": 5 + 9, "targets": 4 + 3 + 11, "trained": 3}
    report = made["truncate"].report
    assert report == whole | {"truncated": 1, "too_long": 0, "without_response": 2, "padding": report["padding"]}
    report = made["drop"].report
    counts = {"trained": 2, "targets": 7, "lost_targets": 25, "truncated": 0, "too_long": 2, "without_response": 1}
    assert report == whole | counts | {"padding": report["padding"]}
    (tmp_path / "refuse").mkdir()
    refused = packed(tmp_path / "refuse", shapes, 15, too_long="refuse")
    with pytest.raises(
        UserError, match=r"example 2 of the refuse split has 25 tokens, more than the 16 .* 1 more.* to 34"
    ):
        _ = refused.rows


def test_too_long_pair_is_cut_to_the_same_length_or_dropped(tmp_path: Path):
    rows = packed(tmp_path / "cut", [[(3, 20), (3, 12)]], 19)
    lengths = {number: len(tokens) for _, number, tokens, _ in documents_of(rows)}
    assert lengths == {0: 10, 1: 9}  # the last token of the row is only a target: 10 + 10 = 20
    assert rows.report["truncated"] == 1 and rows.report["lost_targets"] == 32 - 2 * 7
    rows = packed(tmp_path / "short", [[(3, 20), (3, 4)]], 19)
    assert {number: len(tokens) for _, number, tokens, _ in documents_of(rows) if number < 2} == {0: 7, 1: 7}
    dropped = packed(tmp_path / "drop", [[(3, 20), (3, 4)], [(2, 3), (2, 4)]], 19, too_long="drop")
    assert (dropped.report["too_long"], dropped.report["trained"], dropped.report["truncated"]) == (1, 1, 0)


def test_identical_pairs_are_dropped_and_lengths_of_responses_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    piece = Plain.piece
    monkeypatch.setattr(
        Plain, "piece", staticmethod(lambda number, at, *shape: piece(number, at * (number != 1), *shape))
    )
    rows = packed(tmp_path, [[(2, 6), (2, 4)], [(2, 3), (2, 3)], [(2, 3), (2, 5)], [(2, 4), (2, 4)]], 40)
    assert rows.report["identical"] == 1 and rows.report["without_response"] == 0 and rows.report["trained"] == 3
    assert {key: rows.report[key] for key in ("pairs", "chosen_tokens", "rejected_tokens", "chosen_longer")} == {
        "pairs": 3, "chosen_tokens": 13, "rejected_tokens": 13, "chosen_longer": 1,
    }  # fmt: skip
    line = format_packing_report(rows.report, rows.rows, 40)
    assert "1 example dropped whose responses are identical" in line
    assert "response tokens: chosen 4.3, rejected 4.3 in the mean; the chosen one is longer in 33% of the pairs" in line


def test_train_on_all_targets_every_token_but_the_first(tmp_path: Path):
    rows = packed(tmp_path, [[(4, 4)], [(2, 5)]], 30, train_on="all")
    for _, number, tokens, targets in documents_of(rows):
        assert number == 2 or targets[:-1] == tokens[1:]
    assert rows.report["targets"] == 7 + 6


def test_padded_rows_are_empty_and_weighted_sources_stay_apart(tmp_path: Path):
    shapes = [[(2, number % 5 + 1)] for number in range(20)]
    rows = packed(tmp_path, shapes, 11, sources=[8, 20])
    assert len(rows.sequences_by_source) == 2 and sum(rows.sequences_by_source) == rows.rows == rows.sequences
    first = rows.read_batch(np.arange(rows.sequences_by_source[0]))
    assert first.target_tokens == sum(number % 5 + 1 for number in range(8))
    batch = rows.read_batch([0, rows.rows, 10_000], padded=True)
    assert (batch.targets[1:] == NO_TARGET).all() and (batch.tokens[1:] == END).all()
    assert sum(len(batch.tokens) for batch in rows.iterate_batches(3)) == rows.rows
    with pytest.raises(AssertionError):
        rows.read_batch([rows.rows])


def test_packing_is_independent_of_shards(tmp_path: Path):
    shapes = [[(2, number % 5 + 1), (3, 4)] for number in range(40)]
    batches = []
    for shard_tokens in (1, 60, 10**6):
        (tmp_path / str(shard_tokens)).mkdir()
        rows = packed(tmp_path / str(shard_tokens), shapes, 33, shard_tokens=shard_tokens)
        batch = rows.read_batch(np.arange(rows.rows))
        batches.append(batch.tokens.tobytes() + batch.targets.tobytes() + batch.document_ids.tobytes())
    assert len(set(batches)) == 1
