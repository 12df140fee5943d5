"""Attention against a softmax over an explicit mask."""

from __future__ import annotations

import math

import pytest
import torch

from bench.shared.key_value_cache import KeyValueCache
from meshwright.model import tiled_attention as tiles
from meshwright.model.documents import Documents
from meshwright.model.scaled_dot_product import attend, make_attention_mask
from meshwright.model.tiled_attention import tiled_attention
from meshwright.spec.presets import preset

CPU = torch.device("cpu")
# rows, tokens, query heads, key-value heads, head size; lengths that a tile of queries divides, and others
SHAPES = [(2, 70, 6, 3, 16), (3, 200, 4, 4, 8), (1, 131, 8, 1, 8), (2, 256, 2, 2, 4), (4, 1, 3, 1, 4)]


def heads(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    rows, tokens, queries, keys, size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    return tuple(
        torch.randn(rows, count, tokens, size, dtype=dtype, generator=generator).requires_grad_()
        for count in (queries, keys, keys)
    )


def allowed(ids_BS: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention mask from the definition, [B, S, S]."""
    places = torch.arange(ids_BS.shape[1])
    distance = places[:, None] - places
    same = ids_BS[:, :, None] == ids_BS[:, None, :]
    return same & (distance >= 0) & (distance < (window or len(places)))


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed_BSS: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed_BSS[:, None], float("-inf"))
    if sinks is not None:
        one_more = sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, one_more], dim=-1), dim=-1)[..., :-1] @ v
    return torch.softmax(scores, dim=-1) @ v


def packed(rows: int, tokens: int) -> torch.Tensor:
    """Document IDs with different boundaries in every sequence; the last sequence is one document."""
    ids = torch.stack([torch.arange(tokens) // (tokens // 3 + 5 * row + 1) for row in range(rows)])
    ids[-1] = 0
    return ids


@pytest.mark.parametrize("window", [None, 1, 17, 500], ids="window {}".format)
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_gradients_match_their_definition(shape: tuple[int, ...], documents: bool, window: int | None):
    q, k, v = heads(shape)
    ids = packed(*shape[:2]) if documents else torch.zeros(shape[:2])
    visible = make_attention_mask(Documents.from_ids(ids), shape[1], window, CPU)
    want = by_definition(q, k, v, allowed(ids, window))
    out = attend(q, k, v, visible)
    direction = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    for mine, theirs in zip(*(torch.autograd.grad(x, (q, k, v), direction) for x in (out, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tile", [1 << 10, 1 << 30])
def test_attention_with_sinks_matches_its_definition(tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "TILE_SCORES", tile)
    q, k, v = heads((3, 70, 6, 3, 8))
    sinks = torch.tensor([9.0, -2.0, 0.0, 1.0, 3.0, -50.0], dtype=torch.float64, requires_grad=True)
    visible = make_attention_mask(Documents.from_ids(packed(3, 70)), 70, 17, CPU)
    out = attend(q, k, v, visible, tiles.ScoreSettings(8**-0.5, 0.0, sinks))
    want = by_definition(q, k, v, allowed(packed(3, 70), 17), sinks)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    of_all = q, k, v, sinks
    for mine, theirs in zip(*(torch.autograd.grad(x.cos().sum(), of_all) for x in (out, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scores", [1, 1 << 12, 1 << 15, 1 << 30])
def test_attention_result_is_independent_of_tile_size(scores: int, monkeypatch: pytest.MonkeyPatch):
    q, k, v = heads((5, 100, 6, 3, 8))
    first = Documents.from_ids(packed(5, 100)).starts_BS
    want = by_definition(q, k, v, allowed(packed(5, 100), None))
    monkeypatch.setattr(tiles, "TILE_SCORES", scores)
    out = tiled_attention(q, k, v, first)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    for mine, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_invisible_keys_are_not_read():
    size = tiles.TILE_QUERIES
    first = torch.arange(4 * size)[None] // size * size  # one document per tile
    everything = slice(0, 4 * size)
    found = tiles.cut_span(tiles.Span(everything, everything), torch.zeros(size, size), first)
    assert [(tile.keys.start, tile.keys.stop) for tile in found] == [(at * size, (at + 1) * size) for at in range(4)]


def test_bfloat16_keeps_scores_in_float32():
    q, k, v = (x.detach() for x in heads((2, 300, 4, 2, 64), torch.bfloat16))
    q = 8 * q  # scores of about 8, whose rounding to bfloat16 would change probabilities by percents
    want = by_definition(q.double(), k.double(), v.double(), allowed(torch.zeros(2, 300), None))
    error = (tiled_attention(q, k, v, None) - want).norm() / want.norm()
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert error < 1.5 * (theirs - want).norm() / want.norm()
    assert error < 3e-3


def test_custom_operators_match_their_declarations():
    q, k, v = heads((2, 70, 4, 2, 8))
    first = Documents.from_ids(packed(2, 70)).starts_BS
    operators, declarations = torch.ops.meshwright, ("test_schema", "test_faketensor")
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(operators.tiled_attention.default, (q, k, v, first, 0.3, 0.7, sinks))
    q, k, v = q.detach(), k.detach(), v.detach()
    torch.library.opcheck(operators.tiled_attention.default, (q, k, v, None, 0.3, 0.0, None), test_utils=declarations)
    for each in (None, sinks.detach()):
        arguments = (q, [q, k, v], first, 0.3, 0.7, each)
        torch.library.opcheck(operators.tiled_attention_backward.default, arguments, test_utils=declarations)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_accelerator_mask_equals_cpu_mask(window: int | None, documents: bool):
    ids = packed(3, 20) if documents else torch.zeros(3, 20)
    mask = make_attention_mask(Documents.from_ids(ids).to("meta"), 20, window, torch.device("meta"))
    if not documents and window is None:
        assert mask is None  # the fused causal kernel
        return
    assert mask is not None and mask.shape == (3 if documents else 1, 1, 20, 20)
    on_cpu = make_attention_mask(Documents.from_ids(ids), 20, window, CPU)
    assert on_cpu is not None
    places = torch.arange(20)
    first_visible = (places >= on_cpu[..., None]) & (places <= places[:, None])
    assert torch.equal(first_visible.expand(3, 20, 20), allowed(ids, window))


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4], [9], [2, 7]], ids=str)
def test_chunked_cached_attention_equals_full_attention(pieces: list[int], window: int | None):
    config = preset("mistral-tiny")
    cache = KeyValueCache(config, rows=2, capacity=3)
    cache._windows = [window] * config.layers
    q, k, v = (x.detach() for x in heads((2, 9, 4, 2, 8)))
    want = by_definition(q, k, v, allowed(torch.zeros(2, 9), window))
    for size in pieces:
        new = slice(cache.length, cache.length + size)
        out = cache.attend(1, q[:, :, new], k[:, :, new], v[:, :, new])
        torch.testing.assert_close(out, want[:, :, new], rtol=0, atol=1e-13)
        cache.advance(size)
