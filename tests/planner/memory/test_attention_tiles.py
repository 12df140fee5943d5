"""Attention memory on a CPU with packed documents: tile by tile if their boundaries are known, else the maximum."""

from __future__ import annotations

import dataclasses
import random
from itertools import product

import pytest
import torch

from bench.shared.packed_documents import documents_from_starts
from meshwright.layout import Layout
from meshwright.model.tiled_attention import Span, cut_tiles
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Starts
from meshwright.planner.memory import attention_tiles
from meshwright.planner.memory.attention_tiles import Tiles, list_tiles, tiled_backward
from meshwright.planner.memory.snapshot import count_bytes
from meshwright.spec.presets import preset


def rows_of(rows: int, length: int, seed: int) -> Starts:
    """Return sequences of one to nine documents."""
    make = random.Random(seed)
    return tuple(
        (0, *sorted(make.sample(range(1, length), make.choice((0, 1, 2, 4, 8))))) for _ in range(rows)
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize(("rows", "kv_heads", "length"), [(1, 2, 300), (4, 2, 256), (5, 1, 700), (3, 2, 128)])
def test_predicted_tiles_match_engine(rows: int, kv_heads: int, length: int, window: int | None) -> None:
    starts, group = rows_of(rows, length, rows * length), 2
    q_BKGSD = torch.zeros(rows, kv_heads, group, length, 4)
    first_BS = documents_from_starts(starts, length).first_visible_BS(length, window, q_BKGSD.device)
    everything = slice(0, length)
    done = 0
    for at, heads, tiles in cut_tiles(q_BKGSD, Span(everything, everything), first_BS):
        together = at.stop - at.start
        sizes = Tiles(together, heads.stop - heads.start, group, min(128, length), length)
        masked = [each.mask is not None and each.mask.dim() > 2 for each in tiles]
        cut = [(each.queries.stop - each.queries.start, each.keys.stop - each.keys.start) for each in tiles]
        assert list_tiles(sizes, window, starts[at]) == [(*size, mask) for size, mask in zip(cut, masked, strict=True)]
        for each, (queries, keys) in zip(tiles, cut, strict=True):
            if each.mask is not None and each.mask.dim() > 2:
                assert each.mask.numel() == together * queries * keys
        done += together * (heads.stop - heads.start)
    assert done == rows * kv_heads


@pytest.mark.parametrize("seed", range(40))
def test_unknown_documents_are_priced_at_their_maximum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = random.Random(seed)
    rows, length, group = make.choice((1, 2, 6)), make.choice((128, 300, 1024)), make.choice((1, 2))
    tiles = Tiles(make.randint(1, rows), 2, group, min(128, length), length)
    monkeypatch.setattr(attention_tiles, "choose_tiles", lambda *_: tiles)
    tiled_backward.cache_clear()
    starts = rows_of(rows, length, seed)
    config = dataclasses.replace(preset("llama-tiny"), heads=2 * group, kv_heads=2, head_dim=32)
    for dtype, window, turned in product(("float32", "bfloat16"), (None, 64), (True, False)):
        kind = LayerKind(window, mixed=False, rotates=turned)
        known, most = (
            count_bytes(tiled_backward(MicroBatch.of(config, Layout(), rows, length, dtype=dtype, packed=packed), kind))
            for packed in (starts, True)
        )
        assert known <= most, (dtype, kind, starts)
