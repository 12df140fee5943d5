"""Triton kernels against their reference in plain torch: on the GPU where there is one, else in Triton's interpreter.

Triton is no dependency of the project: without it these tests are skipped, and the reference alone is under test.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from meshwright.kernels import device_operations as device  # noqa: E402
from meshwright.kernels.device_attention import AttentionSettings, Tiles  # noqa: E402
from tests.serving import device_reference as reference  # noqa: E402

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
SIZE, KV_HEADS, GROUP, BLOCKS = 24, 2, 3, 20
SCALE = SIZE**-0.5


@pytest.fixture(autouse=True)
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: products that add in one order. NumPy's takes another one for the rows at a tile's edge."""
    if DEVICE == "cpu":
        matmul = lambda a, b, dtype: np.add.reduce(a.astype(dtype)[:, :, None] * b.astype(dtype), axis=1)  # noqa: E731
        monkeypatch.setattr(np, "matmul", matmul)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> bool:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return bool(((found.float() - expected.float()).abs() <= tolerance * (1 + expected.float().abs())).all())


def step_of(chunks: list[tuple[int, int, list[int]]], tokens: int, rows: int):
    """Tiles, positions and slots of chunks (first position, tokens, block table) with tiles of at most `tokens`."""
    numbers, positions, slots = [], [], []
    for owner, (begin, count, table) in enumerate(chunks):
        for first in range(0, count, tokens):
            numbers.append((len(positions) + first, min(tokens, count - first), owner))
        positions += range(begin, begin + count)
        slots += [table[place // 16] * 16 + place % 16 for place in range(begin, begin + count)]
    tables = torch.zeros(len(chunks), max(len(table) for *_, table in chunks), dtype=torch.int32)
    for owner, (*_, table) in enumerate(chunks):
        tables[owner, : len(table)] = torch.tensor(table)
    integers = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (numbers, positions, slots)]
    longest = max(begin + count for begin, count, _ in chunks)
    return integers[0].T.contiguous(), tokens, rows, *integers[1:], tables.to(DEVICE), longest


def attend_in_pieces(module, pieces: list[int], settings: AttentionSettings, batched: bool, tokens: int, section=32):
    """Attention of the 45 tokens of one sequence read in pieces, alone or in a batch with another one."""
    module.SECTION = section
    cache = draw(BLOCKS * 16, KV_HEADS, SIZE, seed=1), draw(BLOCKS * 16, KV_HEADS, SIZE, seed=2)
    whole, found, begin = draw(45, (GROUP + 2) * KV_HEADS * SIZE, seed=3), [], 0
    table, scratch = [4, 9, 1], torch.zeros(40_000, device=DEVICE)
    arrivals = torch.zeros(200, dtype=torch.int32, device=DEVICE)
    for count in pieces:
        chunks = [(begin, count, table)]
        qkv = whole[begin : begin + count].clone()
        if batched:
            chunks.append((3, 21, [2, 3]))
            qkv = torch.cat([qkv, draw(21, qkv.shape[1], seed=4)])
        tiles = Tiles(*step_of(chunks, tokens, 16))
        tables = torch.arange(99 * SIZE // 2, device=DEVICE).view(99, -1) / 70
        module.rotate_and_store(qkv, cache, tiles, (tables.cos(), tables.sin()), None, 1e-5)
        found.append(module.attend(qkv, cache, tiles, settings, scratch, arrivals)[:count])
        begin += count
        assert not bool(arrivals.any())
    return torch.cat(found), *cache


WINDOWS = [(None, False), (20, False), (20, True)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "chunks"), WINDOWS)
def test_attention_is_that_of_the_reference_and_of_one_softmax(window: int | None, chunks: bool, sinks: bool):
    one_more = torch.tensor([9.0, -3.0, 0.0, 1.0, 2.0, -50.0], device=DEVICE) if sinks else None
    settings = AttentionSettings(SCALE, 0.0, one_more, window, chunks)
    for section in (32, 96):  # several sections, one
        found = attend_in_pieces(device, [45], settings, True, 4, section)
        expected = attend_in_pieces(reference, [45], settings, True, 4, 128 - section)
        assert all(same(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(("window", "chunks"), WINDOWS)
def test_bits_of_a_token_depend_on_its_sequence_alone(window: int | None, chunks: bool):
    settings = AttentionSettings(SCALE, window=window, chunks=chunks)
    whole = attend_in_pieces(device, [45], settings, False, 4)[0]
    for pieces, batched, tokens in (([1] * 45, False, 1), ([33, 1, 11], True, 4), ([45], True, 4)):
        assert torch.equal(attend_in_pieces(device, pieces, settings, batched, tokens)[0], whole)


def test_queries_and_keys_are_normalised_and_rotated_in_half_precision():
    norms = draw(SIZE, dtype=HALF, seed=5), draw(SIZE, dtype=HALF, seed=6)
    angles = torch.arange(9 * SIZE // 2, device=DEVICE).view(9, -1) / 50
    at = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 5, 8], [17, 3, 40])]
    tiles = at[0], 1, 16, *at, at[0], 9
    found = []
    for module in (device, reference):
        qkv = draw(3, (GROUP + 2) * KV_HEADS * SIZE, dtype=HALF, seed=7)
        cache = tuple(torch.zeros(48, KV_HEADS, SIZE, dtype=HALF, device=DEVICE) for _ in range(2))
        module.rotate_and_store(qkv, cache, Tiles(*tiles), (angles.cos(), angles.sin()), norms, 1e-5)
        found.append((qkv[:, : GROUP * KV_HEADS * SIZE], *cache))
    assert all(same(*pair, tolerance=0.01) for pair in zip(*found, strict=True))


def test_keys_of_layers_with_temperatures_are_not_multiplied():
    factors, at = 1 + torch.arange(9 * SIZE // 2, device=DEVICE).view(9, -1) / 50, torch.arange(3, device=DEVICE).int()
    found = []
    for module in (device, reference):
        qkv, cache = draw(3, (GROUP + 2) * KV_HEADS * SIZE, seed=7), torch.zeros(2, 48, KV_HEADS, SIZE, device=DEVICE)
        keys = qkv.view(3, -1, SIZE)[:, GROUP * KV_HEADS :][:, :KV_HEADS].clone()
        tiles = Tiles(at, 1, 16, at, at, at, 3)
        module.rotate_and_store(qkv, cache, tiles, (factors, torch.zeros_like(factors)), None, 1e-5, True)
        assert torch.equal(cache[0, :3], keys)
        found.append(qkv[:, : GROUP * KV_HEADS * SIZE])
    assert same(*found)


RANK, ROTARY, HEADS, PLAIN, VALUE = 24, 8, 6, 12, 10  # of latent attention


def draw_latent() -> tuple[torch.Tensor, ...]:
    """For 45 tokens latent vectors with rotary keys, and queries; up-projections of all heads; norm's weight."""
    shapes = (45, RANK + ROTARY + 5), (45, HEADS, PLAIN + ROTARY), (HEADS, PLAIN + VALUE, RANK), (RANK,)
    return tuple(draw(*shape, seed=3 + place) for place, shape in enumerate(shapes))


def attend_latent(module, pieces: list[int], batched: bool, tokens: int) -> torch.Tensor:
    """Latent attention [45, N, V] of one sequence read in pieces, alone or in a batch with another one."""
    module.SECTION = 32
    parts, queries, up, norm = draw_latent()
    cache = torch.zeros(1, BLOCKS * 16, 1, RANK + ROTARY, device=DEVICE)
    scratch, arrivals = torch.zeros(40_000, device=DEVICE), torch.zeros(200, dtype=torch.int32, device=DEVICE)
    angles = torch.arange(99 * ROTARY // 2, device=DEVICE).view(99, -1) / 70
    found, begin = [], 0
    for count in pieces:
        chunks, own = [(begin, count, [4, 9, 1])], slice(begin, begin + count)
        x, q = parts[own], queries[own]
        if batched:
            chunks.append((3, 21, [2, 3]))
            x, q = torch.cat([x, parts[:21].flip(0)]), torch.cat([q, queries[:21].flip(0)])
        tiles = Tiles(*step_of(chunks, tokens, 16))
        wide, out = (torch.empty(len(x), HEADS, size, device=DEVICE) for size in (RANK + ROTARY, VALUE))
        module.multiply_heads(q[:, :, :PLAIN], up[:, :PLAIN].mT, wide[:, :, :RANK])
        module.rotate_and_store_latent(x, q, wide, cache[0], tiles, (angles.cos(), angles.sin()), (norm, 1e-6))
        settings = AttentionSettings(SCALE, key_only=ROTARY, groups=3)
        latent = module.attend(wide.flatten(1), cache, tiles, settings, scratch, arrivals)
        module.multiply_heads(latent.unflatten(1, (HEADS, -1)), up[:, PLAIN:], out)
        found.append(out[:count])
        begin += count
        assert not bool(arrivals.any())
    return torch.cat(found)


def test_latent_attention_is_that_of_the_decompressed_keys_and_values():
    parts, queries, up, norm = (each.double().cpu() for each in draw_latent())
    latent = parts[:, :RANK] * torch.rsqrt(parts[:, :RANK].square().mean(1, keepdim=True) + 1e-6) * norm
    turns = torch.polar(torch.ones(45, 1, ROTARY // 2).double(), torch.arange(45 * 4).view(45, 1, 4).double() / 70)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    both = torch.einsum("sr,nor->sno", latent, up)
    keys = torch.cat([both[..., :PLAIN], rotate(parts[:, None, RANK : RANK + ROTARY]).expand(-1, HEADS, -1)], dim=-1)
    q = torch.cat([queries[..., :PLAIN], rotate(queries[..., PLAIN:])], dim=-1)
    scores = torch.einsum("tnd,snd->nts", q, keys) * SCALE
    weights = scores.masked_fill(torch.ones(45, 45).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("nts,snv->tnv", weights, both[..., PLAIN:])
    for module in (device, reference):
        error = (attend_latent(module, [45], True, 8).double().cpu() - expected).abs().max()
        assert float(error) < 1e-5 * float(expected.abs().max())


def test_bits_of_latent_attention_depend_on_the_sequence_alone():
    whole = attend_latent(device, [45], False, 8)
    for pieces, batched, tokens in (([1] * 45, False, 1), ([33, 1, 11], True, 8)):
        assert torch.equal(attend_latent(device, pieces, batched, tokens), whole)


def test_norm_adds_in_place():
    weight = draw(100, seed=8)
    for delta in (None, draw(5, 100, seed=9)):
        x, y = draw(5, 100), draw(5, 100)
        assert same(device.add_norm(x, delta, weight, 1e-5), reference.add_norm(y, delta, weight, 1e-5)) and same(x, y)


@pytest.mark.parametrize(("columns", "inner"), [(70, 50), (40, 2100)])
def test_product_adds_its_splits_in_order(columns: int, inner: int):
    x, weight, bias = draw(67, inner), draw(columns, inner, seed=1), draw(columns)
    whole = device.product(x, weight, bias)
    assert same(whole, reference.product(x, weight, bias), 2e-4)
    assert torch.equal(device.product(x[3:5], weight, bias), whole[3:5])
    wide = device.product(x.to(HALF), weight.to(HALF), None, torch.float32)
    assert same(wide, reference.product(x.to(HALF), weight.to(HALF), None, torch.float32), 2e-4)


@pytest.mark.parametrize(("norm", "added"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "inner"), [(70, 50), (9, 2100), (33, 17_000)])
def test_product_of_one_row_is_that_of_the_reference(columns: int, inner: int, gated: bool, added: bool, norm: bool):
    x, weight = draw(1, inner), draw((1 + gated) * columns, inner, seed=1) / inner**0.5
    options = {
        "norm": (draw(inner, seed=3), 1e-5) if norm else None,
        "delta_1X": draw(1, inner, seed=2) if added else None,
        "gated": gated,
    }
    bias = None if gated else draw(columns)
    for dtype in (torch.float32, HALF):
        cast = {**options, "delta_1X": None if options["delta_1X"] is None else options["delta_1X"].to(dtype)}
        arguments = (x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        for found, expected in zip(device.gemv(*arguments, **cast), reference.gemv(*arguments, **cast), strict=True):
            assert same(found, expected, tolerance)
    assert device.gemv(x.to(HALF), weight.to(HALF), None, torch.float32, **cast)[0].dtype == torch.float32


def test_grouped_product_multiplies_each_copy_by_its_experts_matrix():
    ends = torch.tensor([0, 5, 5, 80], dtype=torch.int32, device=DEVICE)
    x, weight = draw(80, 33), draw(4, 20, 33)
    whole = device.grouped_product(x, weight, ends)
    assert same(whole, reference.grouped_product(x, weight, ends), 1e-4)
    few = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=DEVICE)
    assert torch.equal(device.grouped_product(x[[2, 7, 70]], weight, few), whole[[2, 7, 70]])


def test_gate_is_silu_times_up():
    up = draw(3, 2 * 1100)
    assert same(device.swiglu(up), reference.swiglu(up))


def test_bits_of_attention_do_not_depend_on_how_sections_and_tiles_share_programs(monkeypatch: pytest.MonkeyPatch):
    """150 tokens in 5 sections: one program for all, some for several each, one for each; launches of one tile each."""
    monkeypatch.setattr(device, "SECTION", 32)
    cache = draw(BLOCKS * 16, KV_HEADS, SIZE, seed=1), draw(BLOCKS * 16, KV_HEADS, SIZE, seed=2)
    qkv = draw(6, (GROUP + 2) * KV_HEADS * SIZE, seed=3)
    table = [4, 9, 1, 0, 2, 3, 5, 6, 7, 8]
    tiles = Tiles(*step_of([(144, 6, table)], 4, 16))
    arrivals, found = torch.zeros(200, dtype=torch.int32, device=DEVICE), []
    for programs, floats in ((1, 40_000), (8, 40_000), (512, 40_000), (8, 4 * GROUP * KV_HEADS * 5 * (SIZE + 2))):
        monkeypatch.setattr(device, "_PROGRAMS", programs)
        scratch = torch.zeros(floats, device=DEVICE)
        found.append(device.attend(qkv, cache, tiles, AttentionSettings(SCALE), scratch, arrivals))
        assert not bool(arrivals.any())
    assert all(torch.equal(each, found[0]) for each in found)
    monkeypatch.setattr(reference, "SECTION", 32)
    expected = reference.attend(qkv, cache, tiles, AttentionSettings(SCALE), torch.zeros(1, device=DEVICE), arrivals)
    assert same(found[0], expected)


class Launches:
    """Number of launches of a kernel."""

    def __init__(self, kernel) -> None:
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]):
        self.count += 1
        return self.kernel[grid]


@pytest.mark.parametrize(("context", "launches"), [(30, 1), (60, 2), (128, 4)])
def test_launches_of_attention_follow_from_the_longest_context_of_the_step(
    context: int, launches: int, monkeypatch: pytest.MonkeyPatch
):
    """Latent attention of 8 tokens, one for a tile, with partial results of 8 sections in scratch memory; block tables
    are those of much longer sequences."""
    monkeypatch.setattr(device, "SECTION", 32)
    recorded = Launches(device.attention.attend)
    monkeypatch.setattr(device.attention, "attend", recorded)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    tiles = Tiles(*step_of([(context - 8, 8, table)], 1, 16))
    cache = draw(1, BLOCKS * 16, 1, RANK + ROTARY)
    queries, arrivals = draw(8, HEADS * (RANK + ROTARY)), torch.zeros(24, dtype=torch.int32, device=DEVICE)
    scratch = torch.zeros(8 * HEADS * (RANK + 2), device=DEVICE)
    settings = AttentionSettings(SCALE, key_only=ROTARY, groups=3)
    found = device.attend(queries, cache, tiles, settings, scratch, arrivals)
    assert recorded.count == launches
    assert same(found, reference.attend(queries, cache, tiles, settings, scratch, arrivals))


def figures_of(module, logits: torch.Tensor, rows: list[tuple[float, float, int]]) -> torch.Tensor:
    return module.summarize_logits(logits, torch.tensor(rows, dtype=torch.float64, device=DEVICE).T.contiguous())


@pytest.mark.parametrize("size", [3, 4096, 10_000])
def test_figures_of_logits_are_those_of_the_reference(size: int):
    options = [(0.0, 0.0, 0), (1.0, 0.0, 1), (0.7, 0.3, size - 1), (3.0, 0.9, 2), (1.0, 1 - 2**-53, 2), (0.01, 0.5, 0)]
    wide = draw(len(options), size + 5)
    for logits in (wide[:, :size], (4 * wide[:, :size]).round()):  # rows are strided; the second has equal logits
        found, expected = (figures_of(module, logits, options) for module in (device, reference))
        assert torch.equal(found[:, [0, 1, 4, 5, 6]], expected[:, [0, 1, 4, 5, 6]])
        assert torch.allclose(found[:, 2:4], expected[:, 2:4], rtol=1e-6)
        alone = [figures_of(device, logits[[row]], [options[row]])[0] for row in range(len(options))]
        assert torch.equal(torch.stack(alone), found)


def test_draws_have_the_frequencies_of_the_softmax():
    logits = draw(1, 9000).expand(2000, -1)
    found = figures_of(device, logits, [(0.5, (number + 0.5) / 2000, 0) for number in range(2000)])[:, 4]
    counts = torch.bincount(found.long(), minlength=9000).double() / 2000
    expected = (logits[0].double() / 0.5).softmax(0)
    assert float((counts.cumsum(0) - expected.cumsum(0)).abs().max()) < 1 / 2000


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_logits_are_seen_in_the_highest(value: float):
    logits = draw(2, 9000)
    logits[1, 8500] = value
    found = figures_of(device, logits, [(1.0, 0.5, 0)] * 2)[:, 1]
    assert float(found[0]) == float(logits[0].max()) and not bool(found[1].isfinite())


def test_logits_of_minus_infinity_are_never_drawn():
    logits = draw(4, 9000)
    logits[:, 10:] = -torch.inf
    found = figures_of(device, logits, [(1.0, uniform, 0) for uniform in (0.0, 0.3, 0.9, 1 - 2**-53)])
    assert bool((found[:, 4] < 10).all()) and bool(found.isfinite().all())
