"""The calls of flash kernels in ring attention cover each visible pair of a query and a key exactly once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from bench.shared.flash_kernels import visible_pairs
from bench.shared.packed_documents import documents_from_starts
from meshwright.model.documents import Documents
from meshwright.model.varlen_attention import make_varlen_mask
from meshwright.parallel import ring_spans

CPU = torch.device("cpu")
Call = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]
"""Sequence, indices of queries and of keys in it, pairs that the kernels compute of them."""


def calls_of(rank: int, ranks: int, chunk: int, rows: int, documents: Documents, window: int | None) -> Iterator[Call]:
    """The calls of a rank; one with variable lengths is a call for each document."""
    indices = torch.arange(2 * ranks * chunk).view(2 * ranks, chunk)
    mine = indices[list(ring_spans.list_held_chunks(rank, ranks))].flatten()
    mask = make_varlen_mask(documents, window, CPU, ring_spans.list_held_chunks(rank, ranks), 2 * ranks)
    for source in range(ranks):
        theirs = indices[list(ring_spans.list_held_chunks(source, ranks))].flatten()
        for span in ring_spans.list_spans(rank, source, ranks, 2 * chunk):
            for at, there, call in ring_spans.list_kernel_calls(mask, span, rows):
                queries, keys = mine[at[3]], theirs[there[2]]
                if call.cu_seqlens is None:
                    pairs = visible_pairs(len(queries), len(keys), (len(queries), len(keys)), call.causal, call.left)
                    yield from ((row, queries, keys, pairs) for row in range(rows)[at[0]])
                    continue
                concatenated = queries.repeat(rows)
                for first, end in itertools.pairwise(call.cu_seqlens.unique().tolist()):
                    assert end - first <= call.longest
                    longest = max(2, call.longest)
                    pairs = visible_pairs(end - first, end - first, (longest, longest), call.causal, call.left)
                    yield first // chunk, concatenated[first:end], concatenated[first:end], pairs


def random_case(draw: random.Random, ranks: int) -> tuple[int, int, Documents, int | None]:
    """Tokens of a chunk, sequences, documents (some sequences have equal ones), window."""
    chunk, rows = draw.choice([1, 2, 3, 5, 8]), draw.randint(1, 4)
    tokens = 2 * ranks * chunk
    starts = [[draw.randrange(tokens) for _ in range(draw.choice([0, 1, 2, tokens // 2, tokens]))] for _ in range(rows)]
    starts[-1] = draw.choice(starts)
    documents = documents_from_starts(starts, tokens) if draw.random() < 0.8 else Documents()
    return chunk, rows, documents, draw.choice([None, 1, 2, chunk, chunk + 1, 2 * chunk, draw.randint(1, tokens + 2)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_visible_pair_is_computed_once_and_every_query_of_a_call_sees_a_key(ranks: int):
    draw = random.Random(ranks)
    for _ in range(40):
        chunk, rows, documents, window = case = random_case(draw, ranks)
        places = torch.arange(2 * ranks * chunk)
        first_BS = documents.first_visible_BS(len(places), window, CPU)
        first_BS = torch.zeros(1, len(places), dtype=torch.int64) if first_BS is None else first_BS
        visible = (places <= places[:, None]) & (places >= first_BS[..., None])
        found = torch.zeros(rows, len(places), len(places), dtype=torch.int64)
        for rank in range(ranks):
            for row, queries, keys, pairs in calls_of(rank, ranks, chunk, rows, documents, window):
                assert pairs.any(dim=1).all(), (case, rank)  # else the kernels return a log-sum-exp of infinity
                found[row][queries[:, None], keys] += pairs
        assert torch.equal(found, visible.long().expand_as(found)), case
