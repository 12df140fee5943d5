"""Context parallelism: token placement, balanced work, and attention over ranks against one device."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model import tiled_attention as tiles
from meshwright.model.documents import Documents
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.parallel.context import list_local_positions, shard_sequences
from meshwright.parallel.ring_spans import list_spans
from tests.conftest import exhaustive
from tests.parallel import context_cases as cases

# rows, tokens, query heads, key-value heads, head size; documents; window; queries of a tile
CASES: list[cases.Case] = [
    ((1, 48, 8, 4, 4), False, None, 128),
    ((3, 48, 8, 2, 4), True, None, 2),
    ((2, 48, 8, 8, 4), False, 9, 3),
    ((3, 96, 8, 1, 4), True, 13, 4),
    ((2, 48, 8, 2, 4), True, 1, 128),
    ((2, 48, 8, 4, 4), True, 500, 5),
]
THREE = [((rows, tokens, 6, keys, size), *rest) for (rows, tokens, _, _, size), *rest in CASES for keys in (1, 3)]


# --- token placement


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_token_belongs_to_exactly_one_rank(ranks, method):
    layout = Layout(cp=ranks, cp_method=method)
    places = [list_local_positions(layout, rank, 48) for rank in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(48))
    assert {len(each) for each in places} == {48 // ranks}
    assert all(each.tolist() == sorted(each.tolist()) for each in places)


def test_ring_sharding_gives_each_rank_early_and_late_tokens():
    layout = Layout(cp=3)
    assert [list_local_positions(layout, rank, 12).tolist() for rank in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert list_local_positions(Layout(cp=3, cp_method="ulysses"), 1, 12).tolist() == [4, 5, 6, 7]


def test_sharded_documents_know_positions_of_local_tokens():
    documents = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]))
    places = torch.tensor([1, 2, 5, 6])
    assert documents.select_tokens(places).positions_BS().tolist() == [[1, 2, 2, 3], [1, 2, 5, 6]]
    assert Documents().select_tokens(places).positions_BS().tolist() == [[1, 2, 5, 6]]
    moved = documents.select_tokens(places).to("meta")
    assert moved.starts_BS.device.type == moved.indices_C.device.type == "meta"


def test_single_rank_keeps_whole_sequences():
    tokens, targets, documents = torch.zeros(2, 5), torch.ones(2, 5), Documents()
    assert shard_sequences(tokens, targets, documents, Mesh.single()) == (tokens, targets, documents)


# --- balanced work


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ring_spans_cover_every_visible_key_once(ranks):
    tokens = 12
    seen = torch.zeros(ranks * tokens, ranks * tokens)
    for rank, source in itertools.product(range(ranks), repeat=2):
        mine, theirs = (list_local_positions(Layout(cp=ranks), each, ranks * tokens) for each in (rank, source))
        for span in list_spans(rank, source, ranks, tokens):
            queries, keys = mine[span.queries], theirs[span.keys]
            assert (int(queries[0]), int(keys[0])) == (span.query_start, span.key_start)
            seen[queries[:, None], keys] += 1
    assert torch.equal(seen.tril(), torch.ones_like(seen).tril())
    assert float(seen.max()) == 1


def work(rank: int, source: int, ranks: int, tokens: int, first: torch.Tensor | None = None) -> int:
    """Scores that `rank` computes with the keys of `source`."""
    triangle = torch.zeros(tiles.TILE_QUERIES, tiles.TILE_QUERIES)
    return sum(
        (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
        for span in list_spans(rank, source, ranks, tokens)
        for tile in tiles.cut_span(span, triangle, first)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ranks_compute_equally_many_scores_in_every_round(ranks):
    tokens = 2 * tiles.TILE_QUERIES
    rounds = {tuple(work(rank, (rank - at) % ranks, ranks, tokens) for at in range(ranks)) for rank in range(ranks)}
    assert len(rounds) == 1
    first, *others = next(iter(rounds))
    assert set(others) == {tokens * tokens // 2}, "half of all pairs"
    assert first == tokens * tokens // 2 + tokens * tiles.TILE_QUERIES // 2, (
        "the same, and the masked half of diagonal tiles"
    )


def test_keys_invisible_to_local_queries_are_not_read():
    ranks, tokens = 4, 2 * tiles.TILE_QUERIES
    places = torch.arange(ranks * tokens)
    piece = places // tiles.TILE_QUERIES * tiles.TILE_QUERIES  # one document per chunk
    window = (places - 9).clamp(min=0)
    for rank in range(ranks):
        here = list_local_positions(Layout(cp=ranks), rank, ranks * tokens)
        scores = [work(rank, source, ranks, tokens, piece[here][None]) for source in range(ranks)]
        assert [count > 0 for count in scores] == [source == rank for source in range(ranks)]
        scores = [work(rank, source, ranks, tokens, window[here][None]) for source in range(ranks)]
        assert [count > 0 for count in scores] == [abs(source - rank) <= 1 for source in range(ranks)]


# --- attention over ranks


@pytest.mark.parametrize("ranks", [3, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_output_and_gradients_match_one_device(ranks):
    with LocalRanks(ranks) as started:
        for method in ("ring", "ulysses"):
            for worst in started.run(cases.errors, method, THREE if ranks == 3 else CASES):
                assert max(worst) < 1e-12, (method, worst)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_attention_on_two_ranks_matches_for_every_dtype(two, method):
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        for worst in two.run(cases.errors, method, CASES, dtype):
            assert max(worst) < most, (dtype, worst)
    assert two.run(cases.without_gradients, method) == [True, True]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_scaled_and_capped_scores_and_sinks_on_two_ranks_match_one_device(two, method):
    for worst in two.run(cases.errors, method, CASES, torch.float64, ScoreSettings(0.9, 1.3)):
        assert max(worst) < 1e-12
    for worst in two.run(cases.errors, method, CASES[::2], torch.float64, ScoreSettings(0.9), False, True):
        assert max(worst) < 1e-12


HOSTILE = [
    # Documents of one token, ends at chunk borders, and documents that begin or end one token off them.
    [[0, 1, 2, 11, 12, 13, 24, 47], [0], [0, 12, 24, 36]],
    # One document over all chunks but a few tokens at either end; documents from within one chunk into the next.
    [[0, 3, 45], [0, 6, 18, 30, 42], [0, 11, 13, 35, 37]],
    [[0, 47], [0, 23], [0, 25]],
]
FLASH: list[cases.Case] = [
    *(((3, 48, 4, kv_heads, 8), starts, window, 128)
      for starts, kv_heads in zip(HOSTILE, (1, 2, 4), strict=True) for window in (None, 1, 2, 5, 12, 13, 30, 48)),
    ((2, 48, 4, 2, 8), [list(range(48))] * 2, None, 128),
    *(((2, 48, 4, 2, 8), False, window, 128) for window in (None, 1, 7, 12, 20, 47, 500)),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [4, *exhaustive(2, 3)])
def test_ring_of_flash_kernels_with_documents_and_windows_matches_dense_masks(ranks):
    with LocalRanks(ranks) as started:
        for worst in started.run(cases.flash_errors, FLASH, torch.float64):
            assert max(worst) < 1e-12, [case for case, error in zip(FLASH, worst, strict=True) if not error < 1e-12]
        for sinks in (False, True):
            for worst in started.run(cases.flash_errors, FLASH[sinks::5], torch.float64, ScoreSettings(0.9), sinks):
                assert max(worst) < 1e-12, "scaled scores, and sinks"
        for worst in started.run(cases.flash_errors, FLASH[::5], torch.bfloat16):
            assert max(worst) < 0.1, worst


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_custom_operators_match_their_declarations(two, method):
    two.run(cases.operators, method)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_every_fault_in_exchanged_blocks_is_detected(two, method):
    found = two.run(cases.spoilt, method, CASES[1])
    sites = {fault.split(" (")[0] for fault in found[0]}
    ring = {"attention.ring", "attention.ring.backward", "attention.ring.gradients"}
    traded = {f"attention.{what}{way}" for what in ("heads", "tokens") for way in ("", ".backward")}
    assert sites == (ring if method == "ring" else traded)
    for fault in found[0]:
        assert max(each[fault] for each in found) > 1e-3, fault
